"""An engine that speaks the real EngineService and does what a test says: scripted load, blocks, gaps, restarts.

It generates nothing. Another service (GenerationService) can be served beside it on the same address, as a real
engine does. Run as a module it is a process of its own, for tests that kill it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from libs.kv import HASH_ALGORITHM, HashContract, PrefixHash
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.registry import NodeRecord, NodeRegistry
from libs.rpc import Registration, duration_from_seconds, make_server

DEFAULT_CONTRACT = HashContract(16, HASH_ALGORITHM, b"d" * 32)
_HASHES_PER_PART = 16_384


class FakeEngine(engine_pb2_grpc.EngineServiceServicer):
    """One engine. Change it with the methods; watchers are told as by a real one."""

    def __init__(
        self,
        engine_id: str = "engine-0",
        *,
        model_name: str = "model",
        hash_contract: HashContract = DEFAULT_CONTRACT,
        incarnation: int = 1,
        max_model_len: int = 8192,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        num_blocks: int = 1024,
        hashes_per_part: int = _HASHES_PER_PART,
    ) -> None:
        self.engine_id = engine_id
        self.model_name = model_name
        self.hash_contract = hash_contract
        self.incarnation = incarnation
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = num_blocks
        self.address = ""
        self.num_watches_opened = 0
        self.prefix_hashes: set[PrefixHash] = set()
        self.load = engine_pb2.EngineLoad(
            num_available_blocks=num_blocks, num_blocks=num_blocks, state=engine_pb2.ENGINE_STATE_READY
        )
        self._hashes_per_part = hashes_per_part
        self._sequence_number = 0
        self._watchers: set[asyncio.Queue[engine_pb2.WatchEngineResponse]] = set()

    # Life.

    async def start(self, address: str = "127.0.0.1:0", beside: Sequence[Registration] = ()) -> None:
        """Serve at an address; port 0 takes a free one, which ``address`` tells."""
        own = Registration(
            engine_pb2_grpc.add_EngineServiceServicer_to_server, self, "octavo.engine.v1.EngineService"
        )
        self._server = make_server(address, [own, *beside])
        await self._server.start()
        await self._server.set_serving(True)
        self.address = self._server.address

    async def stop(self) -> None:
        """Vanish: all calls break."""
        await self._server.stop(0)

    async def take_lease(self, nodes: NodeRegistry, lease_seconds: float = 30.0) -> None:
        """Enter the registry once; a test that wants the lease to end gives it back or lets it run out."""
        await nodes.renew(self.node_record(), lease_seconds)

    def node_record(self) -> NodeRecord:
        """Return the engine's row of ``gpu_cluster_nodes``."""
        return NodeRecord(
            node_id=self.engine_id,
            gpu_type="CPU",
            total_vram_bytes=0,
            free_kv_cache_blocks=self.load.num_available_blocks,
            active_slots=self.load.num_running_requests,
            tensor_parallel_size=1,
            address=self.address,
            model_name=self.model_name,
            incarnation=self.incarnation,
            hash_contract=self.hash_contract,
        )

    # What a test scripts.

    def set_load(
        self,
        *,
        num_running_requests: int = 0,
        num_waiting_requests: int = 0,
        num_pending_prefill_tokens: int = 0,
        prefill_tokens_per_second: float | None = None,
        decode_step_seconds: float | None = None,
        state: engine_pb2.EngineState.ValueType = engine_pb2.ENGINE_STATE_READY,
    ) -> None:
        """Report new figures."""
        step_duration = None if decode_step_seconds is None else duration_from_seconds(decode_step_seconds)
        self.load = engine_pb2.EngineLoad(
            num_running_requests=num_running_requests,
            num_waiting_requests=num_waiting_requests,
            num_pending_prefill_tokens=num_pending_prefill_tokens,
            num_available_blocks=self.num_blocks,
            num_blocks=self.num_blocks,
            prefill_tokens_per_second=prefill_tokens_per_second,
            decode_step_duration=step_duration,
            state=state,
        )
        self._tell(load=self.load)

    def change_blocks(
        self, *, stored: Iterable[PrefixHash] = (), removed: Iterable[PrefixHash] = (), is_cleared: bool = False
    ) -> None:
        """Report changes of the prefix cache."""
        stored, removed = list(stored), list(removed)
        if is_cleared:
            self.prefix_hashes.clear()
        self.prefix_hashes.difference_update(removed)
        self.prefix_hashes.update(stored)
        changes = engine_pb2.BlockChanges(removed_hashes=removed, stored_hashes=stored, is_cleared=is_cleared)
        self._tell(block_changes=changes)

    def lose_event(self) -> None:
        """Make a gap: a number that no watcher gets."""
        self._sequence_number += 1

    def begin_incarnation(self) -> None:
        """Empty the cache and start numbering anew, as after the loss of a worker."""
        self.incarnation += 1
        self._sequence_number = 0
        self.prefix_hashes.clear()
        for watcher in self._watchers:
            for message in self._snapshot():
                watcher.put_nowait(message)

    # The service.

    async def GetEngine(self, request: engine_pb2.GetEngineRequest, context: Any) -> engine_pb2.GetEngineResponse:
        return engine_pb2.GetEngineResponse(engine=self._identity(), load=self.load)

    async def DrainEngine(
        self, request: engine_pb2.DrainEngineRequest, context: Any
    ) -> engine_pb2.DrainEngineResponse:
        self.set_load(state=engine_pb2.ENGINE_STATE_DRAINING)
        return engine_pb2.DrainEngineResponse(num_requests=self.load.num_running_requests)

    async def GetPageTable(
        self, request: engine_pb2.GetPageTableRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetPageTableResponse]:
        yield engine_pb2.GetPageTableResponse()

    async def WatchEngine(
        self, request: engine_pb2.WatchEngineRequest, context: Any
    ) -> AsyncIterator[engine_pb2.WatchEngineResponse]:
        self.num_watches_opened += 1
        events: asyncio.Queue[engine_pb2.WatchEngineResponse] = asyncio.Queue(10_000)
        for message in self._snapshot():
            events.put_nowait(message)
        self._watchers.add(events)
        try:
            while True:
                yield await events.get()
        finally:
            self._watchers.discard(events)

    def _identity(self) -> engine_pb2.Engine:
        return engine_pb2.Engine(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            address=self.address,
            model_name=self.model_name,
            hash_contract=engine_pb2.HashContract(
                block_size=self.hash_contract.block_size,
                algorithm=self.hash_contract.algorithm,
                tokenizer_digest=self.hash_contract.tokenizer_digest,
            ),
            state=self.load.state,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_type="CPU",
            tensor_parallel_size=1,
        )

    def _snapshot(self) -> Iterable[engine_pb2.WatchEngineResponse]:
        hashes = sorted(self.prefix_hashes)
        starts = range(0, max(1, len(hashes)), self._hashes_per_part)
        for start in starts:
            part = engine_pb2.EngineSnapshot(
                prefix_hashes=hashes[start : start + self._hashes_per_part],
                is_first_part=start == starts[0],
                is_last_part=start == starts[-1],
            )
            if part.is_first_part:
                part.engine.CopyFrom(self._identity())
                part.load.CopyFrom(self.load)
            yield engine_pb2.WatchEngineResponse(
                incarnation=self.incarnation, sequence_number=self._sequence_number, snapshot=part
            )

    def _tell(self, **event: Any) -> None:  # Any: one of the fields of the oneof.
        self._sequence_number += 1
        message = engine_pb2.WatchEngineResponse(
            incarnation=self.incarnation, sequence_number=self._sequence_number, **event
        )
        for watcher in self._watchers:
            watcher.put_nowait(message)


async def _serve(address: str, engine_id: str, model_name: str) -> None:
    engine = FakeEngine(engine_id, model_name=model_name)
    await engine.start(address)
    print(engine.address, flush=True)
    while True:
        await asyncio.sleep(0.2)
        # A real engine also reports while nothing happens.
        engine.set_load()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:4]))
