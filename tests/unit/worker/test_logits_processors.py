from __future__ import annotations

import math

import numpy as np
import pytest

from libs.errors import InvalidRequest
from services.worker.logits_processors import TokenHistory, make_rules
from services.worker.step import SamplingParams

END = 5


def changed_logits(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    logits = np.array([1.0, -2.0, 3.0, 0.5, 0.0, 4.0], dtype=np.float32)
    history = TokenHistory(np.array([*prompt, *output], dtype=np.int32), len(prompt))
    make_rules(params, [END], vocab_size=6).edits_after(history).apply(logits)
    changed: list[float] = logits.tolist()
    return changed


def test_neutral_parameters_change_nothing() -> None:
    assert make_rules(SamplingParams(temperature=0.7, top_p=0.9), [END], vocab_size=6).are_neutral


def test_bias_is_added() -> None:
    logits = changed_logits(SamplingParams(logit_bias=((0, 2.5), (4, -100.0))), [1], [])

    assert logits == [3.5, -2.0, 3.0, 0.5, -100.0, 4.0]


def test_only_allowed_tokens_keep_their_logits() -> None:
    logits = changed_logits(SamplingParams(allowed_token_ids=(1, 3)), [1], [])

    assert logits == [-math.inf, -2.0, -math.inf, 0.5, -math.inf, -math.inf]


def test_presence_and_frequency_count_output_only() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)

    logits = changed_logits(params, [2, 2, 2], [0, 0, 3])

    assert logits == [1.0 - 1.0 - 2 * 0.5, -2.0, 3.0, 0.5 - 1.0 - 0.5, 0.0, 4.0]


def test_repetition_counts_prompt_and_output_once() -> None:
    logits = changed_logits(SamplingParams(repetition_penalty=2.0), [1, 1], [2, 2])

    assert logits == [1.0, -4.0, 1.5, 0.5, 0.0, 4.0]


def test_end_tokens_are_masked_until_the_output_is_long_enough() -> None:
    params = SamplingParams(min_output_tokens=2, stop_token_ids=(3,))

    assert changed_logits(params, [1], [0])[3] == changed_logits(params, [1], [0])[END] == -math.inf
    assert changed_logits(params, [1], [0, 0])[3:] == [0.5, 0.0, 4.0]


def test_ignored_eos_is_not_masked() -> None:
    params = SamplingParams(min_output_tokens=2, ignore_eos=True, stop_token_ids=(3,))

    logits = changed_logits(params, [1], [])

    assert logits[3] == -math.inf
    assert logits[END] == 4.0


def test_last_token_of_a_begun_bad_word_is_masked() -> None:
    params = SamplingParams(bad_words=((4,), (1, 2, 3), (0, 2)))

    logits = changed_logits(params, [4, 1], [2])

    assert logits == [1.0, -2.0, 3.0, -math.inf, -math.inf, 4.0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias=((6, 1.0),)),
        SamplingParams(allowed_token_ids=(6,)),
        SamplingParams(bad_words=((1, 6),)),
        SamplingParams(stop_token_ids=(2**32 - 1,)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary has 6"):
        make_rules(params, [END], vocab_size=6)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"logit_bias": ((1, math.nan),)},
        {"bad_words": ((),)},
        {"seed": 2**64},
        {"num_logprobs": -1},
        {"num_prompt_logprobs": -1},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(**values)  # type: ignore[arg-type]
