"""One trace across gateway, router and engine, sent by real processes to a real OTLP endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp

from libs.errors import InvalidLogits, WorkerLost
from tests.fakes.fake_generation_engine import Script
from tests.fakes.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.integration.gateway_process import MODEL_NAME, open_stand
from tests.integration.octavo import RunningOctavo

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STUB = ("--set", "worker.runner=stub", "--set", "worker.stub_step_seconds=0.005")
SERVER = 2  # SPAN_KIND_SERVER
BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True}


def _traceparent(flags: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}


async def _post(base_url: str, headers: dict[str, str], **fields: Any) -> int:
    async with (
        aiohttp.ClientSession(base_url) as http,
        http.post("/v1/chat/completions", json=BODY | fields, headers=headers) as response,
    ):
        await response.read()
        return response.status


async def test_a_clients_trace_goes_through_gateway_router_and_engine(running_octavo: StartOctavo) -> None:
    async with OtlpReceiver() as receiver:
        # Starting blocks; the receiver has nothing to take yet.
        with running_octavo(*STUB, "--otlp-endpoint", receiver.endpoint) as octavo:
            assert await _post(octavo.base_url, _traceparent("01"), stream=True) == 200
            # Nobody wants to see this one.
            assert await _post(octavo.base_url, _traceparent("00")) == 200
            spans = await receiver.until(
                lambda spans: (
                    {span.service for span in spans} == {"octavo-gateway", "octavo-router", "octavo-engine"}
                )
            )
            await asyncio.to_thread(octavo.process.send_signal, 2)
            await asyncio.to_thread(octavo.wait_for_exit)

    assert {span.trace_id for span in spans} == {TRACE_ID}
    by_name = {span.name: span for span in spans}
    assert len(by_name) == len(spans), "the trace that nobody samples was sent too"
    server, chat = by_name["POST /v1/chat/completions"], by_name[f"chat {MODEL_NAME}"]
    engine = by_name["octavo.engine.generate"]
    assert (server.parent_id, server.kind) == (PARENT_ID, SERVER)
    assert chat.parent_id == server.span_id
    assert {by_name["octavo.router.place"].parent_id, engine.parent_id} == {chat.span_id}
    for name in ("queue", "prefill", "decode"):
        assert by_name[f"octavo.engine.{name}"].parent_id == engine.span_id
    for name in ("auth", "parse", "template", "tokenize", "hash", "router_queue", "first_token_wait", "answer"):
        assert by_name[f"octavo.{name}"].parent_id == chat.span_id
    _check_times(server, spans)
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["http.route"] == "/v1/chat/completions"
    told = chat.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == MODEL_NAME
    assert told["gen_ai.usage.output_tokens"] == engine.attributes["octavo.output_tokens"] == 5
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert chat.event_names == ["first_token"]
    segments = [value for name, value in told.items() if name.startswith("octavo.segment.")]
    # Each is rounded down to microseconds.
    assert 0 <= told["octavo.wall_us"] - sum(segments) - told["octavo.unattributed_us"] <= len(segments) + 1


def _check_times(server: ReceivedSpan, spans: list[ReceivedSpan]) -> None:
    slack_ns = 50_000_000
    for span in spans:
        assert span.start_ns <= span.end_ns
        # All processes are on one machine, whose clocks agree.
        assert server.start_ns - slack_ns <= span.start_ns, span.name
        assert span.end_ns <= server.end_ns + slack_ns, span.name


async def test_a_gateway_begins_traces_itself_and_says_what_went_wrong(tmp_path: Path) -> None:
    async with OtlpReceiver() as receiver, open_stand(tmp_path, "--otlp-endpoint", receiver.endpoint) as stand:
        stand.engine.scripts.append(Script(error=InvalidLogits("The logits are not numbers.")))
        failed = await _post(stand.gateway.base_url, {})
        refused = await _post(stand.gateway.base_url, {}, temperature="hot")
        spans = await receiver.until(
            lambda spans: sum(span.name == "POST /v1/chat/completions" for span in spans) == 2
        )

    assert (failed, refused) == (500, 400)
    servers = {span.attributes["http.response.status_code"]: span for span in spans if not span.parent_id}
    assert servers[500].has_error
    # A client's mistake is no error of the server's.
    assert not servers[400].has_error
    [chat] = [span for span in spans if span.name == f"chat {MODEL_NAME}"]
    assert (chat.parent_id, chat.has_error) == (servers[500].span_id, True)
    # The engine gets the trace of the generation, not the client's or none.
    _, trace_id, span_id, flags = stand.engine.submits[0].traceparent.split("-")
    assert (trace_id, span_id) == (chat.trace_id, chat.span_id)
    assert int(flags, 16) & 1, "the engine's spans would not be kept"


async def test_the_time_without_an_engine_is_a_span(tmp_path: Path) -> None:
    async with OtlpReceiver() as receiver, open_stand(tmp_path, "--otlp-endpoint", receiver.endpoint) as stand:
        token_ids = stand.encode("one two three")
        stand.engine.scripts.append(Script(token_ids=token_ids[:1], error=WorkerLost("The worker is gone.")))
        stand.engine.default_script = Script(token_ids=token_ids, goes_on=True)

        assert await _post(stand.gateway.base_url, _traceparent("01"), stream=True) == 200
        spans = await receiver.until(lambda spans: any(span.name.startswith("POST") for span in spans))

    by_name = {span.name: span for span in spans}
    server, chat, resume = (
        by_name[name] for name in ("POST /v1/chat/completions", f"chat {MODEL_NAME}", "octavo.resume")
    )
    assert resume.parent_id == chat.span_id
    _check_times(server, spans)
    assert chat.attributes["octavo.retries"] == 1
    assert 0 < chat.attributes["octavo.segment.resume_us"] <= (resume.end_ns - resume.start_ns) // 1_000 + 50_000


async def test_without_an_endpoint_a_clients_context_goes_on_as_it_came(tmp_path: Path) -> None:
    async with open_stand(tmp_path) as stand:
        await _post(stand.gateway.base_url, _traceparent("01"))

        assert stand.engine.submits[0].traceparent == _traceparent("01")["traceparent"]
        assert not stand.engine.submits[0].HasField("stall_bound")


async def test_an_endpoint_that_is_away_costs_no_request(tmp_path: Path) -> None:
    async with open_stand(tmp_path, "--otlp-endpoint", "http://127.0.0.1:9") as stand:
        assert await _post(stand.gateway.base_url, {}) == 200
        stand.gateway.terminate()
        assert await stand.gateway.wait_exit() == 0
