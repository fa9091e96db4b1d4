"""The settings of ``octavo up`` and the settings that it passes through to tiers."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.config import ConfigError, load, setting
from libs.config.loader import DEFAULT_CONFIG_FILE

# The tables of the configuration file, which are also the first parts of ``--set tier.field=value``.
TIERS = ("gateway", "router", "engine", "worker", "telemetry", "clickhouse")

# The worker's own names for them, which a test compares.
QUANTIZATIONS = ("none", "int8")

_TIER_SETTING = re.compile(r"([a-z]+)\.([a-z][a-z0-9_-]*)=(.*)", re.DOTALL)
_MAX_ENGINES = 64
_MAX_GATEWAY_PROCESSES = 64
_MAX_RANKS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """All tiers as processes on this machine, with embedded stores unless URLs are given."""

    host: str = setting("127.0.0.1", "Address that the gateway listens on for HTTP.")
    port: int = setting(8000, "Port that the gateway listens on; 0 takes a free one.")
    grpc_host: str = setting("127.0.0.1", "Address that the gateway listens on for gRPC.")
    grpc_port: int = setting(0, "Port that the gateway listens on for gRPC; 0 takes a free one.")
    model: str = setting(
        "smollm2-135m-instruct", "Model to serve: smollm2-135m-instruct or gemma3-270m, a folder, or a .gguf file."
    )
    served_model_name: str | None = setting(
        None, "Name that clients use for the model; by default the name of the folder or file."
    )
    model_aliases: tuple[str, ...] = setting(
        (), "Further names by which clients may ask for the model, comma-separated."
    )
    gateway_processes: int = setting(1, "Gateway processes that share the port; one serves some thousand streams.")
    quantization: str | None = setting(
        None,
        f"Number format that workers keep weights in, {' or '.join(QUANTIZATIONS)}; by default what "
        "worker.quantization says, which is none (16 bits) unless set.",
    )
    engines: int = setting(1, "Number of replicas: each is one engine process and its worker processes.")
    tensor_parallel_size: int = setting(
        1, "Worker processes of each replica, which divide the model between them (Linux only).", unit="ranks"
    )
    data_dir: str = setting(
        "octavo-data", "Folder for stores, spools, logs and run.json; it serves one `octavo up` at a time."
    )
    redis_url: str | None = setting(None, "Redis to use instead of the embedded Valkey.")
    clickhouse_url: str | None = setting(None, "ClickHouse to use instead of the embedded one.")
    otlp_endpoint: str | None = setting(
        None, "Where gateway, router and engines send spans by OTLP over gRPC, for example http://127.0.0.1:4317."
    )
    set: tuple[str, ...] = setting(
        (),
        "tier.field=value, passed to every process of that tier; the flag can be repeated (in the environment, "
        "commas separate). "
        f"Tiers: {', '.join(TIERS)}.",
    )
    background_nice: int = setting(
        10,
        # A worker's threads lost 1.6x when processes of their own priority wanted their cores, and nothing when
        # those were nicer: docs/decisions/0006.
        "Niceness added to every process but the workers, so that a forward pass keeps its cores.",
    )
    ready_timeout_seconds: float = setting(
        900.0, "How long all processes together may take until they are ready.", unit="seconds"
    )
    drain_timeout_seconds: float = setting(
        30.0, "How long gateways may take at the end to finish their streams.", unit="seconds"
    )
    worker_silence_seconds: float = setting(
        30.0,
        "A worker that answers nothing for so long is killed and started again; longer than "
        "worker.drain_grace_seconds, because one that drains takes no calls.",
        unit="seconds",
    )
    process_silence_seconds: float = setting(
        30.0,
        "Any other process that gives no sign of life for so long is killed and started again.",
        unit="seconds",
    )
    max_restarts_per_minute: int = setting(
        12, "Restarts of one process within a minute after which everything is stopped."
    )
    log_level: str = setting("info", "Least level of the supervisor's own log: debug, info, warning or error.")

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for name in ("port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name} must be between 0 and 65535, not {getattr(self, name)}.")
        if not 1 <= self.engines <= _MAX_ENGINES:
            raise ValueError(f"engines must be between 1 and {_MAX_ENGINES}, not {self.engines}.")
        if not 1 <= self.gateway_processes <= _MAX_GATEWAY_PROCESSES:
            raise ValueError(
                f"gateway_processes must be between 1 and {_MAX_GATEWAY_PROCESSES}, not {self.gateway_processes}."
            )
        if not 1 <= self.tensor_parallel_size <= _MAX_RANKS:
            raise ValueError(
                f"tensor_parallel_size must be between 1 and {_MAX_RANKS}, not {self.tensor_parallel_size}."
            )
        if not 0 <= self.background_nice <= 19:
            raise ValueError(f"background_nice must be between 0 and 19, not {self.background_nice}.")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be {' or '.join(QUANTIZATIONS)}, not {self.quantization!r}.")
        _require_scheme("redis_url", self.redis_url, ("redis", "rediss", "unix"))
        _require_scheme("clickhouse_url", self.clickhouse_url, ("http", "https"))
        _require_scheme("otlp_endpoint", self.otlp_endpoint, ("http", "https"))
        for name in (
            "ready_timeout_seconds",
            "drain_timeout_seconds",
            "worker_silence_seconds",
            "process_silence_seconds",
        ):
            # Written so that NaN fails, too.
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0.")
        if self.max_restarts_per_minute < 1:
            raise ValueError(f"max_restarts_per_minute must be at least 1, not {self.max_restarts_per_minute}.")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"log_level must be debug, info, warning or error, not {self.log_level!r}.")


def _require_scheme(name: str, url: str | None, schemes: Sequence[str]) -> None:
    if url is not None and not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        raise ValueError(
            f"{name} must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}, not {url!r}."
        )


@dataclass(frozen=True, slots=True)
class TierSetting:
    """A setting for every process of one tier."""

    tier: str
    field: str
    value: str

    @classmethod
    def parse(cls, text: str) -> TierSetting:
        """Parse ``tier.field=value``; raises ConfigError."""
        match = _TIER_SETTING.fullmatch(text)
        if match is None:
            raise ConfigError(f"--set needs tier.field=value, for example worker.dtype=float32, not {text!r}.")
        tier, field, value = match.groups()
        if tier not in TIERS:
            raise ConfigError(f"--set {text}: there is no tier {tier!r}; the tiers are: {', '.join(TIERS)}.")
        return cls(tier, field.replace("-", "_"), value)

    @property
    def flag(self) -> str:
        """The setting as one flag of the tier's command, in the form that allows any value."""
        return f"--{self.field.replace('_', '-')}={self.value}"


@dataclass(frozen=True, slots=True)
class TierKey:
    """A field that the configuration file or the environment sets for a tier."""

    tier: str
    field: str
    source: str


@dataclass(frozen=True, slots=True)
class UpOptions:
    """All that the command line, the file and the environment say to ``octavo up``."""

    config: UpConfig
    tier_settings: tuple[TierSetting, ...]
    config_file: Path | None
    # What the file and the environment set for tiers, and where; the tier itself reads the values.
    tier_keys: tuple[TierKey, ...] = ()

    @property
    def named_keys(self) -> Iterator[TierKey]:
        """Every field of a tier that anybody sets."""
        yield from self.tier_keys
        for given in self.tier_settings:
            yield TierKey(given.tier, given.field, f"--set {given.tier}.{given.field}")

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> UpOptions:
        """Load the configuration of ``up`` in all its layers; raises ConfigError."""
        # ``--set`` can be repeated and its values may have commas, which the common loader does not offer.
        outer = argparse.ArgumentParser(prog="octavo up", add_help=False, allow_abbrev=False)
        outer.add_argument("--config")
        outer.add_argument("--set", action="append", default=[])
        known, rest = outer.parse_known_args(list(argv))
        file_flags = [] if known.config is None else ["--config", known.config]
        config = load(UpConfig, tier="up", argv=[*file_flags, *rest], environ=environ)
        # Files and environment come first, so that a flag wins.
        config = dataclasses.replace(config, set=(*config.set, *known.set))
        file = None if known.config is None else Path(known.config)
        return cls(
            config,
            tuple(TierSetting.parse(text) for text in config.set),
            file,
            (*_keys_of_tables(file or Path(DEFAULT_CONFIG_FILE)), *_keys_of_environment(environ)),
        )


def _keys_of_tables(file: Path) -> Iterator[TierKey]:
    """Name all that the file sets for tiers; raises ConfigError for a table that no tier reads."""
    if not file.exists():
        return
    tables: dict[str, Any] = tomllib.loads(file.read_text())
    unknown = sorted({*tables} - {*TIERS, "up"})
    if unknown:
        raise ConfigError(
            f"Unknown table [{unknown[0]}] in {file}; the tables are: {', '.join(sorted((*TIERS, 'up')))}."
        )
    for tier, table in tables.items():
        if tier != "up" and isinstance(table, dict):
            yield from (TierKey(tier, field, f"[{tier}] in {file}") for field in table)


def _keys_of_environment(environ: Mapping[str, str]) -> Iterator[TierKey]:
    for variable in environ:
        for tier in TIERS:
            prefix = f"OCTAVO_{tier.upper()}__"
            if variable.startswith(prefix):
                yield TierKey(tier, variable.removeprefix(prefix).lower(), f"{variable} in the environment")
