"""What the processes print: line by line to the supervisor's stderr and to a bounded log file each.

A terminal that stalls must stall nobody: lines wait in a bounded queue for a thread of its own, and what does not
fit is counted and said.
"""

from __future__ import annotations

import io
import json
import os
import queue
import threading
from collections import deque
from pathlib import Path
from typing import Any

_MAX_WAITING_LINES = 2_000
_MAX_LINE_BYTES = 16_384
_MAX_LOG_BYTES = 8 * 1024 * 1024
_NUM_TAIL_LINES = 20
_CLOSE_TIMEOUT_SECONDS = 2.0
# Fields that every line of a tier has and that the prefix says already.
_KNOWN_FIELDS = frozenset({"event", "level", "timestamp", "tier", "instance_id", "part"})


class LineWriter:
    """Writes lines to a file descriptor from its own thread; never blocks its callers."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.is_terminal = os.isatty(fd)
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write_lines, name="line-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue one line without its end; drop and count it when too many wait."""
        try:
            if self._num_dropped:
                self._lines.put_nowait(self._note())
                self._num_dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Write what waits, for as long as the other end reads."""
        try:
            if self._num_dropped:
                self._lines.put(self._note(), timeout=_CLOSE_TIMEOUT_SECONDS)
            self._lines.put(None, timeout=_CLOSE_TIMEOUT_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_SECONDS)

    def _note(self) -> bytes:
        return f"[up] {self._num_dropped} lines were not shown: this output is slow.".encode()

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            remaining = memoryview(line + b"\n")
            while remaining:
                try:
                    remaining = remaining[os.write(self._fd, remaining) :]
                except OSError:
                    # Nobody reads any more; the log files have all.
                    break


class BoundedLog:
    """A log file that begins anew when it is full; the full one is kept once as ``.1``."""

    def __init__(self, path: Path, max_bytes: int = _MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size_bytes = path.stat().st_size

    def write(self, line: bytes) -> None:
        """Append one line; a full disk loses lines, never the process."""
        try:
            if self._size_bytes + len(line) + 1 > self._max_bytes:
                self._file.close()
                self._path.replace(self._path.with_suffix(".log.1"))
                self._file = self._path.open("ab", buffering=0)
                self._size_bytes = 0
            self._file.write(line + b"\n")
            self._size_bytes += len(line) + 1
        except (OSError, ValueError):
            # ValueError: the file could not be opened again.
            return

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ProcessOutput:
    """The output of one process over all its restarts."""

    def __init__(self, name: str, writer: LineWriter, log: BoundedLog) -> None:
        self._name = name
        self._writer = writer
        self._log = log
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Take what the process wrote; an endless line is cut into pieces."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._put(line)
        while len(self._partial) > _MAX_LINE_BYTES:
            self._put(self._partial[:_MAX_LINE_BYTES])
            self._partial = self._partial[_MAX_LINE_BYTES:]

    def end_of_process(self) -> None:
        """Show what was written without an end of line."""
        if self._partial:
            self._put(self._partial)
            self._partial = b""

    @property
    def tail(self) -> list[str]:
        """The last lines, as shown."""
        return list(self._tail)

    def close(self) -> None:
        """Close the log file."""
        self.end_of_process()
        self._log.close()

    def _put(self, line: bytes) -> None:
        line = line[:_MAX_LINE_BYTES].rstrip(b"\r")
        self._log.write(line)
        text = line.decode(errors="replace")
        if self._writer.is_terminal:
            text = plain_line(text)
        self._tail.append(text)
        self._writer.put(f"[{self._name}] {text}".encode())


class LogStream(io.RawIOBase):
    """A stream for the supervisor's own log, which then goes the way of every process's output."""

    def __init__(self, output: ProcessOutput) -> None:
        self._output = output

    def writable(self) -> bool:
        """Say yes."""
        return True

    def write(self, data: Any, /) -> int:  # Any: typeshed's Buffer is not there at run time.
        """Take what the log wrote."""
        self._output.feed(bytes(data))
        return len(data)


def plain_line(line: str) -> str:
    """Turn an event in JSON into words for a terminal; leave any other line as it is."""
    if not line.startswith("{"):
        return line
    try:
        event: dict[str, Any] = json.loads(line)
        words = [str(event["event"])]
    except (ValueError, KeyError):
        return line
    if event.get("level") in ("warning", "error", "critical"):
        words.insert(0, f"{event['level'].upper()}:")
    words += [f"{key}={value}" for key, value in event.items() if key not in _KNOWN_FIELDS]
    return " ".join(words)
