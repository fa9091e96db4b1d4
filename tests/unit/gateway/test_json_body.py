"""What counts as the JSON object of a request, in whatever parts its bytes come."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import InvalidRequest
from services.gateway.json_body import MAX_BODY_MEMBERS, JsonBody


def parsed(raw: bytes, *, part_bytes: int = 2**18) -> dict[str, Any]:
    """Read a body that comes in parts of this size."""
    body = JsonBody()
    for start in range(0, len(raw), part_bytes):
        body.add(raw[start : start + part_bytes])
    return body.parse()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"hello",
        b"[]",
        b'"x"',
        b"5",
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"temperature": ' + b"9" * 5_000 + b"}",
        b'{"model": "\\ud83d"}',
        b'{"model": "\\udc00x"}',
        b'{"model": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parsed(raw)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8), values, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), _VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_what_is_json_is_read_as_it_was_written(fields: dict[str, Any], is_ascii: bool, indent: int | None) -> None:
    raw = json.dumps(fields, ensure_ascii=is_ascii, indent=indent).encode()

    assert parsed(raw, part_bytes=7) == fields


@given(st.binary(max_size=12), st.integers(0, 30))
def test_what_another_reader_of_strict_json_refuses_is_refused(noise: bytes, position: int) -> None:
    raw = b'{"a": [1.5e3, "\\u00e9x", true, null], "b": {}}'
    raw = raw[:position] + noise + raw[position + len(noise) :]

    try:
        read = orjson.loads(raw)
    except orjson.JSONDecodeError:
        read = None

    if isinstance(read, dict):
        assert parsed(raw) == read
    else:
        with pytest.raises(InvalidRequest, match="JSON"):
            parsed(raw)


def test_a_refusal_says_what_is_wrong_and_nothing_of_the_reader() -> None:
    with pytest.raises(InvalidRequest, match=r"^The body is not valid JSON: Number out of range\.$"):
        parsed(b'{"temperature": 1e999}')


def test_nesting_is_read_as_deep_as_is_promised() -> None:
    assert parsed(b'{"a":' * 900 + b"1" + b"}" * 900).keys() == {"a"}


def test_an_integer_of_more_than_64_bits_keeps_its_digits() -> None:
    assert parsed(b'{"seed": %d}' % 10**400) == {"seed": 10**400}


def test_a_body_of_too_many_values_is_refused_before_it_is_read() -> None:
    members = b'{"logit_bias":{' + b",".join(b'"%d":1' % index for index in range(70_000)) + b"}}"
    values = b'{"prompt":[' + b"1," * 600_000 + b"1]}"

    for raw in (members, values):
        with pytest.raises(InvalidRequest, match=r"at most 65536|more than 524288"):
            parsed(raw)


def test_a_text_that_holds_json_has_no_members() -> None:
    text = orjson.dumps({"a": 1}).decode() * 70_000

    assert parsed(orjson.dumps({"prompt": text})) == {"prompt": text}


@pytest.mark.parametrize("part_bytes", range(1, 9))
@pytest.mark.parametrize("surplus", [0, 1])
@pytest.mark.parametrize("num_quotes", [0, MAX_BODY_MEMBERS])
def test_members_are_counted_right_however_a_body_is_cut(part_bytes: int, surplus: int, num_quotes: int) -> None:
    """Every border of two parts falls into a member's quote and colon; after many quotes each part is counted."""
    body = JsonBody()
    body.add(b'{"quotes":"' + b'\\"' * num_quotes + b'"')
    num_members = MAX_BODY_MEMBERS + surplus
    # The value holds what would be a member if its quote did not belong to the text.
    raw = b',"a":"\\":"' + b',"b":1' * (num_members - 2) + b"}"
    # The beginning in small parts, the rest at once: what is counted twice or not at all shows in the sum.
    for start in range(0, 6_000, part_bytes):
        body.add(raw[start : min(start + part_bytes, 6_000)])
    body.add(raw[6_000:])

    if surplus > 0:
        with pytest.raises(InvalidRequest, match="at most 65536"):
            body.parse()
    else:
        assert body.parse() == {"quotes": '"' * num_quotes, "a": '":', "b": 1}


def test_a_conversation_of_too_many_messages_is_refused_by_name() -> None:
    raw = orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 100_000})

    with pytest.raises(InvalidRequest) as caught:
        parsed(raw)

    assert caught.value.param == "messages"


def test_nothing_is_kept_of_a_body_that_will_be_refused() -> None:
    body = JsonBody()
    for _ in range(20):
        body.add(b'{"a":1},' * 10_000)

    assert body.num_bytes == 0


@pytest.mark.parametrize("ending", [b"", b'"', b'",', b'":tru'])
def test_a_large_body_that_is_cut_is_refused(ending: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parsed(b'{"model":"' + b"a" * 100_000 + ending)


@pytest.mark.parametrize("ending", [b"}", b"}\n", b"}" + b" " * 1_000])
def test_a_large_body_may_end_with_white_space(ending: bytes) -> None:
    assert parsed(b'{"model":"' + b"a" * 100_000 + b'"' + ending) == {"model": "a" * 100_000}
