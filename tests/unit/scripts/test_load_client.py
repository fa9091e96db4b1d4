from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from aiohttp import web

from libs.text import load_model_text, resolve_model_path
from scripts.bench_ttft import arrival_times, keeps_promise
from scripts.load_client import LoadClient, Prompt, PromptMaker, Stream, percentile_ms, summary
from scripts.server_processes import share_of_python_tiers, spent
from services.supervisor.ports import claim_port

MODEL = resolve_model_path("smollm2-135m-instruct")


def stream(ttft: float = 0.1, *gaps: float, error: str | None = None) -> Stream:
    return Stream(error, 10, 1 + len(gaps), ttft, gaps)


def test_a_prompt_has_the_tokens_that_were_asked_for() -> None:
    tokenizer = load_model_text(MODEL).tokenizer
    maker = PromptMaker(tokenizer, seed=1)

    texts = [maker.words(count) for count in (1, 128, 1_000)]

    assert [len(tokenizer.encode(text, allow_special=False)) for text in texts] == [1, 128, 1_000]
    assert maker.words(20) != maker.words(20)
    assert PromptMaker(tokenizer, seed=1).words(1) == texts[0]


def test_an_exported_tokenizer_gives_the_same_tokens() -> None:
    tokenizer = load_model_text(MODEL).tokenizer
    exported = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    text = "<|im_start|>user\nWhat's 1,234 × 5? Größe 你好\n\n<|im_end|>"

    assert exported.encode(text).ids == tokenizer.encode(text, allow_special=True)


def test_arrivals_are_a_seeded_poisson_process() -> None:
    times = arrival_times(20.0, 500.0, seed=3)

    assert times == arrival_times(20.0, 500.0, seed=3)
    assert times == sorted(times)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    # The gaps of a Poisson process deviate as much as they are long.
    assert np.std(np.diff(times)) == pytest.approx(1 / 20, rel=0.05)
    assert arrival_times(0.001, 1.0, seed=3) == [0.0]


@pytest.mark.parametrize(
    ("streams", "is_kept"),
    [
        ([stream(0.19, 0.02, 0.025)], True),
        ([stream(0.21, 0.02)], False),
        ([stream(0.19, *[0.02] * 50, 0.03)], False),
        ([stream(0.19, *[0.02] * 99, 0.03)], True),
        ([stream(0.19, 0.02, error="http 500")], False),
        ([stream(0.1)] * 99 + [stream(0.9)], True),
    ],
)
def test_a_promise_is_kept_when_a_hundredth_is_late_at_most(streams: list[Stream], is_kept: bool) -> None:
    assert keeps_promise(streams) is is_kept


def test_a_summary_counts_what_came() -> None:
    figures = summary([stream(0.1, 0.01, 0.03), stream(0.3, 0.02), stream(0.0, error="HTTP 503")], 2.0)

    assert figures["num_requests"] == 3
    assert figures["num_failed"] == 1
    assert figures["num_output_tokens"] == 6
    assert figures["output_tokens_per_second"] == 3.0
    assert (figures["ttft_p50_ms"], figures["ttft_p99_ms"]) == (300.0, 300.0)
    assert (figures["itl_p50_ms"], figures["itl_p99_ms"]) == (20.0, 30.0)
    assert percentile_ms([], 50) == 0.0


def test_processor_time_is_shared_between_the_python_tiers_and_the_rest() -> None:
    used = spent(
        {"worker-0": 1.0, "gateway-0": 5.0},
        {"worker-0": 9.0, "gateway-0": 5.5, "engine-0": 0.5, "valkey-server-0": 1.0},
    )

    assert used == {"worker-0": 8.0, "gateway-0": 0.5, "engine-0": 0.5, "valkey-server-0": 1.0}
    assert share_of_python_tiers(used) == 0.1
    assert share_of_python_tiers({"vllm-0": 3.0}) is None
    assert share_of_python_tiers({}) is None


async def test_a_stream_is_read_with_its_times(free_port: int) -> None:
    bodies: list[dict[str, object]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        chunks: list[dict[str, object]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": text}}]} for text in ("a", "b", "c")]
        chunks += [{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}]
        for chunk in chunks:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", free_port).start()
    client = await LoadClient.connect(f"http://127.0.0.1:{free_port}")
    try:
        three, four = await client.send(Prompt("x", 3)), await client.send(Prompt("x", 4))
    finally:
        await client.close()
        await runner.cleanup()

    assert bodies[0]["model"] == "small"
    assert bodies[0]["ignore_eos"] is True
    assert (three.error, three.num_prompt_tokens, three.num_output_tokens) == (None, 5, 3)
    assert 0 < three.ttft_seconds < 10
    assert len(three.itl_seconds) == 2
    assert four.error == "3 tokens came instead of 4"


@pytest.fixture
def free_port() -> int:
    return claim_port("127.0.0.1", 0)
