from __future__ import annotations

import threading
from collections.abc import Callable

from structlog.testing import capture_logs

from services.worker.resident_memory import MemoryStatement, give_back_freed_memory, measure_memory_in_use
from services.worker.settling import Settling


def statement(kv_cache_bytes: int) -> MemoryStatement:
    give_back_freed_memory()
    before = measure_memory_in_use().resident_bytes
    return MemoryStatement(before_bytes=before, weights_bytes=0, kv_cache_bytes=kv_cache_bytes, workspace_bytes=0)


def nothing(should_stop: Callable[[], bool]) -> None:
    assert not should_stop()


def test_memory_is_compared_with_what_was_stated() -> None:
    with capture_logs() as events:
        Settling(nothing, statement(0)).wait()

    assert [(event["event"], event["log_level"]) for event in events] == [("memory in use", "info")]
    assert events[0]["resident_bytes"] > 0
    assert events[0]["huge_pages"]


def test_a_difference_of_more_than_a_tenth_is_a_warning_with_both_numbers() -> None:
    stated = statement(2**40)

    with capture_logs() as events:
        Settling(nothing, stated).wait()

    assert [event["log_level"] for event in events] == ["warning"]
    assert events[0]["expected_resident_bytes"] == stated.expected_bytes
    assert events[0]["resident_bytes"] < 2**40


def test_stopping_ends_it_without_a_word() -> None:
    has_begun = threading.Event()

    def populate(should_stop: Callable[[], bool]) -> None:
        has_begun.set()
        while not should_stop():
            pass

    with capture_logs() as events:
        settling = Settling(populate, statement(0))
        assert has_begun.wait(10)
        settling.stop()

    assert events == []


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    def populate(should_stop: Callable[[], bool]) -> None:
        raise OSError(12, "Cannot allocate memory")

    with capture_logs() as events:
        Settling(populate, statement(0)).wait()

    assert events[0]["log_level"] == "error"
    assert "Cannot allocate memory" in events[0]["error"]
