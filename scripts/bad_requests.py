"""Requests that cannot be served and are expensive for a server that finds out late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.sse_load import request_bytes

_LARGE_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A whole HTTP request and what is wrong with it."""

    name: str
    raw: bytes


def bad_requests(model: str) -> Iterator[BadRequest]:
    """Make them all."""

    def chat(**fields: Any) -> bytes:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields}
        return request_bytes(json.dumps(body).encode())

    def prompt(text: str) -> bytes:
        return request_bytes(json.dumps({"model": model, "prompt": text}).encode(), path="/v1/completions")

    deep = 100_000
    words = "the quick brown fox " * (_LARGE_BYTES // 20)
    yield BadRequest("prompt of 4 MB", prompt(words))
    yield BadRequest("prompt of 4 MB without a space", prompt("a" * _LARGE_BYTES))
    yield BadRequest("prompt of 4 MB of emoji", prompt("🙂" * (_LARGE_BYTES // 12)))
    yield BadRequest("message of 4 MB", chat(messages=[{"role": "user", "content": words}]))
    yield BadRequest("100,000 messages", chat(messages=[{"role": "user", "content": "a"}] * 100_000))
    yield BadRequest("nesting of 100,000", request_bytes(b'{"model":' + b"[" * deep + b"]" * deep + b"}"))
    yield BadRequest("broken after 4 MB", request_bytes(b'{"model":"' + b"a" * _LARGE_BYTES))
    yield BadRequest("invalid UTF-8", request_bytes(b'{"model":"\xff\xfe"}'))
    yield BadRequest("logit_bias of 200,000", chat(logit_bias={str(index): 1 for index in range(200_000)}))
    yield BadRequest("100,000 stop strings", chat(stop=[f"stop {index}" for index in range(100_000)]))
    yield BadRequest("stop string of 1 MB", chat(stop=["a" * 1_000_000]))
    properties = {f"field_{index}": {"type": "string", "pattern": "[a-z]{1,50}"} for index in range(20_000)}
    schema = {"name": "large", "schema": {"type": "object", "properties": properties}}
    yield BadRequest("schema of 1 MB", chat(response_format={"type": "json_schema", "json_schema": schema}))
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        nested = {"type": "object", "properties": {"a": nested}}
    deep_schema = {"name": "deep", "schema": nested}
    yield BadRequest(
        "schema nested 400 deep", chat(response_format={"type": "json_schema", "json_schema": deep_schema})
    )
    tokens = list(range(10)) * 100_000
    raw = json.dumps({"model": model, "prompt": tokens}).encode()
    yield BadRequest("prompt of 1,000,000 token ids", request_bytes(raw, path="/v1/completions"))
    # As many values as a body may have: these are read to their end.
    raw = json.dumps({"model": model, "prompt": tokens[:500_000]}).encode()
    yield BadRequest("prompt of 500,000 token ids", request_bytes(raw, path="/v1/completions"))
    parts = [{"type": "text", "text": "a"}] * 15
    yield BadRequest(
        "30,000 parts of messages, one wrong", chat(messages=[{"role": "user", "content": parts}] * 2000, n=0)
    )
    yield BadRequest("10,000 unknown fields", chat(**{f"unknown_{index}": index for index in range(10_000)}))
