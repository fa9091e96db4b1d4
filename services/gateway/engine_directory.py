"""Which engines exist and what they are doing, from the gateway's own point of view.

Owns three sources of addresses (the router, the registry in Redis, the configuration) and the questions to
engines themselves. It must not choose an engine for a request. What it knows is used when no router answers, for
readiness, for metrics and for the context limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from libs.errors import OctavoError, StoreUnavailable
from libs.kv import HashContract
from libs.obs import get_logger
from services.gateway.clients import EngineClient, RouterClient
from services.gateway.peers import EngineState, EngineStatus

if TYPE_CHECKING:
    from libs.registry import NodeRegistry

log = get_logger("engine_directory")

# Engines asked at once; each answer is awaited for a bounded time, so a look at all of them is bounded too.
_MAX_CONCURRENT_QUESTIONS = 16
# One ready engine suffices for readiness, so a probe of a large cluster need not ask them all.
_MAX_READINESS_QUESTIONS = 8
# Why an engine takes no requests, after its name.
_CONDITIONS = {
    EngineState.STARTING: "waits for its workers to load the model, whose logs say why if that lasts",
    EngineState.READY: "serves another model, or with another block size",
    EngineState.DRAINING: "is going away",
}


class EngineDirectory:
    """The engines of one model, refreshed in the background."""

    def __init__(
        self,
        *,
        model_name: str,
        hash_contract: HashContract,
        configured_addresses: Sequence[str],
        registry: NodeRegistry | None,
        router: RouterClient | None,
        refresh_seconds: float,
        answer_timeout_seconds: float,
    ) -> None:
        self._model_name = model_name
        self._hash_contract = hash_contract
        self._configured_addresses = frozenset(configured_addresses)
        self._registry = registry
        self._router = router
        self._refresh_seconds = refresh_seconds
        self._answer_timeout_seconds = answer_timeout_seconds
        self._addresses_by_source: dict[str, frozenset[str]] = {"configuration": self._configured_addresses}
        self._silent_sources: set[str] = set()
        self._mismatched_ids: set[str] = set()
        self._clients: dict[str, EngineClient] = {}
        self._engines: dict[str, EngineStatus] = {}
        self._max_model_len: int | None = None
        self._readiness_lock = asyncio.Lock()

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """The engines of this model that answered last time and hash prefixes as the gateway does, by id."""
        return tuple(_by_id(engine for engine in self._engines.values() if self._is_ours(engine)))

    @property
    def max_model_len(self) -> int | None:
        """The smallest context of the engines, the last known one while none answers; None before the first."""
        return self._max_model_len

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._refresh_seconds)

    async def close(self) -> None:
        """Close the channels to engines."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    async def refresh(self) -> None:
        """Look at all sources once. A source that does not answer leaves what it said before."""
        listed = await self._list_by_router()
        await self._list_by_registry()
        addresses = frozenset[str]().union(*self._addresses_by_source.values())
        engines = {engine.address: engine for engine in listed}
        for engine in await self._ask(addresses - engines.keys(), self._answer_timeout_seconds):
            engines[engine.address] = engine
        self._engines = engines
        self._warn_of_mismatches()
        lengths = [engine.max_model_len for engine in self.engines if engine.max_model_len]
        self._max_model_len = min(lengths, default=self._max_model_len)
        for address in self._clients.keys() - addresses:
            # Somebody may be asking it at this moment.
            await self._clients.pop(address).close(self._answer_timeout_seconds)

    async def ask_all(self, timeout_seconds: float) -> list[EngineStatus]:
        """Ask all known engines what they are doing now; those that do not answer in time are left out."""
        return _by_id(await self._ask(self._known_addresses(), timeout_seconds))

    async def has_ready_engine(self, timeout_seconds: float) -> bool:
        """Ask engines themselves whether one takes requests now."""
        return await self.unready_reason(timeout_seconds) is None

    async def unready_reason(self, timeout_seconds: float) -> str | None:
        """Ask engines themselves, and return why none takes requests now, as a sentence; None when one does."""
        # Probes that come together wait for one another instead of multiplying the questions.
        async with self._readiness_lock:
            if not self._known_addresses():
                await self.refresh()
            addresses = self._known_addresses()[:_MAX_READINESS_QUESTIONS]
            answers = await self._ask(addresses, timeout_seconds)
        if any(engine.state is EngineState.READY and self._is_ours(engine) for engine in answers):
            return None
        return _no_engine_ready(_by_id(answers), num_silent=len(addresses) - len(answers))

    def _is_ours(self, engine: EngineStatus) -> bool:
        return engine.model_name == self._model_name and engine.hash_contract == self._hash_contract

    def _warn_of_mismatches(self) -> None:
        """Say once of each engine that it cannot be used because it hashes or tokenizes in another way."""
        mismatched = {
            engine.engine_id
            for engine in self._engines.values()
            # One that loads its model has no contract yet.
            if engine.state is not EngineState.STARTING
            and engine.model_name == self._model_name
            and engine.hash_contract != self._hash_contract
        }
        for engine_id in mismatched - self._mismatched_ids:
            log.error(
                "engine left out: its hash contract differs; give both the same model and block size",
                engine_id=engine_id,
            )
        self._mismatched_ids = mismatched

    def _known_addresses(self) -> list[str]:
        """Return all addresses, those of engines that were ready at the last look first."""
        addresses = frozenset[str]().union(*self._addresses_by_source.values())

        def was_not_ready(address: str) -> bool:
            engine = self._engines.get(address)
            return engine is None or engine.state is not EngineState.READY

        return sorted(addresses, key=lambda address: (was_not_ready(address), address))

    async def _list_by_router(self) -> list[EngineStatus]:
        if self._router is None:
            return []
        try:
            engines = await self._router.list_engines(self._answer_timeout_seconds)
        except OctavoError as error:
            self._note_silence("router", error)
            return []
        self._note_answer("router")
        self._addresses_by_source["router"] = frozenset(engine.address for engine in engines)
        return engines

    async def _list_by_registry(self) -> None:
        if self._registry is None:
            return
        try:
            nodes = await self._registry.list_nodes()
        except StoreUnavailable as error:
            self._note_silence("registry", error)
            return
        self._note_answer("registry")
        self._addresses_by_source["registry"] = frozenset(node.address for node in nodes)

    async def _ask(self, addresses: Iterable[str], timeout_seconds: float) -> list[EngineStatus]:
        slots = asyncio.Semaphore(_MAX_CONCURRENT_QUESTIONS)

        async def ask(address: str) -> EngineStatus | None:
            async with slots:
                client = self._clients.get(address)
                if client is None:
                    client = self._clients[address] = EngineClient(address)
                try:
                    return await client.get_engine(timeout_seconds)
                except OctavoError:
                    # An engine that is starting or gone; who needs one hears that there is none.
                    return None

        answers = await asyncio.gather(*(ask(address) for address in addresses))
        return [engine for engine in answers if engine is not None]

    def _note_silence(self, source: str, error: OctavoError) -> None:
        if source not in self._silent_sources:
            self._silent_sources.add(source)
            log.warning("source of engines does not answer", source=source, error=error.message)

    def _note_answer(self, source: str) -> None:
        if source in self._silent_sources:
            self._silent_sources.discard(source)
            log.info("source of engines answers again", source=source)


def _by_id(engines: Iterable[EngineStatus]) -> list[EngineStatus]:
    """Return each engine once, by id: one may be known by several addresses, and is one engine all the same."""
    found: dict[str, EngineStatus] = {}
    # Of several answers the one of a ready engine counts.
    for engine in sorted(engines, key=lambda engine: (engine.state is EngineState.READY, engine.address)):
        found[engine.engine_id] = engine
    return [found[engine_id] for engine_id in sorted(found)]


def _no_engine_ready(engines: Sequence[EngineStatus], *, num_silent: int) -> str:
    """Say what each engine waits for, as a sentence, and how many say nothing."""
    parts = [f"{engine.engine_id} {_CONDITIONS[engine.state]}" for engine in engines]
    if num_silent:
        parts.append(f"{num_silent} {'does' if num_silent == 1 else 'do'} not answer")
    return f"No engine is ready: {', '.join(parts)}." if parts else "No engine is ready: none is known."
