"""What a gateway knows of engines by itself."""

from __future__ import annotations

import dataclasses

import structlog.testing

from libs.kv import HashContract
from libs.protogen.engine.v1 import engine_pb2
from services.gateway.clients import RouterClient
from services.gateway.engine_directory import EngineDirectory
from tests.fakes.fake_router import FakeRouter
from tests.unit.gateway.conftest import MODEL_NAME, StartEngine


def make_directory(contract: HashContract, router_address: str | None, *addresses: str) -> EngineDirectory:
    return EngineDirectory(
        model_name=MODEL_NAME,
        hash_contract=contract,
        configured_addresses=addresses,
        registry=None,
        router=None if router_address is None else RouterClient(router_address),
        refresh_seconds=60.0,
        answer_timeout_seconds=1.0,
    )


async def test_the_directory_asks_engines_itself_when_the_router_is_gone(start_engine: StartEngine) -> None:
    engine = await start_engine()
    router = FakeRouter([engine])
    await router.start()
    directory = make_directory(engine.hash_contract, router.address)
    await directory.refresh()
    assert [found.engine_id for found in directory.engines] == ["fake-0"]

    await router.stop()
    engine.max_model_len = 4096
    await directory.refresh()

    assert [found.max_model_len for found in directory.engines] == [4096]
    assert directory.max_model_len == 4096
    assert await directory.has_ready_engine(1.0)
    await directory.close()


async def test_readiness_is_what_engines_say_now(start_engine: StartEngine) -> None:
    engine = await start_engine()
    directory = make_directory(engine.hash_contract, None, engine.address)

    assert await directory.has_ready_engine(1.0)
    engine.state = engine_pb2.ENGINE_STATE_STARTING
    assert not await directory.has_ready_engine(1.0)
    assert await directory.unready_reason(1.0) == (
        "No engine is ready: fake-0 waits for its workers to load the model, whose logs say why if that lasts."
    )
    engine.state = engine_pb2.ENGINE_STATE_READY
    await engine.stop()
    assert not await directory.has_ready_engine(1.0)
    assert await directory.unready_reason(1.0) == "No engine is ready: 1 does not answer."
    assert await directory.ask_all(1.0) == []
    await directory.close()


async def test_the_smallest_engine_bounds_the_context_and_is_remembered(start_engine: StartEngine) -> None:
    small, large = await start_engine("small"), await start_engine("large")
    small.max_model_len = 2048
    directory = make_directory(small.hash_contract, None, small.address, large.address)
    assert directory.max_model_len is None

    await directory.refresh()
    await small.stop()
    await large.stop()
    await directory.refresh()

    assert directory.engines == ()
    assert directory.max_model_len == 2048
    await directory.close()


async def test_an_engine_that_hashes_in_another_way_is_left_out(start_engine: StartEngine) -> None:
    engine = await start_engine()
    directory = make_directory(HashContract(32, "other", bytes(32)), None, engine.address)

    await directory.refresh()

    assert directory.engines == ()
    assert await directory.unready_reason(1.0) == (
        "No engine is ready: fake-0 serves another model, or with another block size."
    )
    assert len(await directory.ask_all(1.0)) == 1
    await directory.close()


async def test_only_an_engine_that_has_loaded_its_model_is_said_to_hash_in_another_way(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.state = engine_pb2.ENGINE_STATE_STARTING
    other = dataclasses.replace(engine.hash_contract, block_size=2 * engine.hash_contract.block_size)
    directory = make_directory(other, None, engine.address)

    with structlog.testing.capture_logs() as while_loading:
        await directory.refresh()
    engine.state = engine_pb2.ENGINE_STATE_READY
    with structlog.testing.capture_logs() as when_ready:
        await directory.refresh()

    assert while_loading == []
    assert [event["engine_id"] for event in when_ready] == ["fake-0"]
    await directory.close()


async def test_an_engine_that_is_known_by_two_addresses_is_one(start_engine: StartEngine) -> None:
    """Else it is twice in /metrics, which no Prometheus takes, and gets twice its share of requests."""
    engine = await start_engine()
    port = engine.address.rpartition(":")[2]
    directory = make_directory(engine.hash_contract, None, engine.address, f"localhost:{port}")

    await directory.refresh()

    assert [found.engine_id for found in directory.engines] == ["fake-0"]
    assert [found.engine_id for found in await directory.ask_all(1.0)] == ["fake-0"]
    await directory.close()
