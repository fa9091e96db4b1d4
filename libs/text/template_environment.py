"""The sandbox in which a model's chat template runs.

Owns what templates may use, as templates expect it from transformers, and the bounds on what they may make:
numbers that count something, text that is multiplied or added up, and the steps of ``range``. A template comes with
the model, so an operator chose it; the bounds are there because its input comes from clients. It must not know
messages or tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RANGE_STEPS: Final = 100_000
# The longest text that one expression may build, and the largest number that a function may be given.
MAX_EXPRESSION_CHARACTERS: Final = 16_000_000
MAX_NUMBER: Final = 1_000_000

_COUNTING_FILTERS: Final = ("batch", "center", "format", "indent", "slice", "truncate", "wordwrap")
_LONG_NUMBER: Final = re.compile(r"\d{7}|%\*|\{[^{}]*\{")


def template_environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """Make the environment; ``now`` answers templates that ask for the date."""
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], autoescape=False
    )
    environment.filters |= {name: _with_small_numbers(environment.filters[name]) for name in _COUNTING_FILTERS}
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum")  # It writes random text of any length.
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


class RangeBudget:
    """``range`` for one rendering; all its calls together may take ``MAX_RANGE_STEPS`` steps."""

    def __init__(self) -> None:
        self._num_steps_left = MAX_RANGE_STEPS

    def __call__(self, *bounds: int) -> range:
        """Return the range, or refuse when the rendering has no steps left for it."""
        steps = range(*bounds)
        self._num_steps_left -= len(steps)
        if self._num_steps_left < 0:
            raise SecurityError(f"it loops over more than {MAX_RANGE_STEPS} numbers")
        return steps


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that also looks at how much an operation would make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be huge."""
        match operator:
            case "*":
                for text, count in ((left, right), (right, left)):
                    if isinstance(text, str | list | tuple) and isinstance(count, int):
                        _check_length(len(text) * count)
            case "+" if isinstance(left, str | list | tuple):
                _check_length(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
            case "**":
                _check_numbers(left)
                if isinstance(right, int | float) and abs(right) > 64:
                    raise SecurityError("it raises a number to a power over 64")
            case "%" if isinstance(left, str):
                _check_layout(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, unless it is a method of a text that is given a huge number (``"a".ljust(10**9)``)."""
        if isinstance(getattr(function, "__self__", None), str):
            _check_numbers(*args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed ``format`` of a text, unless its layout asks for a huge width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_layout(value.__self__)
        return wrapped


class _GenerationTag(Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` marks answers for training; here it only has to be known."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body and drop the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # It also copies the marks by which jinja knows what to pass.
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args, *kwargs.values())
        for text in args:
            if function.__name__ == "do_format" and isinstance(text, str):
                _check_layout(text)
        return function(*args, **kwargs)

    return bounded


def _check_numbers(*values: Any) -> None:
    if any(isinstance(value, int | float) and abs(value) > MAX_NUMBER for value in values):
        raise SecurityError(f"it counts to more than {MAX_NUMBER}")


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_EXPRESSION_CHARACTERS:
        raise SecurityError(f"it builds a value longer than {MAX_EXPRESSION_CHARACTERS}")


def _check_layout(layout: str) -> None:
    """Refuse a layout with a width of seven digits, or with a width that is itself an argument."""
    if _LONG_NUMBER.search(layout):
        raise SecurityError("it formats with a width that is too large or not fixed")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a model to read: without the HTML escapes of jinja's own filter, and with Unicode as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
