"""Real processes of the telemetry tier and the embedded ClickHouse, started and stopped by tests."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

READY_SECONDS = 30.0
STOP_SECONDS = 30.0


class ClickHouseProcess:
    """An embedded ClickHouse over a folder; `url` is where it listens."""

    def __init__(self, data_dir: Path, *flags: str, port: int = 0) -> None:
        arguments = ["--port", str(port), "--data-dir", str(data_dir), *flags]
        self.process = _start("services.telemetry.embedded_clickhouse.main", arguments, data_dir)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("embedded clickhouse ready http://"):
            raise AssertionError(f"the embedded ClickHouse did not start: {line!r}")
        self.url = line.split()[-1]

    def query(self, sql: str, data: bytes = b"", params: Mapping[str, str] | None = None) -> str:
        """Run a statement by plain HTTP and return the text of the answer."""
        return self.request(sql, data, params)[1]

    def request(self, sql: str, data: bytes = b"", params: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run a statement and return the status and the text."""
        url = f"{self.url}/?{urlencode({'query': sql, **(params or {})})}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=data, method="POST")) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


class TelemetryProcess:
    """A telemetry process on a unix socket."""

    def __init__(self, folder: Path, clickhouse_url: str, *flags: str) -> None:
        self.address = f"unix:{folder / 'telemetry.sock'}"
        arguments = ["--listen-address", self.address, "--spool-dir", str(folder / "spool")]
        arguments += ["--clickhouse-url", clickhouse_url, *flags]
        self.process = _start("services.telemetry.main", arguments, folder)

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


@contextmanager
def closing_process(process: ClickHouseProcess | TelemetryProcess) -> Iterator[None]:
    """Leave no process behind, whatever the test did."""
    try:
        yield
    finally:
        if process.process.poll() is None:
            process.kill()
        if process.process.stdout is not None:
            process.process.stdout.close()


def wait_until_equal(read: Callable[[], object], expected: object) -> None:
    """Call `read` until it returns `expected`; fail with what it returned last."""
    deadline = time.monotonic() + READY_SECONDS
    while (value := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert value == expected


def _start(module: str, arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    code = f"import sys; from {module} import main; main(sys.argv[1:])"
    log = (folder / "process.log").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
        )
