"""What stops an answer that reasons first."""

from __future__ import annotations

import pytest

from libs.text import ModelText
from services.gateway.generation import EngineUsage, FinishReason, GenerationFinished
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.model_formats.reasoning import THINK_TAGS, ReasoningState
from services.gateway.output_text import TextDelta, new_output
from services.gateway.parsed_output import ParsedOutput
from tests.unit.gateway.conftest import options

END = GenerationFinished(FinishReason.LENGTH, None, EngineUsage(0, 0, 0, 0, 0.0))


def read(model_text: ModelText, text: str, state: ReasoningState, *, size: int, stop: list[str]) -> list[TextDelta]:
    """Take an answer of so many tokens at once until it ends."""
    parser = ModelFormat(reasoning=THINK_TAGS).new_parser(state, ())
    assert parser is not None
    output = new_output(model_text.tokenizer, options(stop=stop), is_continued=False)
    parsed = ParsedOutput(output, parser, shows_reasoning=True)
    token_ids = model_text.tokenizer.encode(text, allow_special=True)
    deltas = []
    for start in range(0, len(token_ids), size):
        is_last = start + size >= len(token_ids)
        deltas.append(parsed.take(token_ids[start : start + size], END if is_last else None))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("stop", ["Question:", "Ques", ":", "\n\n", "Question: 2", "<|im_start|>"])
def test_what_stops_an_answer_does_not_stop_its_reasoning(model_text: ModelText, stop: str, size: int) -> None:
    """vllm-project/vllm#53066: lm-eval's stop strings cut off what thinking models restate."""
    thought = "They ask: Question: 1.\n\nQues<|im_start|>tion: so two. Question: 2"
    text = f"{thought}</think>\n\nTwo! {stop} more"

    deltas = read(model_text, text, ReasoningState.OPEN, size=size, stop=[stop])

    assert "".join(delta.reasoning for delta in deltas) == thought.replace("<|im_start|>", "")
    assert "".join(delta.text for delta in deltas).startswith("Two!")
    assert "more" not in "".join(delta.text for delta in deltas)
    assert (deltas[-1].finish_reason, deltas[-1].stop_string) == (FinishReason.STOP, stop)


def test_a_stop_string_does_not_reach_over_the_end_of_reasoning(model_text: ModelText) -> None:
    deltas = read(model_text, "a b</think>c d", ReasoningState.OPEN, size=1, stop=["k>c", "bc", "b</think>c"])

    assert "".join(delta.text for delta in deltas) == "c d"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_an_answer_that_does_not_reason_is_stopped_from_its_beginning(model_text: ModelText) -> None:
    deltas = read(model_text, "Sure. Question: 2", ReasoningState.POSSIBLE, size=1, stop=["Question:"])

    assert "".join(delta.text for delta in deltas) == "Sure. "
    assert deltas[-1].finish_reason is FinishReason.STOP
