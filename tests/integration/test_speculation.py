"""Speculation through the whole system with the real model: what clients get is what they get without.

SKV-10 and SKV-11 of the known faults (vllm-project/vllm#47616, #41758).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import jsonschema
import pytest

from services.supervisor.ports import claim_port
from tests.integration.gateway_process import events_of
from tests.integration.octavo import RunningOctavo
from tests.integration.test_real_model import MODEL, StartOctavo
from tests.integration.test_worker_metrics import samples_of
from tests.unit.worker.kernels.native_models import needs_kernels

pytestmark = pytest.mark.asyncio

SPECULATION = ("--set", "engine.speculation=ngram", "--set", "engine.min_ngram_tokens=1")
LIST_OF_NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"values": {"type": "array", "items": {"enum": [10, 20]}, "minItems": 12, "maxItems": 16}},
    "required": ["values"],
    "additionalProperties": False,
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": LIST_OF_NUMBERS}}}
PENALTIES = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.05}
_MAX_REQUESTS_AT_ONCE = 8

Request = tuple[str, dict[str, Any]]
Body = dict[str, Any]


def completion(prompt: str | list[int], **fields: Any) -> Request:
    return "/v1/completions", {"prompt": prompt, "max_tokens": 48, **fields}


def chat(text: str, **fields: Any) -> Request:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 96, **fields}


def repetitive_prompts(count: int) -> list[str]:
    words = (
        "ha",
        "one two",
        "red, green, blue,",
        "def f(x):\n    return x\n\n",
        "10 20 30",
        "la la di",
        "tick tock",
    )
    endings = ("", " And again: ", "\n", " yes ")
    return [
        words[index % len(words)]
        + (" " + words[index % len(words)]) * (3 + index % 5)
        + endings[index % len(endings)]
        for index in range(count)
    ]


def requests_of_skv_10() -> dict[str, Request]:
    """A stop string that ends inside a step's tokens, limits, stop ids and least lengths."""
    laugh = "ha ha ha ha"
    requests = {
        "stop string": completion(laugh, stop=[" ha ha ha"], logprobs=2),
        "stop string later": completion(laugh, stop=[" ha ha ha"], logprobs=0, min_tokens=7),
        "stop string shown": completion(laugh, stop=[" ha ha ha"], logprobs=2, include_stop_str_in_output=True),
        "stop of one token": completion("1, 2, 3, 1, 2, 3, 1, 2, 3, 1,", stop=["3"], logprobs=1),
        "least length": completion(laugh, min_tokens=20, max_tokens=30, stop_token_ids=[421], logprobs=0),
        "drawn": completion(laugh, temperature=0.8, seed=11, logprobs=2, n=3),
    }
    for count in range(1, 7):
        requests[f"at most {count}"] = completion(laugh, max_tokens=count, logprobs=1)
    # Of " ha", a comma, a space, "1", "8" and " the".
    for token_id in (421, 28, 216, 33, 40, 260):
        requests[f"stop at {token_id}"] = completion(
            "ha ha ha, 1 8 1 8 1 8, ha the ha the", stop_token_ids=[token_id], logprobs=0
        )
    return requests


def requests_of_skv_11(
    num_greedy: int, num_penalties: int, num_schemas: int, max_tokens: int
) -> dict[str, Request]:
    """Repetitive prompts, each as it is, with penalties, and held to a schema."""
    prompts = repetitive_prompts(num_greedy)
    return {
        **{f"greedy {index}": completion(prompt, max_tokens=max_tokens) for index, prompt in enumerate(prompts)},
        **{
            f"penalties {index}": completion(prompt, logprobs=1, max_tokens=max_tokens, **PENALTIES)
            for index, prompt in enumerate(prompts[:num_penalties])
        },
        **{
            f"schema {index}": chat(f"{prompt} Say 10 and 20 in turn as JSON.", **SCHEMA)
            for index, prompt in enumerate(prompts[:num_schemas])
        },
    }


async def answers_of(octavo: RunningOctavo, requests: Mapping[str, Request]) -> dict[str, Body]:
    """Return all answers, without what differs each time; some are streamed as well and must say the same."""
    gate = asyncio.Semaphore(_MAX_REQUESTS_AT_ONCE)
    async with aiohttp.ClientSession(octavo.base_url, timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def ask(name: str) -> tuple[str, Body]:
            path, fields = requests[name]
            body = {"model": MODEL, "temperature": 0, "return_token_ids": True} | fields
            async with gate, session.post(path, json=body) as response:
                answer = await response.json()
            assert response.status == 200, answer
            if name in requests_of_skv_10() and "n" not in body:
                assert await streamed(session, path, body) == said(answer), name
            return name, said(answer)

        return dict(await asyncio.gather(*map(ask, requests)))


def said(answer: Body) -> Body:
    choices = [
        {
            "text": choice.get("text", choice.get("message", {}).get("content")),
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]
    return {"choices": choices, "completion_tokens": answer["usage"]["completion_tokens"]}


async def streamed(session: aiohttp.ClientSession, path: str, body: Body) -> Body:
    """Stream the same request and put its parts together."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(path, json=body | options) as response:
        events = events_of(await response.read())
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    logprobs = {key: [value for part in parts for value in part[key]] for key in parts[0]} if parts else None
    text = "".join(choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices)
    whole = {
        "text": text,
        "token_ids": [token_id for choice in choices for token_id in choice.get("token_ids") or ()],
        "logprobs": logprobs,
        "finish_reason": choices[-1]["finish_reason"],
    }
    return {"choices": [whole], "completion_tokens": events[-2]["usage"]["completion_tokens"]}


def longest_prompts(max_model_len: int) -> dict[str, Request]:
    """Prompts that leave three places, fewer than there are drafts."""
    return {
        f"{left} left": completion([421] * (max_model_len - left), max_tokens=left, logprobs=0)
        for left in (1, 2, 3)
    }


@needs_kernels
@pytest.mark.slow
async def test_answers_with_speculation_are_those_without(running_octavo: StartOctavo) -> None:
    limits = ("--set", "engine.max_model_len=512")
    requests = {**requests_of_skv_10(), **requests_of_skv_11(8, 4, 2, 24), **longest_prompts(512)}

    with running_octavo(*limits) as octavo:
        expected = await answers_of(octavo, requests)
    port = claim_port("127.0.0.1", 0)
    flags = (*SPECULATION, "--set", "engine.num_draft_tokens=8", "--set", f"engine.metrics_port={port}")
    with running_octavo(*limits, *flags) as octavo:
        came = await answers_of(octavo, requests)
        samples = samples_of(port)

    for name in requests:
        assert came[name] == expected[name], name
    for name, answer in came.items():
        if name.startswith("schema"):
            jsonschema.validate(json.loads(answer["choices"][0]["text"]), LIST_OF_NUMBERS)
    num_drafts = samples["octavo_engine_draft_tokens_total", ""]
    num_accepted = samples["octavo_engine_accepted_draft_tokens_total", ""]
    assert 200 < num_accepted < num_drafts
    assert came["at most 4"]["completion_tokens"] == 4
    assert (
        came["stop string"]["choices"][0]["text"] + " ha ha ha" == came["stop string shown"]["choices"][0]["text"]
    )


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("num_ranks", "num_draft_tokens"), [(1, 4), (1, 8), (2, 4)])
async def test_fifty_repetitive_prompts_with_and_without_the_prefix_cache(
    running_octavo: StartOctavo, num_ranks: int, num_draft_tokens: int
) -> None:
    requests = requests_of_skv_11(50, 50, 50, 48)
    ranks = ("--tensor-parallel-size", str(num_ranks))
    with running_octavo(*ranks) as octavo:
        expected = await answers_of(octavo, requests)

    for has_cache in ("true", "false"):
        flags = (*ranks, *SPECULATION, "--set", f"engine.enable_prefix_caching={has_cache}")
        with running_octavo(*flags, "--set", f"engine.num_draft_tokens={num_draft_tokens}") as octavo:
            came = await answers_of(octavo, requests)

        for name in requests:
            assert came[name] == expected[name], (name, has_cache)


@pytest.mark.slow
async def test_answers_of_two_ranks_with_speculation_are_those_without(running_octavo: StartOctavo) -> None:
    flags = ("--tensor-parallel-size", "2", "--set", "engine.max_model_len=512")
    requests = {**requests_of_skv_10(), **requests_of_skv_11(16, 8, 4, 32), **longest_prompts(512)}
    with running_octavo(*flags) as octavo:
        expected = await answers_of(octavo, requests)

    with running_octavo(*flags, *SPECULATION, "--set", "engine.num_draft_tokens=8") as octavo:
        came = await answers_of(octavo, requests)

    # Both have two ranks, so that sums have one order: there are no near-ties to allow for.
    for name in requests:
        assert came[name] == expected[name], name
