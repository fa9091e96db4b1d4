"""Which processes ``octavo up`` runs: names, commands, addresses, order. Pure: it starts nothing.

Every tier connects to the others again and again until they answer, so few processes need to wait for another: only
those that write to Redis at once wait for Valkey.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

from libs.config import ConfigError
from services.supervisor.config import UpOptions


@dataclass(frozen=True, slots=True)
class GrpcHealth:
    """Healthy when ``grpc.health.v1`` says SERVING, by default for the whole server."""

    address: str
    service: str = ""


@dataclass(frozen=True, slots=True)
class HttpGet:
    """Healthy when a GET answers 200."""

    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class ValkeyPing:
    """Healthy when PING is answered with PONG on a Unix socket."""

    socket_path: Path


Probe: TypeAlias = GrpcHealth | HttpGet | ValkeyPing


class StopStage(IntEnum):
    """The order in which processes are asked to end: who sends work before who does it, stores last."""

    GATEWAY = 0
    ENGINE = 1
    WORKER = 2
    ROUTER = 3
    TELEMETRY = 4
    CLICKHOUSE = 5
    VALKEY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to keep alive."""

    name: str
    command: tuple[str, ...]
    # What it reads beside the environment of all: every user of the machine sees commands.
    environ: Mapping[str, str] = field(default_factory=dict)
    # Where others find it, for run.json: a URL, host:port or unix:/path.
    address: str
    probe: Probe
    # Answers well once the process has done what its start is about, where that is more than to be healthy.
    ready_probe: Probe | None = None
    # Names of processes that must be healthy before this one is started for the first time.
    start_after: tuple[str, ...] = ()
    # A socket file that a killed process may have left behind.
    socket_path: Path | None = None
    niceness: int
    stop_stage: StopStage
    stop_grace_seconds: float
    # Whether `octavo ready` waits for it.
    gates_readiness: bool = True
    # It is killed, and so started again, when it has given no sign of life for so long; None waits for ever.
    silence_limit_seconds: float | None = None
    # Its signs of life come through a pipe, where who asks at its port may get another's answer.
    has_heartbeat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What the effects have found before the plan is made: folders, free ports, programs."""

    data_dir: Path
    socket_dir: Path
    # The command that runs a tier: the tier's name and its flags follow.
    tier_command: tuple[str, ...]
    gateway_port: int
    gateway_grpc_port: int
    # The name that clients use for the model.
    served_model_name: str
    num_cores: int
    # None when --clickhouse-url or --redis-url name a store that is not ours.
    clickhouse_port: int | None
    valkey_binary: Path | None


@dataclass(frozen=True, slots=True)
class UpPlan:
    """All processes, in the order in which they are started, and where the stores are."""

    processes: tuple[ProcessPlan, ...]
    base_url: str
    grpc_address: str
    redis_url: str
    clickhouse_url: str


# What a gateway may take after its streams have ended, to hand over its last records.
_AFTER_DRAIN_SECONDS = 13.0
# What the KV caches of all workers of one machine may take of its free memory.
_KV_CACHE_MEMORY_FRACTION = 0.6
# The health of this is that of a worker's model.
_LOADED_MODEL = "octavo.worker.v1.Model"
_TRACED_TIERS = ("gateway", "router", "engine")
_HEALTH_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def plan_processes(options: UpOptions, places: Places) -> UpPlan:
    """Plan all processes.

    Raises:
        ConfigError: when a tier's setting contradicts what ``up`` sets for that tier itself.
    """
    return _Planner(options, places).plan()


class _Planner:
    """The scratch state of one plan: the names that more than one process needs."""

    def __init__(self, options: UpOptions, places: Places) -> None:
        self._options = options
        self._config = options.config
        self._places = places
        self._redis_url = self._config.redis_url or f"unix://{places.socket_dir / 'valkey.sock'}"
        self._clickhouse_url = self._config.clickhouse_url or f"http://127.0.0.1:{places.clickhouse_port}"

    def plan(self) -> UpPlan:
        # The worker takes longest to become ready, so it is started first.
        engine_numbers = range(self._config.engines)
        stores = [] if self._places.valkey_binary is None else [self._valkey(self._places.valkey_binary)]
        processes = [
            *stores,
            *(self._worker(number, rank) for number in engine_numbers for rank in self._ranks),
            self._router(),
            *(self._engine(number) for number in engine_numbers),
            self._gateway(),
            self._telemetry(),
        ]
        if self._places.clickhouse_port is not None:
            processes.append(self._clickhouse(self._places.clickhouse_port))
        base_url = f"http://{_in_url(self._config.host)}:{self._places.gateway_port}"
        grpc_address = f"{_in_url(self._config.grpc_host)}:{self._places.gateway_grpc_port}"
        return UpPlan(tuple(processes), base_url, grpc_address, self._redis_url, self._clickhouse_url)

    def _valkey(self, binary: Path) -> ProcessPlan:
        socket_path = self._places.socket_dir / "valkey.sock"
        options = {
            "port": "0",
            "unixsocket": str(socket_path),
            "unixsocketperm": "700",
            "dir": str(self._places.data_dir / "valkey"),
            "appendonly": "yes",
            "save": "",
            # What has no lease (budgets) is never dropped; rows with one are written again by their owners.
            "maxmemory": "512mb",
            "maxmemory-policy": "volatile-ttl",
        }
        return ProcessPlan(
            name="valkey",
            command=(str(binary), *(part for key, value in options.items() for part in (f"--{key}", value))),
            address=self._redis_url,
            probe=ValkeyPing(socket_path),
            niceness=self._config.background_nice,
            stop_stage=StopStage.VALKEY,
            stop_grace_seconds=10.0,
            silence_limit_seconds=self._config.process_silence_seconds,
        )

    def _clickhouse(self, port: int) -> ProcessPlan:
        flags = {
            "listen-host": "127.0.0.1",
            "port": str(port),
            "data-dir": str(self._places.data_dir / "clickhouse"),
        }
        return ProcessPlan(
            name="clickhouse",
            command=self._tier("clickhouse", flags),
            address=self._clickhouse_url,
            probe=HttpGet("127.0.0.1", port, "/ping"),
            # Telemetry spools until the store is there, and the model is loaded sooner without it.
            start_after=tuple(_engine_name(number) for number in range(self._config.engines)),
            niceness=self._config.background_nice,
            stop_stage=StopStage.CLICKHOUSE,
            stop_grace_seconds=25.0,
            gates_readiness=False,
            silence_limit_seconds=self._config.process_silence_seconds,
        )

    def _worker(self, number: int, rank: int) -> ProcessPlan:
        name = self._worker_name(number, rank)
        flags = {"instance-id": name, "listen-address": self._address(name), "model": self._config.model}
        if self._config.quantization is not None:
            flags["quantization"] = self._config.quantization
        return dataclasses.replace(
            self._grpc_process("worker", name, flags, StopStage.WORKER, 15.0, niceness=0),
            # It takes calls at once, and may die whenever an engine has it load the model.
            ready_probe=GrpcHealth(self._address(name), _LOADED_MODEL),
            # Other ranks cannot do without it, and one that drains takes no calls.
            silence_limit_seconds=self._config.worker_silence_seconds,
        )

    @property
    def _ranks(self) -> range:
        return range(self._config.tensor_parallel_size)

    def _worker_name(self, number: int, rank: int) -> str:
        return f"worker-{number}" if len(self._ranks) == 1 else f"worker-{number}-{rank}"

    def _engine(self, number: int) -> ProcessPlan:
        name = _engine_name(number)
        flags = {
            "engine-id": name,
            "listen-address": self._address(name),
            "worker-addresses": ",".join(self._address(self._worker_name(number, rank)) for rank in self._ranks),
            "model-name": self._places.served_model_name,
            "redis-url": self._redis_url,
        }
        return self._grpc_process("engine", name, flags, StopStage.ENGINE, 40.0, needs_redis=True)

    def _router(self) -> ProcessPlan:
        flags = {
            "listen-address": self._address("router"),
            "redis-url": self._redis_url,
            # It could find them by their leases, but only at its next look: the first requests would all go to one.
            "engine-addresses": ",".join(
                self._address(_engine_name(number)) for number in range(self._config.engines)
            ),
            # A try costs nothing on this machine, and the first request waits for the watch.
            "watch-backoff-max-seconds": "0.2",
        }
        return self._grpc_process("router", "router", flags, StopStage.ROUTER, 15.0, needs_redis=True)

    def _telemetry(self) -> ProcessPlan:
        flags = {
            "listen-address": self._address("telemetry"),
            "clickhouse-url": self._clickhouse_url,
            "spool-dir": str(self._places.data_dir / "telemetry"),
        }
        return self._grpc_process("telemetry", "telemetry", flags, StopStage.TELEMETRY, 20.0)

    def _gateway(self) -> ProcessPlan:
        host, port = self._config.host, self._places.gateway_port
        flags = {
            "gateway-id": "gateway-0",
            "gateway-processes": str(self._config.gateway_processes),
            "host": host,
            "port": str(port),
            "grpc-host": self._config.grpc_host,
            "grpc-port": str(self._places.gateway_grpc_port),
            "model": self._config.model,
            "served-model-name": self._places.served_model_name,
            "router-address": self._address("router"),
            "redis-url": self._redis_url,
            "telemetry-address": self._address("telemetry"),
            # The gateway makes a folder of its own in it, by its id.
            "data-dir": str(self._places.data_dir),
            "drain-timeout-seconds": str(self._config.drain_timeout_seconds),
            # Of several it watches each itself.
            "process-silence-seconds": str(self._config.process_silence_seconds),
        }
        if self._config.model_aliases:
            flags["model-aliases"] = ",".join(self._config.model_aliases)
        return ProcessPlan(
            name="gateway",
            command=self._tier("gateway", flags),
            environ=_environ("gateway", flags),
            address=f"{host}:{port}",
            probe=HttpGet(_HEALTH_HOSTS.get(host, host), port, "/readyz"),
            start_after=self._after_redis(),
            niceness=self._config.background_nice,
            stop_stage=StopStage.GATEWAY,
            stop_grace_seconds=self._config.drain_timeout_seconds + _AFTER_DRAIN_SECONDS,
            silence_limit_seconds=self._config.process_silence_seconds,
            has_heartbeat=True,
        )

    def _grpc_process(
        self,
        tier: str,
        name: str,
        flags: dict[str, str],
        stop_stage: StopStage,
        stop_grace_seconds: float,
        *,
        niceness: int | None = None,
        needs_redis: bool = False,
    ) -> ProcessPlan:
        return ProcessPlan(
            name=name,
            command=self._tier(tier, flags),
            environ=_environ(tier, flags),
            address=self._address(name),
            probe=GrpcHealth(self._address(name)),
            start_after=self._after_redis() if needs_redis else (),
            socket_path=self._places.socket_dir / f"{name}.sock",
            niceness=self._config.background_nice if niceness is None else niceness,
            stop_stage=stop_stage,
            stop_grace_seconds=stop_grace_seconds,
            # A process that is stopped keeps its connections and never ends by itself.
            silence_limit_seconds=self._config.process_silence_seconds,
        )

    def _address(self, name: str) -> str:
        return f"unix:{self._places.socket_dir / name}.sock"

    def _after_redis(self) -> tuple[str, ...]:
        return () if self._places.valkey_binary is None else ("valkey",)

    def _tier(self, tier: str, flags: dict[str, str]) -> tuple[str, ...]:
        """Return a tier's command: the file, then what ``up`` decides, then what was passed through."""
        self._refuse_conflicts(tier, {flag.replace("-", "_") for flag in flags})
        file = () if self._options.config_file is None else ("--config", str(self._options.config_file))
        own = (f"--{flag}={value}" for flag, value in flags.items() if not _is_secret(flag, value))
        passed = (setting.flag for setting in self._options.tier_settings if setting.tier == tier)
        return (*self._places.tier_command, tier, *file, *own, *self._tracing(tier), *self._derived(tier), *passed)

    def _tracing(self, tier: str) -> Iterator[str]:
        """Tell those who make spans where they go."""
        if self._config.otlp_endpoint and tier in _TRACED_TIERS:
            yield f"--otlp-endpoint={self._config.otlp_endpoint}"

    def _derived(self, tier: str) -> Iterator[str]:
        """Tell a tier what follows from the settings of others."""
        if tier == "worker":
            yield from self._shares_of_workers()
        elif tier == "gateway":
            yield from self._block_size_of_engines()

    def _shares_of_workers(self) -> Iterator[str]:
        """Divide cores and memory between workers, unless the user does: each expects a whole machine."""
        num_workers = self._config.engines * len(self._ranks)
        named = {key.field for key in self._options.named_keys if key.tier == "worker"}
        if num_workers > 1 and "num_threads" not in named:
            yield f"--num-threads={max(1, self._places.num_cores // num_workers)}"
        if num_workers > 1 and "kv_cache_memory_fraction" not in named:
            yield f"--kv-cache-memory-fraction={_KV_CACHE_MEMORY_FRACTION / num_workers:.4f}"

    def _block_size_of_engines(self) -> Iterator[str]:
        """Tell gateways the size of the engines' blocks: with another one prefix hashes mean something else."""
        names = [key for key in self._options.named_keys if key.field == "block_size"]
        of_engines = [key for key in names if key.tier == "engine"]
        if not of_engines or any(key.tier == "gateway" for key in names):
            return
        given = [
            each for each in self._options.tier_settings if (each.tier, each.field) == ("engine", "block_size")
        ]
        if not given:
            raise ConfigError(
                f"engine.block_size is set by {of_engines[0].source}, and gateways must know it; "
                "set gateway.block_size to the same there."
            )
        yield given[-1].flag

    def _refuse_conflicts(self, tier: str, own_fields: Iterable[str]) -> None:
        """Refuse a setting that would be ignored or would tear the processes apart."""
        for key in self._options.named_keys:
            if key.tier == tier and key.field in own_fields:
                raise ConfigError(
                    f"`octavo up` sets {tier}.{key.field} itself, so it cannot be set by {key.source}; "
                    "use the flags of `octavo up` (see `octavo up --help`) or start the tiers one by one."
                )


def _engine_name(number: int) -> str:
    return f"engine-{number}"


def _environ(tier: str, flags: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets among a tier's flags as the environment that stands for them."""
    return {
        f"OCTAVO_{tier.upper()}__{flag.replace('-', '_').upper()}": value
        for flag, value in flags.items()
        if _is_secret(flag, value)
    }


def _is_secret(flag: str, value: str) -> bool:
    """Tell whether a flag is the URL of a store with a password."""
    return flag in ("redis-url", "clickhouse-url") and "@" in value


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
