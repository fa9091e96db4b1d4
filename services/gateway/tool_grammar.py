"""The grammar of an answer that may reason and call tools, in the words of the model's own form.

Owns how reasoning, text and calls follow one another, as llguidance's Lark. It must not know fields of requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import llguidance
import orjson

from libs.errors import InvalidRequest, UnsupportedField
from libs.grammar import Grammar, GrammarForm
from libs.grammar.compiler import compiler_schema, lark_literal
from services.gateway.model_formats.format import CallGrammar, Vocabulary
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.model_formats.reasoning import ReasoningFormat, ReasoningState
from services.gateway.output_constraints import OutputConstraint
from services.gateway.tools import ToolChoice, ToolUse

MAX_CALLS: Final = 16

_HEADER: Final = "%llguidance {}"
# Tells grammars made here, in which only the first ``start`` is a rule.
_OWN_NOTE: Final = "// Text and calls of tools."
_TEXT_RULE: Final = r"TEXT: /(.|\n)*/"
_START: Final = re.compile(r"^start(?=\s*:)", re.MULTILINE)
_START_ANYWHERE: Final = re.compile(r"\bstart\b")


def tool_constraint(
    use: ToolUse, model_format: ModelFormat, form: OutputConstraint | None = None
) -> OutputConstraint | None:
    """Return the grammar of an answer: any text with right calls in it, or nothing but calls.

    Where the answer has a ``form`` it is calls or that. None where the model's form of calls has no grammar and
    calls are not required.

    Raises:
        UnsupportedField: calls cannot be required of this model, or not be held to a schema.
    """
    tools = model_format.tools
    if tools is None:
        raise UnsupportedField("This server is set up without a form of calls; leave 'tools' out.", param="tools")
    max_calls = MAX_CALLS if use.is_parallel and model_format.has_parallel_calls else 1
    named = [(tool.name, f"arguments_{index}") for index, tool in enumerate(use.callable_tools)]
    calls = tools.grammar(named, max_calls, model_format.vocabulary)
    if form is not None:
        _require_apart(form, calls, tools.name)
    if calls is None:
        _require_free_calls(use, tools.name)
        return None
    schemas = [compiler_schema(tool.parameters) for tool in use.callable_tools]
    arguments = [f"{rule}: %json {schema}" for (_, rule), schema in zip(named, schemas, strict=True)]
    if use.choice is ToolChoice.REQUIRED:
        rules = _required(calls, model_format.vocabulary)
    elif form is not None:
        rules = _required_or(form.grammar, calls, model_format.vocabulary)
    else:
        rules = _possible(calls, model_format.vocabulary)
    text = "\n".join([_HEADER, _OWN_NOTE, *rules, *calls.rules, *arguments])
    return OutputConstraint(Grammar(GrammarForm.LARK, (text,)), "tools", form)


def _require_apart(form: OutputConstraint, calls: CallGrammar | None, name: str) -> None:
    """Refuse a form of the answer that could not be told from calls, or not be written beside them."""
    if form.grammar.form is GrammarForm.LARK:
        raise UnsupportedField(f"{form.param!r} and 'tools' cannot be used together.", param="tools")
    if calls is None or calls.begin is None:
        raise UnsupportedField(
            f"{form.param!r} and 'tools' cannot be used together: calls in this model's form ({name}) cannot be "
            "told from other answers.",
            param="tools",
        )


def _require_free_calls(use: ToolUse, form: str) -> None:
    if use.choice is ToolChoice.REQUIRED:
        raise UnsupportedField(
            f"Calls in this model's form ({form}) cannot be required; use 'tool_choice' 'auto'.",
            param="tool_choice",
        )
    if not use.is_parallel:
        raise UnsupportedField(
            f"Calls in this model's form ({form}) cannot be limited to one.", param="parallel_tool_calls"
        )
    for index, tool in enumerate(use.tools):
        if tool.is_strict:
            raise UnsupportedField(
                f"Calls in this model's form ({form}) cannot be held to a schema; leave 'strict' out.",
                param=f"tools[{index}].function.strict",
            )


def _required(calls: CallGrammar, vocabulary: Vocabulary) -> list[str]:
    begin = "" if calls.begin is None else f"{vocabulary.term(calls.begin)} "
    return [f"start: {begin}calls", f"calls: {calls.calls}"]


def _required_or(form: Grammar, calls: CallGrammar, vocabulary: Vocabulary) -> list[str]:
    """Return rules for calls and nothing else, or for an answer of this form."""
    begin, *rules = _required(calls, vocabulary)
    return [f"{begin} | formed_answer", *rules, *_answer(form, "formed_answer")]


def _possible(calls: CallGrammar, vocabulary: Vocabulary) -> list[str]:
    """Return rules for text with calls at its end."""
    rules = [f"calls: {calls.calls}", _TEXT_RULE]
    if calls.begin is None:
        # Only what does not begin as calls do is text.
        text = f"TEXT & ~/{calls.looks_like_calls}/"
        return ["start: calls | PLAIN", f"PLAIN: {text}", *rules]
    if vocabulary.control_token_id(calls.begin) is not None:
        return [f"start: TEXT ({vocabulary.term(calls.begin)} calls)?", *rules]
    # Lazy: as soon as calls begin, the text before them is over.
    before = f"before_calls[lazy]: TEXT {vocabulary.term(calls.begin)}"
    return ["start: before_calls calls | rest", before, "rest: TEXT", *rules]


def with_reasoning(
    grammar: Grammar | None,
    reasoning: ReasoningFormat,
    state: ReasoningState,
    *,
    vocabulary: Vocabulary,
    max_tokens: int | None,
) -> Grammar:
    """Return the grammar of reasoning and then what ``grammar`` allows, any text for None.

    ``max_tokens`` bounds the reasoning; ``state`` says whether the prompt has opened it.

    Raises:
        InvalidRequest: a grammar of a client that cannot stand behind another.
    """
    begin = vocabulary.term(reasoning.begin)
    answer, text_rule = _answer(grammar, "reasoned_answer"), _TEXT_RULE
    if state is ReasoningState.OPEN:
        start = f"start: {begin}? reasoning_thought reasoning_space reasoned_answer"
    else:
        start = f"start: {begin} reasoning_thought reasoning_space reasoned_answer | reasoned_answer"
        if vocabulary.control_token_id(reasoning.begin) is None:
            # What begins with the marker is reasoning, and no text.
            text_rule += f" & ~/[ \\n]*{_in_regex(reasoning.begin)}(.|\\n)*/"
    rules = [start, *_thought_rules(reasoning.end, vocabulary, max_tokens), *answer]
    text = "\n".join([_HEADER, *rules, r"reasoning_space: /[ \n]{0,4}/", r"REASONING: /(.|\n)*/"])
    # The text of an answer is its own, and may be less than any.
    return Grammar(GrammarForm.LARK, (text.replace(_TEXT_RULE, text_rule),))


def _thought_rules(end: str, vocabulary: Vocabulary, max_tokens: int | None) -> list[str]:
    """Return rules for reasoning and the marker at its end, by the name ``reasoning_thought``."""
    token_id = vocabulary.token_id(end)
    if token_id is None:
        assert max_tokens is None, "only what ends with a token can be limited"
        return [f"reasoning_thought[lazy]: REASONING {vocabulary.text(end)}"]
    limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    text = "REASONING"
    if vocabulary.control_token_id(end) is None:
        # The token is text, too: as text it must not belong to the reasoning.
        text = f"REASONING & ~/(.|\\n)*{_in_regex(end)}(.|\\n)*/"
    return [
        f"reasoning_thought: reasoning_text <[{token_id}]>",
        f"reasoning_text{limit}: REASONING_TEXT",
        f"REASONING_TEXT: {text}",
    ]


def _in_regex(marker: str) -> str:
    """Return a marker as an expression of Lark has it."""
    return re.escape(marker).replace("/", r"\/")


def _answer(grammar: Grammar | None, rule: str) -> Sequence[str]:
    """Return the rules of an answer, the first by the name ``rule``."""
    if grammar is None:
        return [f"{rule}: TEXT", _TEXT_RULE]
    match grammar.form:
        case GrammarForm.JSON_SCHEMA:
            return [f"{rule}: %json {compiler_schema(orjson.loads(grammar.text))}"]
        case GrammarForm.REGEX:
            return [f"{rule}: /{llguidance.regex_to_lark(grammar.text, 'd')}/"]
        case GrammarForm.CHOICE:
            return [f"{rule}: " + " | ".join(map(lark_literal, grammar.texts))]
        case GrammarForm.LARK:
            text = grammar.text.removeprefix(_HEADER).lstrip()
            if text.startswith(_OWN_NOTE):
                return [_START.sub(rule, text, count=1)]
            if len(_START_ANYWHERE.findall(text)) != 1 or not _START.search(text) or "%llguidance" in text:
                raise InvalidRequest(
                    "'structured_outputs.grammar' cannot stand behind the model's reasoning: 'start' must be in it "
                    "once, at the beginning of a line. Or turn the reasoning off.",
                    param="structured_outputs.grammar",
                )
            return [_START.sub(rule, text)]
