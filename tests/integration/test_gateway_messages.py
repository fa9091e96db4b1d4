"""Anthropic's Messages API by Anthropic's own client, over HTTP to a real gateway process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from libs.errors import WorkerLost
from libs.text import IncrementalDetokenizer
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand, open_stand, write_keys
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The primes are 2, 3 and 5. 😀"
EOS = 2
LENGTH = 2  # FINISH_REASON_LENGTH
KEY = "sk-one"
USER_TURN: anthropic.types.MessageParam = {"role": "user", "content": "Name three primes."}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("messages")
    keys = write_keys(folder / "keys.json", {KEY: "acme"})
    flags = ("--api-keys-file", str(keys), "--sse-heartbeat-seconds", "0.2")
    async with open_stand(folder / "data", *flags) as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    """The shared stand with an engine that answers well."""
    shared_stand.engine.scripts.clear()
    shared_stand.engine.default_script = Script(
        token_ids=[*shared_stand.encode(TEXT), EOS], ends_with_stop_token=True, num_cached_tokens=16
    )
    return shared_stand


@pytest_asyncio.fixture(loop_scope="module")
async def client(stand: Stand) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=stand.gateway.base_url, api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def post(stand: Stand, path: str = "/v1/messages", **fields: Any) -> tuple[int, Any]:
    body = {"model": MODEL_NAME, "max_tokens": 64, "messages": [USER_TURN]} | fields
    async with stand.gateway.http.post(path, json=body, headers={"X-Api-Key": KEY}) as response:
        assert response.headers["Request-Id"] == response.headers["X-Octavo-Request-Id"]
        return response.status, await response.json()


async def events(stand: Stand, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked to bear its type as its name."""
    body = {"model": MODEL_NAME, "max_tokens": 64, "messages": [USER_TURN], "stream": True} | fields
    async with stand.gateway.http.post("/v1/messages", json=body, headers={"X-Api-Key": KEY}) as response:
        raw = (await response.read()).decode()
    found = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(stand: Stand, token_ids: Sequence[int]) -> str:
    detokenizer = IncrementalDetokenizer(stand.model_text.tokenizer, skip_special_tokens=False)
    return detokenizer.add(list(token_ids)) + detokenizer.flush()


async def test_a_message_is_answered(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model=MODEL_NAME, max_tokens=64, messages=[USER_TURN])

    num_prompt_tokens = len(stand.engine.submits[-1].prompt_token_ids)
    assert message.content[0].to_dict() == {"type": "text", "text": TEXT}
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL_NAME)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.input_tokens + 16 == num_prompt_tokens
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.output_tokens == len(stand.encode(TEXT)) + 1
    assert stand.engine.submits[-1].tenant_id == "acme"


async def test_a_streamed_message_is_the_whole_one(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(model=MODEL_NAME, max_tokens=64, messages=[USER_TURN])
    async with client.messages.stream(model=MODEL_NAME, max_tokens=64, messages=[USER_TURN]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()

    assert text == TEXT
    # The client itself puts its null for stop_details beside what was streamed.
    assert streamed.to_dict() | {"id": ""} == whole.to_dict() | {"id": "", "stop_details": None}


async def test_a_stream_has_the_documented_events_in_their_order(stand: Stand) -> None:
    found = await events(stand)

    types = [event["type"] for event in found]
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert types[:3] == ["message_start", "content_block_start", "ping"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[3:-3]) == {"content_block_delta"}
    assert "".join(deltas) == TEXT
    assert found[0]["message"]["usage"]["input_tokens"] == len(stand.engine.submits[-1].prompt_token_ids)
    assert found[0]["message"]["content"] == []
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_the_stop_sequence_is_named(
    stand: Stand, client: anthropic.AsyncAnthropic, is_streaming: bool
) -> None:
    fields: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 64, "messages": [USER_TURN]}
    fields["stop_sequences"] = ["never", "and 5"]
    if is_streaming:
        async with client.messages.stream(**fields) as stream:
            message = await stream.get_final_message()
    else:
        message = await client.messages.create(**fields)

    assert message.content[0].to_dict()["text"] == "The primes are 2, 3 "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "and 5")


async def test_an_answer_that_is_cut_says_so(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("One two"), reason=LENGTH)

    message = await client.messages.create(model=MODEL_NAME, max_tokens=2, messages=[USER_TURN])

    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert stand.engine.submits[-1].sampling_params.max_output_tokens == 2


async def test_all_parameters_reach_the_engine(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    await client.messages.create(
        model=MODEL_NAME,
        max_tokens=9,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
        ],
        system=[{"type": "text", "text": "You are terse."}],
        metadata={"user_id": "somebody"},
        extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7},
    )

    submit = stand.engine.submits[-1]
    params = submit.sampling_params
    prompt = text_of(stand, submit.prompt_token_ids)
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    assert params.max_output_tokens == 9
    assert "You are terse." in prompt
    assert "Hi" in prompt
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any(event.get("user") == "somebody" for event in stand.gateway.log):
            await asyncio.sleep(0.01)


async def test_an_assistants_last_turn_is_continued(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    turns: list[anthropic.types.MessageParam] = [USER_TURN, {"role": "assistant", "content": "They are 2,"}]
    await client.messages.create(model=MODEL_NAME, max_tokens=9, messages=turns)

    prompt = text_of(stand, stand.engine.submits[-1].prompt_token_ids)
    assert prompt.endswith("They are 2,")


async def test_tokens_are_counted_as_they_are_computed(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    count = await client.messages.count_tokens(model=MODEL_NAME, messages=[USER_TURN], system="You are terse.")
    await client.messages.create(model=MODEL_NAME, max_tokens=9, messages=[USER_TURN], system="You are terse.")

    assert count.input_tokens == len(stand.engine.submits[-1].prompt_token_ids)


TOOL_TURN = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [USER_TURN, {"role": "system", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER_TURN, TOOL_TURN]}, "messages"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [USER_TURN, {"role": "user"}]}, "messages[1].content"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"metadata": {"user": "x"}}, "metadata"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(stand: Stand, fields: dict[str, Any], named: str) -> None:
    status, body = await post(stand, **fields)

    assert status == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert f"'{named}" in body["error"]["message"]


async def test_max_tokens_is_required(stand: Stand) -> None:
    body = {"model": MODEL_NAME, "messages": [USER_TURN]}
    async with stand.gateway.http.post("/v1/messages", json=body, headers={"X-Api-Key": KEY}) as response:
        error = (await response.json())["error"]

    assert (response.status, error["message"]) == (400, "'max_tokens' must be given.")


async def test_the_client_raises_its_own_errors(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", max_tokens=9, messages=[USER_TURN])
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="sk-wrong").messages.count_tokens(model=MODEL_NAME, messages=[USER_TURN])
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(model=MODEL_NAME, max_tokens=10_000, messages=[USER_TURN])

    assert missing.value.request_id
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": missing.value.body["error"]["message"]},  # type: ignore[index]
        "request_id": missing.value.request_id,
    }


async def test_an_engine_that_fails_mid_stream_is_one_error_event_and_the_end(stand: Stand) -> None:
    stand.engine.default_script = Script(
        token_ids=stand.encode("One two"), goes_on=True, error=WorkerLost("The worker is gone.")
    )

    found = await events(stand)

    assert [event["type"] for event in found[-1:]] == ["error"]
    assert found[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in [event["type"] for event in found]


async def test_silence_is_filled_with_pings(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    stand.engine.default_script = Script(
        token_ids=stand.encode(TEXT), first_delay_seconds=0.5, step_delay_seconds=0.3, tokens_per_step=8
    )

    found = await events(stand)
    async with client.messages.stream(model=MODEL_NAME, max_tokens=64, messages=[USER_TURN]) as stream:
        text = await stream.get_final_text()

    assert [event["type"] for event in found].count("ping") > 1
    assert text == TEXT
