"""Requests to a real gateway process and what comes back, for tests of many requests and few words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.integration.gateway_process import MODEL_NAME, Stand, events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Say hi."}]
# A stream that fails ends its connection, so a request that follows must not use it.
ONCE = {"Connection": "close"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        """The body; raises for one that is no JSON in UTF-8."""
        return json.loads(self.raw.decode())

    @property
    def events(self) -> list[Any]:
        """The events of a stream, read strictly."""
        assert self.headers["Content-Type"].startswith("text/event-stream"), self.raw
        return events_of(self.raw)

    @property
    def request_id(self) -> str:
        """The request's id in the audit."""
        return self.headers["X-Octavo-Request-Id"]

    @property
    def error(self) -> dict[str, Any]:
        """The error, of which every part is checked."""
        body = self.json
        assert body.keys() == {"error"}
        error: dict[str, Any] = body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert "Traceback" not in error["message"]
        return error


async def post(stand: Stand, path: str, fields: Mapping[str, Any]) -> Answer:
    """Post JSON; the model is added unless it is given."""
    # Python's NaN and Infinity go out as the bare tokens that are no JSON.
    return await post_raw(stand, path, json.dumps({"model": MODEL_NAME, **fields}).encode())


async def post_raw(stand: Stand, path: str, body: bytes) -> Answer:
    """Post bytes that say that they are JSON."""
    headers = {"Content-Type": "application/json", **ONCE}
    async with stand.gateway.http.post(path, data=body, headers=headers) as response:
        return Answer(response.status, dict(response.headers), await response.read())


async def chat(stand: Stand, **fields: Any) -> Answer:
    """Ask for a chat completion."""
    return await post(stand, CHAT, {"messages": QUESTION} | fields)


async def text(stand: Stand, **fields: Any) -> Answer:
    """Ask for a plain completion."""
    return await post(stand, TEXT, {"prompt": "Say hi."} | fields)


def refused(answer: Answer, *, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """Check that a request was refused as a plain answer, also if it asked for a stream; returns the error."""
    assert answer.status == status, answer.raw[:500]
    assert answer.headers["Content-Type"].startswith("application/json")
    if param is not None:
        assert answer.error["param"] == param
    return answer.error


async def still_serves(stand: Stand) -> None:
    """Check that the next request is answered as if nothing had been."""
    answer = await chat(stand, max_tokens=4)
    assert answer.status == 200, answer.raw[:500]


def chat_parts(events: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    return [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]


def streamed_text(events: list[Any]) -> str:
    """The text of a stream of one choice, of a chat or a plain completion."""
    parts = chat_parts(events)
    return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)
