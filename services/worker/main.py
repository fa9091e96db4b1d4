"""The worker's process: serves at once, loads when the engine asks for it.

Owns the order of start and stop and the environment that torch's threads need. It must not know steps or models.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from libs.config import load
from libs.lifecycle import Lifecycle, run
from libs.obs import configure_logging, get_logger
from libs.obs.metrics import WorkerMetrics, serve_metrics
from libs.rpc import RpcServer, make_server
from services.worker.config import RunnerKind, WorkerConfig
from services.worker.deferred_runner import DeferredRunner
from services.worker.servicer import MODEL_HEALTH, WorkerServicer, registration
from services.worker.step import ModelRunner

_log = get_logger("worker")

# Rounds that an idle OpenMP thread spins before it sleeps. While another process wants a core, spinning makes every
# operator wait for a thread that the system has taken away: with libgomp's default a decode step of 64 sequences
# took 270 to 550 ms on two busy cores, without spinning 110 ms (66 and 71 ms on idle ones).
_SPIN_COUNT = "0"
_HEALTH_INTERVAL_SECONDS = 0.1


def main(argv: Sequence[str]) -> None:
    """Run a worker until it is told to stop."""
    config = load(WorkerConfig, tier="worker", argv=argv)
    configure_logging("worker", config.instance_id, config.log_level)
    # libgomp reads this when torch is imported, so no configuration object can carry it there.
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    run(partial(_serve, config), tier="worker")


async def _serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    servicer = WorkerServicer(DeferredRunner(partial(_make_runner, config)), metrics, model_name=config.model)
    server = make_server(config.listen_address, [registration(servicer)])
    await server.start()
    metrics_server = serve_metrics(metrics.registry, config.metrics_port, config.listen_address)
    # Serving means that LoadModel is taken; the engine waits for its end.
    await server.set_serving(True)
    following = asyncio.create_task(_follow_model(servicer, server))
    _log.info("worker ready", address=server.address, runner=config.runner.value)
    await lifecycle.wait_for_shutdown()
    _log.info("draining")
    following.cancel()
    # The engine drains first and closes its stream; one that does not is cut off after the grace.
    await server.stop(config.drain_grace_seconds)
    await servicer.close()
    if metrics_server is not None:
        await asyncio.to_thread(metrics_server.shutdown)
    _log.info("worker stopped")


async def _follow_model(servicer: WorkerServicer, server: RpcServer) -> None:
    """Tell who asks for the model's health whether it is loaded, until cancelled."""
    told: bool | None = None
    while True:
        if servicer.is_loaded is not told:
            told = servicer.is_loaded
            await server.set_health(MODEL_HEALTH, is_serving=told)
        await asyncio.sleep(_HEALTH_INTERVAL_SECONDS)


def _make_runner(config: WorkerConfig) -> ModelRunner:
    # Imported where it is chosen: the stub must run without torch, and torch takes seconds.
    if config.runner is RunnerKind.STUB:
        from services.worker.stub_runner import StubRunner

        return StubRunner(config)
    with _without_collections():
        from services.worker.model_runner import TorchRunner
    return TorchRunner(config)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from looking through modules while they are made: a fifth of torch's import.

    They stay until the end, so that it need not look at them later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
