"""What the gateway's unit tests share: the text side of a real model, and fakes of the other tiers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from libs.obs.metrics import GatewayMetrics
from libs.text import ModelText, load_model_text, resolve_model_path
from services.gateway.engine_directory import EngineDirectory
from services.gateway.engine_streams import EngineStreams
from services.gateway.generation import SamplingParams, Submission, new_choices
from services.gateway.generation_options import GenerationOptions, parse_generation_options
from services.gateway.peers import PlacementAsk
from services.gateway.placement import Placements
from tests.fakes.fake_generation_engine import FakeGenerationEngine, Script

MODEL_NAME = "smollm2-135m-instruct"
StartEngine = Callable[..., Awaitable[FakeGenerationEngine]]


@pytest.fixture(scope="session")
def model_text() -> ModelText:
    return load_model_text(resolve_model_path(MODEL_NAME))


@pytest.fixture
async def start_engine(model_text: ModelText) -> AsyncIterator[StartEngine]:
    """Start fake engines; they are stopped at the end."""
    async with AsyncExitStack() as stack:

        async def start(engine_id: str = "fake-0", script: Script | None = None) -> FakeGenerationEngine:
            engine = FakeGenerationEngine(tokenizer_digest=model_text.tokenizer_digest, engine_id=engine_id)
            engine.default_script = script or Script(token_ids=[1, 2, 3])
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine

        yield start


@pytest.fixture
async def streams() -> AsyncIterator[EngineStreams]:
    async with asyncio.TaskGroup() as tasks:
        streams = EngineStreams(max_requests=8, tasks=tasks)
        yield streams
        streams.close()


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics(CollectorRegistry())


def submission(
    request_id: str = "r-1",
    *,
    max_output_tokens: int = 16,
    num_choices: int = 1,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> Submission:
    """A small request as an engine takes it."""
    return Submission(
        request_id=request_id,
        tenant_id="default",
        traceparent=None,
        prompt_token_ids=[5, 6, 7],
        sampling_params=SamplingParams(
            temperature=0.0,
            top_p=None,
            top_k=None,
            min_p=None,
            seed=1,
            max_output_tokens=max_output_tokens,
            min_output_tokens=0,
            stop_token_ids=(),
            ignore_eos=False,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        cache_salt=b"salt",
        choices=new_choices(num_choices),
    )


def ask_of(engine: FakeGenerationEngine, request_id: str = "r-1") -> PlacementAsk:
    """The same request as a router knows it."""
    return PlacementAsk(
        request_id=request_id,
        tenant_id="default",
        traceparent=None,
        model_name=MODEL_NAME,
        num_prompt_tokens=3,
        max_output_tokens=16,
        prefix_hashes=[],
        hash_contract=engine.hash_contract,
    )


async def directory_of(*engines: FakeGenerationEngine) -> EngineDirectory:
    """A directory that has looked at these engines once; the first one's hash contract is the gateway's."""
    directory = EngineDirectory(
        model_name=MODEL_NAME,
        hash_contract=engines[0].hash_contract,
        configured_addresses=[engine.address for engine in engines],
        registry=None,
        router=None,
        refresh_seconds=60.0,
        answer_timeout_seconds=30.0,
    )
    await directory.refresh()
    return directory


def own_placements(directory: EngineDirectory, metrics: GatewayMetrics) -> Placements:
    """Placements of a gateway without a router."""
    return Placements(router=None, directory=directory, metrics=metrics, random_source=random.Random(0))


def options(**fields: Any) -> GenerationOptions:
    """Options as a request with these fields has them."""
    return parse_generation_options(fields, vocab_size=49152, max_output_tokens=fields.get("max_tokens"))
