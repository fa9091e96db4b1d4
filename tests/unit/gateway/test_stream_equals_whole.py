"""However tokens are cut into steps, a stream's chunks put together are the whole answer, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.text import ModelText
from services.gateway.answer_format import AnswerFormat, AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.generation import EngineUsage, FinishReason, GenerationFinished, TokenLogprob
from services.gateway.generation_options import GenerationOptions, parse_generation_options
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.openai_answers import ChatFormat
from services.gateway.openai_text_answers import TextFormat
from services.gateway.output_text import new_output
from services.gateway.text_preparation import PreparedPrompt

HEAD = AnswerHead("id", 1700000000, "tiny")
NO_USAGE = EngineUsage(0, 0, 0, 0, 0.0)
COUNTS = UsageCounts(1, 1, None)
EOS = 2
# Parts of emoji, of accents and of stop strings, special tokens among them.
TEXT = "a<|E> 😀é🦜\n"
STOPS = st.lists(st.text(alphabet="a<|E> 😀", min_size=1, max_size=3), max_size=2)


@st.composite
def some_options(draw: st.DrawFn, *, is_chat: bool) -> GenerationOptions:
    num_logprobs = draw(st.none() | st.integers(0, 2))
    echo = draw(st.booleans())
    max_output_tokens = draw(st.none() | st.sampled_from([2, 50] if is_chat else [0, 2, 50]))
    body = {
        "n": draw(st.integers(1, 3)),
        "stop": draw(STOPS),
        "min_tokens": draw(st.integers(0, 2)) if max_output_tokens != 0 else 0,
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
        "echo": echo,
    }
    return parse_generation_options(
        body,
        vocab_size=49152,
        max_output_tokens=draw(st.none() | st.sampled_from([2, 50] if is_chat else [0, 2, 50]))
        if not body["min_tokens"]
        else None,
        num_logprobs=num_logprobs,
        num_echoed_logprobs=num_logprobs if echo and not is_chat else None,
    )


@st.composite
def some_tokens(draw: st.DrawFn, model_text: ModelText) -> list[int]:
    pieces = draw(st.lists(st.text(alphabet=TEXT, min_size=1, max_size=6) | st.just(None), max_size=5))
    encode = model_text.tokenizer.encode
    parts = [[1] if piece is None else encode(piece, allow_special=False) for piece in pieces]
    return list(chain.from_iterable(parts)) + draw(st.sampled_from([[], [EOS]]))


@st.composite
def some_steps(draw: st.DrawFn, token_ids: list[int]) -> list[list[int]]:
    steps, rest = [], list(token_ids)
    while rest:
        size = draw(st.integers(1, len(rest)))
        steps.append(rest[:size])
        rest = rest[size:]
    # The end comes with the token that caused it, else with the last tokens or after them.
    is_marked = token_ids[-1:] == [EOS]
    return steps if steps and (is_marked or draw(st.booleans())) else [*steps, []]


def logprob(token_id: int, count: int) -> TokenLogprob:
    return TokenLogprob(-token_id / 16, token_id, tuple((token_id + 1 + index, -0.5) for index in range(count)))


def deltas_of(
    model_text: ModelText,
    options: GenerationOptions,
    prompt: PreparedPrompt,
    index: int,
    steps: Sequence[Sequence[int]],
) -> list[ChoiceDelta]:
    output = new_output(model_text.tokenizer, options, is_continued=prompt.is_continued)
    count, prompt_count = options.num_logprobs, options.num_measured_prompt_logprobs
    prompt_logprobs = [] if prompt_count is None else [logprob(one, prompt_count) for one in prompt.token_ids[1:]]
    stop_token_id = EOS if steps[-1][-1:] == [EOS] else None
    deltas: list[ChoiceDelta] = []
    for number, step in enumerate(steps):
        end = GenerationFinished(FinishReason.STOP, stop_token_id, NO_USAGE) if number == len(steps) - 1 else None
        content = output.take(step, end)
        logprobs = [] if count is None else [logprob(one, count) for one in content.token_ids]
        deltas.append(ChoiceDelta(index, content, logprobs, [] if deltas else prompt_logprobs))
        if content.finish_reason is not None:
            return deltas
    raise AssertionError("the last step has the end")


def whole_of(answer: AnswerFormat, deltas: Sequence[ChoiceDelta], num_choices: int) -> list[dict[str, Any]]:
    choices = [WholeChoice() for _ in range(num_choices)]
    for delta in deltas:
        choices[delta.choice_index].add(delta)
    body = orjson.loads(answer.body(choices, COUNTS))
    found: list[dict[str, Any]] = body["choices"]
    return found


def chunks_of(answer: AnswerFormat, deltas: Sequence[ChoiceDelta]) -> dict[int, list[dict[str, Any]]]:
    events = b"".join(map(answer.events, deltas)).split(b"\n\n")[:-1]
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        (choice,) = orjson.loads(event.removeprefix(b"data: "))["choices"]
        found.setdefault(choice["index"], []).append(choice)
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_chats_stream_is_its_whole_answer(model_text: ModelText, data: st.DataObject) -> None:
    options = data.draw(some_options(is_chat=True))
    prompt = PreparedPrompt([1, 5, 6], [], None, "Sure: " if options.echoes_prompt else "", options.echoes_prompt)
    shapes = LogprobShapes(model_text.tokenizer)
    outputs = [data.draw(some_tokens(model_text)) for _ in range(options.num_choices)]
    streamed = [
        deltas_of(model_text, options, prompt, index, data.draw(some_steps(token_ids)))
        for index, token_ids in enumerate(outputs)
    ]
    at_once = [deltas_of(model_text, options, prompt, index, [ids]) for index, ids in enumerate(outputs)]

    whole = whole_of(ChatFormat(HEAD, options, prompt, shapes), [*chain(*at_once)], options.num_choices)
    chunks = chunks_of(ChatFormat(HEAD, options, prompt, shapes), [*chain(*streamed)])

    for index, choice in enumerate(whole):
        parts = chunks[index]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [*chain.from_iterable(part.get("token_ids") or [] for part in parts)] == choice.get("token_ids", [])
        logprobs = [*chain.from_iterable(part["logprobs"]["content"] for part in parts if part["logprobs"])]
        assert logprobs == (choice["logprobs"] or {"content": []})["content"]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_completions_stream_is_its_whole_answer(model_text: ModelText, data: st.DataObject) -> None:
    options = data.draw(some_options(is_chat=False))
    texts = data.draw(st.lists(st.text(alphabet=TEXT, min_size=1, max_size=5), min_size=1, max_size=2))
    encode = model_text.tokenizer.encode
    prompts = [
        PreparedPrompt(encode(text, allow_special=False), [], None, text if options.echoes_prompt else "", True)
        for text in texts
    ]
    shapes = LogprobShapes(model_text.tokenizer)
    num_choices = options.num_choices * len(prompts)
    outputs = [data.draw(some_tokens(model_text)) for _ in range(num_choices)]

    def deltas(index: int, steps: Sequence[Sequence[int]]) -> list[ChoiceDelta]:
        return deltas_of(model_text, options, prompts[index // options.num_choices], index, steps)

    streamed = [deltas(index, data.draw(some_steps(token_ids))) for index, token_ids in enumerate(outputs)]
    at_once = [deltas(index, [token_ids]) for index, token_ids in enumerate(outputs)]

    whole = whole_of(TextFormat(HEAD, options, prompts, shapes), [*chain(*at_once)], num_choices)
    chunks = chunks_of(TextFormat(HEAD, options, prompts, shapes), [*chain(*streamed)])

    for index, choice in enumerate(whole):
        parts = chunks[index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [*chain.from_iterable(part.get("token_ids") or [] for part in parts)] == choice.get("token_ids", [])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [*chain.from_iterable(part["logprobs"][name] for part in parts if part["logprobs"])]
            assert values == (choice["logprobs"] or {name: []})[name]
        if choice["logprobs"] is not None and options.num_echoed_logprobs is None:
            assert len(choice["logprobs"]["tokens"]) == len(choice.get("token_ids", choice["logprobs"]["tokens"]))
