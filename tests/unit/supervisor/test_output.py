"""Lines of processes on their way to a terminal and to files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.supervisor.output import BoundedLog, LineWriter, ProcessOutput, plain_line


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_prefixes_whole_lines_however_they_arrive(pipe: tuple[int, int], tmp_path: Path) -> None:
    writer = LineWriter(pipe[1])
    output = ProcessOutput("worker-0", writer, BoundedLog(tmp_path / "a.log"))

    for piece in (b"load", b"ing\r\nhal", b"f\n", b"no end"):
        output.feed(piece)
    output.end_of_process()
    writer.close()

    assert os.read(pipe[0], 1000) == b"[worker-0] loading\n[worker-0] half\n[worker-0] no end\n"
    assert (tmp_path / "a.log").read_bytes() == b"loading\nhalf\nno end\n"
    assert output.tail == ["loading", "half", "no end"]


def test_cuts_an_endless_line_instead_of_keeping_it(pipe: tuple[int, int], tmp_path: Path) -> None:
    writer = LineWriter(pipe[1])
    output = ProcessOutput("engine-0", writer, BoundedLog(tmp_path / "a.log"))

    output.feed(b"x" * 40_000)
    writer.close()

    assert [len(line) for line in output.tail] == [16_384, 16_384]


def test_a_reader_that_stalls_stalls_nobody_and_is_told_what_it_missed() -> None:
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd)

    # Nobody reads yet, and the pipe and the queue hold far less than this.
    for _ in range(5_000):
        writer.put(b"x" * 1_000)
    with ThreadPoolExecutor() as threads, os.fdopen(read_fd, "rb") as reader:
        received = threads.submit(reader.readlines)
        writer.close()
        os.close(write_fd)
        lines = received.result()

    num_missed = [int(line.split()[1]) for line in lines if b"lines were not shown" in line]
    assert sum(num_missed) > 1_000
    assert len(lines) - len(num_missed) + sum(num_missed) == 5_000


def test_a_closed_terminal_is_survived(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    writer = LineWriter(write_fd)
    output = ProcessOutput("router", writer, BoundedLog(tmp_path / "a.log"))

    output.feed(b"one\ntwo\n")
    writer.close()
    os.close(write_fd)

    assert (tmp_path / "a.log").read_bytes() == b"one\ntwo\n"


def test_a_full_log_is_kept_once_and_begun_anew(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=20)

    for number in range(10):
        log.write(b"line %d..." % number)
    log.close()

    assert (tmp_path / "a.log").read_bytes() == b"line 8...\nline 9...\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"line 6...\nline 7...\n"


def test_a_log_is_continued_over_restarts(tmp_path: Path) -> None:
    for text in (b"first", b"second"):
        log = BoundedLog(tmp_path / "a.log")
        log.write(text)
        log.close()

    assert (tmp_path / "a.log").read_bytes() == b"first\nsecond\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"event": "loaded", "level": "info", "tier": "worker", "size_bytes": 7}', "loaded size_bytes=7"),
        ('{"event": "worker lost", "level": "error", "timestamp": "x"}', "ERROR: worker lost"),
        ('{"no": "event"}', '{"no": "event"}'),
        ("{broken", "{broken"),
        ("plain words", "plain words"),
    ],
)
def test_shows_events_as_words_on_a_terminal(line: str, shown: str) -> None:
    assert plain_line(line) == shown
