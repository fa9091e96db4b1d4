"""Logs must not decide whether a process goes on."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def configuration_kept() -> Iterator[None]:
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()


class Terminal(WritesSeen):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


def test_no_client_gives_orders_to_a_terminal() -> None:
    stream = Terminal()
    with configuration_kept():
        configure_logging("gateway", "gateway-0", stream=stream)
        get_logger("test").info("seen", user="\x1b]0;title\x07\x1b[2J\x9b31m", path="/\x1b[2J\r\n")

    line = stream.writes[0]
    assert not {"\x07", "\x9b", "\r"} & set(line)
    assert "\x1b]0" not in line
    assert "\x1b[2J" not in line
    assert line.count("\n") == 1
