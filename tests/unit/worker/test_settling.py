from __future__ import annotations

import threading
from collections.abc import Callable

from structlog.testing import capture_logs
from structlog.typing import EventDict

from services.worker.resident_memory import MemoryStatement, give_back_freed_memory, measure_memory_in_use
from services.worker.settling import Settling


def statement(kv_cache_bytes: int) -> MemoryStatement:
    give_back_freed_memory()
    before = measure_memory_in_use().resident_bytes
    return MemoryStatement(before_bytes=before, weights_bytes=0, kv_cache_bytes=kv_cache_bytes, workspace_bytes=0)


def said(events: list[EventDict], stated: MemoryStatement) -> list[EventDict]:
    """Return what was said of this statement: other workers of this process may have something to say, too."""
    return [event for event in events if event.get("expected_resident_bytes") == stated.expected_bytes]


def nothing(should_stop: Callable[[], bool]) -> None:
    assert not should_stop()


def test_memory_is_compared_with_what_was_stated() -> None:
    stated = statement(0)

    with capture_logs() as events:
        Settling(nothing, stated).wait()

    (event,) = said(events, stated)
    assert (event["event"], event["log_level"]) == ("memory in use", "info")
    assert event["resident_bytes"] > 0
    assert event["huge_pages"]


def test_a_difference_of_more_than_a_tenth_is_a_warning_with_both_numbers() -> None:
    stated = statement(2**40)

    with capture_logs() as events:
        Settling(nothing, stated).wait()

    (event,) = said(events, stated)
    assert event["log_level"] == "warning"
    assert event["resident_bytes"] < 2**40


def test_stopping_ends_it_without_a_word() -> None:
    has_begun, stated = threading.Event(), statement(0)

    def populate(should_stop: Callable[[], bool]) -> None:
        has_begun.set()
        while not should_stop():
            pass

    with capture_logs() as events:
        settling = Settling(populate, stated)
        assert has_begun.wait(10)
        settling.stop()

    assert said(events, stated) == []


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    def populate(should_stop: Callable[[], bool]) -> None:
        raise OSError(12, "Cannot allocate memory")

    with capture_logs() as events:
        Settling(populate, statement(0)).wait()

    (error,) = [event for event in events if event["log_level"] == "error"]
    assert "Cannot allocate memory" in error["error"]
