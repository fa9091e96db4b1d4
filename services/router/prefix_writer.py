"""Rows of ``prompt_prefix_cache``, written to Redis off the placement path.

Owns what waits to be written, within a bound. The rows are for readers outside; the router itself never reads
them, so that one which is lost costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libs.errors import StoreUnavailable
from libs.kv import PrefixHash
from libs.obs import get_logger
from libs.obs.metrics import RouterMetrics
from libs.registry import PrefixCacheEntry, PrefixRegistry
from services.router.policy.facts import PlacementRequest, ScoredCandidate

_MAX_BATCH_ROWS = 512

_log = get_logger("prefix_writer")


class PrefixWriter:
    """Notes where prefixes were sent; a later note for the same prefix replaces the earlier."""

    def __init__(
        self,
        registry: PrefixRegistry,
        metrics: RouterMetrics,
        *,
        max_rows: int,
        interval_seconds: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._max_rows = max_rows
        self._interval_seconds = interval_seconds
        self._wall_clock = wall_clock
        self._rows: dict[PrefixHash, PrefixCacheEntry] = {}

    def note(self, request: PlacementRequest, chosen: ScoredCandidate) -> None:
        """Note a placement: the prefix that was found, and the whole prompt that will be there now."""
        chain, engine = request.prefix_hashes, chosen.candidate.engine
        block_size = engine.identity.hash_contract.block_size
        num_found = min(chosen.candidate.forecast.num_cached_tokens // block_size, len(chain))
        for num_blocks in {num_found, len(chain)} - {0}:
            prefix_hash = chain[num_blocks - 1]
            if len(self._rows) >= self._max_rows and prefix_hash not in self._rows:
                self._metrics.prefix_rows_dropped.inc()
                continue
            self._rows[prefix_hash] = PrefixCacheEntry(
                prefix_hash, engine.engine_id, num_blocks * block_size, self._wall_clock()
            )

    async def run(self) -> None:
        """Write what was noted, again and again; a batch that Redis does not take is dropped."""
        is_up = True
        while True:
            await asyncio.sleep(self._interval_seconds)
            while self._rows:
                batch = [self._rows.pop(key) for key in list(self._rows)[:_MAX_BATCH_ROWS]]
                try:
                    await self._registry.write_prefix_cache(batch)
                except StoreUnavailable as error:
                    self._metrics.prefix_rows_dropped.inc(len(batch))
                    if is_up:
                        _log.warning("prefix rows are dropped while Redis is away", error=error.message)
                    is_up = False
                    break
                is_up = True
