"""A server of others as a process: started, waited for, and stopped."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from scripts.bench_client import ClientUnavailable
from scripts.octavo_under_test import REPOSITORY, stop

_READY_TIMEOUT_SECONDS: Final = 600.0


@contextmanager
def running_server(
    command: Sequence[str], port: int, *, name: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run ``command``, which serves HTTP at ``port``; gives its URL once ``/health`` answers.

    Raises:
        ClientUnavailable: when it ends before it is healthy, or takes too long.
    """
    base_url, log = f"http://127.0.0.1:{port}", REPOSITORY / "build" / f"{name}.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=output, stderr=output) as process,
    ):
        try:
            if not _becomes_healthy(process, base_url):
                raise ClientUnavailable(f"{name} did not become healthy; {log} says why.")
            yield base_url
        finally:
            stop(process)


def _becomes_healthy(process: subprocess.Popen[bytes], base_url: str) -> bool:
    deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=2.0):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    return False
