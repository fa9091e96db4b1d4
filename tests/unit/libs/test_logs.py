"""Logs must not decide whether a process goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
