"""How much work one rendering of a chat template may be, and how much its operations make.

Owns the account and the estimates that are made before anything is. A template comes with a model, so an operator
chose it; but loops over loops, texts that double and macros that call themselves twice would hold a thread for
ever, or take all memory, with the first request. It must not know how templates are compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jinja2.exceptions import SecurityError

# Units of work: a character that is copied, and others by what they take beside it. All together take a second or
# two, and are several times what a template does with as many messages as a request may have.
MAX_WORK: Final = 500_000_000
STEP_WORK: Final = 100
CALL_WORK: Final = 2_500
_ITEM_WORK: Final = 20
# The longest text or list that one expression may build.
MAX_EXPRESSION_CHARACTERS: Final = 16_000_000


class Work:
    """The account of one rendering."""

    def __init__(self, max_units: int) -> None:
        self._num_left = max_units

    def take(self, num_units: int) -> None:
        """Note work that is about to be done; raises SecurityError when there was enough."""
        self._num_left -= num_units
        if self._num_left < 0:
            raise SecurityError("it takes too long: its loops, calls or texts never seem to end")

    def steps(self, values: Iterable[Any]) -> Steps:
        """Return what a loop goes over, each step of which is noted."""
        return Steps(values, self)


class Steps:
    """The values of a loop. Loops also ask how many there are, which not every iterable knows."""

    __slots__ = ("_values", "_work")

    def __init__(self, values: Any, work: Work) -> None:
        self._values = values
        self._work = work

    def __iter__(self) -> Iterator[Any]:
        take = self._work.take
        for value in self._values:
            take(STEP_WORK)
            yield value

    def __len__(self) -> int:
        return len(self._values)


def size_of(value: Any) -> int:
    """Return the work of looking at a value, but not into the values that it holds."""
    if isinstance(value, str):
        return len(value)
    return _ITEM_WORK * len(value) if isinstance(value, list | tuple | Mapping) else 0


def written_size(value: Any) -> int:
    """Return about how many characters a value has as text, values in it included; more than are allowed ends it.

    A value may hold another many times, and so be huge without taking any memory.
    """
    num_characters = 0
    pending = [value]
    while pending:
        part = pending.pop()
        num_characters += size_of(part)
        check_length(num_characters)
        if isinstance(part, Mapping):
            pending.extend(part.keys())
            pending.extend(part.values())
        elif isinstance(part, list | tuple):
            pending.extend(part)
    return num_characters


def joined_size(values: Any, separator: Any = "") -> int:
    """Return about the length of values that are joined."""
    num_gaps = len(values) if isinstance(values, list | tuple | Mapping | str) else 0
    return checked_length(written_size(values) + num_gaps * len(str(separator)))


def replaced_size(text: Any, old: Any, new: Any) -> int:
    """Return the length of a text in which one part stands for another."""
    text, old, new = str(text), str(old), str(new)
    return checked_length(len(text) + text.count(old) * len(new))


def formatted_size(layout: str, num_holes: int, values: Any) -> int:
    """Return the most that a layout can make of values, each of which it may take at each of its holes."""
    return checked_length(len(layout) + num_holes * written_size(values))


def indented_size(text: Any, width: Any) -> int:
    """Return the length of a text of which each line is moved."""
    text = str(text)
    columns = len(width) if isinstance(width, str) else int(width)
    return checked_length(len(text) + (text.count("\n") + 1) * columns)


def checked_length(num_characters: int) -> int:
    """Return a length that may be built; raises SecurityError for others."""
    check_length(num_characters)
    return num_characters


def check_length(num_characters: int) -> None:
    """Refuse to build what is so long; raises SecurityError."""
    if num_characters > MAX_EXPRESSION_CHARACTERS:
        raise SecurityError(f"it builds a value longer than {MAX_EXPRESSION_CHARACTERS}")
