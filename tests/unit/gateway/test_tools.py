"""Tools: whatever is drawn from the grammar of calls is read as calls, in any pieces."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import InvalidRequest, OctavoError
from libs.grammar import GrammarCompiler
from libs.text import ModelText, load_model_text, resolve_model_path
from services.gateway.openai_schema import ModelFacts, parse_chat_completion
from services.gateway.tool_call_text import HermesCallParser
from services.gateway.tools import call_text, parse_tool_use
from tests.unit.grammar.test_grammar_compiler import draw

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def model_text() -> ModelText:
    return load_model_text(resolve_model_path("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def compiler(model_text: ModelText) -> GrammarCompiler:
    return GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser, content, calls = HermesCallParser(), "", list[tuple[str, str]]()
    for index, piece in enumerate(pieces):
        parsed = parser.add(piece, is_last=index == len(pieces) - 1)
        content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert call.call_index == len(calls)
                calls.append((call.name, ""))
            else:
                assert call.call_index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, calls


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_required_call_is_right_whatever_the_model_says(
    choice: Any, is_parallel: bool, compiler: GrammarCompiler, model_text: ModelText
) -> None:
    use = parse_tool_use({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": is_parallel})
    assert use is not None
    num_complete = 0

    for seed in range(8):
        text, is_complete = draw(compiler.compile(use.constraint().grammar), model_text, seed)
        if not is_complete:
            continue
        num_complete += 1
        content, calls = read([text])
        assert content == ""
        assert 1 <= len(calls) <= (16 if is_parallel else 1)
        for name, arguments in calls:
            assert name == "weather" or (name == "now" and choice == "required")
            jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"maxProperties": 0})

    assert num_complete


def test_an_answer_may_have_calls_and_they_are_right(compiler: GrammarCompiler, model_text: ModelText) -> None:
    use = parse_tool_use({"tools": TOOLS})
    assert use is not None
    encode = model_text.tokenizer.encode

    def accepts(text: str) -> bool:
        matcher = compiler.compile(use.constraint().grammar)
        for token_id in [*encode(text, allow_special=False), model_text.eos_token_ids[0]]:
            matcher.accept(token_id)
        return matcher.failure is None

    call = call_text("weather", '{"city": "Rome", "days": 2}')
    assert accepts("No call at all, <tool or not.")
    assert accepts(f"Let me see.\n{call}\n{call_text('now', '{}')}\nDone.")
    assert not accepts('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    assert not accepts(call_text("weather", '{"city": "Rome"}'))
    assert not accepts(f"{call} <tool_call> and text")


TEXTS = st.lists(
    st.sampled_from(
        [
            call_text("weather", '{"city": "a\\"}{<tool_call>", "days": {"x": [1, {}]}}'),
            call_text("now", "{}"),
            "<tool_call>",
            "</tool_call>",
            '<tool_call>\n{"name": "now", "arg',
            "<tool_",
            " \n",
            "text",
            "{",
            "é🙂",
        ]
    ),
    max_size=6,
).map("".join)


@given(TEXTS, st.data())
def test_pieces_are_read_as_the_whole(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert read(pieces) == read([text])


def test_text_around_calls_loses_only_white_space_next_to_them() -> None:
    text = f" Let me see. \n{call_text('now', '{}')}\n and {call_text('now', '{ }')} \n"

    assert read([text]) == (" Let me see.and", [("now", "{}"), ("now", "{ }")])
    assert read([" no call \n"]) == (" no call \n", [])


def parse(**fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return parse_chat_completion(body, ModelFacts("tiny", 49152))


def test_a_conversation_with_calls_and_results_is_written_as_the_model_knows_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    request = parse(
        tools=TOOLS,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        ],
    )

    system, _, assistant, result = request.prompt.messages
    assert system.content.startswith("Be brief.\n\n# Tools")
    assert '"name":"weather","description":"Tell it."' in system.content
    assert assistant.content == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert (result.role, result.content) == ("user", "<tool_response>\nSunny\n</tool_response>")


def test_without_a_choice_the_model_is_not_told_of_tools() -> None:
    request = parse(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})

    assert request.tools is None
    assert len(request.prompt.messages) == 1
    assert request.options.constraint.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"tools": [TOOLS[1]] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(OctavoError) as refused:
        parse(**fields)

    assert refused.value.param == param


def test_parameters_that_cannot_be_enforced_are_refused(compiler: GrammarCompiler) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    use = parse_tool_use({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]})
    assert use is not None

    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiler.compile(use.constraint().grammar)
