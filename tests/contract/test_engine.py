"""The engine over its real wire, with a worker that speaks the real protocol and computes nothing."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from google.rpc import status_pb2
from prometheus_client import CollectorRegistry

from libs.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    InternalError,
    InvalidLogits,
    InvalidRequest,
    WorkerLost,
)
from libs.obs.metrics import EngineMetrics
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.protogen.generation.v1 import generation_pb2, generation_pb2_grpc
from libs.rpc import (
    Registration,
    RpcServer,
    RpcStream,
    duration_from_seconds,
    error_from_status,
    make_channel,
    make_server,
    open_stream,
    seconds_from_duration,
)
from libs.rpc import unary as call
from services.engine.clients import WorkerClient
from services.engine.config import EngineConfig
from services.engine.core.scheduler_config import Admission
from services.engine.feed import EngineFeed
from services.engine.loop import EngineLoop
from services.engine.registry_writer import RegistryWriter
from services.engine.servicer import registrations
from services.engine.worker_group import WorkerGroup
from tests.fakes.fake_worker import EOS_TOKEN_ID, FakeWorker, continuation
from tests.patience import PATIENCE_SECONDS

End: TypeAlias = generation_pb2.Finished | generation_pb2.Failed

PROMPT = [11, 12, 13, 14, 15]


@dataclass
class Engine:
    """A running engine and its worker."""

    worker: FakeWorker
    loop: EngineLoop
    generation: generation_pb2_grpc.GenerationServiceStub
    service: engine_pb2_grpc.EngineServiceStub
    config: EngineConfig
    worker_servers: list[RpcServer]

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[Gateway]:
        async with open_stream(self.generation.Generate, on_lost=EngineLost) as stream:
            gateway = Gateway(stream)
            reader = asyncio.create_task(gateway.read())
            try:
                yield gateway
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)


@dataclass
class Gateway:
    """A gateway's end of the stream: what came for each request."""

    stream: RpcStream[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
    handles: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    messages: list[generation_pb2.GenerateResponse] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        async for message in self.stream:
            self.messages.append(message)
            for started in message.started:
                assert started.request_id not in self.handles
                self.handles[started.request_id] = list(started.handles)
                self.tokens.update({handle: [] for handle in started.handles})
            position = 0
            for handle, count in zip(message.handles, message.num_tokens, strict=True):
                assert handle not in self.ends, "a token came after the end"
                self.tokens[handle] += message.token_ids[position : position + count]
                position += count
            ends: list[End] = [*message.finished, *message.failed]
            for end in ends:
                assert end.handle not in self.ends, "a handle ended twice"
                self.ends[end.handle] = end
            self._changed.set()

    async def submit(self, request_id: str, prompt: list[int], max_output_tokens: int, **fields: object) -> None:
        submit = generation_pb2.Submit(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=generation_pb2.SamplingParams(max_output_tokens=max_output_tokens),
            choices=[generation_pb2.ChoiceState()],
        )
        for name, value in fields.items():
            message = getattr(submit, name)
            message.CopyFrom(value) if hasattr(message, "CopyFrom") else setattr(submit, name, value)
        await self.stream.send(generation_pb2.GenerateRequest(submit=submit))

    async def abort(self, request_id: str) -> None:
        abort = generation_pb2.Abort(request_id=request_id)
        await self.stream.send(generation_pb2.GenerateRequest(abort=abort))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, request_id: str) -> End:
        await self.until(lambda: request_id in self.handles and self.handles[request_id][0] in self.ends)
        return self.ends[self.handles[request_id][0]]

    def tokens_of(self, request_id: str) -> list[int]:
        return self.tokens[self.handles[request_id][0]]


@asynccontextmanager
async def running_engine(
    worker: FakeWorker | None = None,
    metrics: EngineMetrics | None = None,
    *,
    must_be_ready: bool = True,
    registration: Registration | None = None,
    other_ranks: Sequence[FakeWorker] = (),
    **settings: object,
) -> AsyncIterator[Engine]:
    """Run an engine with a fake worker for each rank, or with whatever ``registration`` serves."""
    worker = worker or FakeWorker()
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        config = EngineConfig(
            listen_address=f"unix:{folder}/engine",
            worker_addresses=tuple(f"unix:{folder}/worker-{rank}" for rank in range(1 + len(other_ranks))),
            **settings,  # type: ignore[arg-type] # Tests name settings freely; the dataclass checks them.
        )
        served = [registration or worker.registration(), *(other.registration() for other in other_ranks)]
        worker_servers = [
            make_server(address, [one]) for address, one in zip(config.worker_addresses, served, strict=True)
        ]
        for worker_server in worker_servers:
            await worker_server.start()
        clients = [WorkerClient(config, rank) for rank in range(len(worker_servers))]
        loop = EngineLoop(
            config,
            WorkerGroup(
                clients,
                load_timeout_seconds=config.load_timeout_seconds,
                step_timeout_seconds=config.step_timeout_seconds,
            ),
            EngineFeed(),
            RegistryWriter(None, config.engine_id, lease_seconds=1.0),
            metrics or EngineMetrics(CollectorRegistry()),
            first_incarnation=1,
        )
        server = make_server(config.listen_address, registrations(loop, time.monotonic))
        await server.start()
        running = asyncio.create_task(loop.run())
        channel = make_channel(config.listen_address)
        engine = Engine(
            worker,
            loop,
            generation_pb2_grpc.GenerationServiceStub(channel),
            engine_pb2_grpc.EngineServiceStub(channel),
            config,
            worker_servers,
        )
        try:
            if must_be_ready:
                await until_state(engine, engine_pb2.ENGINE_STATE_READY)
            yield engine
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close()
            for client in clients:
                await client.close()
            await server.stop(0)
            for worker_server in worker_servers:
                await worker_server.stop(0)


async def get_engine(engine: Engine) -> engine_pb2.GetEngineResponse:
    response = await call(
        engine.service.GetEngine,
        engine_pb2.GetEngineRequest(),
        timeout_seconds=PATIENCE_SECONDS,
        on_lost=EngineLost,
    )
    assert isinstance(response, engine_pb2.GetEngineResponse)
    return response


async def until_state(engine: Engine, state: engine_pb2.EngineState.ValueType) -> engine_pb2.GetEngineResponse:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (response := await get_engine(engine)).engine.state != state:
            await asyncio.sleep(0.01)
        return response


async def until_idle(engine: Engine) -> engine_pb2.EngineLoad:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            load = (await get_engine(engine)).load
            if not load.num_running_requests and not load.num_waiting_requests:
                return load
            await asyncio.sleep(0.01)


def error_of(end: End) -> Exception:
    assert isinstance(end, generation_pb2.Failed)
    assert isinstance(end.status, status_pb2.Status)
    return error_from_status(end.status)


async def test_streams_the_tokens_of_many_requests_and_gives_all_blocks_back() -> None:
    prompts = {f"r{index}": [10 + index] * (3 + 7 * index) for index in range(12)}

    async with running_engine(max_num_batched_tokens=32, max_num_seqs=5) as engine, engine.gateway() as gateway:
        for request_id, prompt in prompts.items():
            await gateway.submit(request_id, prompt, 9)
        ends = {request_id: await gateway.end_of(request_id) for request_id in prompts}
        load = await until_idle(engine)

    for request_id, prompt in prompts.items():
        assert gateway.tokens_of(request_id) == continuation(prompt, 9)
        end = ends[request_id]
        assert isinstance(end, generation_pb2.Finished)
        assert end.reason == generation_pb2.FINISH_REASON_LENGTH
        assert end.usage.num_output_tokens == 9
    assert load.num_available_blocks == load.num_blocks


async def test_who_must_wait_for_room_is_counted_by_the_rule_that_says_so() -> None:
    metrics = EngineMetrics(CollectorRegistry())

    async with (
        running_engine(FakeWorker(num_blocks=8, step_seconds=0.002), metrics) as engine,
        engine.gateway() as gateway,
    ):
        for index in range(3):
            await gateway.submit(f"r{index}", [20 + index] * 60, 30)
        for index in range(3):
            await gateway.end_of(f"r{index}")

    waits = [
        metrics.registry.get_sample_value("octavo_engine_admission_waits_total", {"rule": rule})
        for rule in ("capacity", "predicted_peak")
    ]
    assert sum(count or 0 for count in waits) > 0


async def test_preemption_changes_no_token() -> None:
    worker = FakeWorker(num_blocks=8)

    async with (
        running_engine(worker, watermark_fraction=0.0, admission=Admission.WATERMARK) as engine,
        engine.gateway() as gateway,
    ):
        for index in range(6):
            await gateway.submit(f"r{index}", [20 + index] * 20, 60)
        ends = [await gateway.end_of(f"r{index}") for index in range(6)]

    assert sum(end.usage.num_preemptions for end in ends) > 0
    for index in range(6):
        assert gateway.tokens_of(f"r{index}") == continuation([20 + index] * 20, 60)


async def test_the_next_step_is_there_before_the_worker_has_answered() -> None:
    worker = FakeWorker(holds_answers=True)

    async with running_engine(worker) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 20)
        await gateway.end_of("a")

    assert gateway.tokens_of("a") == continuation(PROMPT, 20)
    # The last of the twenty steps has no next.
    assert worker.num_overlapped_steps == 19


async def test_an_end_token_wastes_one_token_and_shows_none_of_it() -> None:
    worker = FakeWorker(holds_answers=True, eos_after_tokens=7)

    async with running_engine(worker) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 20)
        end = await gateway.end_of("a")
        load = await until_idle(engine)

    assert isinstance(end, generation_pb2.Finished)
    assert end.reason == generation_pb2.FINISH_REASON_STOP
    assert end.stop_token_id == EOS_TOKEN_ID
    assert gateway.tokens_of("a") == [*continuation(PROMPT, 6), EOS_TOKEN_ID]
    assert end.usage.num_output_tokens == 7
    assert end.usage.num_discarded_tokens == 1
    assert load.num_available_blocks == load.num_blocks


async def test_the_page_table_is_the_one_that_the_worker_uses() -> None:
    worker = FakeWorker(step_seconds=0.01)

    async with running_engine(worker, max_steps_in_flight=1) as engine, engine.gateway() as gateway:
        await gateway.submit("a", [5] * 40, 200)
        await gateway.until(lambda: bool(gateway.tokens) and len(gateway.tokens_of("a")) >= 30)
        rows = await page_table(engine, "a")
        [sequence] = worker.sequences.values()
        unknown = await page_table(engine, "b")

    assert [row.logical_token_index for row in rows] == list(range(len(rows)))
    assert len(rows) >= 40 + 29
    assert [row.physical_block_id for row in rows] == [
        sequence.block_ids[row.logical_token_index // 16] for row in rows
    ]
    assert {row.reference_count for row in rows} == {1}
    assert unknown == []


async def page_table(engine: Engine, request_id: str) -> list[engine_pb2.PageTableRow]:
    request = engine_pb2.GetPageTableRequest(request_id=request_id)
    async with open_stream(engine.service.GetPageTable, request, on_lost=EngineLost) as stream:
        return [row async for message in stream for row in message.rows]


async def test_choices_share_the_blocks_of_their_prompt() -> None:
    worker = FakeWorker(step_seconds=0.005)

    async with running_engine(worker) as engine, engine.gateway() as gateway:
        submit = generation_pb2.Submit(
            request_id="a",
            prompt_token_ids=[5] * 40,
            sampling_params=generation_pb2.SamplingParams(max_output_tokens=60),
            choices=[generation_pb2.ChoiceState()] * 3,
        )
        await gateway.stream.send(generation_pb2.GenerateRequest(submit=submit))
        await gateway.until(lambda: len(gateway.tokens) == 3 and all(gateway.tokens.values()))
        rows = await page_table(engine, "a")
        await gateway.until(lambda: len(gateway.ends) == 3)
        load = await until_idle(engine)

    shared = [row.reference_count for row in rows if row.logical_token_index < 32]
    own = [row.reference_count for row in rows if row.logical_token_index >= 32]
    assert set(shared) == {3}
    assert set(own) == {1}
    assert all(tokens == continuation([5] * 40, 60) for tokens in gateway.tokens.values())
    copies = [
        pair
        for step in worker.steps
        for pair in zip(step.copy_source_block_ids, step.copy_target_block_ids, strict=True)
    ]
    assert len(copies) == 2
    assert load.num_available_blocks == load.num_blocks


async def test_requests_with_one_prefix_compute_it_once() -> None:
    worker = FakeWorker()
    prompt = [7] * 160

    async with running_engine(worker, max_num_batched_tokens=64) as engine, engine.gateway() as gateway:
        for index in range(5):
            await gateway.submit(str(index), [*prompt, 100 + index], 4)
        ends = [await gateway.end_of(str(index)) for index in range(5)]

    computed = sum(count for step in worker.steps for count in step.num_scheduled_tokens)
    assert computed <= 161 + 5 * 4 + 4
    assert [end.usage.num_cached_tokens for end in ends] == [0, 160, 160, 160, 160]
    assert all(gateway.tokens_of(str(index)) == continuation([*prompt, 100 + index], 4) for index in range(5))


async def test_each_gateway_hears_only_of_its_own_requests() -> None:
    async with running_engine() as engine, engine.gateway() as first, engine.gateway() as second:
        await first.submit("a", PROMPT, 5)
        await second.submit("b", PROMPT, 5)
        await first.end_of("a")
        await second.end_of("b")

    assert set(first.handles) == {"a"}
    assert set(second.handles) == {"b"}
    assert first.tokens_of("a") == second.tokens_of("b") == continuation(PROMPT, 5)


async def test_abort_is_answered_by_an_end_and_frees_blocks() -> None:
    async with running_engine(FakeWorker(step_seconds=0.01)) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 400)
        await gateway.until(lambda: bool(gateway.tokens) and len(gateway.tokens_of("a")) >= 3)
        await gateway.abort("a")
        end = await gateway.end_of("a")
        load = await until_idle(engine)

    assert isinstance(end, generation_pb2.Finished)
    assert end.reason == generation_pb2.FINISH_REASON_ABORTED
    assert end.usage.num_output_tokens == len(gateway.tokens_of("a"))
    assert load.num_available_blocks == load.num_blocks


async def test_a_request_that_comes_on_another_stream_is_taken_there() -> None:
    """A gateway asks again on a new stream before the engine has heard that the old one is gone."""
    worker = FakeWorker(step_seconds=0.01)

    async with running_engine(worker) as engine, engine.gateway() as lost, engine.gateway() as fresh:
        await lost.submit("a", PROMPT, 400)
        await lost.until(lambda: "a" in lost.handles)
        await fresh.submit("a", PROMPT, 5)
        taken = await fresh.end_of("a")
        given_up = await lost.end_of("a")

    assert isinstance(taken, generation_pb2.Finished)
    assert taken.reason == generation_pb2.FINISH_REASON_LENGTH
    assert fresh.tokens_of("a") == continuation(PROMPT, 5)
    assert isinstance(given_up, generation_pb2.Finished)
    assert given_up.reason == generation_pb2.FINISH_REASON_ABORTED


async def test_a_request_id_in_use_on_the_same_stream_is_refused() -> None:
    async with running_engine(FakeWorker(step_seconds=0.01)) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 20)
        await gateway.until(lambda: "a" in gateway.handles)
        [first] = gateway.handles.pop("a")
        await gateway.submit("a", PROMPT, 20)
        refused = await gateway.end_of("a")
        await gateway.until(lambda: first in gateway.ends)

    assert isinstance(refused, generation_pb2.Failed)
    assert isinstance(gateway.ends[first], generation_pb2.Finished)
    assert gateway.tokens[first] == continuation(PROMPT, 20)


async def test_an_abort_reaches_requests_of_its_own_stream_only() -> None:
    async with running_engine(FakeWorker(step_seconds=0.01)) as engine, engine.gateway() as owner:
        await owner.submit("a", PROMPT, 20)
        await owner.until(lambda: "a" in owner.handles)
        async with engine.gateway() as other:
            await other.abort("a")
            await other.submit("b", PROMPT, 1)
            await other.end_of("b")
            end = await owner.end_of("a")

    assert isinstance(end, generation_pb2.Finished)
    assert end.reason == generation_pb2.FINISH_REASON_LENGTH
    assert owner.tokens_of("a") == continuation(PROMPT, 20)


async def test_a_stream_whose_commands_cannot_be_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take requests and answer none."""

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    async with running_engine() as engine:
        monkeypatch.setattr(engine.loop, "submit", fail)
        async with open_stream(engine.generation.Generate, on_lost=EngineLost) as stream:
            gateway = Gateway(stream)
            await gateway.submit("a", PROMPT, 5)
            with pytest.raises(InternalError, match="could not read"):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await gateway.read()


async def test_an_answer_that_cannot_be_read_is_the_loss_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a worker of another version: nobody waits for the step's time to run out."""
    async with running_engine(step_timeout_seconds=600.0) as engine, engine.gateway() as gateway:

        def fail(*_: object) -> None:
            raise ValueError("a field of the future")

        monkeypatch.setattr("services.engine.wire.step_result_of", fail)
        await gateway.submit("a", PROMPT, 5)
        end = await gateway.end_of("a")

    assert isinstance(end, generation_pb2.Failed)
    assert isinstance(error_from_status(end.status), WorkerLost)


async def test_a_request_that_leaves_the_queue_costs_nothing() -> None:
    worker = FakeWorker(step_seconds=0.005)

    async with running_engine(worker, max_num_seqs=1) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 40)
        await gateway.until(lambda: "a" in gateway.handles)
        await gateway.submit("b", [9] * 300, 40)
        await gateway.until(lambda: "b" in gateway.handles)
        await gateway.abort("b")
        left = await gateway.end_of("b")
        waiting = (await get_engine(engine)).load.num_waiting_requests
        await gateway.end_of("a")

    assert isinstance(left, generation_pb2.Finished)
    assert left.reason == generation_pb2.FINISH_REASON_ABORTED
    assert left.usage.num_computed_tokens == 0
    assert waiting == 0
    assert sum(count for step in worker.steps for count in step.num_scheduled_tokens) == len(PROMPT) + 39


async def test_a_gateway_that_leaves_aborts_its_requests() -> None:
    async with running_engine(FakeWorker(step_seconds=0.01)) as engine:
        async with engine.gateway() as gateway:
            await gateway.submit("a", PROMPT, 400)
            await gateway.until(lambda: bool(gateway.tokens) and len(gateway.tokens_of("a")) >= 2)
        load = await until_idle(engine)

    assert load.num_available_blocks == load.num_blocks


async def test_a_lost_worker_fails_requests_and_the_next_one_is_served() -> None:
    async with running_engine(FakeWorker(step_seconds=0.005)) as engine, engine.gateway() as gateway:
        before = (await get_engine(engine)).engine.incarnation
        await gateway.submit("a", PROMPT, 400)
        await gateway.until(lambda: bool(gateway.tokens) and len(gateway.tokens_of("a")) >= 2)
        engine.worker.break_next_step = True
        end = await gateway.end_of("a")
        after = (await until_state(engine, engine_pb2.ENGINE_STATE_READY)).engine.incarnation
        await gateway.submit("b", PROMPT, 4)
        await gateway.end_of("b")

    assert isinstance(error_of(end), WorkerLost)
    assert after > before
    assert gateway.tokens_of("b") == continuation(PROMPT, 4)
    assert gateway.handles["a"] != gateway.handles["b"]


async def test_what_a_lost_worker_held_is_not_shown_while_there_is_none() -> None:
    metrics = EngineMetrics(CollectorRegistry())

    def shown(engine: Engine) -> list[float | None]:
        engine.loop.refresh_gauges()
        held = metrics.registry.get_sample_value("octavo_engine_kv_blocks", {"state": "held"})
        return [metrics.registry.get_sample_value("octavo_engine_running_requests"), held]

    async with running_engine(FakeWorker(step_seconds=0.005), metrics) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 400)
        await gateway.until(lambda: bool(gateway.tokens) and len(gateway.tokens_of("a")) >= 2)
        running, held = shown(engine)
        await engine.worker_servers[0].stop(0)
        await gateway.end_of("a")
        after = shown(engine)

    assert running == 1
    assert held
    assert after == [0, 0]


async def test_every_rank_gets_every_step_and_rank_0_answers() -> None:
    second = FakeWorker(num_blocks=32)
    async with running_engine(other_ranks=[second]) as engine, engine.gateway() as gateway:
        identity = (await get_engine(engine)).engine
        await gateway.submit("a", PROMPT, 6)
        await gateway.end_of("a")
        await until_idle(engine)

    assert gateway.tokens_of("a") == continuation(PROMPT, 6)
    # The smallest rank counts for all.
    assert (identity.tensor_parallel_size, identity.num_blocks) == (2, 32)
    steps = [[step for step in rank.steps if step.slots] for rank in (engine.worker, second)]
    assert steps[0] == steps[1]
    assert engine.worker.group_ids == second.group_ids


@pytest.mark.parametrize("lost_rank", [0, 1])
async def test_a_lost_rank_fails_requests_and_all_form_a_new_group(lost_rank: int) -> None:
    ranks = [FakeWorker(step_seconds=0.005), FakeWorker(step_seconds=0.005)]
    async with running_engine(ranks[0], other_ranks=ranks[1:]) as engine, engine.gateway() as gateway:
        before = (await get_engine(engine)).engine.incarnation
        await gateway.submit("a", PROMPT, 400)
        await gateway.until(lambda: bool(gateway.tokens) and len(gateway.tokens_of("a")) >= 2)
        ranks[lost_rank].break_next_step = True
        end = await gateway.end_of("a")
        after = (await until_state(engine, engine_pb2.ENGINE_STATE_READY)).engine.incarnation
        await gateway.submit("b", PROMPT, 4)
        await gateway.end_of("b")

    assert isinstance(error_of(end), WorkerLost)
    assert after > before
    assert gateway.tokens_of("b") == continuation(PROMPT, 4)
    first, second = ranks[0].group_ids
    assert first != second
    assert ranks[1].group_ids == [first, second]


async def test_no_rank_loads_while_another_cannot_be_reached() -> None:
    ranks = [FakeWorker(), FakeWorker()]
    async with running_engine(ranks[0], other_ranks=ranks[1:]) as engine:
        address = engine.config.worker_addresses[1]
        await engine.worker_servers[1].stop(0)
        await until_state(engine, engine_pb2.ENGINE_STATE_STARTING)
        await asyncio.sleep(0.3)
        loads_while_away = ranks[0].num_loads
        engine.worker_servers[1] = make_server(address, [ranks[1].registration()])
        await engine.worker_servers[1].start()
        await until_state(engine, engine_pb2.ENGINE_STATE_READY)

    assert loads_while_away == 1
    assert ranks[0].num_loads == ranks[1].num_loads == 2


async def test_a_frozen_worker_makes_the_engine_unready_and_then_counts_as_lost() -> None:
    async with (
        running_engine(FakeWorker(), stall_seconds=0.1, step_timeout_seconds=0.5) as engine,
        engine.gateway() as gateway,
    ):
        engine.worker.freeze = True
        await gateway.submit("a", PROMPT, 4)
        await until_state(engine, engine_pb2.ENGINE_STATE_STARTING)
        end = await gateway.end_of("a")
        engine.worker.freeze = False
        await until_state(engine, engine_pb2.ENGINE_STATE_READY)

    assert isinstance(error_of(end), WorkerLost)


async def test_an_idle_engine_notices_a_frozen_worker() -> None:
    async with running_engine(
        FakeWorker(), heartbeat_seconds=0.05, stall_seconds=0.1, step_timeout_seconds=0.4
    ) as engine:
        before = (await get_engine(engine)).engine.incarnation
        engine.worker.freeze = True
        await until_state(engine, engine_pb2.ENGINE_STATE_STARTING)
        engine.worker.freeze = False
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await get_engine(engine)).engine.incarnation == before:
                await asyncio.sleep(0.01)
        healed = await until_state(engine, engine_pb2.ENGINE_STATE_READY)

    assert healed.engine.incarnation > before


async def test_heartbeats_disturb_no_request() -> None:
    async with running_engine(FakeWorker(), heartbeat_seconds=0.01) as engine, engine.gateway() as gateway:
        for index in range(3):
            # Longer than the idle tick, so that a heartbeat comes in between.
            await asyncio.sleep(0.3)
            await gateway.submit(str(index), PROMPT, 8)
            await gateway.end_of(str(index))

    assert all(gateway.tokens_of(str(index)) == continuation(PROMPT, 8) for index in range(3))
    assert sum(step.step_id == 0 for step in engine.worker.steps) > 0


async def test_logits_that_are_not_numbers_end_only_their_own_request() -> None:
    async with running_engine(FakeWorker(poisoned_token_id=99)) as engine, engine.gateway() as gateway:
        await gateway.submit("bad", [99, 98], 5)
        await gateway.submit("good", PROMPT, 5)
        bad, good = await gateway.end_of("bad"), await gateway.end_of("good")

    assert isinstance(error_of(bad), InvalidLogits)
    assert isinstance(good, generation_pb2.Finished)
    assert gateway.tokens_of("good") == continuation(PROMPT, 5)


async def test_output_emitted_elsewhere_counts_as_output() -> None:
    whole = continuation(PROMPT, 8)

    async with running_engine() as engine, engine.gateway() as gateway:
        submit = generation_pb2.Submit(
            request_id="a",
            prompt_token_ids=PROMPT,
            sampling_params=generation_pb2.SamplingParams(max_output_tokens=8),
            choices=[generation_pb2.ChoiceState(output_token_ids=whole[:3])],
        )
        await gateway.stream.send(generation_pb2.GenerateRequest(submit=submit))
        end = await gateway.end_of("a")

    assert gateway.tokens_of("a") == whole[3:]
    assert end.usage.num_output_tokens == 5


async def test_choices_that_are_left_of_a_request_keep_the_index_that_their_draws_depend_on() -> None:
    async with running_engine() as engine, engine.gateway() as gateway:
        submit = generation_pb2.Submit(
            request_id="a",
            prompt_token_ids=PROMPT,
            sampling_params=generation_pb2.SamplingParams(max_output_tokens=8),
            # Without an index it is the place in the list.
            choices=[
                generation_pb2.ChoiceState(output_token_ids=[1], choice_index=2),
                generation_pb2.ChoiceState(),
            ],
        )
        await gateway.stream.send(generation_pb2.GenerateRequest(submit=submit))
        await gateway.end_of("a")

    new = [sequence for step in engine.worker.steps for sequence in step.new_sequences]
    assert [sequence.choice_index for sequence in new] == [2, 1]


async def test_a_request_past_its_deadline_ends_with_an_error() -> None:
    async with running_engine(FakeWorker(step_seconds=0.01)) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 400, remaining_time=duration_from_seconds(0.05))
        end = await gateway.end_of("a")

    assert isinstance(error_of(end), DeadlineExceeded)


@pytest.mark.parametrize(("prompt", "max_output_tokens"), [([], 5), ([10**6], 5), (PROMPT, 0), (PROMPT, 10**6)])
async def test_a_request_that_cannot_be_served_is_refused_with_its_handles(
    prompt: list[int], max_output_tokens: int
) -> None:
    async with running_engine() as engine, engine.gateway() as gateway:
        await gateway.submit("a", prompt, max_output_tokens)
        end = await gateway.end_of("a")

    assert error_of(end).args[0]
    assert len(gateway.handles["a"]) == 1


async def test_a_draining_engine_refuses_new_requests_and_finishes_old_ones() -> None:
    async with running_engine(FakeWorker(step_seconds=0.01)) as engine, engine.gateway() as gateway:
        await gateway.submit("old", PROMPT, 20)
        await gateway.until(lambda: "old" in gateway.handles)
        await call(
            engine.service.DrainEngine,
            engine_pb2.DrainEngineRequest(),
            timeout_seconds=PATIENCE_SECONDS,
            on_lost=EngineLost,
        )
        await gateway.submit("new", PROMPT, 20)
        new, old = await gateway.end_of("new"), await gateway.end_of("old")

    assert isinstance(error_of(new), Draining)
    assert isinstance(old, generation_pb2.Finished)


async def test_a_submit_without_id_breaks_the_stream_with_a_clear_error() -> None:
    async with running_engine() as engine:
        with pytest.raises(InvalidRequest, match="request_id"):
            async with open_stream(engine.generation.Generate, on_lost=EngineLost) as stream:
                await stream.send(generation_pb2.GenerateRequest(submit=generation_pb2.Submit()))
                async for _ in stream:
                    pass


async def test_a_stream_that_cannot_be_read_any_more_does_not_look_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault that nobody foresaw")

    async with running_engine() as engine:
        monkeypatch.setattr(engine.loop, "submit", broken)
        with pytest.raises(InternalError):
            async with (
                asyncio.timeout(PATIENCE_SECONDS),
                open_stream(engine.generation.Generate, on_lost=EngineLost) as stream,
            ):
                await Gateway(stream).submit("a", PROMPT, 4)
                async for _ in stream:
                    pass


async def test_a_watch_starts_with_a_snapshot_and_numbers_what_follows() -> None:
    hashes: set[bytes] = set()
    numbers: list[int] = []
    loads: list[engine_pb2.EngineLoad] = []

    async with running_engine() as engine, engine.gateway() as gateway:
        await gateway.submit("a", [5] * 40, 3)
        await gateway.end_of("a")
        await until_idle(engine)
        async with open_stream(
            engine.service.WatchEngine, engine_pb2.WatchEngineRequest(), on_lost=EngineLost
        ) as watch:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for event in watch:
                    numbers.append(event.sequence_number)
                    if event.WhichOneof("event") == "snapshot":
                        assert event.snapshot.is_first_part
                        assert event.snapshot.is_last_part
                        assert event.snapshot.engine.engine_id == "engine-0"
                        hashes |= set(event.snapshot.prefix_hashes)
                        assert len(hashes) == 2
                        await gateway.submit("b", [6] * 40, 3)
                    elif event.WhichOneof("event") == "block_changes":
                        hashes |= set(event.block_changes.stored_hashes)
                    else:
                        loads.append(event.load)
                    if len(hashes) == 4 and loads and not loads[-1].num_running_requests:
                        break

    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_a_watcher_learns_that_a_lost_worker_voids_the_cache() -> None:
    async with running_engine() as engine, engine.gateway() as gateway:
        await gateway.submit("a", [5] * 40, 3)
        await gateway.end_of("a")
        async with open_stream(
            engine.service.WatchEngine, engine_pb2.WatchEngineRequest(), on_lost=EngineLost
        ) as watch:
            events = aiter(watch)
            first = await anext(events)
            engine.worker.break_next_step = True
            await gateway.submit("b", PROMPT, 3)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (event := await anext(events)).incarnation == first.incarnation:
                    pass

    assert event.incarnation > first.incarnation
    assert event.WhichOneof("event") == "snapshot"
    assert not event.snapshot.prefix_hashes


async def test_an_engine_without_its_worker_says_that_it_is_starting() -> None:
    worker = FakeWorker()
    worker.LoadModel = None  # type: ignore[assignment,method-assign] # A worker that cannot load.

    async with running_engine(worker, must_be_ready=False) as engine, engine.gateway() as gateway:
        await gateway.submit("a", PROMPT, 3)
        end = await gateway.end_of("a")
        response = await get_engine(engine)

    assert "loading" in str(error_of(end))
    assert response.engine.state == engine_pb2.ENGINE_STATE_STARTING
    assert response.engine.engine_id == "engine-0"


async def test_tells_those_who_ask_how_their_first_token_came_and_where_they_stalled() -> None:
    bound = duration_from_seconds(0.02)

    async with running_engine(FakeWorker(step_seconds=0.05)) as engine, engine.gateway() as gateway:
        await gateway.submit("asking", [20] * 40, 3, stall_bound=bound)
        await gateway.submit("silent", [21] * 40, 3)
        ends = [await gateway.end_of(request_id) for request_id in ("asking", "silent")]

    asking, silent = ends[0].usage, ends[1].usage
    [first] = [first for message in gateway.messages for first in message.first_tokens]
    are_told = [started.HasField("accept_duration") for message in gateway.messages for started in message.started]
    assert are_told == [True, False]
    assert [first.handle] == gateway.handles["asking"]
    assert {miss.reason: miss.num_tokens for miss in first.misses} == {
        generation_pb2.CACHE_MISS_REASON_NOT_SEEN: 32,
        generation_pb2.CACHE_MISS_REASON_TAIL: 8,
    }
    assert seconds_from_duration(first.prefill_duration) >= 0.05
    [accepted] = [
        seconds_from_duration(started.accept_duration)
        for message in gateway.messages
        for started in message.started
        if started.HasField("accept_duration")
    ]
    # From reading the submit to handing over the first token, told in two and in three parts.
    parts = (first.queue_duration, first.prefill_duration, first.publish_duration)
    assert accepted + seconds_from_duration(first.since_started_duration) == pytest.approx(
        sum(seconds_from_duration(part) for part in parts), abs=1e-6
    )
    # Its two gaps; the worker says that its steps take a millisecond, so that they explain none.
    assert [stall.reason for stall in asking.stalls] == [generation_pb2.STALL_REASON_ENGINE_WAIT] * 2
    assert (asking.num_stalls, silent.num_stalls) == (2, 0)
