"""Configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from libs.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine: one scheduler and its workers; one replica of the model."""

    engine_id: str = setting("engine-0", "Stable name of this engine; node_id in the registries.")
    listen_address: str = setting("127.0.0.1:7001", "Where the gRPC server listens.", unit="host:port or unix:path")
    advertised_address: str = setting("", "Where others reach it; the listen address when empty.", unit="address")
    worker_addresses: tuple[str, ...] = setting(
        ("127.0.0.1:7101",), "The workers of this replica, one per accelerator, by rank.", unit="address,…"
    )
    model_name: str = setting("smollm2-135m-instruct", "Public name of the model.")
    redis_url: str = setting("", "Redis for the registries; none when empty.", unit="url")
    block_size: int = setting(16, "Tokens in a KV block.", unit="tokens")
    max_model_len: int | None = setting(
        None, "Prompt and output together; the model's limit if unset.", unit="tokens"
    )
    max_num_seqs: int = setting(256, "Sequences that run at once.", unit="sequences")
    max_num_batched_tokens: int = setting(512, "Token budget of a step.", unit="tokens")
    max_waiting_sequences: int = setting(4096, "Sequences that may wait; more are refused.", unit="sequences")
    num_blocks: int | None = setting(
        None, "Use fewer KV blocks than the worker has, for tests and experiments.", unit="blocks"
    )
    enable_prefix_caching: bool = setting(True, "Keep full blocks for later requests.", unit="true|false")
    watermark_fraction: float = setting(0.01, "Share of blocks kept free when admitting.", unit="fraction")
    lease_seconds: float = setting(5.0, "Life of the entry in gpu_cluster_nodes.", unit="seconds")
    load_timeout_seconds: float = setting(900.0, "Longest time to load the model.", unit="seconds")
    step_timeout_seconds: float = setting(60.0, "A worker that takes longer for a step is lost.", unit="seconds")
    stall_seconds: float = setting(10.0, "A step that takes longer makes the engine not ready.", unit="seconds")
    drain_timeout_seconds: float = setting(30.0, "Time for running requests at shutdown.", unit="seconds")
    integrity_interval_steps: int = setting(1000, "Steps between two checks of the block accounts.", unit="steps")
    metrics_port: int = setting(0, "Port of /metrics; 0 serves none.", unit="port")
    log_level: str = setting("info", "Least level of log lines.", unit="level")

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not self.worker_addresses:
            raise ValueError("worker_addresses must name at least one worker.")
        if not 0 <= self.watermark_fraction < 1:
            raise ValueError(f"watermark_fraction must be in [0, 1), not {self.watermark_fraction}.")

    @property
    def address(self) -> str:
        """Where others reach this engine."""
        return self.advertised_address or self.listen_address
