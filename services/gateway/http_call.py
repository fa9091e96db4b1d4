"""A request over HTTP: its body is read, and its answer is one body or server-sent events."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from services.gateway.body_memory import BodyMemory
from services.gateway.client_call import LONG_BODY_BYTES, Caller, RequestBody
from services.gateway.http_body import BodyLimits, read_json_body
from services.gateway.json_body import JsonBody
from services.gateway.latency_receipt import Segment
from services.gateway.sse import SseWriter


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request and the connection that it came by."""

    http_request: web.Request
    caller: Caller
    body_limits: BodyLimits
    body_memory: BodyMemory

    @property
    def remaining_seconds(self) -> None:
        """HTTP clients do not tell how long they wait; who has waited enough leaves."""
        return None

    async def read_body(self) -> RequestBody:
        """Return the body; raises OctavoError for one that is no JSON object."""
        times = self.caller.times
        body = await read_json_body(self.http_request, self.body_limits, self.body_memory.lend)
        times.lap(Segment.RECEIVE)
        fields = await _in_turns(body)
        times.lap(Segment.PARSE)
        return RequestBody(fields, body.num_bytes)

    def new_writer(self, deadline: float) -> SseWriter:
        """Return what writes the answer."""
        return SseWriter(self.http_request, deadline=deadline)


async def _in_turns(body: JsonBody) -> dict[str, Any]:
    """Read a body; each piece of a long one gets a turn of the event loop for itself."""
    if body.num_bytes <= LONG_BODY_BYTES:
        return body.parse()
    with closing(body.parse_in_pieces()) as pieces:
        while True:
            await asyncio.sleep(0)
            try:
                next(pieces)
            except StopIteration as end:
                fields: dict[str, Any] = end.value
                break
    await asyncio.sleep(0)
    return fields
