"""lm-eval's scores of a served model against those of transformers, for the same weights in fp32.

A task of choices and one of greedy answers, both from local files. Every item is compared, not the scores alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from libs.text import EMBEDDED_MODEL_NAME, resolve_model_path
from scripts.export_model import export_model
from tests.integration.conftest import StartOctavo
from tests.integration.test_other_clients import PYTHON

MODEL_NAME = "smollm2"
CHOICES, ANSWERS = "octavo_choices", "octavo_answers"
# Sums of a few log-probabilities, computed in fp32 by other kernels in another order; a wrong token or weight
# changes tenths.
TOLERANCE = 5e-4
TIMEOUT_SECONDS = 270
CAPITALS = (
    "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Austria Vienna, Greece Athens, "
    "Poland Warsaw, Portugal Lisbon, Ireland Dublin, Norway Oslo, Sweden Stockholm, Finland Helsinki, "
    "Denmark Copenhagen, Hungary Budapest, Russia Moscow, Japan Tokyo, China Beijing, India Delhi, "
    "Egypt Cairo, Turkey Ankara, Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago, Kenya Nairobi, "
    "Iran Tehran, Iraq Baghdad, Syria Damascus"
)
OPPOSITES = (
    "hot cold, big small, up down, left right, black white, young old, fast slow, rich poor, hard soft, "
    "dark light, wet dry, full empty, early late, near far, high low, open closed, good bad, long short, "
    "loud quiet, strong weak"
)
GROUPS = (
    "dog animal, rose flower, apple fruit, carrot vegetable, hammer tool, car vehicle, piano instrument, "
    "shirt clothing, iron metal, oak tree, salmon fish, eagle bird"
)
CHOICE_TASK = f"""
task: {CHOICES}
dataset_path: json
dataset_kwargs: {{data_files: {{test: FILE}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
ANSWER_TASK = f"""
task: {ANSWERS}
dataset_path: json
dataset_kwargs: {{data_files: {{test: FILE}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["\\n", "."], do_sample: false, max_gen_toks: 12}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}
"""


def items() -> list[dict[str, Any]]:
    """Sixty questions with four answers each."""
    found = []
    for words, question in (
        (CAPITALS, "The capital of {} is"),
        (OPPOSITES, "The opposite of {} is"),
        (GROUPS, "Of the things that there are, a {} is a kind of"),
    ):
        pairs = [pair.split() for pair in words.split(", ")]
        for index, (subject, answer) in enumerate(pairs):
            others = [pairs[(index + step) % len(pairs)][1] for step in (1, 4, 7)]
            place = index % 4
            choices = [*others[:place], answer, *others[place:]]
            found.append(
                {"question": question.format(subject), "choices": choices, "answer": place, "text": answer}
            )
    return found


def write_tasks(folder: Path) -> None:
    for name, task, rows in ((CHOICES, CHOICE_TASK, items()), (ANSWERS, ANSWER_TASK, items()[::5])):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.replace("FILE", str(data)))


def evaluate(folder: Path, name: str, *model: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run lm-eval; returns its scores and its samples, both by task."""
    output = folder / name
    command = [str(PYTHON), "-m", "lm_eval", "run", *model, "--tasks", CHOICES, ANSWERS]
    command += ["--include_path", str(folder), "--output_path", str(output), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    (scores,) = output.rglob("results_*.json")
    samples = {
        task: [json.loads(line) for path in output.rglob(f"samples_{task}_*.jsonl") for line in path.open()]
        for task in (CHOICES, ANSWERS)
    }
    return json.loads(scores.read_text())["results"], samples


def answers_of(samples: list[dict[str, Any]]) -> dict[int, Any]:
    return {sample["doc_id"]: sample["filtered_resps"] for sample in samples}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scores_of_the_served_model_are_those_of_transformers(running_octavo: StartOctavo, tmp_path: Path) -> None:
    assert PYTHON.exists(), "lm-eval is not installed: run `make install-clients`"
    folder = export_model(resolve_model_path(EMBEDDED_MODEL_NAME), tmp_path / "model")
    write_tasks(tmp_path)

    hf_scores, hf_samples = evaluate(
        tmp_path,
        "hf",
        *("--model", "hf", "--batch_size", "8", "--device", "cpu"),
        *("--model_args", f"pretrained={folder}", "dtype=float32"),
    )
    flags = ("--model", str(folder), "--served-model-name", MODEL_NAME, "--set", "worker.dtype=float32")
    with running_octavo(*flags) as octavo:
        scores, samples = evaluate(
            tmp_path,
            "served",
            *("--model", "local-completions", "--batch_size", "4"),
            *("--model_args", f"model={MODEL_NAME}", f"base_url={octavo.base_url}/v1/completions"),
            *(f"tokenizer={folder}", "num_concurrent=4"),
        )

    assert [len(samples[CHOICES]), len(samples[ANSWERS])] == [60, 12]
    hf_choices, choices = answers_of(hf_samples[CHOICES]), answers_of(samples[CHOICES])
    assert choices.keys() == hf_choices.keys()
    differences = [
        abs(float(ours[0]) - float(theirs[0]))
        for doc_id, theirs_of_item in hf_choices.items()
        for ours, theirs in zip(choices[doc_id], theirs_of_item, strict=True)
    ]
    print(f"{len(differences)} log-likelihoods differ by at most {max(differences):.2e}")
    print({task: {name: value for name, value in scores[task].items() if name != "alias"} for task in scores})
    assert max(differences) < TOLERANCE
    assert [[one[1] for one in choices[doc_id]] for doc_id in hf_choices] == [
        [one[1] for one in theirs] for theirs in hf_choices.values()
    ]
    assert answers_of(samples[ANSWERS]) == answers_of(hf_samples[ANSWERS])
    assert scores == hf_scores
