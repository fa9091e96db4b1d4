from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.stop_strings import StopResult, StopStringMatcher


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client sees of a stream, and how it ended."""

    shown: str
    matched: str | None
    num_pieces_taken: int


def stream(pieces: Sequence[str], stop_strings: Sequence[str], include_stop_str: bool = False) -> Outcome:
    matcher = StopStringMatcher(stop_strings, include_stop_str)
    shown = ""
    for index, piece in enumerate(pieces, start=1):
        result = matcher.add(piece)
        shown += result.text_to_emit
        if result.matched is not None:
            return Outcome(shown, result.matched, index)
    return Outcome(shown + matcher.flush(), None, len(pieces))


def cut_at_stop(text: str, stop_strings: Sequence[str], include_stop_str: bool) -> tuple[str, str | None]:
    """Do on the whole text what the matcher does on its pieces, by looking at every end in turn."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop_str else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4, unique=True)
TEXT = st.text(alphabet="ab\n", max_size=30)


@st.composite
def pieces_of(draw: st.DrawFn, text: st.SearchStrategy[str]) -> list[str]:
    whole = draw(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in itertools.pairwise([0, *cuts, len(whole)])]


@settings(max_examples=500)
@given(pieces=pieces_of(TEXT), stop_strings=STOPS, include_stop_str=st.booleans())
def test_any_cut_into_pieces_shows_what_the_whole_text_shows(
    pieces: list[str], stop_strings: list[str], include_stop_str: bool
) -> None:
    outcome = stream(pieces, stop_strings, include_stop_str)

    assert (outcome.shown, outcome.matched) == cut_at_stop("".join(pieces), stop_strings, include_stop_str)


@settings(max_examples=300)
@given(pieces=pieces_of(TEXT), stop_strings=STOPS)
def test_held_back_is_exactly_what_may_become_a_stop_string(pieces: list[str], stop_strings: list[str]) -> None:
    matcher = StopStringMatcher(stop_strings, include_stop_str=False)
    seen = shown = ""

    for piece in pieces:
        result = matcher.add(piece)
        seen, shown = seen + piece, shown + result.text_to_emit
        if result.matched is not None:
            return
        beginnings = {stop[:length] for stop in stop_strings for length in range(len(stop))}
        longest = max((len(beginning) for beginning in beginnings if seen.endswith(beginning)), default=0)
        assert shown == seen[: len(seen) - longest]


@given(pieces=pieces_of(TEXT), stop_strings=STOPS)
def test_the_match_is_reported_with_the_piece_that_completes_it(pieces: list[str], stop_strings: list[str]) -> None:
    outcome = stream(pieces, stop_strings)

    if outcome.matched is not None:
        taken = "".join(pieces[: outcome.num_pieces_taken])
        before = "".join(pieces[: outcome.num_pieces_taken - 1])
        assert cut_at_stop(taken, stop_strings, False)[1] == outcome.matched
        assert cut_at_stop(before, stop_strings, False)[1] is None


def test_a_stop_string_over_token_borders_never_shows() -> None:
    matcher = StopStringMatcher(["\n\nUser:"], include_stop_str=False)

    results = [matcher.add(piece) for piece in ["Fine.", "\n", "\nUs", "er", ": hi"]]

    assert results == [
        StopResult("Fine.", None),
        StopResult("", None),
        StopResult("", None),
        StopResult("", None),
        StopResult("", "\n\nUser:"),
    ]


def test_a_false_beginning_is_shown_as_soon_as_it_is_one() -> None:
    matcher = StopStringMatcher(["STOP"], include_stop_str=False)

    emitted = [matcher.add(piece).text_to_emit for piece in ["S", "T", "A", "ST", "STO"]]

    # The second "ST" may be the beginning; the "ST" before it no longer can.
    assert emitted == ["", "", "STA", "", "ST"]
    assert matcher.flush() == "STO"


def test_flush_gives_what_was_held_once() -> None:
    matcher = StopStringMatcher(["end"], include_stop_str=False)

    assert matcher.add("the en").text_to_emit == "the "
    assert (matcher.flush(), matcher.flush()) == ("en", "")


@pytest.mark.parametrize(
    ("text", "stop_strings", "shown", "matched"),
    [
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # "bc" ends first, although "abcd" begins first.
        ("xabc", ["bc", "abc", "c"], "x", "abc"),  # All end together: the longest leaves nothing of itself.
        ("aabaac", ["aabaa"], "", "aabaa"),
        ("abababc", ["ababc"], "ab", "ababc"),
        ("🎉é🎉", ["é🎉"], "🎉", "é🎉"),
    ],
)
def test_the_first_end_wins_and_then_the_longest(
    text: str, stop_strings: list[str], shown: str, matched: str
) -> None:
    for pieces in ([text], list(text)):
        outcome = stream(pieces, stop_strings)
        assert (outcome.shown, outcome.matched) == (shown, matched)


def test_an_included_stop_string_is_shown_without_delay_and_nothing_after_it() -> None:
    matcher = StopStringMatcher(["END"], include_stop_str=True)

    results = [matcher.add(piece) for piece in ["a E", "N", "D b"]]

    assert results == [StopResult("a E", None), StopResult("N", None), StopResult("D", "END")]


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopStringMatcher([], include_stop_str=False).add("text\n") == StopResult("text\n", None)


def test_our_own_mistakes_are_caught() -> None:
    with pytest.raises(AssertionError, match="empty stop string"):
        StopStringMatcher(["x", ""], include_stop_str=False)
    matcher = StopStringMatcher(["x"], include_stop_str=False)
    matcher.add("x")
    with pytest.raises(AssertionError, match="after a stop string"):
        matcher.add("more")
