"""The settings of a router."""

from __future__ import annotations

from dataclasses import dataclass

from libs.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Places requests on engines."""

    listen_address: str = setting("127.0.0.1:50052", "Where the router serves gRPC: host:port or unix:/path.")
    instance_id: str = setting("router-0", "Name of this process in logs.")
    log_level: str = setting("info", "Least level of logs: debug, info, warning or error.")
    metrics_port: int = setting(0, "Port of Prometheus metrics; 0 serves none.")
    otlp_endpoint: str = setting(
        "", "Where spans go by OTLP over gRPC, for example http://127.0.0.1:4317; none when empty.", unit="url"
    )
    redis_url: str | None = setting(None, "Redis that holds the engines' leases; unset for none.")
    engine_addresses: tuple[str, ...] = setting((), "Engines to watch beside those with a lease, by address.")

    lease_poll_seconds: float = setting(1.0, "How often leases are read.", unit="seconds")
    lease_grace_seconds: float = setting(
        10.0,
        "How long an engine is kept when its lease is gone while its watch is alive, as after a restart of Redis.",
        unit="seconds",
    )
    max_engines: int = setting(1_024, "Engines that are watched at most; further leases are left out.")
    watch_backoff_min_seconds: float = setting(0.05, "Pause before a broken watch is opened again.", unit="seconds")
    watch_backoff_max_seconds: float = setting(2.0, "Longest pause between two tries to watch.", unit="seconds")
    snapshot_timeout_seconds: float = setting(
        10.0, "How long an engine may take to send its snapshot.", unit="seconds"
    )
    load_stale_seconds: float = setting(
        10.0, "A load report older than this is taken as unknown, which is neutral.", unit="seconds"
    )
    report_lag_seconds: float = setting(
        0.02,
        "A load report is taken to contain what was placed at least this long before it came.",
        unit="seconds",
    )
    max_hashes_per_engine: int = setting(1_000_000, "Prefix hashes remembered for each engine; more are left out.")
    max_hashes: int = setting(
        16_000_000,
        "Prefix hashes remembered in all, at some 115 bytes each; more are left out, which costs prefix hits.",
    )

    max_waiting_requests: int = setting(4_096, "Requests that wait for a place; more are refused at once.")
    max_wait_seconds: float = setting(
        60.0,
        "How long a request waits at the router for a place at most; a shorter deadline of its own holds. The few "
        "that an engine is given beyond what it runs at once wait there, as long as a request may.",
        unit="seconds",
    )
    max_waiting_steps: float = setting(
        1.0, "An engine is given requests while fewer prompt tokens wait there than this many steps compute."
    )
    max_requests_ratio: float = setting(
        1.25, "Requests at an engine at most, as a multiple of the sequences that it runs at once."
    )
    no_engine_retry_seconds: float = setting(
        5.0, "What to tell clients about coming back while no engine is ready.", unit="seconds"
    )
    max_retry_after_seconds: float = setting(60.0, "Longest computed time to come back.", unit="seconds")

    wait_tolerance_seconds: float = setting(
        0.05, "Difference between two predicted waits that hardly counts.", unit="seconds"
    )
    prefix_match_weight: float = setting(
        0.1, "Weight of the cached share of the prompt, beside 1 for the predicted wait."
    )
    unmeasured_prefill_tokens_per_second: float = setting(
        1_000.0, "Prefill rate to assume while no engine has measured one.", unit="tokens/second"
    )
    unmeasured_decode_step_seconds: float = setting(
        0.03, "Time of a decode step to assume while no engine has measured one.", unit="seconds"
    )

    max_requests_per_gateway: int = setting(65_536, "Requests of one gateway, waiting and placed, at most.")
    prefix_write_interval_seconds: float = setting(
        0.5, "How often rows of prompt_prefix_cache are written.", unit="seconds"
    )
    max_prefix_rows: int = setting(
        4_096, "Rows of prompt_prefix_cache that wait to be written; more are dropped and counted."
    )
    drain_grace_seconds: float = setting(2.0, "How long streams may take to end at shutdown.", unit="seconds")

    def __post_init__(self) -> None:
        for name in (
            "max_engines",
            "max_hashes_per_engine",
            "max_hashes",
            "max_waiting_requests",
            "max_requests_per_gateway",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in (
            "lease_poll_seconds",
            "watch_backoff_min_seconds",
            "snapshot_timeout_seconds",
            "max_wait_seconds",
            "max_waiting_steps",
            "wait_tolerance_seconds",
            "unmeasured_prefill_tokens_per_second",
            "unmeasured_decode_step_seconds",
            "prefix_write_interval_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}.")
        if self.watch_backoff_max_seconds < self.watch_backoff_min_seconds:
            raise ValueError("watch_backoff_max_seconds must be at least watch_backoff_min_seconds.")
        if not 0 <= self.prefix_match_weight < 1:
            raise ValueError(f"prefix_match_weight must be in [0, 1), not {self.prefix_match_weight}.")
