"""A JSON text that is read in pieces gives what it gives when it is read at once."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from services.gateway.json_pieces import decode_in_pieces


def _read(text: bytes) -> tuple[Any, int]:
    """Return the value and how often others had their turn."""
    pieces, num_turns = decode_in_pieces(text), 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value, num_turns
        num_turns += 1


_NUMBERS = [*range(-5, 60_000), 1.5, -2e9, 2**70, True, None]
_PARTS = [{"type": "text", "text": f'naïve {index} 🙂 \\ " ,'} for index in range(8)]
_LARGE: dict[str, Any] = {
    "numbers": {"prompt": _NUMBERS, "n": 1},
    "lists of numbers": {"prompt": [list(range(400))] * 300},
    "messages": {"messages": [{"role": "user", "content": _PARTS}] * 900},
    "many members": {"logit_bias": {str(index): index for index in range(30_000)}},
    "schema": {"schema": {"properties": {f"field_{index}": {"type": "string"} for index in range(9_000)}}},
    "texts": {"stop": [f"stop, [{index}]" for index in range(30_000)], "prompt": "a" * 300_000},
    "one text": "b" * 200_000,
    "a list": [{"a": [1, 2, {"b": "x" * 90_000}]}, [], {}, "c" * 70_000],
    "one large among many small": [*({"a": index} for index in range(5_000)), {"b": list(range(60_000))}],
}


@pytest.mark.parametrize("indent", [None, 1, 90])
@pytest.mark.parametrize("name", _LARGE)
def test_reads_what_msgspec_reads(name: str, indent: int | None) -> None:
    text = json.dumps(_LARGE[name], ensure_ascii=False, indent=indent).encode()

    value, _ = _read(text)

    assert value == msgspec.json.decode(text) == _LARGE[name]


@pytest.mark.parametrize("name", ["numbers", "lists of numbers", "messages", "many members", "schema"])
def test_others_have_their_turn(name: str) -> None:
    text = json.dumps(_LARGE[name]).encode()

    _, num_turns = _read(text)

    assert num_turns > len(text) // 200_000 + 2


def test_a_short_text_is_read_at_once() -> None:
    assert _read(b' {"a": [1, {"b": "c"}]} ') == ({"a": [1, {"b": "c"}]}, 0)


def test_reads_random_values_as_msgspec_does() -> None:
    chance = random.Random(7)

    def value(depth: int) -> Any:
        kind = chance.randrange(7 if depth < 5 else 4)
        match kind:
            case 0:
                return chance.choice([0, -1, 3.25, 2**64, True, False, None])
            case 1 | 2:
                return "".join(chance.choice('ab"\\,[]{}: é🙂') for _ in range(chance.choice([0, 3, 40_000])))
            case 3:
                return [chance.random() for _ in range(chance.choice([0, 3, 8_000]))]
            case 4:
                return {f"{index},": value(depth + 1) for index in range(chance.randrange(5))}
            case _:
                return [value(depth + 1) for _ in range(chance.randrange(5))]

    for _ in range(60):
        text = json.dumps([value(0) for _ in range(6)], ensure_ascii=chance.random() < 0.5).encode()
        assert _read(text)[0] == msgspec.json.decode(text)


_FILLING = b'"' + b"x" * 70_000 + b'"'


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": %b, "b": [1, 2' % _FILLING,
        b'{"a": [%b 1]}' % _FILLING,
        b'{"a": %b, "b": 01}' % _FILLING,
        b'{"a": %b} x' % _FILLING,
        b'{"a": [%b 1e999]}' % (b"1, " * 40_000),
        b'{"a": [%b,,1]}' % b",".join([b"1"] * 40_000),
        b'{"a": %b, "b": "\xff"}' % _FILLING,
        b'[{"b": "\\ud800"}, %b]' % _FILLING,
        b'{"a": [%b]}' % b",".join([b"NaN"] * 40_000),
    ],
)
def test_refuses_what_msgspec_refuses(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text)
    with pytest.raises(msgspec.DecodeError):
        _read(text)


def test_deep_nesting_is_refused_as_by_msgspec() -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

    with pytest.raises(RecursionError):
        _read(text)
