from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from services.worker.resident_memory import (
    MemoryInUse,
    MemoryStatement,
    ResidentMemory,
    can_populate_in_use,
    describe_huge_pages,
    huge_page_bytes_of,
    measure_memory_in_use,
)

SIZE = 64 * 2**20
STATEMENT = MemoryStatement(before_bytes=300, weights_bytes=270, kv_cache_bytes=1_000, workspace_bytes=30)

needs_populate = pytest.mark.skipif(
    not can_populate_in_use(), reason="needs a system that makes memory resident as it is (Linux 5.14)"
)
needs_huge_pages = pytest.mark.skipif(
    measure_memory_in_use().huge_page_bytes is None
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="needs a system that gives huge pages when asked",
)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_memory_is_zero_and_takes_its_size_when_populated() -> None:
    memory = ResidentMemory(SIZE)
    before = resident_bytes()

    memory.populate(num_parts=7)

    assert resident_bytes() - before > SIZE // 2
    assert not memory.bytes.any()


@needs_populate
def test_populating_leaves_what_was_written_meanwhile() -> None:
    memory = ResidentMemory(SIZE + 12_345)
    memory.bytes[::1_000] = 7

    memory.populate(num_parts=3)

    assert (memory.bytes[::1_000] == 7).all()


@needs_populate
def test_populating_stops_when_it_is_told_to() -> None:
    memory = ResidentMemory(SIZE)
    before, asked = resident_bytes(), list[None]()

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > 2

    memory.populate(should_stop)

    assert resident_bytes() - before < SIZE // 2


@needs_huge_pages
def test_memory_comes_in_huge_pages() -> None:
    before = measure_memory_in_use().huge_page_bytes or 0
    memory = ResidentMemory(SIZE)

    memory.populate()

    # The system gives them as long as it has them; a part shows that they were asked for.
    assert (measure_memory_in_use().huge_page_bytes or 0) - before >= SIZE // 4
    assert len(memory.bytes) == SIZE


def test_huge_pages_are_read_from_the_systems_account(tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text("Rss:  900 kB\nAnonHugePages:   2048 kB\nSwap: 0 kB\n")

    assert huge_page_bytes_of(rollup) == 2**21
    assert huge_page_bytes_of(tmp_path / "missing") is None


def test_it_is_said_whether_huge_pages_came(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")

    assert describe_huge_pages(950, 1_000, setting) == "yes"
    assert describe_huge_pages(500, 1_000, setting) == f"in part: {setting} is always madvise [never]"
    assert describe_huge_pages(0, 1_000, setting) == f"no: {setting} is always madvise [never]"
    assert "does not say" in describe_huge_pages(None, 1_000, setting)
    assert describe_huge_pages(0, 1_000, tmp_path / "missing") == "no: this system has none"


@pytest.mark.parametrize(
    ("in_use", "is_met"), [(1_600, True), (1_750, True), (1_450, True), (1_761, False), (1_439, False)]
)
def test_a_statement_is_met_within_a_tenth(in_use: int, is_met: bool) -> None:
    assert STATEMENT.expected_bytes == 1_600
    assert STATEMENT.is_met_by(MemoryInUse(in_use, None)) is is_met
