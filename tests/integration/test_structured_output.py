"""Structured output through the whole system: whatever a model would say, the answer has its form."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from libs.text import load_model_text, resolve_model_path
from tests.integration.test_real_model import MODEL, StartOctavo, client_of

pytestmark = pytest.mark.asyncio

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
PERSON_FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
# So few blocks that sequences are preempted and come back with their output.
FEW_BLOCKS = (
    "--set",
    "engine.num_blocks=40",
    "--set",
    "engine.watermark_fraction=0",
    "--set",
    "engine.admission=watermark",
)


def white_space_ids() -> list[int]:
    tokenizer = load_model_text(resolve_model_path(MODEL)).tokenizer
    return [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.token_bytes(token_id).isspace()][:300]


async def ask(client: openai.AsyncOpenAI, seed: int, **fields: Any) -> tuple[str, str]:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        seed=seed,
        **({"max_tokens": 160} | fields),
    )
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


async def test_answers_of_the_real_model_have_their_form(running_octavo: StartOctavo) -> None:
    with running_octavo(*FEW_BLOCKS) as octavo:
        async with client_of(octavo) as client:
            people = await asyncio.gather(*(ask(client, seed, response_format=PERSON_FORMAT) for seed in range(12)))
            pattern, _ = await ask(client, 1, extra_body={"structured_outputs": {"regex": r"[A-Z]{3}-\d{4}"}})
            choice, _ = await ask(client, 2, extra_body={"structured_outputs": {"choice": ["red", "blue"]}})
            cut, cut_reason = await ask(client, 3, response_format=PERSON_FORMAT, max_tokens=4)
            plain, _ = await ask(client, 4, max_tokens=8)
            # TSO-06: what the model would rather say is white space.
            bias = {str(token_id): 20 for token_id in white_space_ids()}
            fields: dict[str, Any] = {"response_format": PERSON_FORMAT, "logit_bias": bias, "max_tokens": 500}
            pressed = [await ask(client, seed, **fields) for seed in (5, 6)]
            with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
                await ask(
                    client, 5, extra_body={"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}
                )

    for text, reason in [*people, *pressed]:
        assert reason == "stop"
        jsonschema.validate(json.loads(text), PERSON)
    assert re.fullmatch(r"[A-Z]{3}-\d{4}", pattern)
    assert choice in ("red", "blue")
    assert (cut_reason, cut[:1]) == ("length", "{")
    assert plain
    assert refused.value.param == "structured_outputs.json"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["llama3", "mistral", "mistral_named", "deepseek_v3", "deepseek_v31"])
async def test_the_real_model_calls_in_every_form(running_octavo: StartOctavo, form: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "describe", "parameters": PERSON}}
    with running_octavo("--set", f"gateway.tool_format={form}") as octavo:
        async with client_of(octavo) as client:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Describe Ann, who is 30 and has a cat."}],
                tools=[tool],
                tool_choice="required",
                max_tokens=400,
                parallel_tool_calls=False,
            )

    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, answer.choices[0].finish_reason, message.content) == (
        "describe",
        "tool_calls",
        None,
    )
    jsonschema.validate(json.loads(call.function.arguments), PERSON)


async def test_a_required_call_of_the_real_model_is_right_and_streamed(running_octavo: StartOctavo) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Describe Ann, who is 30 and has a cat."}],
        "tools": [{"type": "function", "function": {"name": "describe", "parameters": PERSON}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 160,
    }
    with running_octavo() as octavo:
        async with client_of(octavo) as client:
            whole = await client.chat.completions.create(**fields)
            stream = await client.chat.completions.create(**fields, stream=True)
            choices = [chunk.choices[0] async for chunk in stream if chunk.choices]
            response = await client.responses.create(
                model=MODEL,
                input="Describe Ann, who is 30 and has a cat.",
                tools=[{"type": "function", "name": "describe", "parameters": PERSON, "strict": True}],
                tool_choice="required",
                parallel_tool_calls=False,
                max_output_tokens=160,
            )
        async with anthropic.AsyncAnthropic(base_url=octavo.base_url, api_key="none", max_retries=0) as other:
            told = await other.messages.create(
                model=MODEL,
                max_tokens=160,
                messages=[{"role": "user", "content": "Describe Ann, who is 30 and has a cat."}],
                tools=[{"name": "describe", "input_schema": PERSON}],
                tool_choice={"type": "tool", "name": "describe", "disable_parallel_tool_use": True},
            )

    (item,) = response.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), PERSON)
    (block,) = told.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, PERSON)
    assert (block.name, told.stop_reason) == ("describe", "tool_use")
    message = whole.choices[0].message
    assert message.tool_calls is not None
    assert message.content is None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, whole.choices[0].finish_reason) == ("describe", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), PERSON)
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    assert parts[0].function is not None
    assert (parts[0].index, parts[0].type, parts[0].function.name) == (0, "function", "describe")
    assert "".join((part.function.arguments or "") for part in parts if part.function) == call.function.arguments
    assert choices[-1].finish_reason == "tool_calls"
    assert len(parts) > 5
