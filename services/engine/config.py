"""Configuration of an engine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from libs.config import setting
from services.engine.core.scheduler_config import Admission, Batching, Layout, SpeculationConfig

# It is part of keys in Redis and of patterns that look for them, in which * or [ would stand for other engines.
_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class Speculation(StrEnum):
    """Where drafts come from: tokens that are computed before they are known."""

    NONE = "none"
    NGRAM = "ngram"


_AT_LEAST_ONE = (
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_waiting_sequences",
    "num_blocks",
    "integrity_interval_steps",
)
_ABOVE_ZERO = (
    "lease_seconds",
    "load_timeout_seconds",
    "step_timeout_seconds",
    "stall_seconds",
    "heartbeat_seconds",
)


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
    aging_seconds: float = setting(
        30.0, "Head start in line that one level of priority gives; 0 serves by arrival.", unit="seconds"
    )
    target_itl: float | None = setting(
        None, "Predicted time of a step at most while somebody decodes; prompts wait for it.", unit="seconds"
    )
    max_prefill_share: float = setting(
        0.34,
        "Share of a step for prompts while others run or wait, and of that share for one before a shorter one.",
        unit="fraction",
    )
    admission: Admission = setting(
        Admission.PREDICTED_PEAK, "What must fit before a request starts.", unit="predicted_peak|watermark"
    )
    batching: Batching = setting(
        Batching.CONTINUOUS, "static waits for the longest of a batch; for measurements.", unit="continuous|static"
    )
    layout: Layout = setting(
        Layout.PAGED, "contiguous gives everyone max_model_len; for measurements.", unit="paged|contiguous"
    )
    max_steps_in_flight: int = setting(
        2, "2 sends a step while the one before it is computed; 1 waits for its result.", unit="steps"
    )
    speculation: Speculation = setting(
        Speculation.NONE, "ngram computes what followed the last time beside the next token.", unit="none|ngram"
    )
    num_draft_tokens: int = setting(4, "Drafts of a sequence in a step at most.", unit="tokens")
    min_ngram_tokens: int = setting(2, "Fewest last tokens that must have occurred before.", unit="tokens")
    max_ngram_tokens: int = setting(4, "Most last tokens that are looked for.", unit="tokens")
    max_drafting_seqs: int = setting(16, "While more sequences run nobody drafts.", unit="sequences")
    lease_seconds: float = setting(5.0, "Life of the entry in gpu_cluster_nodes.", unit="seconds")
    load_timeout_seconds: float = setting(900.0, "Longest time to load the model.", unit="seconds")
    step_timeout_seconds: float = setting(60.0, "A worker that takes longer for a step is lost.", unit="seconds")
    stall_seconds: float = setting(10.0, "A step that takes longer makes the engine not ready.", unit="seconds")
    heartbeat_seconds: float = setting(
        2.0, "While nothing is computed, how often the worker is asked for a sign of life.", unit="seconds"
    )
    drain_timeout_seconds: float = setting(30.0, "Time for running requests at shutdown.", unit="seconds")
    integrity_interval_steps: int = setting(1000, "Steps between two checks of the block accounts.", unit="steps")
    metrics_port: int = setting(0, "Port of /metrics; 0 serves none.", unit="port")
    otlp_endpoint: str = setting(
        "", "Where spans go by OTLP over gRPC, for example http://127.0.0.1:4317; none when empty.", unit="url"
    )
    log_level: str = setting("info", "Least level of log lines.", unit="level")

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            # Some may be unset.
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        for name in _ABOVE_ZERO:
            # Written so that NaN fails, too.
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 seconds, not {getattr(self, name)}.")
        if not 0 <= self.drain_timeout_seconds < math.inf:
            raise ValueError(f"drain_timeout_seconds must be at least 0, not {self.drain_timeout_seconds}.")
        if _ENGINE_ID.fullmatch(self.engine_id) is None:
            raise ValueError("engine_id must be up to 128 letters, digits, dots, colons, dashes and underscores.")
        if self.max_steps_in_flight not in (1, 2):
            raise ValueError(f"max_steps_in_flight must be 1 or 2, not {self.max_steps_in_flight}.")
        if self.target_itl is not None and not self.target_itl > 0:
            raise ValueError(f"target_itl must be above 0 seconds, not {self.target_itl}.")
        if not 0 < self.max_prefill_share <= 1:
            raise ValueError(f"max_prefill_share must be in (0, 1], not {self.max_prefill_share}.")
        if not 0 <= self.aging_seconds < math.inf:
            raise ValueError(f"aging_seconds must be at least 0, not {self.aging_seconds}.")
        # Raises for limits of drafts that contradict each other, also while nothing is speculated.
        self._ngram_config()
        if not self.worker_addresses:
            raise ValueError("worker_addresses must name at least one worker.")
        if not 0 <= self.watermark_fraction < 1:
            raise ValueError(f"watermark_fraction must be in [0, 1), not {self.watermark_fraction}.")

    @property
    def speculation_config(self) -> SpeculationConfig | None:
        """How drafts are made, if any are."""
        return self._ngram_config() if self.speculation is Speculation.NGRAM else None

    def _ngram_config(self) -> SpeculationConfig:
        return SpeculationConfig(
            num_draft_tokens=self.num_draft_tokens,
            min_ngram_tokens=self.min_ngram_tokens,
            max_ngram_tokens=self.max_ngram_tokens,
            max_drafting_seqs=self.max_drafting_seqs,
        )

    @property
    def address(self) -> str:
        """Where others reach this engine."""
        return self.advertised_address or self.listen_address
