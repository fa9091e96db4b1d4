"""Forms of calls and of reasoning: however an answer is cut into pieces, the same is read out of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.model_formats.model_format import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ModelFormat,
    detect_reasoning_format,
    detect_tool_format,
)
from services.gateway.model_formats.reasoning import MISTRAL_THINK, THINK_TAGS, ReasoningState

NAMES = ("weather", "now", "f-1_x")
ALL_MARKERS = tuple(dict.fromkeys(marker for one in TOOL_FORMATS.values() for marker in one.markers))


@dataclass(slots=True)
class Read:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def read(
    tool_format: str | None,
    pieces: Sequence[str],
    *,
    reasoning: str | None = None,
    state: ReasoningState = ReasoningState.POSSIBLE,
    names: Sequence[str] = NAMES,
    is_cut: bool = False,
) -> Read:
    """Read pieces strictly: a call begins with its name and an index of its own."""
    model_format = ModelFormat(
        tools=TOOL_FORMATS[tool_format or "hermes"],
        reasoning=None if reasoning is None else REASONING_FORMATS[reasoning],
    )
    parser = model_format.new_parser(state, names if tool_format else ())
    assert parser is not None
    found = Read()
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        parsed = parser.add(piece, is_last=is_last, is_cut=is_cut and is_last)
        found.content += parsed.content
        found.reasoning += parsed.reasoning
        for call in parsed.calls:
            if call.name is not None:
                assert (call.call_index, call.arguments) == (len(found.calls), "")
                found.calls.append((call.name, ""))
            else:
                assert call.call_index == len(found.calls) - 1
                found.calls[-1] = (found.calls[-1][0], found.calls[-1][1] + call.arguments)
    return found


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cut a text anywhere, also into nothing."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def by_character(text: str) -> list[str]:
    return [*text, ""]


# Values whose strings hold all that ends something elsewhere.
STRINGS = st.one_of(
    st.text(alphabet='a"\\{}[]<>é🦜\n ', max_size=8),
    st.sampled_from([*ALL_MARKERS, "</think>", "}]", '"}', "\\", "```", "; "]),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "été"]) | STRINGS, VALUES, max_size=3)
# The pythonic form has Python's names as keys.
NAMED_ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "x"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
PLAIN = st.text(alphabet="Hi <>{[é🦜\n", max_size=10)


def written(tool_format: str, calls: Sequence[tuple[str, dict[str, Any]]], *, ensure_ascii: bool = False) -> str:
    """Write calls as models of each form do."""
    texts = [(name, json.dumps(arguments, ensure_ascii=ensure_ascii)) for name, arguments in calls]
    match tool_format:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in texts
            )
        case "llama3":
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in texts)
        case "mistral":
            objects = ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in texts)
            return f"[TOOL_CALLS] [{objects}]"
        case "mistral_named":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in texts)
        case "deepseek_v3":
            blocks = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                for name, text in texts
            )
            return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            blocks = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, text in texts
            )
            return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"
        case _:
            joined = ", ".join(
                f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                for name, arguments in calls
            )
            return f"[{joined}]"


def same_calls(found: Read, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    return [(name, json.loads(text)) for name, text in found.calls] == list(calls)


def test_a_marker_that_is_cut_off_after_a_call_is_no_text() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}'

    for mark in ("\n</tool_call>", "\n</tool_call>\n<tool_call"):
        for length in range(len(mark) + 1):
            assert read("hermes", by_character(call + mark[:length])) == Read("", "", [("now", "{}")]), mark[
                :length
            ]


@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS if name not in ("pythonic", "llama3")])
def test_the_head_of_a_call_that_is_cut_is_no_text(tool_format: str) -> None:
    text = "I look. " + written(tool_format, [("weather", {"city": "Rome"})])
    marker = min(index for mark in ALL_MARKERS if (index := text.find(mark)) > 0)
    head = text.index("Rome")
    first = min(end for end in range(marker, head) if any(text[marker:end] == mark for mark in ALL_MARKERS))

    for end in range(first, head):
        found = read(tool_format, by_character(text[:end]), is_cut=True)
        assert found.content == "I look.", text[:end]
        assert found == read(tool_format, [text[:end]], is_cut=True)
    # What is no call stays text, and so does what the model left as it is.
    wrong = f"{text[:first]} is a marker"
    assert read(tool_format, [wrong], is_cut=True).content == wrong
    assert read(tool_format, [text[:first] + "{"]).content == text[:first] + "{"


@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS if name != "pythonic"])
@settings(max_examples=40)
@given(data=st.data(), calls=CALLS, ensure_ascii=st.booleans())
def test_calls_are_read_out_of_any_pieces(
    tool_format: str, data: st.DataObject, calls: list[tuple[str, dict[str, Any]]], ensure_ascii: bool
) -> None:
    text = written(tool_format, calls, ensure_ascii=ensure_ascii)

    whole = read(tool_format, [text])

    assert same_calls(whole, calls)
    assert whole.content == ""
    assert read(tool_format, by_character(text)) == whole
    assert read(tool_format, data.draw(cut(text))) == whole


@settings(max_examples=40)
@given(data=st.data(), calls=st.lists(st.tuples(st.sampled_from(["weather", "now"]), NAMED_ARGUMENTS), min_size=1))
def test_pythonic_calls_are_read_out_of_any_pieces(
    data: st.DataObject, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    text = written("pythonic", calls)

    whole = read("pythonic", [text])

    assert same_calls(whole, calls)
    assert whole.content == ""
    assert read("pythonic", data.draw(cut(text))) == whole


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@settings(max_examples=40)
@given(data=st.data(), pieces=st.lists(st.sampled_from([*ALL_MARKERS, "weather", "(", ")"]) | PLAIN, max_size=6))
def test_whatever_a_model_writes_the_pieces_change_nothing_and_nothing_without_a_call_is_lost(
    tool_format: str, data: st.DataObject, pieces: list[str]
) -> None:
    text = "".join(pieces)

    whole = read(tool_format, [text])

    assert read(tool_format, by_character(text)) == whole
    assert read(tool_format, data.draw(cut(text))) == whole
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS if name != "pythonic"])
@settings(max_examples=40)
@given(data=st.data(), calls=CALLS)
def test_a_call_that_is_cut_gives_the_arguments_as_far_as_they_came(
    tool_format: str, data: st.DataObject, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    text = written(tool_format, calls)
    text = text[: data.draw(st.integers(0, len(text)))]

    whole = read(tool_format, [text])

    assert read(tool_format, data.draw(cut(text))) == whole
    for (name, arguments), (told_name, told) in zip(whole.calls, calls, strict=False):
        assert name == told_name
        assert json.dumps(told, ensure_ascii=False).startswith(arguments)
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "mistral_named", "deepseek_v3", "deepseek_v31"])
def test_text_before_calls_is_content_without_the_white_space(tool_format: str) -> None:
    text = "Let me look.\n\n" + written(tool_format, [("weather", {"city": "Oslo"}), ("now", {})])

    found = read(tool_format, by_character(text))

    assert found == Read("Let me look.", "", [("weather", '{"city": "Oslo"}'), ("now", "{}")])


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "elsewhere", "arguments": {}}\n</tool_call>'),
        ("hermes", "<tool_call>weather()</tool_call> and more"),
        ("hermes", 'Say <tool_call> {"name": "weather"'),
        ("llama3", '{"name": "Bob", "parameters": {}}'),
        ("llama3", '{"city": "Oslo"}'),
        ("llama3", 'Here: {"name": "weather", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] weather in Oslo"),
        ("mistral", '[TOOL_CALLS] [{"arguments": {}}]'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> none"),
        ("pythonic", "[weather(city=open('x'))]"),
        ("pythonic", "[1, 2, weather()]"),
    ],
)
def test_what_is_no_call_is_text(tool_format: str, text: str) -> None:
    assert read(tool_format, by_character(text)) == Read(text)


NOW = Read(calls=[("now", "{}")])


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        # Keys in another order, keys beside, no arguments, and markers that models leave out.
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>',
            Read(calls=[("now", '{"a": 1}')]),
        ),
        ("hermes", '<tool_call>{"name": "now", "id": "x", "arguments": {}}', NOW),
        ("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', Read("Done.", "", [("now", "{}")])),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>', NOW),
        ("llama3", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', NOW),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', NOW),
        ("mistral", '[TOOL_CALLS]now{"a": 1}', Read(calls=[("now", '{"a": 1}')])),
        ("mistral_named", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": 1}', Read(calls=[("now", '{"a": 1}')])),
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜> Done.",
            Read("Done.", "", [("now", "{}")]),
        ),
        (
            "pythonic",
            "<|python_start|>[now(a=true, b={'c': None})]<|python_end|>",
            Read(calls=[("now", '{"a":true,"b":{"c":null}}')]),
        ),
    ],
)
def test_what_models_write_otherwise_is_read_too(tool_format: str, text: str, expected: Read) -> None:
    assert read(tool_format, by_character(text)) == read(tool_format, [text]) == expected


def test_a_marker_where_no_json_has_it_does_not_become_an_argument() -> None:
    found = read("hermes", by_character('<tool_call>\n{"name": "now", "arguments": {"a": 1</tool_call> Done.'))

    assert found == Read("Done.", "", [("now", '{"a": 1')])


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
@settings(max_examples=40)
@given(data=st.data(), thought=PLAIN.map(str.strip), answer=PLAIN.map(str.strip), is_opened=st.booleans())
@example(data=None, thought="", answer="Hi", is_opened=True)
def test_reasoning_is_told_apart_in_any_pieces(
    reasoning: str, data: st.DataObject | None, thought: str, answer: str, is_opened: bool
) -> None:
    markers = REASONING_FORMATS[reasoning]
    text = f"{'' if is_opened else markers.begin}\n{thought}\n{markers.end}\n\n{answer}"
    state = ReasoningState.OPEN if is_opened else ReasoningState.POSSIBLE

    whole = read(None, [text], reasoning=reasoning, state=state)

    assert whole == Read(answer, thought)
    assert read(None, by_character(text), reasoning=reasoning, state=state) == whole
    if data is not None:
        assert read(None, data.draw(cut(text)), reasoning=reasoning, state=state) == whole


@given(data=st.data(), calls=CALLS)
def test_calls_in_reasoning_are_reasoning(data: st.DataObject, calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "<think>\nI could <tool_call> now.\n</think>\n\n" + written("hermes", calls)

    found = read("hermes", data.draw(cut(text)), reasoning="think")

    assert found.reasoning == "I could <tool_call> now."
    assert same_calls(found, calls)
    assert found.content == ""


@pytest.mark.parametrize(
    ("text", "state", "expected"),
    [
        ("Thinking", ReasoningState.OPEN, Read("", "Thinking")),
        ("<think>Thinking </thi", ReasoningState.POSSIBLE, Read("", "Thinking </thi")),
        ("<think>a</think>b", ReasoningState.OPEN, Read("b", "a")),
        ("  No <think>a</think>b", ReasoningState.POSSIBLE, Read("  No <think>a</think>b")),
        ("<think>a</think>b", ReasoningState.OVER, Read("<think>a</think>b")),
    ],
)
def test_reasoning_that_is_cut_or_absent(text: str, state: ReasoningState, expected: Read) -> None:
    assert read(None, by_character(text), reasoning="think", state=state) == expected


def test_a_prompt_tells_where_its_answer_begins() -> None:
    assert THINK_TAGS.state_after("user: <think>\nassistant: ", None) is ReasoningState.POSSIBLE
    assert THINK_TAGS.state_after("assistant: <think>\n", None) is ReasoningState.OPEN
    assert THINK_TAGS.state_after("assistant: <think>\n\n</think>\n\n", None) is ReasoningState.OVER
    assert THINK_TAGS.state_after("assistant: <think>\nSo", "<think>\nSo") is ReasoningState.OPEN
    assert THINK_TAGS.state_after("assistant: So", "So") is ReasoningState.OVER


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}{{ '</think>' }}", "hermes", THINK_TAGS),
        ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}{{ '[THINK]' }}", "mistral_named", MISTRAL_THINK),
        ("{{ '<｜tool▁calls▁begin｜>' }}{{ '```json' }}", "deepseek_v3", None),
        ("{{ '<｜tool▁calls▁begin｜>' }}{{ '<think>' }}", "deepseek_v31", THINK_TAGS),
        ("{{ '<|python_tag|>' }}", "llama3", None),
        ("Reply as [func_name1(params_name1=params_value1)]", "pythonic", None),
        ("{{ '<tool_call>\\n<function=' }}", None, None),
        ("{{ messages }}", None, None),
        (None, None, None),
    ],
)
def test_a_template_tells_its_forms(source: str | None, tools: str | None, reasoning: Any) -> None:
    assert detect_tool_format(source) is (None if tools is None else TOOL_FORMATS[tools])
    assert detect_reasoning_format(source) is reasoning
