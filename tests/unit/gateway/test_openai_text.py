"""Plain completions: what a request may say, and the shape of its answers."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import InvalidRequest, OctavoError, UnsupportedField
from libs.text import load_model_text, resolve_model_path
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.generation import FinishReason
from services.gateway.generation_options import check_total_logprobs
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.openai_fields import TEXT_FIELDS
from services.gateway.openai_schema import ModelFacts
from services.gateway.openai_text_answers import TextFormat
from services.gateway.openai_text_schema import MAX_PROMPTS, ValidTextCompletion, parse_text_completion
from services.gateway.output_text import TextDelta
from services.gateway.prompts import TextPrompt, TokenPrompt
from services.gateway.text_preparation import PreparedPrompt
from tests.unit.gateway.conftest import MODEL_NAME, options

MODEL = ModelFacts(name="tiny", vocab_size=1000)
HEAD = AnswerHead("cmpl-1", 1700000000, "tiny")
SHAPES = LogprobShapes(load_model_text(resolve_model_path(MODEL_NAME)).tokenizer)
COUNTS = UsageCounts(num_prompt_tokens=5, num_completion_tokens=7, num_cached_tokens=4)


def parse(**fields: Any) -> ValidTextCompletion:
    return parse_text_completion({"model": "tiny", "prompt": "Hi"} | fields, MODEL)


def refusal(**fields: Any) -> OctavoError:
    with pytest.raises(OctavoError) as caught:
        parse(**fields)
    return caught.value


# --- Requests.


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", (TextPrompt("Hi"),)),
        ("", (TextPrompt(""),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([5, 6], (TokenPrompt((5, 6)),)),
        ([[5, 6], [7]], (TokenPrompt((5, 6)), TokenPrompt((7,)))),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    assert parse(prompt=prompt).prompts == expected


def test_special_tokens_before_a_text_may_be_left_out() -> None:
    assert parse(add_special_tokens=False).prompts == (TextPrompt("Hi", add_special_tokens=False),)


@pytest.mark.parametrize(
    "prompt",
    [
        *(
            None,
            [],
            [[]],
            5,
            {},
            True,
            [True],
            [1.5],
            [-1],
            [1000],
            [[1000]],
            ["a", 5],
            [5, "a"],
            [[5], "a"],
            [None],
        ),
        *(["x"] * (MAX_PROMPTS + 1), ["x"] * 100_000, [[5]] * (MAX_PROMPTS + 1)),
    ],
    ids=lambda prompt: str(prompt)[:24],
)
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    error = refusal(prompt=prompt)

    assert isinstance(error, InvalidRequest)
    assert error.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 2),
        ("best_of", 10**6),
        ("use_beam_search", True),
        ("guided_regex", "a+"),
    ],
)
def test_what_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})

    assert isinstance(error, UnsupportedField)
    assert error.param == field


def test_messages_belong_to_conversations() -> None:
    assert refusal(messages=[{"role": "user", "content": "x"}]).param == "messages"
    assert refusal(top_logprobs=5).param == "top_logprobs"


def test_the_newer_name_of_the_limit_is_known_here_too() -> None:
    """neuralmagic/guidellm sends both names to both routes."""
    assert parse(max_completion_tokens=5).options.max_output_tokens == 5
    assert parse(max_tokens=5, max_completion_tokens=5).options.max_output_tokens == 5
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"


def test_nothing_may_be_generated_where_the_prompt_is_echoed() -> None:
    assert parse(max_tokens=0, echo=True).options.max_output_tokens == 0
    assert refusal(max_tokens=0).param == "max_tokens"
    assert refusal(max_tokens=-1, echo=True).param == "max_tokens"


def test_log_probabilities_are_counted_alternatives() -> None:
    assert parse().options.num_logprobs is None
    assert parse(logprobs=0).options.num_logprobs == 0
    assert parse(logprobs=5).options.num_measured_prompt_logprobs is None
    assert parse(logprobs=2, echo=True).options.num_measured_prompt_logprobs == 2
    assert parse(logprobs=2, echo=True, prompt_logprobs=7).options.num_measured_prompt_logprobs == 7
    assert parse(max_tokens=0, prompt_logprobs=1).options.max_output_tokens == 0
    for wrong in (True, -1, 21, 49152, "1", 1.5):
        assert refusal(logprobs=wrong).param == "logprobs"
    assert refusal(top_logprobs=2).param == "top_logprobs"


def test_what_may_come_to_too_many_log_probabilities_is_refused() -> None:
    def check(num_prompt_tokens: int, max_output_tokens: int, **fields: Any) -> None:
        options = parse(**fields).options
        check_total_logprobs(options, num_prompt_tokens=num_prompt_tokens, max_output_tokens=max_output_tokens)

    check(10**9, 10**9)
    check(10**9, 8192, logprobs=20)
    check(128 * 2047, 128, logprobs=1, echo=True)
    for wrong, param in (
        ({"logprobs": 20, "n": 4}, "logprobs"),
        ({"logprobs": 5, "echo": True, "n": 32}, "logprobs"),
        ({"prompt_logprobs": 20, "n": 4}, "prompt_logprobs"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check(8000, 8000, **wrong)
        assert caught.value.param == param


def test_prompts_and_choices_are_bounded_together() -> None:
    assert parse(prompt=["a"] * 16, n=8).options.num_choices == 8
    assert refusal(prompt=["a"] * 16, n=9).param == "n"
    assert refusal(n=129).param == "n"


def test_every_parameter_of_openais_client_is_known() -> None:
    signature = inspect.signature(openai.resources.completions.Completions.create)
    names = set(signature.parameters) - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

    unknown = {
        name for name in names if name not in TEXT_FIELDS and "Unknown" in refusal(**{name: object()}).message
    }

    assert len(names) > 15
    assert unknown == set()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_prompt_is_parsed_or_refused(prompt: Any) -> None:
    param = None
    try:
        parse(prompt=prompt)
    except OctavoError as error:
        param = error.param

    assert param in (None, "prompt")


# --- Answers.


def prompt_of(echoed_text: str = "", token_ids: tuple[int, ...] = (1, 2, 3)) -> PreparedPrompt:
    return PreparedPrompt(list(token_ids), [], None, echoed_text)


def delta(
    text: str, *, index: int = 0, token_ids: tuple[int, ...] = (9,), reason: FinishReason | None = None
) -> ChoiceDelta:
    return ChoiceDelta(index, TextDelta(text, token_ids, reason))


def chunks_of(events: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(block[len(b"data: ") :]) for block in events.split(b"\n\n")[:-1]]


def test_a_chunk_has_openais_shape() -> None:
    answer = TextFormat(HEAD, options(), [prompt_of()], SHAPES)

    text, end = chunks_of(answer.events(delta(" there", reason=FinishReason.STOP)))

    assert text == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"text": " there", "index": 0, "logprobs": None, "finish_reason": None}],
    }
    assert end["choices"] == [{"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}]


def test_a_whole_answer_has_all_choices_of_all_prompts() -> None:
    answer = TextFormat(HEAD, options(n=2, echo=True), [prompt_of("A"), prompt_of("B")], SHAPES)
    choices = [WholeChoice([text], [7], FinishReason.LENGTH) for text in ("1", "2", "3", "4")]

    body = orjson.loads(answer.body(choices, COUNTS))

    assert body["object"] == "text_completion"
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "A1"),
        (1, "A2"),
        (2, "B3"),
        (3, "B4"),
    ]
    assert body["usage"] == COUNTS.as_json()
    assert set(body["choices"][0]) == {"text", "index", "logprobs", "finish_reason"}


def test_the_prompt_is_the_first_text_of_each_choice_where_it_is_echoed() -> None:
    answer = TextFormat(HEAD, options(n=1, echo=True), [prompt_of("A"), prompt_of("B")], SHAPES)
    nothing = delta("", index=1, token_ids=(), reason=FinishReason.LENGTH)

    events = answer.events(delta("1")) + answer.events(nothing)

    found = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks_of(events)]
    assert found == [(0, "A"), (0, "1"), (1, "B"), (1, "")]


def test_token_ids_and_counts_come_where_they_are_asked_for() -> None:
    fields: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    answer = TextFormat(
        HEAD, options(return_token_ids=True, **fields), [prompt_of(), prompt_of(token_ids=(4, 5))], SHAPES
    )

    first, text = chunks_of(answer.events(delta("x", index=1, token_ids=(7, 8))))

    assert first["choices"][0]["prompt_token_ids"] == [4, 5]
    assert text["choices"][0]["token_ids"] == [7, 8]
    assert (text["usage"]["prompt_tokens"], text["usage"]["completion_tokens"]) == (5, 2)
    (usage,) = chunks_of(answer.usage_event(COUNTS))
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 12)
