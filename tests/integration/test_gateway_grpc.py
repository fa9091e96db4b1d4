"""The gateway's gRPC API, from a client of grpc.aio to a real gateway process between fakes of the other tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import json_format
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from libs.errors import (
    ContextLengthExceeded,
    Draining,
    EngineLost,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    PayloadTooLarge,
    Unauthenticated,
    UnsupportedField,
    WorkerLost,
)
from libs.protogen.inference.v1 import inference_pb2 as pb
from libs.protogen.inference.v1 import inference_pb2_grpc
from libs.protogen.telemetry.v1 import telemetry_pb2
from libs.rpc import make_channel
from libs.rpc.statuses import error_from_rpc
from tests.fakes.fake_generation_engine import Script
from tests.integration.conftest import StartOctavo
from tests.integration.gateway_process import MODEL_NAME, Stand, events_of, open_stand, write_keys
from tests.integration.observations import audit_rows
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 2
SERVICE = "octavo.inference.v1.InferenceService"
ALIAS = "meta-llama/Llama-3-70b-instruct"
QUESTION = [pb.ChatMessage(role="user", content="Count.")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    flags = ("--model-aliases", ALIAS, "--max-body-bytes", "200000")
    async with open_stand(tmp_path_factory.mktemp("grpc"), *flags) as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    """The shared stand with an engine whose choices differ."""
    engine = shared_stand.engine
    engine.scripts.clear()
    engine.default_script = Script(
        token_ids=[*shared_stand.encode("One 😀 two."), EOS],
        ends_with_stop_token=True,
        num_cached_tokens=16,
        other_choices=(Script(token_ids=shared_stand.encode("Three four"), reason=2),),
    )
    return shared_stand


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(shared_stand: Stand) -> AsyncIterator[grpc.aio.Channel]:
    async with make_channel(shared_stand.gateway.grpc_address) as channel:
        yield channel


@pytest.fixture
def client(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel)


def chat_request(**fields: Any) -> pb.ChatCompletionRequest:
    return pb.ChatCompletionRequest(**({"model": MODEL_NAME, "messages": QUESTION} | fields))


async def collect(call: Any) -> list[Any]:
    messages: list[Any] = []
    await collect_into(messages, call)
    return messages


def texts_of(messages: Sequence[Any], field: str) -> dict[int, str]:
    texts: dict[int, str] = {}
    for message in messages:
        for choice in message.choices:
            texts[choice.index] = texts.get(choice.index, "") + getattr(choice, field)
    return texts


def reasons_of(messages: Sequence[Any]) -> dict[int, str]:
    """The finish reason of each choice, which is told once."""
    found = [
        (choice.index, choice.finish_reason)
        for message in messages
        for choice in message.choices
        if choice.HasField("finish_reason")
    ]
    assert len(found) == len(dict(found))
    return dict(found)


async def error_of(call: Any) -> tuple[OctavoError, list[Any], str]:
    """The error that a stream ended with, what came before, and the request's id."""
    messages: list[Any] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect_into(messages, call)
    info = error_details_pb2.RequestInfo()
    status: Any = rpc_status.from_call(caught.value)
    assert any(detail.Unpack(info) for detail in status.details)
    return error_from_rpc(caught.value, on_lost=EngineLost), messages, info.request_id


async def collect_into(messages: list[Any], call: Any) -> None:
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)


async def id_of(call: Any) -> str:
    """The id of a call that has not ended yet."""
    return str(dict(await call.initial_metadata())["x-octavo-request-id"])


async def http_events(stand: Stand, path: str, **fields: Any) -> list[Any]:
    body = {"model": MODEL_NAME, "stream": True, "stream_options": {"include_usage": True}} | fields
    async with stand.gateway.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return events_of(await response.read())


async def test_a_chat_is_what_it_is_over_http(stand: Stand, client: Any) -> None:
    options = pb.GenerationOptions(n=2, return_token_ids=True)
    messages = await collect(client.ChatCompletion(chat_request(options=options, logprobs=True, top_logprobs=2)))
    events = await http_events(
        stand,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Count."}],
        n=2,
        return_token_ids=True,
        logprobs=True,
        top_logprobs=2,
    )

    over_http = [choice for event in events[:-1] for choice in event["choices"]]
    assert texts_of(messages, "content") == {0: "One 😀 two.", 1: "Three four"}
    assert reasons_of(messages) == {0: "stop", 1: "length"}
    merged = [choice for message in messages for choice in message.choices]
    for index in range(2):
        mine = [choice for choice in merged if choice.index == index]
        theirs = [choice for choice in over_http if choice["index"] == index]
        assert [choice.role for choice in mine if choice.HasField("role")] == ["assistant"]
        assert [one for choice in mine for one in choice.token_ids] == [
            one for choice in theirs for one in choice.get("token_ids", ())
        ]
        expected = [entry for choice in theirs if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        entries = [entry for choice in mine for entry in choice.logprobs]
        assert [(one.token, one.logprob, list(one.bytes)) for one in entries] == [
            (one["token"], one["logprob"], one["bytes"]) for one in expected
        ]
        assert [[top.token for top in one.top_logprobs] for one in entries] == [
            [top["token"] for top in one["top_logprobs"]] for one in expected
        ]
    usage, last = events[-2]["usage"], messages[-1].usage
    assert (last.prompt_tokens, last.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert last.cached_tokens == 16
    assert not any(message.HasField("usage") for message in messages[:-1])
    assert list(messages[0].prompt_token_ids) == list(stand.engine.submits[-1].prompt_token_ids)
    assert {message.id for message in messages} == {messages[0].id}


async def test_plain_prompts_are_what_they_are_over_http(stand: Stand, client: Any) -> None:
    prompts = [pb.Prompt(text="A: "), pb.Prompt(text="B: ")]
    options = pb.GenerationOptions(echo=True, max_tokens=9)
    request = pb.CompletionRequest(model=MODEL_NAME, prompts=prompts, options=options, logprobs=1)
    messages = await collect(client.Completion(request))
    events = await http_events(stand, "/v1/completions", prompt=["A: ", "B: "], echo=True, max_tokens=9, logprobs=1)

    over_http: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            over_http[choice["index"]] = over_http.get(choice["index"], "") + choice["text"]
    assert texts_of(messages, "text") == over_http == {0: "A: One 😀 two.", 1: "B: One 😀 two."}
    first = next(choice for message in messages for choice in message.choices if choice.index == 0)
    assert not first.logprobs[0].HasField("logprob")
    assert messages[-1].usage.completion_tokens == events[-2]["usage"]["completion_tokens"]


async def test_a_request_has_one_row_with_its_method_and_the_callers_id(stand: Stand, client: Any) -> None:
    call = client.ChatCompletion(chat_request(), metadata=(("x-request-id", "mine-7"), ("traceparent", "nonsense")))
    request_id = await id_of(call)
    messages = await collect(call)
    record = await stand.telemetry.wait_for(request_id)

    assert messages[0].id == f"chatcmpl-{request_id}"
    assert record.endpoint == f"/{SERVICE}/ChatCompletion"
    assert (record.client_request_id, record.tenant_id, record.is_streaming) == ("mine-7", "default", True)
    assert record.status == telemetry_pb2.REQUEST_STATUS_STOP
    assert record.completion_tokens == messages[-1].usage.completion_tokens
    assert dict(await call.initial_metadata())["x-request-id"] == "mine-7"
    assert [one.request_id for one in stand.telemetry.records].count(request_id) == 1


@pytest.mark.parametrize(
    ("request_fields", "error_class", "param"),
    [
        ({"model": "nobody"}, ModelNotFound, "model"),
        ({"messages": []}, InvalidRequest, "messages"),
        ({"messages": [pb.ChatMessage(role="wizard", content="x")]}, InvalidRequest, "messages[0].role"),
        ({"options": pb.GenerationOptions(temperature=float("nan"))}, InvalidRequest, "temperature"),
        ({"options": pb.GenerationOptions(n=0)}, InvalidRequest, "n"),
        ({"options": pb.GenerationOptions(stop=["a", "b", "c", "d", "e"])}, InvalidRequest, "stop"),
        ({"options": pb.GenerationOptions(max_tokens=9000)}, ContextLengthExceeded, "messages"),
        ({"top_logprobs": 2}, InvalidRequest, "top_logprobs"),
        (
            {"options": pb.GenerationOptions(structured_outputs=pb.StructuredOutputs(json='{"not": {}}'))},
            InvalidRequest,
            "structured_outputs.json",
        ),
        ({"messages": [pb.ChatMessage(role="function", content="x")]}, UnsupportedField, "messages[0].role"),
        ({"messages": [pb.ChatMessage(role="user", content="x" * 200_000)]}, PayloadTooLarge, None),
    ],
)
async def test_a_wrong_request_ends_with_the_error_that_names_its_field(
    stand: Stand, client: Any, request_fields: dict[str, Any], error_class: type[OctavoError], param: str | None
) -> None:
    num_submits = len(stand.engine.submits)

    error, messages, request_id = await error_of(client.ChatCompletion(chat_request(**request_fields)))
    record = await stand.telemetry.wait_for(request_id)

    assert (type(error), error.param, messages) == (error_class, param, [])
    assert record.status == telemetry_pb2.REQUEST_STATUS_REJECTED
    assert len(stand.engine.submits) == num_submits


async def test_an_engine_that_fails_mid_stream_ends_the_call_with_its_error(stand: Stand, client: Any) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b c"), goes_on=True, error=WorkerLost("gone"))

    error, messages, request_id = await error_of(client.ChatCompletion(chat_request()))
    record = await stand.telemetry.wait_for(request_id)

    assert isinstance(error, WorkerLost)
    assert texts_of(messages, "content") == {0: "a b c"}
    assert reasons_of(messages) == {}
    assert record.status == telemetry_pb2.REQUEST_STATUS_ERROR
    assert record.completion_tokens == 3


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_client_that_cancels_ends_its_request_on_the_engine(
    stand: Stand, client: Any, num_tokens: int
) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b c d")[:num_tokens], hangs=True)
    num_submits = len(stand.engine.submits)
    call = client.ChatCompletion(chat_request())
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    request_id = stand.engine.submits[-1].request_id
    text = ""
    while len(stand.encode(text)) < num_tokens:
        text += "".join(choice.content for choice in (await call.read()).choices)

    call.cancel()
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)
    record = await stand.telemetry.wait_for(request_id)

    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    assert record.completion_tokens == num_tokens
    assert not stand.engine.running_ids
    assert await stand.gateway.metric("octavo_gateway_requests_in_flight") == 0


async def test_a_deadline_ends_the_request_everywhere(stand: Stand, client: Any) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b"), hangs=True)
    call = client.ChatCompletion(chat_request(), timeout=2.0)
    request_id = await id_of(call)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)
    record = await stand.telemetry.wait_for(request_id)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    submit = next(one for one in stand.engine.submits if one.request_id == request_id)
    # gRPC rounds a deadline up by some milliseconds.
    assert 0 < submit.remaining_time.ToTimedelta().total_seconds() < 2.02
    # The call is over at both ends at once: the client may seem to leave a moment before its time is up.
    assert record.status in (telemetry_pb2.REQUEST_STATUS_ERROR, telemetry_pb2.REQUEST_STATUS_ABORTED)


async def test_tools_are_called_in_parts(stand: Stand, client: Any) -> None:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2)]
    stand.engine.default_script = Script(token_ids=stand.encode("\n".join(calls)), tokens_per_step=3)
    tool = pb.Tool(name="add", parameters='{"properties": {"a": {"type": "integer"}}, "required": ["a"]}')

    messages = await collect(client.ChatCompletion(chat_request(tools=[tool], tool_choice="required")))

    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    ids: set[str] = set()
    for message in messages:
        for choice in message.choices:
            for part in choice.tool_calls:
                names[part.index] = names.get(part.index, "") + part.name
                arguments[part.index] = arguments.get(part.index, "") + part.arguments
                ids |= {part.id} if part.HasField("id") else set()
    assert names == {0: "add", 1: "add"}
    assert {index: text.replace(" ", "") for index, text in arguments.items()} == {0: '{"a":1}', 1: '{"a":2}'}
    assert len(ids) == 2
    assert reasons_of(messages) == {0: "tool_calls"}


async def test_models_are_listed_under_all_their_names(stand: Stand, client: Any) -> None:
    response = await client.ListModels(pb.ListModelsRequest())

    assert [(model.id, model.root) for model in response.models] == [(MODEL_NAME, MODEL_NAME), (ALIAS, MODEL_NAME)]
    assert response.models[0].max_model_len == 8192
    assert response.models[0].created_time.seconds > 1_700_000_000


async def test_tokens_are_those_that_an_answer_is_made_from(stand: Stand, client: Any) -> None:
    await collect(client.ChatCompletion(chat_request()))
    of_messages = await client.Tokenize(pb.TokenizeRequest(messages=QUESTION, model=ALIAS))
    of_text = await client.Tokenize(pb.TokenizeRequest(prompt="one two"))

    assert list(of_messages.token_ids) == list(stand.engine.submits[-1].prompt_token_ids)
    assert list(of_text.token_ids) == stand.encode("one two")
    assert of_text.max_model_len == 8192
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.Tokenize(pb.TokenizeRequest())
    assert isinstance(error_from_rpc(caught.value, on_lost=EngineLost), InvalidRequest)


async def test_health_and_reflection_stand_beside(channel: grpc.aio.Channel) -> None:
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    names = await reflected_names(channel)

    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def reflected_names(channel: grpc.aio.Channel, **metadata: str) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), metadata=tuple(metadata.items()))
    response = await call.read()
    if response is grpc.aio.EOF:
        raise AssertionError(await call.code())
    return {service.name for service in response.list_services_response.service}


async def test_without_a_key_only_health_is_open(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", {"sk-a": "tenant-a", "sk-b": "tenant-b"})
    async with (
        open_stand(tmp_path / "data", "--api-keys-file", str(keys)) as stand,
        make_channel(stand.gateway.grpc_address) as channel,
    ):
        stand.engine.default_script = Script(token_ids=stand.encode("hi"))
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        refused = [
            (await error_of(stub.ChatCompletion(chat_request(), metadata=metadata)))[0]
            for metadata in ((), (("authorization", "Bearer wrong"),))
        ]
        for method, request in ((stub.ListModels, pb.ListModelsRequest()), (stub.Tokenize, pb.TokenizeRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(request)
            refused.append(error_from_rpc(caught.value, on_lost=EngineLost))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected_names(channel)
        refused.append(error_from_rpc(caught.value, on_lost=EngineLost))
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        for metadata in ((("authorization", "Bearer sk-a"),), (("x-api-key", "sk-b"),)):
            assert texts_of(await collect(stub.ChatCompletion(chat_request(), metadata=metadata)), "content")
        names = await reflected_names(channel, authorization="Bearer sk-a")

        assert all(isinstance(error, Unauthenticated) for error in refused)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert [submit.tenant_id for submit in stand.engine.submits] == ["tenant-a", "tenant-b"]
        assert stand.engine.submits[0].cache_salt != stand.engine.submits[1].cache_salt
        assert SERVICE in names


async def test_every_reflection_without_a_key_is_told_why(tmp_path: Path) -> None:
    """Refused before its question is read, a call in twenty would end with the client's own failed write."""
    keys = write_keys(tmp_path / "keys.json", {"sk-a": "tenant-a"})
    async with open_stand(tmp_path / "data", "--api-keys-file", str(keys)) as stand:
        refused = []
        for _ in range(50):
            async with make_channel(stand.gateway.grpc_address) as channel:
                for _ in range(3):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await reflected_names(channel)
                    refused.append(caught.value.code())
        async with make_channel(stand.gateway.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo().read()
            refused.append(caught.value.code())

    assert refused == [grpc.StatusCode.UNAUTHENTICATED] * 151


async def test_a_drain_finishes_calls_and_refuses_new_ones(tmp_path: Path) -> None:
    async with open_stand(tmp_path) as stand, make_channel(stand.gateway.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        was_refused = asyncio.Event()
        stand.engine.default_script = Script(token_ids=stand.encode("a b c d e f"), last_step_after=was_refused)
        call = stub.ChatCompletion(chat_request())
        first = await call.read()

        stand.gateway.terminate()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(event["event"] == "gateway drains" for event in stand.gateway.log):
                await asyncio.sleep(0.01)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        error, _, _ = await error_of(stub.ChatCompletion(chat_request()))
        was_refused.set()
        messages = [first, *await collect(call)]

        assert isinstance(error, Draining)
        assert error.retry_after_seconds is not None
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert texts_of(messages, "content") == {0: "a b c d e f"}
        assert await stand.gateway.wait_exit() == 0
        assert len(stand.telemetry.records) == 2


async def test_a_message_is_json_that_a_generic_client_can_send(stand: Stand, client: Any) -> None:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "options": {"maxTokens": 2}}

    messages = await collect(client.ChatCompletion(json_format.ParseDict(body, pb.ChatCompletionRequest())))

    assert reasons_of(messages) == {0: "length"}
    assert messages[-1].usage.completion_tokens == 2


@pytest.mark.slow
async def test_the_whole_system_answers_over_grpc_what_it_answers_over_http(running_octavo: StartOctavo) -> None:
    with running_octavo() as octavo:
        fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Count."}]} | fields
        async with (
            aiohttp.ClientSession(octavo.base_url) as session,
            session.post("/v1/chat/completions", json=body) as response,
        ):
            whole = await response.json()
        async with make_channel(octavo.state()["grpc_address"]) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            messages = await collect(stub.ChatCompletion(chat_request(options=pb.GenerationOptions(**fields))))
        [row] = [row for row in audit_rows(octavo, at_least=2) if row["endpoint"].startswith("/octavo.inference")]

    assert texts_of(messages, "content") == {0: whole["choices"][0]["message"]["content"]}
    assert messages[-1].usage.completion_tokens == whole["usage"]["completion_tokens"] == row["completion_tokens"]
    assert messages[-1].usage.cached_tokens == row["cached_tokens"] > 0
