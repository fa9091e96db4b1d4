"""The native kernels with every address and every arithmetic operation checked (ASan, UBSan)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.kernels.cpu.build import BuildFailed, sanitizer_runtime

ROOT = Path(__file__).parents[2]
TESTS = "tests/unit/worker/kernels"
TIMEOUT_SECONDS = 1_800.0


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_SECONDS)
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizer's runtime as Linux does")
def test_the_kernels_tests_pass_under_sanitizers() -> None:
    try:
        runtime = ":".join(map(str, sanitizer_runtime()))
    except BuildFailed as failure:
        pytest.skip(str(failure))
    environment = os.environ | {"OCTAVO_SANITIZE": "1", "PYTHONPATH": str(ROOT)}
    # Python and torch keep memory until the process ends, which is no leak of ours; and torch catches signals.
    checked = environment | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0"}

    _run("-m", "services.worker.kernels.cpu.build", environment=environment)
    loaded = _run(
        "-c",
        "from services.worker.kernels.cpu.extension import load_extension; print(load_extension().__file__)",
        environment=checked,
    )
    assert "sanitized" in loaded, "the kernels that are checked must be those that the tests load"
    # A finding ends the process: what the runtime says of it must not wait in pytest's files.
    quiet = ("-q", "-x", "-p", "no:cacheprovider", "--capture=sys")
    _run("-m", "pytest", *quiet, TESTS, environment=checked)


def _run(*arguments: str, environment: dict[str, str]) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4_000:] + finished.stderr[-8_000:]
    return finished.stdout
