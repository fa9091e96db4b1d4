"""The control of the gateway's benchmark reads any request to its end and refuses it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

from scripts.sse_load import Stream, open_load, request_bytes
from tests.patience import PATIENCE_SECONDS


def _has_ended(stream: Stream) -> bool:
    return stream.ended_at is not None


def test_reads_to_the_end_and_refuses() -> None:
    with subprocess.Popen([sys.executable, "-m", "scripts.byte_sink"], stdout=subprocess.PIPE) as sink:
        try:
            assert sink.stdout is not None
            port = json.loads(sink.stdout.readline())["port"]
            with open_load("127.0.0.1", port) as load:
                for num_bytes in (0, 10, 3_000_000):
                    stream = load.begin(request_bytes(b"x" * num_bytes), elsewhere=("127.0.0.1", port))
                    load.run_until(time.perf_counter() + PATIENCE_SECONDS, partial(_has_ended, stream))
                    assert stream.status == 400
        finally:
            sink.kill()
