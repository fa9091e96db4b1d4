"""Tools: whatever is drawn from the grammar of calls is read as calls, in any pieces."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from libs.errors import InvalidRequest, OctavoError, UnsupportedField
from libs.grammar import CompiledGrammar, Grammar, GrammarCompiler, GrammarForm
from libs.text import IncrementalDetokenizer, ModelText, load_model_text, resolve_model_path
from services.gateway.anthropic_schema import parse_messages
from services.gateway.model_formats.model_format import TOOL_FORMATS, ModelFormat
from services.gateway.model_formats.reasoning import THINK_TAGS, ReasoningState
from services.gateway.openai_schema import ModelFacts, parse_chat_completion
from services.gateway.tool_grammar import tool_constraint, with_reasoning
from services.gateway.tool_prompt import phrased, short_call_id
from services.gateway.tools import ToolChoice, ToolUse
from tests.fakes.model_folders import CONTROL_TOKENS, write_model_folder
from tests.unit.gateway.test_model_formats import read, written
from tests.unit.grammar.test_grammar_compiler import draw, draw_token_ids
from tests.unit.text.small_models import control_ids

HERMES = ModelFormat()
NAMES = ("weather", "now")
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


def use_of(**fields: Any) -> ToolUse:
    use = parse(tools=TOOLS, **fields).options.tools
    assert isinstance(use, ToolUse)
    return use


def grammar_of(use: ToolUse, model_format: ModelFormat = HERMES) -> Grammar:
    constraint = tool_constraint(use, model_format)
    assert constraint is not None
    return constraint.grammar


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_required_call_is_right_whatever_the_model_says(
    choice: Any, is_parallel: bool, compiler: GrammarCompiler, model_text: ModelText
) -> None:
    use = use_of(tool_choice=choice, parallel_tool_calls=is_parallel)
    num_complete = 0

    for seed in range(12):
        text, is_complete = draw(compiler.compile(grammar_of(use)), model_text, seed)
        if not is_complete:
            continue
        num_complete += 1
        found = read("hermes", [text], names=NAMES)
        assert found.content == ""
        assert 1 <= len(found.calls) <= (16 if is_parallel else 1)
        for name, arguments in found.calls:
            assert name == "weather" or (name == "now" and choice == "required")
            jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"maxProperties": 0})

    assert num_complete


def call_text(name: str, arguments: str) -> str:
    return TOOL_FORMATS["hermes"].call_text(name, arguments)


def test_an_answer_may_have_calls_and_they_are_right(compiler: GrammarCompiler, model_text: ModelText) -> None:
    grammar = grammar_of(use_of())

    def accepts(text: str) -> bool:
        return accepts_text(compiler, model_text, grammar, text)

    call = call_text("weather", '{"city": "Rome", "days": 2}')
    assert accepts("No call at all, <tool or not.")
    assert accepts(f"Let me see.\n{call}\n{call_text('now', '{}')}")
    assert not accepts('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    assert not accepts(call_text("weather", '{"city": "Rome"}'))
    assert not accepts(f"{call} <tool_call> and text")


FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": WEATHER | {"title": "Answer"}}}
ANSWER = '{"city": "Rome", "days": 2}'


@pytest.mark.parametrize("name", ["hermes", "qwen3", "mistral", "magistral", "deepseek_v31"])
@pytest.mark.parametrize("is_behind_reasoning", [False, True])
def test_an_answer_with_tools_and_a_form_is_calls_or_has_the_form(
    name: str, is_behind_reasoning: bool, compiler: GrammarCompiler, model_text: ModelText
) -> None:
    """OpenAI's agents send both, tools and a type of output."""
    text, held_by = (model_text, compiler) if name == "hermes" else model_like(name)
    model_format = ModelFormat.of(text)
    tools = model_format.tools
    assert tools is not None
    options = parse(tools=TOOLS, response_format=FORM, model_format=model_format).options
    grammar, begun = options.constraint.grammar, ""
    if is_behind_reasoning:
        state = ReasoningState.OPEN
        grammar = with_reasoning(grammar, THINK_TAGS, state, vocabulary=model_format.vocabulary, max_tokens=None)
        begun = f"Hm, {ANSWER}?\n</think>\n\n"

    def accepts(answer: str) -> bool:
        return accepts_text(held_by, text, grammar, begun + answer)

    call = written(tools.name, [("weather", {"city": "Rome", "days": 2})])
    assert accepts(ANSWER)
    assert accepts(call)
    assert not accepts("Rome")
    assert not accepts(f"Look: {call}")
    assert not accepts(f"{ANSWER}{call}")
    assert not accepts(call.replace("weather", "other"))


@pytest.mark.parametrize(
    ("form", "answer"),
    [({"regex": "[a-z]{2}"}, "ab"), ({"choice": ["red", "blue"]}, "blue"), ({"json_object": True}, "{}")],
)
def test_every_form_can_stand_beside_tools(
    form: dict[str, Any], answer: str, compiler: GrammarCompiler, model_text: ModelText
) -> None:
    grammar = parse(tools=TOOLS, structured_outputs=form).options.constraint.grammar

    assert accepts_text(compiler, model_text, grammar, answer)
    assert accepts_text(compiler, model_text, grammar, call_text("now", "{}"))
    assert not accepts_text(compiler, model_text, grammar, "neither")


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_a_form_is_refused_where_calls_cannot_be_told_from_it(name: str) -> None:
    with pytest.raises(UnsupportedField, match="response_format") as refused:
        parse(tools=TOOLS, response_format=FORM, model_format=ModelFormat(tools=TOOL_FORMATS[name]))

    assert refused.value.param == "tools"


def accepts_text(compiler: GrammarCompiler, model_text: ModelText, grammar: Grammar, text: str) -> bool:
    """Tell whether a text, whose markers are control tokens where the model has them, can be a whole answer."""
    matcher = compiler.compile(grammar)
    for token_id in [*model_text.tokenizer.encode(text, allow_special=True), model_text.eos_token_ids[0]]:
        matcher.accept(token_id)
    return matcher.failure is None


@functools.cache
def model_like(name: str) -> tuple[ModelText, GrammarCompiler]:
    with tempfile.TemporaryDirectory() as folder:
        model_text = load_model_text(write_model_folder(Path(folder), name))
    return model_text, GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)


@pytest.fixture(params=CONTROL_TOKENS)
def other_model(request: pytest.FixtureRequest) -> ModelText:
    return model_like(request.param)[0]


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_every_form_is_held_in_its_own_words(name: str) -> None:
    other_model, compiler = model_like(name)
    model_format = ModelFormat.of(other_model)
    assert model_format.tools is not None
    assert model_format.template_knows_tools
    required, possible = use_of(tool_choice="required"), use_of()
    one = use_of(tool_choice="required", parallel_tool_calls=False)
    right = [("weather", {"city": "Rome", "days": 2})]
    two = [*right, ("now", {})]
    form = model_format.tools.name

    def accepts(use: ToolUse, text: str) -> bool:
        return accepts_text(compiler, other_model, grammar_of(use, model_format), text)

    assert accepts(required, written(form, right))
    assert accepts(possible, written(form, right))
    assert accepts(possible, "No call at all.")
    assert not accepts(required, "No call at all.")
    assert not accepts(one, written(form, two))
    assert accepts(required, written(form, two)) is model_format.has_parallel_calls
    for use in (required, possible):
        assert not accepts(use, written(form, [("weather", {"city": "Rome"})]))
        assert not accepts(use, written(form, [("elsewhere", {})]))
    text, is_complete = drawn_with_markers(compiler.compile(grammar_of(one, model_format)), other_model, 1)
    found = read(form, [text], names=NAMES)
    assert not is_complete or (len(found.calls), found.content) == (1, "")


def drawn_with_markers(matcher: CompiledGrammar, model_text: ModelText, seed: int) -> tuple[str, bool]:
    token_ids, is_complete = draw_token_ids(matcher, model_text, seed)
    detokenizer = IncrementalDetokenizer(model_text.tokenizer, skip_special_tokens=False)
    return detokenizer.add(token_ids) + detokenizer.flush(), is_complete


@pytest.mark.parametrize(
    ("grammar", "answer", "wrong"),
    [
        (Grammar(GrammarForm.JSON_SCHEMA, (json.dumps(WEATHER),)), '{"city": "Rome", "days": 2}', '{"city": 1}'),
        (Grammar(GrammarForm.REGEX, (r"\d{2}/[ab]",)), "12/a", "1/a"),
        (Grammar(GrammarForm.CHOICE, ("yes", 'n"o')), 'n"o', "no"),
        (Grammar(GrammarForm.LARK, ('start: "a" other\nother: "b"',)), "ab", "aa"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "magistral", "deepseek_v31"])
def test_a_form_holds_behind_reasoning(name: str, grammar: Grammar, answer: str, wrong: str) -> None:
    model_text, compiler = model_like(name)
    model_format = ModelFormat.of(model_text)
    reasoning = model_format.reasoning
    assert reasoning is not None

    def accepts(state: ReasoningState, text: str, max_tokens: int | None = None) -> bool:
        held = with_reasoning(grammar, reasoning, state, vocabulary=model_format.vocabulary, max_tokens=max_tokens)
        return accepts_text(compiler, model_text, held, text)

    thought = "\nMaybe {not} this?\n" + reasoning.end + "\n\n"
    assert accepts(ReasoningState.OPEN, thought + answer)
    assert accepts(ReasoningState.POSSIBLE, reasoning.begin + thought + answer)
    assert accepts(ReasoningState.POSSIBLE, answer)
    assert not accepts(ReasoningState.OPEN, answer)
    assert not accepts(ReasoningState.OPEN, thought + wrong)
    assert not accepts(ReasoningState.POSSIBLE, wrong)
    assert model_format.can_limit_reasoning is (name != "deepseek_v31")
    if model_format.can_limit_reasoning:
        assert accepts(ReasoningState.OPEN, "Hm." + reasoning.end + answer, max_tokens=4)
        assert not accepts(ReasoningState.OPEN, "One two three four five." + reasoning.end + answer, max_tokens=4)


def test_words_of_grammars_in_a_tool_are_only_words() -> None:
    model_text, compiler = model_like("qwen3")
    model_format = ModelFormat.of(model_text)
    parameters = {"type": "object", "properties": {"start": {"const": "start: TEXT"}}, "required": ["start"]}
    tool = {"type": "function", "function": {"name": "start", "parameters": parameters}}
    use = parse(tools=[tool], tool_choice="required").options.tools
    held = with_reasoning(
        grammar_of(use, model_format),
        THINK_TAGS,
        ReasoningState.OPEN,
        vocabulary=model_format.vocabulary,
        max_tokens=None,
    )

    text = "Hm.</think>\n\n" + written("hermes", [("start", {"start": "start: TEXT"})])
    assert accepts_text(compiler, model_text, held, text)


def test_a_grammar_that_cannot_stand_behind_reasoning_is_refused() -> None:
    grammar = Grammar(GrammarForm.LARK, ('start: "a" start?',))

    with pytest.raises(InvalidRequest, match="start"):
        with_reasoning(grammar, THINK_TAGS, ReasoningState.OPEN, vocabulary=HERMES.vocabulary, max_tokens=None)


def test_a_server_without_a_form_of_calls_refuses_tools() -> None:
    with pytest.raises(OctavoError) as refused:
        tool_constraint(use_of(), ModelFormat(tools=None))

    assert refused.value.param == "tools"


def test_calls_in_pythons_words_can_be_read_but_not_required() -> None:
    pythonic = ModelFormat(tools=TOOL_FORMATS["pythonic"])
    strict = {"type": "function", "function": {"name": "now", "strict": True}}

    assert tool_constraint(use_of(), pythonic) is None
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [strict]}, "tools[0].function.strict"),
    ):
        with pytest.raises(OctavoError) as refused:
            tool_constraint(parse(**({"tools": TOOLS} | fields)).options.tools, pythonic)
        assert refused.value.param == param


def parse(*, model_format: ModelFormat = HERMES, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return parse_chat_completion(body, ModelFacts("tiny", 49152, format=model_format))


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CONVERSATION = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "And now?"},
]


def test_a_template_that_knows_no_tools_gets_them_in_words(model_text: ModelText) -> None:
    request = parse(tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *CONVERSATION])

    system, _, assistant, result, *_ = phrased(request.prompt, ModelFormat.of(model_text)).messages

    assert system.content.startswith("Be brief.\n\n# Tools")
    assert '"name":"weather","description":"Tell it."' in system.content
    assert assistant.content == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert (result.role, result.content) == ("user", "<tool_response>\nSunny\n</tool_response>")


def test_a_template_that_knows_tools_is_told_of_them_as_they_are(other_model: ModelText) -> None:
    model_format = ModelFormat.of(other_model)
    assert model_format.tools is not None
    request = parse(tools=TOOLS, messages=CONVERSATION)
    prompt = phrased(request.prompt, model_format)

    token_ids = other_model.chat_template.render_token_ids(
        prompt.messages, other_model.tokenizer, add_generation_prompt=True, tools=prompt.tools
    )

    detokenizer = IncrementalDetokenizer(other_model.tokenizer, skip_special_tokens=False)
    text = detokenizer.add(token_ids)
    places = [text.index(part) for part in ("Tell it.", '"Rome"', "Sunny", "Sunny.")]
    assert places == sorted(places) or model_format.needs_short_ids
    assert json.loads(
        f"{{{text[text.index(chr(34) + 'city' + chr(34) + ': ' + chr(34) + 'Rome') :].split('}')[0]}}}"
    ) == {"city": "Rome"}
    if model_format.needs_short_ids:
        assert text.count(short_call_id("call_1")) == 2


def test_markers_in_what_a_client_gives_stay_text(other_model: ModelText) -> None:
    markers = "".join(token.text for token in other_model.tokenizer.definition.added_tokens)
    bare = [{"role": "user", "content": "Rome?"}]
    hostile = {"type": "function", "function": {"name": "f", "description": markers}}

    def control_tokens(**fields: Any) -> list[int]:
        prompt = phrased(parse(messages=bare, **fields).prompt, ModelFormat.of(other_model))
        token_ids = other_model.chat_template.render_token_ids(
            prompt.messages, other_model.tokenizer, add_generation_prompt=True, tools=prompt.tools
        )
        return control_ids(token_ids, other_model.tokenizer.definition)

    assert control_tokens(tools=[hostile]) == control_tokens(tools=[TOOLS[1]])


def test_without_a_choice_the_model_is_not_told_of_tools() -> None:
    request = parse(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})

    assert request.options.tools is None
    assert request.prompt.tools == ()
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
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}}, "tools"),
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
    use = parse(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}]).options.tools

    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiler.compile(grammar_of(use))


def test_parameters_may_hold_integers_of_more_than_64_bits(
    compiler: GrammarCompiler, model_text: ModelText
) -> None:
    parameters = {"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 2**70}}, "required": ["a"]}
    request = parse(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])

    compiler.compile(grammar_of(request.options.tools))

    assert request.prompt.num_characters > 0
    assert "maximum" in phrased(request.prompt, ModelFormat.of(model_text)).messages[0].content


def test_a_bound_that_no_number_has_is_refused() -> None:
    parameters = {"properties": {"a": {"type": "integer", "maximum": 10**400}}}

    with pytest.raises(InvalidRequest) as refused:
        parse(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert refused.value.param == "tools[0].function.parameters"


def test_what_a_model_called_with_keeps_its_digits() -> None:
    """Identifiers of more than 64 bits are integers in arguments, which come back as they went."""
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"id": 10**30}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "Found"}
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Find it"}, *turns]}

    messages = parse_messages(body, ModelFacts("tiny", 49152)).prompts[0].messages

    assert json.loads(messages[1].tool_calls[0].arguments) == {"id": 10**30}


def test_a_choice_can_allow_some_tools() -> None:
    allowed = {"mode": "required", "tools": [NAMED]}

    use = use_of(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})

    assert (use.choice, use.names) == (ToolChoice.REQUIRED, frozenset({"weather"}))
    assert len(use.tools) == 2


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize("state", [ReasoningState.OPEN, ReasoningState.POSSIBLE])
def test_calls_are_held_behind_reasoning_and_not_in_it(name: str, state: ReasoningState) -> None:
    model_text, compiler = model_like(name)
    model_format = ModelFormat.of(model_text)
    reasoning, tools = model_format.reasoning, model_format.tools
    assert reasoning is not None
    assert tools is not None
    held = with_reasoning(
        grammar_of(use_of(), model_format), reasoning, state, vocabulary=model_format.vocabulary, max_tokens=None
    )

    def accepts(text: str) -> bool:
        return accepts_text(compiler, model_text, held, text)

    call = written(tools.name, [("weather", {"city": "Rome", "days": 2})])
    wrong = written(tools.name, [("elsewhere", {})])
    # What begins calls is a control token of DeepSeek's, which no reasoning has.
    thought = "Maybe " + ("<tool_call>" if name == "qwen3" else "a call") + "?"
    begun = f"{reasoning.begin if state is ReasoningState.POSSIBLE else ''}\n{thought}\n{reasoning.end}\n\n"
    assert accepts(begun + call)
    assert accepts(begun + "No call.")
    assert accepts(begun + "Look:\n" + call)
    assert not accepts(begun + wrong)
    if state is ReasoningState.POSSIBLE:
        assert accepts(call)
        assert accepts("No call.")
        assert not accepts(wrong)


def names_taken(parse_name: Callable[[str], Any]) -> list[int]:
    """Return how many characters a name may have, of some around the bounds of all dialects."""
    taken = []
    for length in (64, 65, 128, 129):
        with contextlib.suppress(InvalidRequest):
            parse_name("n" * length)
            taken.append(length)
    return taken


def test_names_of_tools_are_bounded_as_each_dialect_has_it() -> None:
    # anthropics/claude-code#96152: 128 with Anthropic, where OpenAI's have 64 (use-novamira/novamira#12).
    turn = {"role": "user", "content": "Hi"}

    def chat(name: str) -> Any:
        return parse(tools=[{"type": "function", "function": {"name": name}}])

    def message(name: str) -> Any:
        call = {"type": "tool_use", "id": "a", "name": name, "input": {}}
        body = {"model": "tiny", "max_tokens": 9, "tools": [{"name": name, "input_schema": {"type": "object"}}]}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
        turns = [turn, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        choice = {"type": "tool", "name": name}
        return parse_messages(body | {"messages": turns, "tool_choice": choice}, ModelFacts("tiny", 49152))

    assert names_taken(chat) == [64]
    assert names_taken(message) == [64, 65, 128]
