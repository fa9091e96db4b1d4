"""The sandbox in which a model's chat template runs.

Owns what templates may use, as templates expect it from transformers, and the bounds on what they may make:
numbers that count something, text that is multiplied or added up, the steps of ``range``, and all the work of one
rendering. A template comes with the model, so an operator chose it; the bounds are there because its input comes
from clients, and models from strangers. It must not know messages or tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from libs.text.template_work import (
    CALL_WORK,
    MAX_WORK,
    Work,
    check_length,
    checked_length,
    formatted_size,
    indented_size,
    joined_size,
    replaced_size,
    size_of,
    written_size,
)

MAX_RANGE_STEPS: Final = 100_000
# The largest number that a function may be given, and the most bits of a product.
MAX_NUMBER: Final = 1_000_000
_MAX_PRODUCT_BITS: Final = 4096
_MAX_JSON_INDENT: Final = 64
# Texts given to filters that may write them once for each word.
_MAX_ADDED_CHARACTERS: Final = 1_000

_COUNTING_FILTERS: Final = frozenset(
    ("batch", "center", "format", "indent", "round", "slice", "truncate", "wordwrap")
)
# They look at no more than one value, however many there are.
_QUICK_FILTERS: Final = frozenset(
    ("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "safe")
)
_WRITING_FILTERS: Final = frozenset(
    ("e", "escape", "forceescape", "pprint", "string", "tojson", "urlencode", "xmlattr")
)
_SORTING_FILTERS: Final = frozenset(("dictsort", "groupby", "sort", "unique"))
_SORTING_FACTOR: Final = 20
_ADDING_FILTERS: Final = frozenset(("truncate", "urlize", "wordwrap", "xmlattr"))
_LONG_NUMBER: Final = re.compile(r"\d{7}|%\*|\{[^{}]*\{")
# Filters that the compiler puts in where it would else not be asked; a template may use them, for what they are.
_STEPS, _JOINED, _MEASURED = "octavo_steps", "octavo_joined", "octavo_measured"


def template_environment(now: Callable[[], datetime], *, max_work: int = MAX_WORK) -> jinja2.Environment:
    """Make the environment; ``now`` answers templates that ask for the date, ``max_work`` bounds one rendering."""
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationTag],
        autoescape=False,
        finalize=_shown,
    )
    environment.max_work = max_work
    environment.filters["tojson"] = _to_json
    environment.filters = {name: _metered(name, function) for name, function in environment.filters.items()}
    environment.filters |= {_STEPS: _steps, _JOINED: _joined, _MEASURED: _measured}
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


class _MeteredContext(Context):
    """The variables of one rendering, and the account of its work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: jinja's own, passed on as they are.
        super().__init__(*args, **kwargs)
        environment = self.environment
        assert isinstance(environment, _BoundedEnvironment), "no other makes this context"
        self.work = Work(environment.max_work)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that also looks at how much an operation would make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = _MeteredContext
    max_work = MAX_WORK

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Put together what a macro or a block has written."""
        kept: list[str] = []
        num_characters = 0
        for piece in pieces:
            num_characters += len(piece)
            check_length(num_characters)
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be huge, and note what it makes."""
        match operator:
            case "*":
                for text, count in ((left, right), (right, left)):
                    if isinstance(text, str | list | tuple) and isinstance(count, int):
                        check_length(len(text) * count)
                _check_product(left, right)
            case "+" if isinstance(left, str | list | tuple):
                check_length(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
            case "**":
                _check_numbers(left)
                if isinstance(right, int | float) and abs(right) > 64:
                    raise SecurityError("it raises a number to a power over 64")
            case "%" if isinstance(left, str):
                _check_layout(left)
                formatted_size(left, left.count("%"), right)
        result = super().call_binop(context, operator, left, right)
        _work_of(context).take(size_of(result))
        return result

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, unless it is a method that would make something huge (``"a".ljust(10**9)``)."""
        work = _work_of(context)
        work.take(CALL_WORK + sum(map(size_of, args)))
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | int | float):
            _check_numbers(*args, *kwargs.values())
        if isinstance(owner, str):
            work.take(len(owner) + _size_of_call(owner, function.__name__, args, kwargs))
        result = super().call(context, function, *args, **kwargs)
        work.take(size_of(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed ``format`` of a text, unless its layout asks for a huge width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        layout = value.__self__
        _check_layout(layout)

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            formatted_size(layout, layout.count("{"), [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile a template of which every loop and every joining asks this environment."""
        # Any: jinja's own arguments; it made this method to be overridden.
        return super()._generate(_Metering().visit(source), *args, **kwargs)


class _Metering(NodeTransformer):
    """Puts filters that note work where the compiler writes plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _STEPS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        if node.op in ("in", "notin"):
            node.expr = _filtered(node.expr, _MEASURED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MEASURED) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _MEASURED, lineno=node.lineno)
        return node


def _filtered(node: nodes.Node | None, name: str, *, lineno: int | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno if node is not None else lineno)


class _GenerationTag(Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` marks answers for training; here it only has to be known."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body and drop the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses to make something huge, and notes its work."""
    passed = _passed_to(function)

    @functools.wraps(function)
    def metered(context: Context, *args: Any, **kwargs: Any) -> Any:
        work = _work_of(context)
        work.take(CALL_WORK + _size_of_filter(name, args, kwargs))
        result = function(*passed(context), *args, **kwargs)
        if name not in _QUICK_FILTERS:
            work.take(size_of(result))
        return result

    return jinja2.pass_context(metered)


def _passed_to(function: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """Return what jinja would pass to a filter before its values."""
    # Any: a mark of jinja's own kind, told by its name.
    match getattr(getattr(function, "jinja_pass_arg", None), "name", None):
        case "context":
            return lambda context: (context,)
        case "eval_context":
            return lambda context: (context.eval_ctx,)
        case "environment":
            return lambda context: (context.environment,)
        case _:
            return lambda _: ()


def _size_of_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the work of a filter; raises SecurityError where it would make something huge."""
    given = [*args, *kwargs.values()]
    if name in _QUICK_FILTERS:
        return 0
    if name in _COUNTING_FILTERS:
        _check_numbers(*given)
    if name in _ADDING_FILTERS and sum(len(text) for text in given[1:] if isinstance(text, str)) > (
        _MAX_ADDED_CHARACTERS
    ):
        raise SecurityError(f"it adds a text longer than {_MAX_ADDED_CHARACTERS} at many places")
    match name:
        case "replace":
            old, new = _argument(args, kwargs, 1, "old"), _argument(args, kwargs, 2, "new")
            return replaced_size(given[0], old, new)
        case "join":
            return joined_size(given[0], _argument(args, kwargs, 1, "d"))
        case "indent":
            return indented_size(given[0], _argument(args, kwargs, 1, "width") or 4)
        case "format" if isinstance(given[0], str):
            _check_layout(given[0])
            return formatted_size(given[0], given[0].count("%"), given[1:])
        case "sum" if isinstance(_argument(args, kwargs, 2, "start"), str | list | tuple):
            raise SecurityError("it adds up lists")
        case _ if name in _WRITING_FILTERS:
            return written_size(given)
        case _:
            return sum(map(size_of, given)) * (_SORTING_FACTOR if name in _SORTING_FILTERS else 1)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Return what a filter was given by place or by name; an empty text for nothing."""
    return args[position] if len(args) > position else kwargs.get(name, "")


def _size_of_call(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return what a method of a text makes of it; raises SecurityError where that would be huge."""
    match name, args:
        case "replace", [old, new, *_]:
            return replaced_size(text, old, new)
        case "join", [values]:
            return joined_size(values, text)
        case "expandtabs", _:
            width = next(iter([*args, *kwargs.values()]), 8)
            return checked_length(len(text) + text.count("\t") * int(width))
        case (("encode" | "translate"), _):
            raise SecurityError(f"it calls {name!r}, which templates may not")
        case _:
            return 0


@jinja2.pass_context
def _shown(context: Context, value: Any) -> Any:
    """Return what is about to be written."""
    if not isinstance(value, str):
        _work_of(context).take(written_size(value))
    return value


@jinja2.pass_context
def _steps(context: Context, values: Any) -> Any:
    """Return what a loop goes over."""
    return _work_of(context).steps(values)


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    """Return values as one text, as ``~`` does."""
    _work_of(context).take(written_size(values))
    return "".join(map(str, values))


@jinja2.pass_context
def _measured(context: Context, value: Any) -> Any:
    """Return a value whose parts are about to be looked at, or were put together."""
    _work_of(context).take(size_of(value))
    return value


def _work_of(context: Context) -> Work:
    assert isinstance(context, _MeteredContext), "every rendering has one"
    return context.work


def _check_numbers(*values: Any) -> None:
    if any(isinstance(value, int | float) and abs(value) > MAX_NUMBER for value in values):
        raise SecurityError(f"it counts to more than {MAX_NUMBER}")


def _check_product(left: Any, right: Any) -> None:
    factors = (left, right)
    if sum(factor.bit_length() for factor in factors if isinstance(factor, int)) > _MAX_PRODUCT_BITS:
        raise SecurityError(f"it makes a number of more than {_MAX_PRODUCT_BITS} bits")


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
    if isinstance(indent, int) and indent > _MAX_JSON_INDENT:
        raise SecurityError(f"it indents by more than {_MAX_JSON_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
