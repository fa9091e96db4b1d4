"""Every field that clients may send is enforced, or refused by a 400 that names it: one table for both routes.

A served field must be seen to do something; a value that it cannot have must be refused by its name. What a value
does further on, in the engine and the sampler, is tested there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from libs.protogen.generation.v1 import generation_pb2
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import Stand
from tests.integration.http_answers import CHAT, QUESTION, TEXT, Answer, chat_parts, post, streamed_text

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "http-api.md"
SPECIAL = 1  # a control token in the answer
TURNS = [*QUESTION, {"role": "assistant", "content": "Sure: "}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@dataclass(frozen=True)
class Seen:
    """What a request did."""

    stand: Stand
    path: str
    answer: Answer
    submit: generation_pb2.Submit
    # The same request without the field.
    plain_submit: generation_pb2.Submit

    @property
    def is_held_otherwise(self) -> bool:
        """Whether the answer is held to another grammar than without the field."""
        return self.params.grammar != self.plain_submit.sampling_params.grammar

    @property
    def params(self) -> generation_pb2.SamplingParams:
        return self.submit.sampling_params

    @property
    def choice(self) -> dict[str, Any]:
        found: dict[str, Any] = self.answer.json["choices"][0]
        return found

    @property
    def text(self) -> str:
        choice = self.choice
        return str(choice["text"] if self.path == TEXT else choice["message"]["content"])

    @property
    def log(self) -> dict[str, Any]:
        return next(
            event for event in reversed(self.stand.gateway.log) if event.get("request_id") == self.answer.request_id
        )


@dataclass(frozen=True)
class Row:
    """A field: a value and what shows that it was enforced, and values that are refused."""

    name: str
    value: Any
    shows: Callable[[Seen], bool]
    refused: tuple[Any, ...]
    # What must be sent beside it.
    beside: dict[str, Any] = field(default_factory=dict)
    # Where it is served; elsewhere it must be refused.
    paths: tuple[str, ...] = (CHAT, TEXT)


def last_usage(seen: Seen) -> Any:
    return seen.answer.events[-2]["usage"]


def running_usage(seen: Seen) -> list[int]:
    """The counts of a stream's chunks."""
    return [event["usage"]["completion_tokens"] for event in seen.answer.events[:-1] if event["choices"]]


ROWS = [
    Row("temperature", 0.5, lambda seen: seen.params.temperature == 0.5, (-1, 2.5, "1", True)),
    Row("top_p", 0.5, lambda seen: seen.params.top_p == 0.5, (0, 1.5, "1")),
    Row("top_k", 7, lambda seen: seen.params.top_k == 7, (-2, 1.5, 10**9)),
    Row("min_p", 0.25, lambda seen: seen.params.min_p == 0.25, (-0.5, 2)),
    Row("seed", -5, lambda seen: seen.params.seed == 2**64 - 5, (1.5, "1", 2**64)),
    Row("stop", " two", lambda seen: seen.text == "one", ("", [""], ["a"] * 5, ["x" * 257], 5, [5])),
    Row(
        "stop_token_ids",
        [9],
        lambda seen: list(seen.params.stop_token_ids) == [9],
        ([-1], [10**6], 9, list(range(65))),
    ),
    Row(
        "include_stop_str_in_output",
        True,
        lambda seen: seen.text == "one two",
        ("yes", 1),
        beside={"stop": " two"},
    ),
    Row("min_tokens", 2, lambda seen: seen.params.min_output_tokens == 2, (-1, 1.5, 10**6)),
    Row("max_tokens", 2, lambda seen: seen.params.max_output_tokens == 2, (-1, 1.5, "5")),
    Row(
        "max_completion_tokens",
        2,
        lambda seen: seen.params.max_output_tokens == 2,
        (0, -1, 1.5, "5"),
    ),
    Row("n", 2, lambda seen: len(seen.submit.choices) == len(seen.answer.json["choices"]) == 2, (0, 129, 1.5)),
    Row("presence_penalty", 0.5, lambda seen: seen.params.presence_penalty == 0.5, (-3, 3, "1")),
    Row("frequency_penalty", 0.5, lambda seen: seen.params.frequency_penalty == 0.5, (-3, 3, "1")),
    Row("repetition_penalty", 1.5, lambda seen: seen.params.repetition_penalty == 1.5, (0, -1, 11, "1")),
    Row(
        "logit_bias",
        {"17": -100},
        lambda seen: dict(seen.params.logit_bias) == {17: -100.0},
        ({"x": 1}, {"-1": 1}, {"99999999": 1}, {"1": 101}, {"1": "1"}, [1], {"01": 1}),
    ),
    Row(
        "logprobs",
        True,
        lambda seen: len(seen.choice["logprobs"]["content"]) == seen.answer.json["usage"]["completion_tokens"],
        ("yes", 1),
        paths=(CHAT,),
    ),
    Row(
        "logprobs",
        1,
        lambda seen: len(seen.choice["logprobs"]["tokens"]) == seen.answer.json["usage"]["completion_tokens"],
        (-1, 21, True),
        paths=(TEXT,),
    ),
    Row(
        "top_logprobs",
        2,
        lambda seen: all(len(entry["top_logprobs"]) == 2 for entry in seen.choice["logprobs"]["content"]),
        (-1, 21, 1.5, True),
        beside={"logprobs": True},
        paths=(CHAT,),
    ),
    Row(
        "prompt_logprobs",
        1,
        lambda seen: (
            len((seen.choice if seen.path == TEXT else seen.answer.json)["prompt_logprobs"])
            == len(seen.submit.prompt_token_ids)
        ),
        (-1, 21, True),
    ),
    Row(
        "response_format",
        {"type": "json_schema", "json_schema": SCHEMA},
        lambda seen: "integer" in seen.params.grammar.json_schema,
        ("json", {"type": "xml"}, {"type": "json_object", "more": 1}),
    ),
    Row(
        "structured_outputs",
        {"regex": "a+"},
        lambda seen: seen.params.grammar.regex == "a+",
        ("a", {}, {"regex": "a", "choice": ["b"]}),
    ),
    Row("tools", [TOOL], lambda seen: seen.is_held_otherwise, ("x", [5], [{"type": "x"}]), paths=(CHAT,)),
    Row(
        "tool_choice",
        "none",
        lambda seen: not seen.params.HasField("grammar"),
        ("maybe", 5, {"type": "function", "function": {"name": "other"}}),
        beside={"tools": [TOOL]},
        paths=(CHAT,),
    ),
    Row(
        "parallel_tool_calls",
        False,
        lambda seen: seen.is_held_otherwise,
        ("yes", 1),
        beside={"tools": [TOOL]},
        paths=(CHAT,),
    ),
    Row("stream", True, lambda seen: streamed_text(seen.answer.events) == "one two three", ("yes", 1)),
    Row(
        "stream_options",
        {"include_usage": True},
        lambda seen: last_usage(seen)["completion_tokens"] == 4,
        ("x", {"include_usage": "yes"}, {"other": True}),
        beside={"stream": True},
    ),
    Row(
        "stream_options",
        {"continuous_usage_stats": True},
        lambda seen: running_usage(seen) == sorted(running_usage(seen)) and running_usage(seen)[-1] == 4,
        ({"continuous_usage_stats": 1},),
        beside={"stream": True},
    ),
    Row(
        "echo",
        True,
        lambda seen: seen.text == ("Sure: one two three" if seen.path == CHAT else "Say hi.one two three"),
        ("yes", 1),
        beside={"messages": TURNS},
    ),
    Row(
        "add_generation_prompt",
        False,
        lambda seen: (
            seen.stand.model_text.tokenizer.encode("assistant", allow_special=False)[0]
            not in list(seen.submit.prompt_token_ids)[-3:]
        ),
        ("yes", 1),
        paths=(CHAT,),
    ),
    Row(
        "continue_final_message",
        True,
        lambda seen: list(seen.submit.prompt_token_ids)[-2:] == seen.stand.encode("Sure: ")[-2:],
        ("yes", 1),
        beside={"messages": TURNS},
        paths=(CHAT,),
    ),
    Row("ignore_eos", True, lambda seen: seen.params.ignore_eos, ("yes", 1)),
    Row("skip_special_tokens", False, lambda seen: "<|im_start|>" in seen.text, ("yes", 1)),
    Row("truncate_prompt_tokens", 2, lambda seen: len(seen.submit.prompt_token_ids) == 2, (0, -2, 1.5, "5")),
    Row("priority", 5, lambda seen: seen.submit.priority == -5, (101, -101, 1.5, "1")),
    Row("user", "ann", lambda seen: seen.log["user"] == "ann", (5, "x" * 257)),
    Row("metadata", {"a": "b"}, lambda seen: seen.log["metadata"] == {"a": "b"}, (5, {"a": 1}, {"a": "x" * 513})),
    Row(
        "return_token_ids",
        True,
        lambda seen: seen.choice["token_ids"] == seen.stand.engine.default_script.token_ids,
        ("yes", 1),
    ),
    Row("timings", True, lambda seen: bool(seen.answer.json["timings"]), ("yes", 1)),
]
REFUSED_EVERYWHERE: dict[str, Any] = {
    "suffix": "x",
    "best_of": 2,
    "use_beam_search": True,
    "logits_processors": ["x"],
    "cache_salt": "x",
    "service_tier": "flex",
    "store": True,
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "kv_transfer_params": {"x": 1},
    "no_such_field": None,
}


@pytest.fixture
def talking(stand: Stand) -> Stand:
    """The stand with an engine whose answer has a control token and three words."""
    one, *rest = stand.encode("one two three")
    stand.engine.default_script = Script(token_ids=[one, SPECIAL, *rest])
    return stand


async def ask(stand: Stand, path: str, fields: dict[str, Any]) -> Answer:
    prompt = {"messages": QUESTION} if path == CHAT else {"prompt": "Say hi."}
    beside = {name: value for name, value in fields.items() if path == CHAT or name != "messages"}
    limit = {} if "max_completion_tokens" in fields else {"max_tokens": 100}
    return await post(stand, path, prompt | limit | beside)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_a_field_does_what_it_says_or_is_refused_by_name(talking: Stand, row: Row, path: str) -> None:
    await ask(talking, path, row.beside)
    plain_submit = talking.engine.submits[-1]
    answer = await ask(talking, path, row.beside | {row.name: row.value})

    if path in row.paths and (row.name != "timings" or answer.status == 200):
        assert answer.status == 200, answer.raw
        await talking.telemetry.wait_for(answer.request_id)
        assert row.shows(Seen(talking, path, answer, talking.engine.submits[-1], plain_submit))
    elif row.name not in {other.name for other in ROWS if path in other.paths}:
        assert answer.status == 400
        assert answer.error["param"] in {row.name, *row.beside}
    for value in row.refused if path in row.paths else ():
        refused = await ask(talking, path, row.beside | {row.name: value})
        assert refused.status == 400, (value, refused.raw)
        assert str(refused.error["param"]).partition("[")[0].partition(".")[0] == row.name, (value, refused.raw)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", REFUSED_EVERYWHERE)
async def test_a_field_that_is_not_served_is_refused_by_name(talking: Stand, name: str, path: str) -> None:
    answer = await ask(talking, path, {name: REFUSED_EVERYWHERE[name]})

    assert answer.status == 400
    assert answer.error["param"] == name


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_null_is_the_same_as_nothing_for_every_field(talking: Stand, path: str) -> None:
    names = {row.name for row in ROWS if path in row.paths and row.name != "timings"}

    answer = await ask(talking, path, dict.fromkeys(names))

    assert answer.status == 200, answer.raw
    assert len(chat_parts([answer.json])) == 1


@pytest.mark.parametrize("name", sorted({row.name for row in ROWS} - {"timings"}))
def test_every_field_is_documented(name: str) -> None:
    assert f"`{name}" in DOCUMENT.read_text() or f".{name}`" in DOCUMENT.read_text()
