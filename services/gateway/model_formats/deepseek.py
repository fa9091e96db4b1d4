"""The two forms of calls of DeepSeek's models, between control tokens of their own.

V3 and R1: ``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, the arguments in a block
of Markdown, ``<｜tool▁call▁end｜>``. V3.1: ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``.
``<｜tool▁calls▁end｜>`` follows the last call. Both are read; a format writes one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from services.gateway.model_formats.format import CallGrammar, Vocabulary, repeated
from services.gateway.model_formats.text_reader import NotACall, Reading, TextReader

CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
_KIND: Final = "function"
_BLOCK_BEGIN: Final = "\n```json\n"
_BLOCK_END: Final = "\n```"
_NAME_CHARACTER: Final = re.compile(r"[A-Za-z0-9_-]")


class DeepSeekV31Format:
    """A ``ToolFormat``: bare arguments."""

    name = "deepseek_v31"
    markers: tuple[str, ...] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    @property
    def instruction(self) -> str:
        """How to call, for models whose template does not say it."""
        return f"To call a function, answer: {self.call_text('<function-name>', '<args-json-object>')}"

    def read(self, reader: TextReader, names: Collection[str]) -> Reading[None]:
        """Take all of an answer's text."""
        # R1 sometimes leaves out the outer marker.
        while (
            marker := (yield from reader.text_until((CALLS_BEGIN, CALL_BEGIN), reader.give_content))
        ) is not None:
            if (yield from reader.attempt(_call(reader, names, has_begun=marker == CALL_BEGIN))):
                yield from _close(reader)
                while (yield from reader.attempt(_call(reader, names, has_begun=False))):
                    yield from _close(reader)
                yield from reader.skip(CALLS_END)
                yield from reader.skip_space()
            else:
                reader.give_back(marker)

    def grammar(self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar of calls; a tool is its name and the rule of its arguments."""
        separator = vocabulary.term(SEPARATOR)
        bodies = [f"{vocabulary.text(name)} {separator} {arguments}" for name, arguments in tools]
        return self._calls(bodies, max_calls, vocabulary, between="")

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        return f"{CALLS_BEGIN}{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}{CALLS_END}"

    def _calls(self, bodies: Sequence[str], max_calls: int, vocabulary: Vocabulary, between: str) -> CallGrammar:
        begin, end = vocabulary.term(CALL_BEGIN), vocabulary.term(CALL_END)
        rules = [f"one_call: {begin} ({' | '.join(bodies)}) {end}"]
        calls = f"{repeated('one_call', between + ' one_call', max_calls)} {vocabulary.term(CALLS_END)}"
        return CallGrammar(CALLS_BEGIN, calls, rules)


class DeepSeekV3Format(DeepSeekV31Format):
    """A ``ToolFormat``: arguments in a block of Markdown."""

    name = "deepseek_v3"

    def grammar(self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar of calls; a tool is its name and the rule of its arguments."""
        head = f"{vocabulary.text(_KIND)} {vocabulary.term(SEPARATOR)}"
        bodies = [
            f"{head} {vocabulary.text(name + _BLOCK_BEGIN)} {arguments} {vocabulary.text(_BLOCK_END)}"
            for name, arguments in tools
        ]
        return self._calls(bodies, max_calls, vocabulary, between='"\\n"')

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        call = f"{CALL_BEGIN}{_KIND}{SEPARATOR}{name}{_BLOCK_BEGIN}{arguments}{_BLOCK_END}{CALL_END}"
        return f"{CALLS_BEGIN}{call}{CALLS_END}"


def _call(reader: TextReader, names: Collection[str], *, has_begun: bool) -> Reading[None]:
    yield from reader.skip_space()
    if not has_begun:
        yield from reader.expect(CALL_BEGIN)
    name = yield from reader.word(_NAME_CHARACTER)
    yield from reader.expect(SEPARATOR)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        # V3: what came was the kind; the name and a block follow.
        name = yield from reader.word(_NAME_CHARACTER)
        yield from reader.skip_space()
        yield from reader.expect("```json")
        yield from reader.skip_space()
    if name not in names or (yield from reader.peek()) != "{":
        raise NotACall
    reader.begin_call(name)
    yield from reader.json_object(reader.give_arguments)


def _close(reader: TextReader) -> Reading[None]:
    yield from reader.skip_any("` \n")
    yield from reader.skip(CALL_END)
    yield from reader.skip_any(" \n")
