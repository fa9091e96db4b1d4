"""The process of the embedded ClickHouse: `octavo clickhouse`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from aiohttp import web

from libs.config import load
from libs.errors import StoreUnavailable
from libs.lifecycle import Lifecycle, run
from libs.obs import configure_logging, get_logger
from services.telemetry.embedded_clickhouse.app import make_app
from services.telemetry.embedded_clickhouse.config import EmbeddedClickHouseConfig
from services.telemetry.embedded_clickhouse.engine import open_engine


def main(argv: Sequence[str]) -> None:
    """Run the process until SIGTERM."""
    config = load(EmbeddedClickHouseConfig, tier="clickhouse", argv=argv)
    configure_logging("clickhouse", "embedded", config.log_level)
    run(functools.partial(_serve, config), tier="clickhouse")


async def _serve(config: EmbeddedClickHouseConfig, lifecycle: Lifecycle) -> None:
    log = get_logger("embedded_clickhouse")
    engine = await asyncio.to_thread(open_engine, config)
    # Bodies are decompressed in `bodies`, which knows several frames and a bound.
    runner = web.AppRunner(
        make_app(engine, config), auto_decompress=False, shutdown_timeout=config.shutdown_seconds, access_log=None
    )
    try:
        await runner.setup()
        url = await _listen(runner, config)
        log.info("embedded clickhouse ready", url=url, data_dir=config.data_dir, engine_version=engine.version)
        # The line that whoever started this process waits for.
        print(f"embedded clickhouse ready {url}", flush=True)
        await lifecycle.wait_for_shutdown()
    finally:
        # Stops listening, waits for open requests, then for queries whose client has left.
        await runner.cleanup()
        await asyncio.to_thread(engine.close)
    log.info("embedded clickhouse stopped")


async def _listen(runner: web.AppRunner, config: EmbeddedClickHouseConfig) -> str:
    site = web.TCPSite(runner, config.listen_host, config.port)
    try:
        await site.start()
    except OSError as error:
        raise StoreUnavailable(
            f"cannot listen on {config.listen_host}:{config.port}: {error.strerror}; choose another --port"
        ) from error
    port = runner.addresses[0][1]
    host = f"[{config.listen_host}]" if ":" in config.listen_host else config.listen_host
    return f"http://{host}:{port}"
