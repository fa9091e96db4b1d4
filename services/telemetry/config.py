"""Configuration of the telemetry tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from libs.config import setting

_MAX_TTL_DAYS: Final = 36_500
# The largest message that a gateway can send is 16 MiB.
_LEAST_SPOOL_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Configuration of the telemetry tier."""

    listen_address: str = setting("127.0.0.1:50055", "gRPC address: host:port or unix:/path.")
    clickhouse_url: str = setting(
        "http://127.0.0.1:8123",
        "ClickHouse over HTTP: http(s)://user:password@host:port/database; the database is 'default' if left out.",
    )
    spool_dir: str = setting(
        ".octavo/telemetry", "Folder for records on their way to the store; one for each process.", unit="path"
    )
    spool_max_bytes: int = setting(1 << 30, "Most that may wait on disk; more is refused.", unit="bytes")
    flush_interval_seconds: float = setting(1.0, "Records reach the store after this time.", unit="seconds")
    batch_max_rows: int = setting(1_000, "Rows of one insert; as many waiting are flushed at once.", unit="rows")
    audit_ttl_days: int = setting(365, "Audit records older than this are deleted, by whole months.", unit="days")
    shutdown_flush_seconds: float = setting(10.0, "Time for the last flush; the rest waits.", unit="seconds")
    metrics_port: int = setting(0, "Port of /metrics; 0 for none.")
    log_level: str = setting("info", "Least level of the log: debug, info, warning or error.")

    def __post_init__(self) -> None:
        url = urlsplit(self.clickhouse_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            # Not with its value: it may hold a password.
            raise ValueError("clickhouse_url must be http(s)://user:password@host:port/database")
        if self.spool_max_bytes < _LEAST_SPOOL_BYTES:
            raise ValueError(f"spool_max_bytes must be at least {_LEAST_SPOOL_BYTES}: room for any one batch")
        if self.batch_max_rows < 1:
            raise ValueError("batch_max_rows must be at least 1")
        if self.flush_interval_seconds <= 0 or self.shutdown_flush_seconds < 0:
            raise ValueError("flush_interval_seconds must be over 0, shutdown_flush_seconds not negative")
        if not 1 <= self.audit_ttl_days <= _MAX_TTL_DAYS:
            raise ValueError(f"audit_ttl_days must be between 1 and {_MAX_TTL_DAYS}")
