"""Logs must not decide whether a process goes on."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from libs.obs import configure_logging, get_logger

_PROGRAM = """
import sys
from libs.obs import configure_logging, get_logger
configure_logging("gateway", "gateway-0")
sys.stdin.read()
for number in range(100):
    get_logger("test").info("nobody reads this", number=number)
print("went on")
"""


def test_a_process_goes_on_when_nobody_reads_its_log() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stderr.close()
        process.stdin.close()

        assert process.stdout.read() == b"went on\n"


class WritesSeen(io.StringIO):
    """A stream that keeps what each write brought."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


def test_a_line_is_one_write_so_that_processes_with_one_stderr_do_not_mix_theirs() -> None:
    stream = WritesSeen()
    with configuration_kept():
        configure_logging("gateway", "gateway-0", stream=stream)
        get_logger("test").info("first", number=1)
        get_logger("test").warning("second")

    assert [json.loads(line)["event"] for line in stream.writes] == ["first", "second"]
    assert all(line.endswith("}\n") for line in stream.writes)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream_class", [io.StringIO, Terminal])
@pytest.mark.parametrize("text", ["a\nlevel=error event=forged", "a\r\x1b[2Jb", "a\u2028b\u202eb"])
def test_what_a_stranger_sends_begins_no_line_and_moves_no_cursor(
    stream_class: type[io.StringIO], text: str
) -> None:
    stream = stream_class()
    with configuration_kept():
        configure_logging("gateway", "gateway-0", stream=stream)
        get_logger("test").info("request finished", user=text, metadata={"note": text})

    line = stream.getvalue()
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    assert text[1] not in line[:-1]


def test_what_libraries_complain_about_is_an_event_too() -> None:
    stream = io.StringIO()
    with configuration_kept():
        configure_logging("gateway", "gateway-0", stream=stream)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("asyncio").exception("Task exception was never retrieved\nfuture: %s", "f")
        logging.getLogger("asyncio").info("nobody cares")

    (event,) = map(json.loads, stream.getvalue().splitlines())
    assert (event["event"], event["level"], event["library"]) == ("library complains", "error", "asyncio")
    assert event["detail"].startswith("Task exception was never retrieved")
    assert event["exception"].endswith("ValueError: broken")


@contextmanager
def configuration_kept() -> Iterator[None]:
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
