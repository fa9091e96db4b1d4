"""The two forms of calls of Mistral's models, after the control token ``[TOOL_CALLS]``.

Until version 7 of their tokenizer it begins one list of JSON, ``[TOOL_CALLS] [{"name": …, "arguments": {…}}]``;
from version 11 on it begins each call, ``[TOOL_CALLS]name[ARGS]{…}`` or ``[TOOL_CALLS]name{…}``, with an id before
the arguments in some versions, ``[CALL_ID]id``. Both are read; a format writes one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

import orjson

from services.gateway.model_formats.call_objects import read_call_object
from services.gateway.model_formats.format import CallGrammar, Vocabulary, call_object, repeated
from services.gateway.model_formats.text_reader import NotACall, Reading, TextReader

BEGIN: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
_NAME_CHARACTER: Final = re.compile(r"[A-Za-z0-9_-]")
_ID_CHARACTER: Final = re.compile(r"[A-Za-z0-9]")


class MistralListFormat:
    """A ``ToolFormat``: one list of calls."""

    name = "mistral"
    markers: tuple[str, ...] = (BEGIN, CALL_ID, ARGUMENTS)
    instruction = (
        f'To call functions, answer: {BEGIN}[{{"name": <function-name>, "arguments": <args-json-object>}}]'
    )

    def read(self, reader: TextReader, names: Collection[str]) -> Reading[None]:
        """Take all of an answer's text."""
        while (yield from reader.text_until((BEGIN,), reader.give_content)) is not None:
            if (yield from reader.attempt(_first_of_list(reader, names))):
                yield from _rest_of_list(reader, names)
            elif not (yield from reader.attempt(_named_call(reader, names))):
                reader.give_back(BEGIN)
                continue
            yield from reader.skip_space()

    def grammar(self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar of calls; a tool is its name and the rule of its arguments."""
        bodies = [call_object(vocabulary, name, "arguments", arguments) for name, arguments in tools]
        rules = [f"one_call: {' | '.join(bodies)}"]
        calls = repeated("one_call", '", " one_call', max_calls)
        return CallGrammar(BEGIN, f'" "? "[" {calls} "]"', rules)

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        return f'{BEGIN}[{{"name": {orjson.dumps(name).decode()}, "arguments": {arguments}}}]'


class MistralNamedFormat(MistralListFormat):
    """A ``ToolFormat``: each call has the marker, its name and its arguments."""

    name = "mistral_named"
    instruction = f"To call functions, answer for each: {BEGIN}<function-name>{ARGUMENTS}<args-json-object>"

    def grammar(self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar of calls; a tool is its name and the rule of its arguments."""
        has_marker = vocabulary.control_token_id(ARGUMENTS) is not None
        between = f" {vocabulary.term(ARGUMENTS)} " if has_marker else " "
        bodies = [f"{vocabulary.text(name)}{between}{arguments}" for name, arguments in tools]
        rules = [f"one_call: {' | '.join(bodies)}"]
        return CallGrammar(BEGIN, repeated("one_call", f"{vocabulary.term(BEGIN)} one_call", max_calls), rules)

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        return f"{BEGIN}{name}{ARGUMENTS}{arguments}"


def _first_of_list(reader: TextReader, names: Collection[str]) -> Reading[None]:
    yield from reader.skip_space()
    yield from reader.expect("[")
    yield from reader.skip_space()
    yield from read_call_object(reader, names)


def _rest_of_list(reader: TextReader, names: Collection[str]) -> Reading[None]:
    while (yield from reader.attempt(_next_of_list(reader, names))):
        pass
    yield from reader.skip_any(" \n")
    yield from reader.skip("]")


def _next_of_list(reader: TextReader, names: Collection[str]) -> Reading[None]:
    yield from reader.skip_space()
    yield from reader.expect(",")
    yield from reader.skip_space()
    yield from read_call_object(reader, names)


def _named_call(reader: TextReader, names: Collection[str]) -> Reading[None]:
    yield from reader.skip_space()
    name = yield from reader.word(_NAME_CHARACTER)
    if name not in names:
        raise NotACall
    if (yield from reader.skip(CALL_ID)):
        yield from reader.word(_ID_CHARACTER)
    yield from reader.skip(ARGUMENTS)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise NotACall
    reader.begin_call(name)
    yield from reader.json_object(reader.give_arguments)
