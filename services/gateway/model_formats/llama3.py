"""The form of calls of Llama 3.1 to 3.3: bare JSON in place of the answer, with or without ``<|python_tag|>``.

``{"name": …, "parameters": {…}}``; several are separated by ``; ``. As there may be no marker, JSON is a call only
where the answer begins with it and where it names a tool of the request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import orjson

from services.gateway.model_formats.call_objects import read_call_object
from services.gateway.model_formats.format import CallGrammar, Vocabulary, call_object, repeated
from services.gateway.model_formats.text_reader import Reading, TextReader

TAG: Final = "<|python_tag|>"
_LOOKS_LIKE_CALLS: Final = r'[ \n]*\{[ \n]*"(name|type|id|parameters|arguments)"(.|\n)*'


class Llama3Format:
    """A ``ToolFormat``."""

    name = "llama3"
    markers = (TAG,)
    # As Llama's template words it.
    instruction = (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        "Do not use variables."
    )

    def read(self, reader: TextReader, names: Collection[str]) -> Reading[None]:
        """Take all of an answer's text."""
        if (yield from reader.attempt(_call(reader, names, " \n"))):
            yield from _further_calls(reader, names)
        while (yield from reader.text_until((TAG,), reader.give_content)) is not None:
            if (yield from reader.attempt(_call(reader, names, " \n"))):
                yield from _further_calls(reader, names)
            else:
                reader.give_back(TAG)

    def grammar(self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar of calls; a tool is its name and the rule of its arguments."""
        bodies = [call_object(vocabulary, name, "parameters", arguments) for name, arguments in tools]
        tag = "" if vocabulary.control_token_id(TAG) is None else f"{vocabulary.term(TAG)}? "
        rules = [f"one_call: {' | '.join(bodies)}"]
        calls = tag + repeated("one_call", '"; " one_call', max_calls)
        return CallGrammar(None, calls, rules, _LOOKS_LIKE_CALLS)

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        return f'{{"name": {orjson.dumps(name).decode()}, "parameters": {arguments}}}'


def _further_calls(reader: TextReader, names: Collection[str]) -> Reading[None]:
    while (yield from reader.attempt(_call(reader, names, " \n;,"))):
        pass
    # White space next to a call is no text.
    yield from reader.skip_space()


def _call(reader: TextReader, names: Collection[str], between: str) -> Reading[None]:
    yield from reader.skip_any(between)
    yield from reader.skip(TAG)
    yield from reader.skip_any(" \n")
    yield from read_call_object(reader, names)
