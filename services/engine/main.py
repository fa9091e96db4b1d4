"""An engine's process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from libs.config import load
from libs.lifecycle import Lifecycle, run
from libs.obs import configure_logging, get_logger
from libs.obs.metrics import EngineMetrics, serve_metrics
from libs.obs.tracers import open_tracer
from libs.registry import make_redis
from libs.rpc import make_server
from services.engine.clients import WorkerClient
from services.engine.config import EngineConfig
from services.engine.feed import EngineFeed
from services.engine.identity import EngineState
from services.engine.loop import EngineLoop
from services.engine.registry_writer import RegistryWriter
from services.engine.servicer import registrations
from services.engine.worker_group import WorkerGroup

_log = get_logger("engine")

# Events already in the outboxes still reach the gateways after the last request has ended.
_FLUSH_SECONDS = 1.0
_HEALTH_INTERVAL_SECONDS = 0.1


def main(argv: Sequence[str]) -> None:
    """Run an engine until it is told to stop."""
    config = load(EngineConfig, tier="engine", argv=argv)
    configure_logging("engine", config.engine_id, config.log_level)
    run(lambda lifecycle: _serve(config, lifecycle), tier="engine")


async def _serve(config: EngineConfig, lifecycle: Lifecycle) -> None:
    metrics = EngineMetrics(CollectorRegistry())
    redis = make_redis(config.redis_url) if config.redis_url else None
    tracer = open_tracer(config.otlp_endpoint, tier="engine", instance_id=config.engine_id)
    registry = RegistryWriter(redis, config.engine_id, lease_seconds=config.lease_seconds)
    workers = [WorkerClient(config, rank) for rank in range(len(config.worker_addresses))]
    loop = EngineLoop(
        config,
        WorkerGroup(
            workers,
            load_timeout_seconds=config.load_timeout_seconds,
            step_timeout_seconds=config.step_timeout_seconds,
        ),
        EngineFeed(),
        registry,
        metrics,
        # Grows over restarts of this process, also without anything stored.
        first_incarnation=time.time_ns() // 1_000_000,
        tracer=tracer,
    )
    server = make_server(config.listen_address, registrations(loop, time.monotonic))
    await server.start()
    async with AsyncExitStack() as stack:
        # However serving ends, also with a model that cannot be loaded.
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        stack.push_async_callback(server.stop, _FLUSH_SECONDS)
        for worker in workers:
            stack.push_async_callback(worker.close)
        if redis is not None:
            stack.push_async_callback(redis.aclose)
        metrics_server = serve_metrics(
            metrics.registry, config.metrics_port, config.listen_address, before_scrape=loop.refresh_gauges
        )
        if metrics_server is not None:
            stack.callback(metrics_server.shutdown)
        async with asyncio.TaskGroup() as tasks:
            serving = [
                tasks.create_task(loop.run()),
                tasks.create_task(registry.run(lambda: loop.status)),
                tasks.create_task(_follow_health(loop, server.set_serving)),
            ]
            await lifecycle.wait_for_shutdown()
            _log.info("draining", num_requests=loop.num_requests)
            loop.drain()
            await registry.withdraw()
            await loop.wait_until_idle(config.drain_timeout_seconds)
            await server.stop(_FLUSH_SECONDS)
            for task in serving:
                task.cancel()


async def _follow_health(loop: EngineLoop, set_serving: Callable[[bool], Awaitable[None]]) -> None:
    """Tell health watchers whenever the engine becomes ready or stops being so."""
    told: bool | None = None
    while True:
        is_ready = loop.status.state is EngineState.READY
        if is_ready is not told:
            await set_serving(is_ready)
            told = is_ready
        await asyncio.sleep(_HEALTH_INTERVAL_SECONDS)
