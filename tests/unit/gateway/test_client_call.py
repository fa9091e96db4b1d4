"""Ids and contexts that clients send: what is none counts as none."""

from __future__ import annotations

import pytest

from services.gateway.client_call import read_traceparent

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-01"),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", f"00-{TRACE_ID}-{SPAN_ID}-00"),
        # Of a later version what this one knows.
        (f"cc-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-01"),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-the-future-will-be-like", f"00-{TRACE_ID}-{SPAN_ID}-01"),
        (f"00-{TRACE_ID}-{SPAN_ID}-01-more", None),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01.more", None),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01", None),
        (f"00-{'0' * 32}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{SPAN_ID}", None),
        (f"00-{TRACE_ID}-{SPAN_ID}-01\n", None),
        ("", None),
        (None, None),
    ],
)
def test_reads_what_w3c_calls_a_context_and_nothing_else(value: str | None, read: str | None) -> None:
    assert read_traceparent(value) == read
