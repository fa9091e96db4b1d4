"""What the tests look at from outside: metrics of a running system and rows of its audit table."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import Any

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError, DatabaseError
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.octavo import RunningOctavo


def metric(octavo: RunningOctavo, name: str, **labels: str) -> float:
    """Sum a metric of the gateway's /metrics over all samples with these labels."""
    with urllib.request.urlopen(f"{octavo.base_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def seconds_until_no_block_is_held(octavo: RunningOctavo, *, limit_seconds: float = 10.0) -> float:
    """Wait until no engine holds a block; returns how long it took."""
    start = time.monotonic()
    while await asyncio.to_thread(metric, octavo, "octavo_engine_kv_blocks_used"):
        assert time.monotonic() - start < limit_seconds, "blocks are still held"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


def audit_rows(octavo: RunningOctavo, *, at_least: int, limit_seconds: float = 30.0) -> list[dict[str, Any]]:
    """Read all audit rows once there are ``at_least`` so many."""
    deadline = time.monotonic() + limit_seconds
    while True:
        rows = _query(octavo.state()["clickhouse_url"], "SELECT * FROM inference_requests")
        if len(rows) >= at_least:
            return rows
        assert time.monotonic() < deadline, f"{len(rows)} of {at_least} audit rows arrived"
        time.sleep(0.2)


def _query(url: str, sql: str) -> list[dict[str, Any]]:
    try:
        client = clickhouse_connect.get_client(dsn=url)
    except ClickHouseError:
        # The embedded engine is still starting.
        return []
    try:
        result = client.query(sql)
    except DatabaseError as error:
        if "UNKNOWN_TABLE" in str(error):
            return []
        raise
    finally:
        client.close()
    return [dict(zip(result.column_names, row, strict=True)) for row in result.result_rows]
