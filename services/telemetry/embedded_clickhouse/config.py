"""Configuration of the embedded ClickHouse process."""

from __future__ import annotations

from dataclasses import dataclass

from libs.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedClickHouseConfig:
    """Configuration of the embedded ClickHouse."""

    listen_host: str = setting("127.0.0.1", "Address to listen on; anyone who reaches it can read and write.")
    port: int = setting(8123, "TCP port; 0 takes a free one, named in the ready line.")
    data_dir: str = setting(
        ".octavo/clickhouse", "Folder of the data; one process at a time may use it.", unit="path"
    )
    password: str = setting("", "Password of the user 'default'; empty for none. Best given by environment.")
    max_concurrent_queries: int = setting(8, "Queries run at once; the others wait.", unit="count")
    max_waiting_queries: int = setting(64, "Queries that may wait; beyond it they get 503.", unit="count")
    max_body_bytes: int = setting(64 << 20, "Largest body, also once it is decompressed.", unit="bytes")
    max_result_bytes: int = setting(256 << 20, "Largest result of a query.", unit="bytes")
    max_query_memory_bytes: int = setting(2 << 30, "Memory that one query may take.", unit="bytes")
    max_query_seconds: int = setting(300, "Longest time that a query may run.", unit="seconds")
    shutdown_seconds: float = setting(20.0, "Time given to running queries at shutdown.", unit="seconds")
    log_level: str = setting("info", "Least level of the log: debug, info, warning or error.")

    def __post_init__(self) -> None:
        bounds = ("concurrent_queries", "body_bytes", "result_bytes", "query_memory_bytes", "query_seconds")
        for bound in bounds:
            if getattr(self, f"max_{bound}") < 1:
                raise ValueError(f"max_{bound} must be at least 1")
        if self.max_waiting_queries < 0 or self.shutdown_seconds < 0:
            raise ValueError("max_waiting_queries and shutdown_seconds must not be negative")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be between 0 and 65535, not {self.port}")
