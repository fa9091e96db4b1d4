"""Hermes' form of calls, which Qwen and many others are trained on: ``<tool_call>`` around JSON.

``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``, once for each call, text around them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import orjson

from services.gateway.model_formats.call_objects import read_call_object
from services.gateway.model_formats.format import CallGrammar, Vocabulary, call_object, repeated
from services.gateway.model_formats.text_reader import Reading, TextReader

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


class HermesFormat:
    """A ``ToolFormat``."""

    name = "hermes"
    markers = (BEGIN, END)
    # As Qwen's template words it.
    instruction = (
        "For each function call, return a json object with function name and arguments within "
        f'{BEGIN}{END} XML tags:\n{BEGIN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{END}'
    )

    def read(self, reader: TextReader, names: Collection[str]) -> Reading[None]:
        """Take all of an answer's text."""
        while (yield from reader.text_until((BEGIN,), reader.give_content)) is not None:
            if (yield from reader.attempt(_spaced_object(reader, names))):
                yield from reader.close_call(END, BEGIN)
            else:
                reader.give_back(BEGIN)

    def grammar(self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar of calls; a tool is its name and the rule of its arguments."""
        begin, end = vocabulary.term(BEGIN), vocabulary.term(END)
        bodies = [call_object(vocabulary, name, "arguments", arguments) for name, arguments in tools]
        rules = [f'one_call: "\\n" ({" | ".join(bodies)}) "\\n" {end}']
        return CallGrammar(BEGIN, repeated("one_call", f'"\\n" {begin} one_call', max_calls), rules)

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        return f'{BEGIN}\n{{"name": {orjson.dumps(name).decode()}, "arguments": {arguments}}}\n{END}'


def _spaced_object(reader: TextReader, names: Collection[str]) -> Reading[None]:
    yield from reader.skip_space()
    yield from read_call_object(reader, names)
