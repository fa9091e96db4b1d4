"""``vllm serve`` for a comparison, in the environment of the outside client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench_client import client_python
from scripts.server_under_test import running_server
from services.supervisor.ports import claim_port

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
    with running_server(command, port, name="vllm-serve", environ=environ) as base_url:
        yield base_url
