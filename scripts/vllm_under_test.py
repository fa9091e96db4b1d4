"""``vllm serve`` for a comparison, in the environment of the outside client."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench_client import ClientUnavailable, client_python
from scripts.octavo_under_test import REPOSITORY
from services.supervisor.ports import claim_port

_READY_TIMEOUT_SECONDS = 600.0
_STOP_TIMEOUT_SECONDS = 60.0
_KV_CACHE_GIB = "1"


@contextmanager
def running_vllm(folder: Path, *, served_model_name: str) -> Iterator[str]:
    """Run ``vllm serve`` on a model folder in bf16; gives its URL once it is healthy.

    Raises:
        ClientUnavailable: when it cannot be installed or does not become healthy.
    """
    port, python = claim_port("127.0.0.1", 0), client_python()
    command = [str(python.with_name("vllm")), "serve", str(folder), "--dtype", "bfloat16", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", served_model_name, "--max-model-len", "8192"]
    environ = {
        **os.environ,
        # As much cache as Octavo takes when nothing is said.
        "VLLM_CPU_KVCACHE_SPACE": _KV_CACHE_GIB,
        # torch's compiler calls the tools that lie beside this Python.
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    log = REPOSITORY / "build" / "vllm-serve.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=output, stderr=output) as process,
    ):
        try:
            wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_healthy(process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
    """Wait until a server answers ``/health``; raises ClientUnavailable when it ends before or takes too long."""
    deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise ClientUnavailable(f"{base_url} did not become healthy; {log} says why.")
