"""The pythonic form of calls of Llama 3.2 and 4: ``[name(key=value, …), …]`` in place of the answer.

A call is given when its closing parenthesis has come: its arguments are Python's literals, which become JSON.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson

from services.gateway.model_formats.format import CallGrammar, Vocabulary
from services.gateway.model_formats.text_reader import NotACall, Reading, TextReader

BEGIN: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_NAME_CHARACTER: Final = re.compile(r"[A-Za-z0-9_-]")
# Models write JSON's names, too.
_NAMED_VALUES: Final = {"true": True, "false": False, "null": None}


class PythonicFormat:
    """A ``ToolFormat``."""

    name = "pythonic"
    markers = (BEGIN, END)
    instruction = (
        "To call functions, answer with a list of them and nothing else: "
        "[function_name(argument=value, other_argument=value)]"
    )

    def read(self, reader: TextReader, names: Collection[str]) -> Reading[None]:
        """Take all of an answer's text."""
        if (yield from reader.attempt(_call(reader, names, "["))):
            while (yield from reader.attempt(_call(reader, names, ","))):
                pass
            yield from reader.skip_space()
            yield from reader.skip("]")
            yield from reader.skip_space()
            yield from reader.skip(END)
            yield from reader.skip_space()
        yield from reader.rest(reader.give_content)

    def grammar(
        self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary
    ) -> CallGrammar | None:
        """Return None: arguments in Python's words have no schema that could hold them."""
        return None

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it; ``arguments`` is JSON."""
        written = ", ".join(f"{key}={value!r}" for key, value in orjson.loads(arguments).items())
        return f"[{name}({written})]"


def _call(reader: TextReader, names: Collection[str], before: str) -> Reading[None]:
    yield from reader.skip_space()
    if before == "[":
        yield from reader.skip(BEGIN)
    yield from reader.expect(before)
    yield from reader.skip_space()
    name = yield from reader.word(_NAME_CHARACTER)
    if name not in names:
        raise NotACall
    arguments = _arguments_as_json((yield from reader.parenthesized()))
    reader.begin_call(name)
    reader.give_arguments(arguments)


def _arguments_as_json(written: str) -> str:
    """Return the keyword arguments of a call as an object of JSON; raises NotACall for anything but literals."""
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise NotACall
        values = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        return orjson.dumps(values).decode()
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        raise NotACall from error


def _value(node: ast.expr) -> Any:  # Any: a JSON value.
    named = _Named().visit(node)
    return ast.literal_eval(named)


class _Named(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _NAMED_VALUES:
            raise ValueError(node.id)
        return ast.Constant(_NAMED_VALUES[node.id])
