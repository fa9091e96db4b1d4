"""The router's process: builds the parts, serves until asked to stop, drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from libs.config import load
from libs.lifecycle import Lifecycle, run
from libs.obs import configure_logging, get_logger
from libs.obs.metrics import RouterMetrics, serve_metrics
from libs.obs.tracers import open_tracer
from libs.registry import NodeRegistry, PrefixRegistry, make_redis
from libs.rpc import make_server
from services.router.clients import watch_engine
from services.router.config import RouterConfig
from services.router.engine_directory import EngineDirectory
from services.router.engine_watch import EngineWatcher
from services.router.placement import Placement, make_policy
from services.router.policy.facts import PlacementRequest, ScoredCandidate
from services.router.prefix_writer import PrefixWriter
from services.router.servicer import RouterServicer, registration

_log = get_logger("router")


def main(argv: Sequence[str]) -> None:
    """Run a router until it is told to stop."""
    config = load(RouterConfig, tier="router", argv=argv)
    configure_logging("router", config.instance_id, config.log_level)
    run(partial(_serve, config), tier="router")


async def _serve(config: RouterConfig, lifecycle: Lifecycle) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    redis = make_redis(config.redis_url) if config.redis_url else None
    writer = _make_writer(config, redis, metrics) if redis is not None else None
    tracer = open_tracer(config.otlp_endpoint, tier="router", instance_id=config.instance_id)
    directory = EngineDirectory(
        report_lag_seconds=config.report_lag_seconds,
        load_stale_seconds=config.load_stale_seconds,
        max_hashes_per_engine=config.max_hashes_per_engine,
        max_hashes=config.max_hashes,
    )
    placement = Placement(
        config,
        directory=directory,
        policy=make_policy(config),
        metrics=metrics,
        clock=time.monotonic,
        on_placed=writer.note if writer is not None else _forget,
        tracer=tracer,
    )
    watcher = EngineWatcher(
        config,
        directory=directory,
        nodes=NodeRegistry(redis) if redis is not None else None,
        watch=watch_engine,
        metrics=metrics,
        clock=time.monotonic,
        on_change=placement.wake,
    )
    servicer = RouterServicer(placement, directory, max_answers=config.max_requests_per_gateway)
    server = make_server(config.listen_address, [registration(servicer)])
    await server.start()
    metrics_server = serve_metrics(metrics.registry, config.metrics_port, config.listen_address)
    if redis is None and not config.engine_addresses:
        _log.warning("no engine can be found: give --redis-url or --engine-addresses")
    async with asyncio.TaskGroup() as tasks:
        serving = [tasks.create_task(watcher.run()), tasks.create_task(placement.run())]
        if writer is not None:
            serving.append(tasks.create_task(writer.run()))
        # A router without engines is alive: it says so to each request.
        await server.set_serving(True)
        _log.info("router ready", address=server.address)
        await lifecycle.wait_for_shutdown()
        _log.info("draining")
        placement.drain()
        servicer.drain()
        await server.stop(config.drain_grace_seconds)
        for task in serving:
            task.cancel()
    if redis is not None:
        await redis.aclose()
    if metrics_server is not None:
        await asyncio.to_thread(metrics_server.shutdown)
    await asyncio.to_thread(tracer.close)
    _log.info("router stopped")


def _make_writer(config: RouterConfig, redis: Redis, metrics: RouterMetrics) -> PrefixWriter:
    return PrefixWriter(
        PrefixRegistry(redis),
        metrics,
        max_rows=config.max_prefix_rows,
        interval_seconds=config.prefix_write_interval_seconds,
        wall_clock=time.time,
    )


def _forget(request: PlacementRequest, chosen: ScoredCandidate) -> None:
    """Stand in for the writer when there is no Redis."""
