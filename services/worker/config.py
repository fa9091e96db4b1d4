"""The worker's configuration: which model, on what, with how much memory.

Owns names, defaults and units of the settings. It must not read them from anywhere: ``libs.config`` does.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from enum import StrEnum

from libs.config import setting

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class RunnerKind(StrEnum):
    """Which model runner a worker uses."""

    TORCH = "torch"
    STUB = "stub"


class KernelChoice(StrEnum):
    """Which code computes the forward pass."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class WeightsType(StrEnum):
    """Number format of weights, activations and KV cache."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    """Number format of packed weights, where it is another than that of activations."""

    NONE = "none"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker: one process, one accelerator."""

    listen_address: str = setting("127.0.0.1:50071", "Where the worker serves gRPC: host:port or unix:/path.")
    instance_id: str = setting("worker-0", "Name of this process in logs.")
    model: str = setting(
        "smollm2-135m-instruct",
        "Name of a packaged model, a folder with config.json and safetensors, or a GGUF file.",
    )
    runner: RunnerKind = setting(
        RunnerKind.TORCH, "torch runs the model; stub gives deterministic tokens without it."
    )
    dtype: WeightsType = setting(
        WeightsType.BFLOAT16, "Number format of weights, activations and KV cache: bfloat16 or float32."
    )
    kernels: KernelChoice = setting(
        KernelChoice.AUTO,
        "What computes the forward pass: native, the compiled kernels, which serve bfloat16 alone; torch, which is "
        "slower and serves float32 as well; or auto, native where it is built and can serve, otherwise torch.",
    )
    quantization: Quantization = setting(
        Quantization.NONE,
        "int8 rounds weights when they are loaded, and inputs of products as they come, to 8 bits: half the memory "
        "and less time for a small loss of quality; attention and the KV cache stay in bfloat16. Only the native "
        "kernels serve it.",
    )
    num_threads: int = setting(0, "Threads of the forward pass; 0 takes all cores.", unit="threads")
    kv_cache_memory: str = setting(
        "", "Memory of the KV cache as a size such as 512MiB; empty derives it from what is free.", unit="size"
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "The same in bytes; only one of the two may be given.", unit="bytes"
    )
    kv_cache_memory_fraction: float = setting(
        0.3,
        "Share of the memory that is free after loading the weights that the KV cache takes when no size is given.",
    )
    kv_cache_memory_limit: str = setting(
        "1GiB", "Most that the KV cache takes when no size is given, so that a laptop stays usable.", unit="size"
    )
    log_level: str = setting("info", "Least level of log events shown: debug, info, warning or error.")
    metrics_port: int = setting(0, "Port of /metrics; 0 serves none.", unit="port")
    exchange_timeout_seconds: float = setting(
        10.0,
        "With several ranks, how long one waits for another within a step before it gives the group up.",
        unit="seconds",
    )
    drain_grace_seconds: float = setting(
        10.0, "How long the open step stream may go on after SIGTERM.", unit="seconds"
    )
    stub_step_seconds: float = setting(0.0, "Stub: least time of a step.", unit="seconds")
    stub_seconds_per_token: float = setting(0.0, "Stub: time added for each computed token.", unit="seconds")
    stub_num_blocks: int = setting(4096, "Stub: KV blocks that it claims to have.", unit="blocks")
    stub_max_model_len: int = setting(8192, "Stub: longest sequence.", unit="tokens")
    stub_vocab_size: int = setting(49152, "Stub: size of the vocabulary that it claims to have.", unit="tokens")
    stub_first_token_id: int = setting(
        17, "Stub: first id that it emits; 17 is the first printable character of SmolLM2's vocabulary."
    )
    stub_num_token_ids: int = setting(94, "Stub: number of ids that it emits, from the first on.", unit="tokens")
    stub_eos_after_tokens: int | None = setting(
        None, "Stub: emit an end token after so many output tokens; unset never does.", unit="tokens"
    )

    def __post_init__(self) -> None:
        if self.quantization is not Quantization.NONE:
            if self.dtype is not WeightsType.BFLOAT16:
                raise ValueError(f"quantization {self.quantization} needs dtype bfloat16, not {self.dtype}.")
            if self.kernels is KernelChoice.TORCH:
                raise ValueError(
                    f"quantization {self.quantization} needs the native kernels; leave kernels at auto."
                )
        if self.num_threads < 0:
            raise ValueError(f"num_threads must be at least 0, not {self.num_threads}.")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ValueError(f"kv_cache_memory_bytes must be at least 1, not {self.kv_cache_memory_bytes}.")
        if not 0.0 <= self.drain_grace_seconds < math.inf:
            raise ValueError(f"drain_grace_seconds must be at least 0, not {self.drain_grace_seconds}.")
        if self.kv_cache_memory and self.kv_cache_memory_bytes is not None:
            raise ValueError("give kv_cache_memory or kv_cache_memory_bytes, not both.")
        if not 0.0 < self.exchange_timeout_seconds < math.inf:
            raise ValueError(f"exchange_timeout_seconds must be above 0, not {self.exchange_timeout_seconds}.")
        if not 0.0 < self.kv_cache_memory_fraction < 1.0:
            raise ValueError(f"kv_cache_memory_fraction must be in (0, 1), not {self.kv_cache_memory_fraction}.")
        if self.stub_first_token_id + self.stub_num_token_ids > self.stub_vocab_size or self.stub_num_token_ids < 1:
            raise ValueError("the stub's token ids must lie inside its vocabulary.")
        parse_size(self.kv_cache_memory_limit)
        if self.kv_cache_memory:
            parse_size(self.kv_cache_memory)

    @property
    def num_threads_used(self) -> int:
        """Threads of the forward pass, the default resolved."""
        if self.num_threads:
            return self.num_threads
        # Only Linux says which cores this process may use.
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def requested_kv_cache_bytes(self) -> int | None:
        """Memory asked for the KV cache, or None when it is derived from what is free."""
        if self.kv_cache_memory:
            return parse_size(self.kv_cache_memory)
        return self.kv_cache_memory_bytes


def parse_size(text: str) -> int:
    """Read a size such as ``512MiB``, ``2 GB`` or ``1000000`` as bytes.

    Raises:
        ValueError: when the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is no size; write a number and a unit, for example 512MiB.")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])
