"""gRPC between two real ends: errors arrive whole, streams end, lost peers are noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from libs.errors import (
    ERROR_TABLE,
    DeadlineExceeded,
    EngineLost,
    ErrorSpec,
    InternalError,
    InvalidRequest,
    OctavoError,
    Overloaded,
    StoreUnavailable,
    spec_of,
)
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.protogen.generation.v1 import generation_pb2, generation_pb2_grpc
from libs.rpc import (
    CallContext,
    Registration,
    RpcServer,
    abort_with,
    call_context_of,
    duration_from_seconds,
    error_from_status,
    make_channel,
    make_server,
    open_stream,
    seconds_from_duration,
    status_from_error,
    unary,
)
from tests.patience import PATIENCE_SECONDS


class Engine(engine_pb2_grpc.EngineServiceServicer):
    """Answers as the test says."""

    def __init__(self) -> None:
        self.error: OctavoError | None = None
        self.delay_seconds = 0.0
        self.seen: CallContext | None = None
        self.deadline_seconds: float | None = None
        self.watch_was_cancelled = asyncio.Event()

    async def GetEngine(self, request: Any, context: Any) -> engine_pb2.GetEngineResponse:
        self.seen = call_context_of(context)
        self.deadline_seconds = context.time_remaining()
        await asyncio.sleep(self.delay_seconds)
        if self.error is not None:
            await abort_with(context, self.error)
        return engine_pb2.GetEngineResponse()

    async def WatchEngine(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.WatchEngineResponse]:
        yield engine_pb2.WatchEngineResponse(sequence_number=1)
        if self.error is not None:
            await abort_with(context, self.error)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.watch_was_cancelled.set()
            raise

    async def GetPageTable(
        self, request: engine_pb2.GetPageTableRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetPageTableResponse]:
        yield engine_pb2.GetPageTableResponse()

    async def DrainEngine(self, request: Any, context: Any) -> engine_pb2.DrainEngineResponse:
        raise RuntimeError("a fault that nobody translated")


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Echoes request ids as step ids; tells when its stream has ended.

    To a servicer, a client that cancels looks at first like one that has nothing more to send: its requests end,
    and the cancellation comes at the next await.
    """

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    async def Generate(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        try:
            async for request in request_iterator:
                yield generation_pb2.GenerateResponse(step_id=int(request.abort.request_id))
        finally:
            self.has_ended.set()


class Peer:
    """A served engine and a channel to it."""

    def __init__(
        self, server: RpcServer, channel: grpc.aio.Channel, engine: Engine, generation: Generation
    ) -> None:
        self.server, self.channel = server, channel
        self.engine, self.generation = engine, generation
        self.engine_stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
        self.generation_stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)


@asynccontextmanager
async def _serve(address: str) -> AsyncIterator[Peer]:
    engine, generation = Engine(), Generation()
    server = make_server(
        address,
        [
            Registration(
                engine_pb2_grpc.add_EngineServiceServicer_to_server, engine, "octavo.engine.v1.EngineService"
            ),
            Registration(
                generation_pb2_grpc.add_GenerationServiceServicer_to_server,
                generation,
                "octavo.generation.v1.GenerationService",
            ),
        ],
    )
    await server.start()
    async with make_channel(server.address) as channel:
        yield Peer(server, channel, engine, generation)
    await server.stop(0)


@pytest.fixture(params=["unix", "tcp"])
async def peer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Peer]:
    address = f"unix:{tmp_path}/p.sock" if request.param == "unix" else "127.0.0.1:0"
    async with asyncio.timeout(PATIENCE_SECONDS), _serve(address) as served:
        yield served


async def _get_engine(peer: Peer, *, timeout_seconds: float = PATIENCE_SECONDS, **options: Any) -> Any:
    method = peer.engine_stub.GetEngine
    request = engine_pb2.GetEngineRequest()
    return await unary(method, request, timeout_seconds=timeout_seconds, on_lost=EngineLost, **options)


def _abort(number: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(abort=generation_pb2.Abort(request_id=str(number)))


@pytest.mark.parametrize("spec", ERROR_TABLE, ids=lambda spec: spec.error_class.__name__)
async def test_every_error_arrives_as_it_was_raised(spec: ErrorSpec, tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), _serve(f"unix:{tmp_path}/p.sock") as peer:
        peer.engine.error = spec.error_class("Why: ünïcode, too.", param="messages", retry_after_seconds=1.25)

        with pytest.raises(OctavoError) as from_unary:
            await _get_engine(peer)
        with pytest.raises(OctavoError) as from_stream:
            async with open_stream(
                peer.engine_stub.WatchEngine, engine_pb2.WatchEngineRequest(), on_lost=EngineLost
            ) as stream:
                async for _ in stream:
                    pass

    for caught in (from_unary.value, from_stream.value):
        assert type(caught) is spec.error_class
        assert caught.message == "Why: ünïcode, too."
        assert (caught.param, caught.retry_after_seconds) == ("messages", 1.25)


@pytest.mark.parametrize("spec", ERROR_TABLE, ids=lambda spec: spec.error_class.__name__)
def test_a_status_has_our_reason_and_only_what_was_said(spec: ErrorSpec) -> None:
    status = status_from_error(spec.error_class("m"))

    detail, *others = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    # Who has used too much is told so in Google's words too.
    num_excesses = int(spec.http_status == 429)
    assert [other.Is(error_details_pb2.QuotaFailure.DESCRIPTOR) for other in others] == [True] * num_excesses
    assert (info.reason, info.domain) == (spec.reason.value, "octavo")
    assert status.code == grpc.StatusCode[spec.grpc_code].value[0]


def test_a_status_without_our_reason_is_a_fault_of_ours() -> None:
    assert type(error_from_status(status_pb2.Status(code=3, message="m"))) is InternalError


def test_a_reason_of_a_newer_peer_is_a_fault_of_ours_with_its_message() -> None:
    status = status_pb2.Status(code=3, message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="octavo"))

    error = error_from_status(status)

    assert (type(error), error.message) == (InternalError, "m")


async def test_a_call_carries_context_and_deadline(peer: Peer) -> None:
    context = CallContext("r-1", "tenant", "00-a-b-01")

    await _get_engine(peer, timeout_seconds=9.0, context=context)

    assert peer.engine.seen == context
    # gRPC rounds deadlines up a little.
    assert peer.engine.deadline_seconds == pytest.approx(9.0, abs=2.0)


async def test_a_call_without_context_carries_none(peer: Peer) -> None:
    await _get_engine(peer)

    assert peer.engine.seen == CallContext()


async def test_a_call_that_takes_too_long_exceeds_its_deadline(peer: Peer) -> None:
    peer.engine.delay_seconds = PATIENCE_SECONDS

    with pytest.raises(DeadlineExceeded):
        await _get_engine(peer, timeout_seconds=0.05)


async def test_a_peer_that_cannot_be_reached_is_lost_as_the_caller_names_it(tmp_path: Path) -> None:
    async with make_channel(f"unix:{tmp_path}/nobody.sock") as channel:
        stub: Any = engine_pb2_grpc.EngineServiceStub(channel)

        with pytest.raises(StoreUnavailable, match="UNAVAILABLE"):
            await unary(
                stub.GetEngine, engine_pb2.GetEngineRequest(), timeout_seconds=5.0, on_lost=StoreUnavailable
            )


async def test_an_error_that_nobody_translated_is_the_callers_kind_of_loss(peer: Peer) -> None:
    with pytest.raises(EngineLost, match="UNKNOWN"):
        await unary(
            peer.engine_stub.DrainEngine,
            engine_pb2.DrainEngineRequest(),
            timeout_seconds=PATIENCE_SECONDS,
            on_lost=EngineLost,
        )


async def test_a_stream_carries_messages_both_ways_and_ends_when_the_sender_is_done(peer: Peer) -> None:
    async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
        await stream.send(_abort(1))
        await stream.send(_abort(2))
        await stream.done_sending()
        received = [message.step_id async for message in stream]

    assert received == [1, 2]


async def test_leaving_a_stream_cancels_it_at_the_other_end(peer: Peer) -> None:
    async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
        await stream.send(_abort(1))
        async for _ in stream:
            break
        assert not peer.generation.has_ended.is_set()

    # The fixture bounds the wait.
    assert await peer.generation.has_ended.wait()


async def test_leaving_a_stream_of_one_direction_cancels_it_at_the_other_end(peer: Peer) -> None:
    watch = peer.engine_stub.WatchEngine
    async with open_stream(watch, engine_pb2.WatchEngineRequest(), on_lost=EngineLost) as stream:
        async for message in stream:
            assert message.sequence_number == 1
            break

    await peer.engine.watch_was_cancelled.wait()


async def test_an_error_inside_the_block_cancels_the_stream_and_is_not_replaced(peer: Peer) -> None:
    with pytest.raises(InvalidRequest, match="ours"):
        async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
            await stream.send(_abort(1))
            async for _ in stream:
                raise InvalidRequest("ours")

    await peer.generation.has_ended.wait()


async def test_cancelling_the_reader_cancels_the_stream(peer: Peer) -> None:
    is_reading = asyncio.Event()

    async def read() -> None:
        async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
            await stream.send(_abort(1))
            async for _ in stream:
                is_reading.set()

    task = asyncio.create_task(read())
    await is_reading.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await peer.generation.has_ended.wait()


async def test_a_write_after_the_streams_end_is_a_loss(peer: Peer) -> None:
    async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
        await stream.send(_abort(1))
        async for _ in stream:
            break
        await peer.server.stop(0)

        with pytest.raises(EngineLost):
            await _until_raises(lambda: stream.send(_abort(2)))


async def test_a_write_after_the_peers_error_says_the_error(peer: Peer) -> None:
    async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
        # int() of this fails in the servicer, which ends the call.
        await stream.send(generation_pb2.GenerateRequest(abort=generation_pb2.Abort(request_id="not a number")))
        with pytest.raises(EngineLost):
            async for _ in stream:
                pass

        with pytest.raises(EngineLost, match="UNKNOWN"):
            await _until_raises(lambda: stream.send(_abort(2)))


async def _until_raises(call: Callable[[], Any]) -> None:
    """The end of a stream reaches the writer a moment after the reader."""
    while True:
        await call()
        await asyncio.sleep(0.01)


_SERVE_FOREVER = """
import asyncio, sys
sys.path.insert(0, {repository!r})
from tests.unit.libs.test_rpc import _serve
async def main():
    async with _serve({address!r}):
        print("listening", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_peer_that_is_killed_mid_stream_is_lost(tmp_path: Path) -> None:
    address, repository = f"unix:{tmp_path}/p.sock", str(Path(__file__).parents[3])
    script = _SERVE_FOREVER.format(repository=repository, address=address)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS), make_channel(address) as channel:
        assert await process.stdout.readline() == b"listening\n"
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

        with pytest.raises(EngineLost):
            async with open_stream(stub.Generate, on_lost=EngineLost) as stream:
                await stream.send(_abort(1))
                async for _ in stream:
                    os.kill(process.pid, signal.SIGKILL)

        await process.wait()


@pytest.mark.slow
async def test_a_peer_that_freezes_mid_stream_is_lost(tmp_path: Path) -> None:
    address, repository = f"unix:{tmp_path}/p.sock", str(Path(__file__).parents[3])
    script = _SERVE_FOREVER.format(repository=repository, address=address)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        # Longer than keep-alive takes to notice, shorter than the minute that gRPC gives a ping of its own.
        async with asyncio.timeout(45), make_channel(address) as channel:
            assert await process.stdout.readline() == b"listening\n"
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

            with pytest.raises(EngineLost):
                async with open_stream(stub.Generate, on_lost=EngineLost) as stream:
                    await stream.send(_abort(1))
                    async for _ in stream:
                        os.kill(process.pid, signal.SIGSTOP)
    finally:
        process.kill()
        await process.wait()


_ASK_FOREVER = """
import asyncio, sys
sys.path.insert(0, {repository!r})
from libs.errors import EngineLost
from libs.protogen.generation.v1 import generation_pb2_grpc
from libs.rpc import make_channel, open_stream
from tests.unit.libs.test_rpc import _abort
async def main():
    async with make_channel({address!r}) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async with open_stream(stub.Generate, on_lost=EngineLost) as stream:
            await stream.send(_abort(1))
            async for _ in stream:
                print("answered", flush=True)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_client_that_freezes_mid_stream_is_given_up(tmp_path: Path) -> None:
    repository = str(Path(__file__).parents[3])
    async with asyncio.timeout(45), _serve(f"unix:{tmp_path}/p.sock") as served:
        script = _ASK_FOREVER.format(repository=repository, address=served.server.address)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"answered\n"

            os.kill(process.pid, signal.SIGSTOP)

            await served.generation.has_ended.wait()
        finally:
            process.kill()
            await process.wait()


async def test_health_tells_whether_the_services_take_calls(peer: Peer) -> None:
    check: Any = health_pb2_grpc.HealthStub(peer.channel).Check
    names = ["", "octavo.engine.v1.EngineService"]

    async def statuses() -> list[int]:
        return [(await check(health_pb2.HealthCheckRequest(service=name))).status for name in names]

    before = await statuses()
    await peer.server.set_serving(True)
    serving = await statuses()
    await peer.server.set_serving(False)
    after = await statuses()

    Response = health_pb2.HealthCheckResponse
    assert before == after == [Response.NOT_SERVING] * 2
    assert serving == [Response.SERVING] * 2


async def test_reflection_lists_the_services(peer: Peer) -> None:
    def list_services() -> Any:
        with grpc.insecure_channel(peer.server.address) as channel:
            return ProtoReflectionDescriptorDatabase(channel).get_services()

    services = await asyncio.to_thread(list_services)

    assert {"octavo.engine.v1.EngineService", "octavo.generation.v1.GenerationService"} <= set(services)
    assert "grpc.health.v1.Health" in services


async def test_two_servers_never_share_a_port() -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), _serve("127.0.0.1:0") as peer:
        second = make_server(peer.server.address, [])

        with pytest.raises(InternalError, match="Cannot listen on"):
            await second.start()


async def test_a_server_takes_over_the_socket_of_a_dead_process(tmp_path: Path) -> None:
    script = f"import socket; socket.socket(socket.AF_UNIX).bind({str(tmp_path / 'p.sock')!r})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == 0
    assert (tmp_path / "p.sock").is_socket()

    async with asyncio.timeout(PATIENCE_SECONDS), _serve(f"unix:{tmp_path}/p.sock") as peer:
        await _get_engine(peer)


async def test_a_message_over_the_limit_is_refused_and_the_peer_unharmed(peer: Peer) -> None:
    # The limit is 16 MiB.
    too_large = generation_pb2.GenerateRequest(abort=generation_pb2.Abort(request_id="1" * (17 * 1024 * 1024)))

    with pytest.raises(EngineLost):
        async with open_stream(peer.generation_stub.Generate, on_lost=EngineLost) as stream:
            await stream.send(too_large)

    await _get_engine(peer)


_UNREADABLE = b"\xff\xff\xff"


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/octavo.engine.v1.EngineService/GetEngine", "unary_unary"),
        ("/octavo.engine.v1.EngineService/WatchEngine", "unary_stream"),
        ("/octavo.generation.v1.GenerationService/Generate", "stream_stream"),
        ("/grpc.health.v1.Health/Check", "unary_unary"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_a_message_that_cannot_be_read_is_refused_in_a_sentence(
    peer: Peer, method: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    request: Any = iter([_UNREADABLE]) if kind == "stream_stream" else _UNREADABLE
    call: Any = getattr(peer.channel, kind)(method)(request)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        if kind == "unary_unary":
            await call
        else:
            await anext(aiter(call))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == f"The message cannot be read: it is none of {method}, or damaged."
    # No traceback: whoever sends garbage must not fill the log.
    assert not [record for record in caplog.records if record.exc_info]
    await _get_engine(peer)


async def test_a_stream_goes_well_until_a_message_cannot_be_read(peer: Peer) -> None:
    def messages() -> Iterator[bytes]:
        yield _abort(7).SerializeToString()
        yield _UNREADABLE

    generate: Any = peer.channel.stream_stream(
        "/octavo.generation.v1.GenerationService/Generate",
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )
    answers = aiter(generate(messages()))

    assert (await anext(answers)).step_id == 7
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(answers)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await peer.generation.has_ended.wait()


async def test_a_message_over_the_limit_has_a_status_of_its_own(peer: Peer) -> None:
    large = bytes(17 * 1024 * 1024)

    # The channels of this system would not send it.
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(peer.server.address, options=options) as channel:
        call: Any = channel.unary_unary("/octavo.engine.v1.EngineService/GetEngine")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(large)

    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.1, 1.0, 3_600.000_000_001, 1e9])
def test_durations_survive_the_wire(seconds: float) -> None:
    assert seconds_from_duration(duration_from_seconds(seconds)) == pytest.approx(seconds, abs=1e-9)


def test_a_negative_duration_is_zero() -> None:
    assert duration_from_seconds(-0.5).ToNanoseconds() == 0


def test_retry_after_is_exact_on_the_wire() -> None:
    error = error_from_status(status_from_error(Overloaded("m", retry_after_seconds=0.1)))

    assert error.retry_after_seconds == 0.1
    assert spec_of(error).is_retryable
