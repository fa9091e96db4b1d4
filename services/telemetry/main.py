"""The telemetry process: `octavo telemetry`.

It serves as long as it runs, also while ClickHouse is away: records wait on disk.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from libs.config import load
from libs.lifecycle import Lifecycle, run
from libs.obs import configure_logging, get_logger
from libs.obs.metrics import TelemetryMetrics, serve_metrics
from libs.rpc import make_server
from services.telemetry.audit_pipeline import AuditPipeline, PipelineSettings
from services.telemetry.audit_spool import AuditSpool, DeadLetters
from services.telemetry.clickhouse_store import ClickHouseStore
from services.telemetry.config import TelemetryConfig
from services.telemetry.servicer import telemetry_registration

# A call only appends to a file; it needs no longer.
_CALLS_GRACE_SECONDS: Final = 2.0
# Records that the store refuses are faults of ours and few.
_DEAD_LETTERS_MAX_BYTES: Final = 64 << 20


def main(argv: Sequence[str]) -> None:
    """Run the process until SIGTERM."""
    config = load(TelemetryConfig, tier="telemetry", argv=argv)
    configure_logging("telemetry", f"telemetry-{os.getpid()}", config.log_level)
    run(functools.partial(_serve, config), tier="telemetry")


async def _serve(config: TelemetryConfig, lifecycle: Lifecycle) -> None:
    log = get_logger("telemetry")
    metrics = TelemetryMetrics(CollectorRegistry())
    pipeline = _make_pipeline(config, metrics)
    server = make_server(config.listen_address, [telemetry_registration(pipeline)])
    metrics_server = serve_metrics(metrics.registry, config.metrics_port, config.listen_address)
    await server.start()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run())
        await server.set_serving(True)
        log.info("telemetry ready", address=server.address)
        await lifecycle.wait_for_shutdown()
        # First the way in, then the way out: what was acknowledged is flushed.
        await server.stop(_CALLS_GRACE_SECONDS)
        pipeline.stop()
    if metrics_server is not None:
        await asyncio.to_thread(metrics_server.shutdown)
    log.info("telemetry stopped")


def _make_pipeline(config: TelemetryConfig, metrics: TelemetryMetrics) -> AuditPipeline:
    directory = Path(config.spool_dir)
    spool = AuditSpool(directory, max_bytes=config.spool_max_bytes, clock=time.time)
    if spool.num_torn_bytes:
        metrics.spool_torn_bytes.inc(spool.num_torn_bytes)
        get_logger("telemetry").warning("cut a torn tail off the spool", num_bytes=spool.num_torn_bytes)
    settings = PipelineSettings(
        flush_interval_seconds=config.flush_interval_seconds,
        batch_max_rows=config.batch_max_rows,
        shutdown_flush_seconds=config.shutdown_flush_seconds,
    )
    dead_letters = DeadLetters(directory / "dead_letters", max_bytes=_DEAD_LETTERS_MAX_BYTES, clock=time.time)
    store = ClickHouseStore(config.clickhouse_url, config.audit_ttl_days)
    return AuditPipeline(spool, dead_letters, store, settings, metrics)
