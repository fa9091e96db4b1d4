"""Every documented call of OpenAI's client for Python that this server answers, sync and async, strictly checked.

The server is a real gateway process; an engine of scripts says what the model would say.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio

from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand, events_of, open_stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The primes are 2, 3 and 5. 😀"
PERSON_JSON = '{"name": "Ann", "age": 30}'
CALL = f'<tool_call>\n{{"name": "describe", "arguments": {PERSON_JSON}}}\n</tool_call>'
EOS = 2
MESSAGES = [{"role": "user", "content": "Name three primes."}]
USAGE = {"include_usage": True}


class Person(pydantic.BaseModel):
    """What is asked for as JSON."""

    name: str
    age: int


TOOL = openai.pydantic_function_tool(Person, name="describe")
# A client of either kind: what it returns is awaited and iterated where it must be.
Client = Any
Check = Callable[[Client], Awaitable[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("client")) as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    say(shared_stand, TEXT)
    return shared_stand


def say(stand: Stand, *texts: str) -> None:
    """Let the engine answer the next requests with these texts, the last of them for ever."""
    scripts = [Script(token_ids=[*stand.encode(text), EOS], ends_with_stop_token=True) for text in texts]
    stand.engine.scripts.clear()
    stand.engine.scripts.extend(scripts[:-1])
    stand.engine.default_script = scripts[-1]


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def items(values: Any) -> list[Any]:
    return [value async for value in values] if hasattr(values, "__aiter__") else list(values)


class entered:  # Reads as the context manager that it is.
    """Either kind of context manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        if hasattr(self._manager, "__aenter__"):
            return await self._manager.__aenter__()
        return self._manager.__enter__()

    async def __aexit__(self, *exception: Any) -> None:
        if hasattr(self._manager, "__aexit__"):
            await self._manager.__aexit__(*exception)
        else:
            self._manager.__exit__(*exception)


async def with_both(stand: Stand, check: Check) -> tuple[Any, Any]:
    """Do the same with the sync client, in a thread, and with the async one."""
    options: dict[str, Any] = {
        "base_url": f"{stand.gateway.base_url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
    }

    def with_sync() -> Any:
        with openai.OpenAI(**options) as client:
            return asyncio.run(check(client))  # type: ignore[arg-type]  # It is a coroutine.

    from_sync = await asyncio.to_thread(with_sync)
    async with openai.AsyncOpenAI(**options) as client:
        return from_sync, await check(client)


async def assert_both(stand: Stand, check: Check, expected: Any) -> None:
    assert await with_both(stand, check) == (expected, expected)


async def test_chat_is_created_whole(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        answer = await settled(client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, n=2))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return [(choice.message.content, choice.finish_reason) for choice in answer.choices]

    await assert_both(stand, check, [(TEXT, "stop"), (TEXT, "stop")])


async def test_chat_is_created_as_a_stream(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        stream = await settled(
            client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True, stream_options=USAGE)
        )
        async with entered(stream):
            chunks = await items(stream)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert chunks[-1].usage.completion_tokens > 0
        return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

    await assert_both(stand, check, (TEXT, "stop"))


async def test_the_streaming_helper_puts_chat_together(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        manager = client.chat.completions.stream(
            model=MODEL_NAME, messages=MESSAGES, logprobs=True, stream_options=USAGE
        )
        async with entered(manager) as stream:
            events = await items(stream)
            final = await settled(stream.get_final_completion())
        deltas = [event.delta for event in events if event.type == "content.delta"]
        names = [event.type for event in events if event.type.endswith(".done")]
        return "".join(deltas), final.choices[0].message.content, names

    await assert_both(stand, check, (TEXT, TEXT, ["content.done", "logprobs.content.done"]))


async def test_an_answer_is_parsed_into_a_type(stand: Stand) -> None:
    say(stand, PERSON_JSON)

    async def check(client: Client) -> Any:
        parsed = await settled(
            client.chat.completions.parse(model=MODEL_NAME, messages=MESSAGES, response_format=Person)
        )
        manager = client.chat.completions.stream(model=MODEL_NAME, messages=MESSAGES, response_format=Person)
        async with entered(manager) as stream:
            await items(stream)
            streamed = await settled(stream.get_final_completion())
        return parsed.choices[0].message.parsed, streamed.choices[0].message.parsed

    ann = Person(name="Ann", age=30)
    await assert_both(stand, check, (ann, ann))


async def test_a_tool_is_called_and_answered(stand: Stand) -> None:
    say(stand, CALL, TEXT, CALL, TEXT)

    async def check(client: Client) -> Any:
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "tools": [TOOL]}
        first = await settled(client.chat.completions.parse(**asked))
        (call,) = first.choices[0].message.tool_calls
        answer = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        # The message goes back as the client has it.
        then = [*MESSAGES, first.choices[0].message, answer]
        last = await settled(client.chat.completions.create(**asked | {"messages": then}))
        reason = first.choices[0].finish_reason
        return reason, call.function.parsed_arguments, last.choices[0].message.content

    await assert_both(stand, check, ("tool_calls", Person(name="Ann", age=30), TEXT))


async def test_the_streaming_helper_puts_a_call_together(stand: Stand) -> None:
    say(stand, CALL, TEXT, CALL, TEXT)

    async def check(client: Client) -> Any:
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "tools": [TOOL]}
        async with entered(client.chat.completions.stream(**asked)) as stream:
            events = await items(stream)
            final = await settled(stream.get_final_completion())
        (call,) = final.choices[0].message.tool_calls
        done = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
        answer = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        then = [*MESSAGES, final.choices[0].message, answer]
        last = await settled(client.chat.completions.create(**asked | {"messages": then}))
        return done, call.function.parsed_arguments, last.choices[0].message.content

    await assert_both(stand, check, (["describe"], Person(name="Ann", age=30), TEXT))


async def test_plain_prompts_are_completed(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        whole = await settled(
            client.completions.create(model=MODEL_NAME, prompt=["a", "b"], logprobs=1, max_tokens=64)
        )
        return [choice.text for choice in whole.choices]

    await assert_both(stand, check, [TEXT, TEXT])


async def test_a_streamed_completion_differs_from_the_clients_type_in_one_null_alone(stand: Stand) -> None:
    """OpenAI's own chunks have null for the reason until the last; its client's type has none (decision 0021)."""
    asked: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 64, "stream": True}

    async def check(client: Client) -> Any:
        lenient = client.with_options(_extra_kwargs={"_strict_response_validation": False})
        stream = await settled(lenient.completions.create(**asked))
        return "".join([choice.text for chunk in await items(stream) for choice in chunk.choices])

    await assert_both(stand, check, TEXT)
    async with stand.gateway.http.post("/v1/completions", json=asked) as response:
        *chunks, done = events_of(await response.read())
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert (reasons, done) == ([*[None] * (len(reasons) - 1), "stop"], "[DONE]")
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = "stop"
        openai.types.Completion.model_validate(chunk, strict=True)


async def test_models_are_listed_and_found(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        listed = await items(await settled(client.models.list()))
        found = await settled(client.models.retrieve(MODEL_NAME))
        return [model.id for model in listed], found.id

    await assert_both(stand, check, ([MODEL_NAME], MODEL_NAME))


async def test_a_response_is_created_whole_and_streamed(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        whole = await settled(client.responses.create(model=MODEL_NAME, input="Name three primes."))
        events = await items(
            await settled(client.responses.create(model=MODEL_NAME, input="Name three primes.", stream=True))
        )
        return whole.output_text, events[-1].type, events[-1].response.output_text

    await assert_both(stand, check, (TEXT, "response.completed", TEXT))


async def test_the_streaming_helper_puts_a_response_together(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        async with entered(client.responses.stream(model=MODEL_NAME, input="Name three primes.")) as stream:
            events = await items(stream)
            final = await settled(stream.get_final_response())
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        return "".join(deltas), final.output_text

    await assert_both(stand, check, (TEXT, TEXT))


async def test_a_response_is_parsed_into_a_type(stand: Stand) -> None:
    say(stand, PERSON_JSON)

    async def check(client: Client) -> Any:
        asked: dict[str, Any] = {"model": MODEL_NAME, "input": "Describe Ann.", "text_format": Person}
        parsed = await settled(client.responses.parse(**asked))
        async with entered(client.responses.stream(**asked)) as stream:
            await items(stream)
            streamed = await settled(stream.get_final_response())
        return parsed.output_parsed, streamed.output_parsed

    ann = Person(name="Ann", age=30)
    await assert_both(stand, check, (ann, ann))


async def test_a_response_calls_a_function_and_is_answered(stand: Stand) -> None:
    say(stand, CALL, TEXT, CALL, TEXT)

    async def check(client: Client) -> Any:
        function = openai.pydantic_function_tool(Person, name="describe")["function"]
        asked: dict[str, Any] = {"model": MODEL_NAME, "tools": [{"type": "function", **function}]}
        first = await settled(client.responses.parse(input="Describe Ann.", **asked))
        (call,) = [item for item in first.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        turns = [{"role": "user", "content": "Describe Ann."}, *first.output, output]
        last = await settled(client.responses.create(input=turns, **asked))
        return call.name, json.loads(call.arguments), last.output_text

    await assert_both(stand, check, ("describe", json.loads(PERSON_JSON), TEXT))


async def test_raw_and_streaming_responses_show_headers(stand: Stand) -> None:
    async def check(client: Client) -> Any:
        raw = await settled(client.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=MESSAGES))
        parsed = await settled(raw.parse())
        manager = client.chat.completions.with_streaming_response.create(model=MODEL_NAME, messages=MESSAGES)
        async with entered(manager) as response:
            lines = await items(response.iter_lines())
        texts = [parsed.choices[0].message.content, json.loads("".join(lines))["choices"][0]["message"]["content"]]
        return texts, "x-request-id" in raw.headers, "x-request-id" in response.headers

    await assert_both(stand, check, ([TEXT, TEXT], True, True))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ],
)
async def test_refusals_are_the_clients_errors(
    stand: Stand, fields: dict[str, Any], error: type[openai.APIStatusError]
) -> None:
    async def check(client: Client) -> Sequence[Any]:
        with pytest.raises(error) as refused:
            await settled(client.chat.completions.create(**{"model": MODEL_NAME, "messages": MESSAGES} | fields))
        return refused.value.param, refused.value.type

    (name,) = fields
    await assert_both(stand, check, (name, "invalid_request_error"))
