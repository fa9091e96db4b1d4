"""Configuration of a gateway. Owns its fields, their units and the checks between them; nothing else."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from libs.config import setting
from services.gateway.model_formats.model_format import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS

_GATEWAY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_POSITIVE = (
    "block_size",
    "max_body_bytes",
    "max_concurrent_requests",
    "max_connections",
    "text_threads",
    "request_timeout_seconds",
    "process_silence_seconds",
    "head_timeout_seconds",
    "body_timeout_seconds",
    "router_timeout_seconds",
    "retry_placement_timeout_seconds",
    "resume_patience_seconds",
    "engine_accept_timeout_seconds",
    "engine_suspicion_seconds",
    "directory_refresh_seconds",
    "api_keys_poll_seconds",
    "readiness_timeout_seconds",
    "sse_heartbeat_seconds",
    "abort_settle_seconds",
    "receipt_stall_seconds",
    "limit_lease_seconds",
    "limit_timeout_seconds",
    "audit_flush_seconds",
    "audit_spool_max_bytes",
)
_MAX_PROCESSES = 64
# A lease must be renewed in time although a call failed.
_MIN_CALLS_PER_LEASE = 10
_NOT_NEGATIVE = ("port", "grpc_port", "max_placement_retries", "drain_timeout_seconds", "audit_shutdown_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """An OpenAI-compatible HTTP gateway."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "TCP port to listen on; 0 takes a free one.")
    grpc_host: str = setting("127.0.0.1", "Address to listen on for gRPC.")
    grpc_port: int = setting(0, "TCP port to listen on for gRPC; 0 takes a free one.")
    gateway_processes: int = setting(
        1, "Processes that share the port, each with a spool of its own; more than one on machines with many cores."
    )
    group_folder: str | None = setting(
        None, "Folder in which processes that share a port add up their metrics; set by gateway_processes alone."
    )
    process_silence_seconds: float = setting(
        30.0,
        "Of several processes, one whose event loop does not run for so long is killed and started again.",
        unit="seconds",
    )
    gateway_id: str = setting("gateway-0", "Name of this gateway; names its folder in data_dir and its audit rows.")
    data_dir: str = setting(".octavo", "Folder for the spool of accepted requests and the cache salt's secret.")
    log_level: str = setting("info", "Least level of log events shown: debug, info, warning or error.")

    model: str = setting(
        "smollm2-135m-instruct",
        "Model whose tokenizer and chat template are used: a folder, a .gguf file or a packaged model's name.",
    )
    served_model_name: str | None = setting(None, "The model's public name; unset takes it from model.")
    model_aliases: tuple[str, ...] = setting(
        (), "Further names by which clients may ask for the model, comma-separated."
    )
    tool_format: str = setting(
        "auto",
        "Form in which the model calls tools: auto (as its chat template has it), none (no tools), hermes, llama3, "
        "pythonic, mistral, mistral_named, deepseek_v3 or deepseek_v31.",
    )
    reasoning_format: str = setting(
        "auto",
        "Markers of the model's reasoning: auto (as its chat template has them), none, think or mistral.",
    )
    generation_config: str = setting(
        "auto",
        "What sampling is where a request says nothing: auto (as the model's generation_config.json or GGUF file "
        "says), or none (OpenAI's defaults).",
    )
    block_size: int = setting(16, "Tokens in a KV block; must be the engines' own.", unit="tokens")
    default_max_tokens: int | None = setting(
        4096, "Output limit of a request that sets none; the room left in the context bounds it too.", unit="tokens"
    )

    router_address: str | None = setting(None, "The router's gRPC address; unset lets the gateway place requests.")
    redis_url: str | None = setting(None, "Redis that holds the node registry, for when no router answers.")
    engine_addresses: tuple[str, ...] = setting((), "Engines' gRPC addresses known beforehand, comma-separated.")
    telemetry_address: str | None = setting(None, "Telemetry's gRPC address; unset keeps no audit records.")

    api_keys_file: str | None = setting(None, "File of API keys that `octavo keys` writes; unset asks for none.")
    api_keys_in_redis: bool = setting(False, "Keep the API keys in redis_url, for all gateways, instead of a file.")
    api_keys_poll_seconds: float = setting(
        1.0, "Time between two looks whether the API keys have changed.", unit="seconds"
    )
    allow_unauthenticated: bool = setting(
        False, "Serve without API keys also on an address that other machines can reach."
    )
    cache_salt_secret: str | None = setting(
        None, "Secret that tenants' cache salts derive from; unset keeps one in data_dir. Equal on all gateways."
    )

    limit_lease_seconds: float = setting(
        30.0, "Time after which what a killed gateway held of its tenants' limits is free again.", unit="seconds"
    )
    limit_timeout_seconds: float = setting(
        0.1, "Time for Redis to decide about a tenant's limits, before the gateway does so alone.", unit="seconds"
    )

    shared_prompt_files: tuple[str, ...] = setting(
        (), "Files with one system prompt each whose cached blocks all tenants share, comma-separated."
    )

    max_body_bytes: int = setting(4 * 1024 * 1024, "Largest request body; more is refused with 413.", unit="bytes")
    max_concurrent_requests: int = setting(4096, "Requests in this gateway at once; more are refused with 503.")
    max_connections: int = setting(
        8192,
        "HTTP connections at once, and three quarters of the files that the system allows at most; beyond it idle "
        "ones are closed, those that have waited longest first.",
    )
    text_threads: int = setting(2, "Threads that render templates and tokenize.")
    head_timeout_seconds: float = setting(
        10.0, "Time for a request's head to arrive, from its first byte on.", unit="seconds"
    )
    body_timeout_seconds: float = setting(60.0, "Time for a request's body to arrive.", unit="seconds")
    request_timeout_seconds: float = setting(600.0, "Time for a whole request.", unit="seconds")

    router_timeout_seconds: float = setting(
        1.0, "Time for the router to show that it lives, before the gateway places requests itself.", unit="seconds"
    )
    max_placement_retries: int = setting(
        2,
        "Placements after the first until an engine takes a request, and losses between two of its tokens.",
    )
    retry_placement_timeout_seconds: float = setting(
        5.0, "Time to find another engine for a request whose engine failed.", unit="seconds"
    )
    resume_patience_seconds: float = setting(
        60.0,
        "How long a request whose engine was lost waits for one that takes it, as while a worker loads its model.",
        unit="seconds",
    )
    engine_accept_timeout_seconds: float = setting(
        10.0, "Time for an engine to say that it has taken a request.", unit="seconds"
    )
    engine_suspicion_seconds: float = setting(
        15.0,
        "How long an engine that did not take a request, or lost it at once, gets none while there are others.",
        unit="seconds",
    )
    directory_refresh_seconds: float = setting(
        2.0, "Time between two looks at which engines exist.", unit="seconds"
    )
    readiness_timeout_seconds: float = setting(
        1.0, "Time for an engine to answer a readiness check.", unit="seconds"
    )

    sse_heartbeat_seconds: float = setting(
        15.0, "Silence in a stream after which a comment keeps it alive.", unit="seconds"
    )
    abort_settle_seconds: float = setting(
        2.0, "Time for an engine to confirm an abort with its counts.", unit="seconds"
    )
    otlp_endpoint: str = setting(
        "", "Where spans go by OTLP over gRPC, for example http://127.0.0.1:4317; none when empty.", unit="url"
    )
    trace_sample_fraction: float = setting(
        1.0, "Share of requests that are traced, of those whose client has not decided it.", unit="fraction"
    )
    receipt_stall_seconds: float = setting(
        0.1, "Gap between two tokens from which on a latency receipt calls it a stall.", unit="seconds"
    )
    drain_timeout_seconds: float = setting(30.0, "Time for running requests to finish at shutdown.", unit="seconds")

    audit_flush_seconds: float = setting(
        0.2, "Longest time that a record waits for its batch to fill.", unit="seconds"
    )
    audit_spool_max_bytes: int = setting(
        64 * 1024 * 1024,
        "Bound of the spool on disk while telemetry is away; more is dropped and counted.",
        unit="bytes",
    )
    audit_shutdown_seconds: float = setting(
        5.0, "Time to hand the last records over at shutdown; the rest stays in the spool.", unit="seconds"
    )

    def __post_init__(self) -> None:
        """Check the fields that must fit together."""
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than zero.")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative.")
        for name, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            if getattr(self, name) not in (AUTO, NONE, *known):
                raise ValueError(f"{name} must be {AUTO}, {NONE} or one of {', '.join(known)}.")
        if self.generation_config not in (AUTO, NONE):
            raise ValueError(f"generation_config must be {AUTO} or {NONE}.")
        if not 1 <= self.gateway_processes <= _MAX_PROCESSES:
            raise ValueError(f"gateway_processes must be between 1 and {_MAX_PROCESSES}.")
        if self.limit_lease_seconds < _MIN_CALLS_PER_LEASE * self.limit_timeout_seconds:
            raise ValueError(f"limit_lease_seconds must be at least {_MIN_CALLS_PER_LEASE} limit_timeout_seconds.")
        if not 0 <= self.trace_sample_fraction <= 1:
            raise ValueError("trace_sample_fraction must be in [0, 1].")
        for name in ("port", "grpc_port"):
            if getattr(self, name) > 65535:
                raise ValueError(f"{name} must be at most 65535.")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ValueError("default_max_tokens must be at least one.")
        if not all(self.model_aliases) or len(set(self.model_aliases)) < len(self.model_aliases):
            raise ValueError("model_aliases must be names that differ.")
        if _GATEWAY_ID.fullmatch(self.gateway_id) is None:
            raise ValueError("gateway_id must be up to 64 letters, digits, dots, dashes and underscores.")
        if self.api_keys_in_redis and (self.redis_url is None or self.api_keys_file is not None):
            raise ValueError("api_keys_in_redis needs redis_url and no api_keys_file.")
        if not self.asks_for_keys and not self.allow_unauthenticated:
            for host in (self.host, self.grpc_host):
                _check_is_loopback(host)

    @property
    def is_of_group(self) -> bool:
        """Whether this process is one of several on one port."""
        return self.group_folder is not None

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.api_keys_file is not None or self.api_keys_in_redis


def _check_is_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ValueError(
            f"{host} can be reached from other machines and no API keys are configured: "
            "set gateway.api_keys_file or gateway.api_keys_in_redis, or listen on 127.0.0.1, or set "
            "gateway.allow_unauthenticated to true."
        )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
