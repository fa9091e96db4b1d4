"""What becomes of a request that is refused."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest

from libs.errors import ClientError
from libs.obs.metrics import GatewayMetrics
from libs.text import ModelText
from services.gateway.accounting import Ledger
from services.gateway.admission import Admission
from services.gateway.answers import AnswerSettings
from services.gateway.audit import NoAudit
from services.gateway.client_call import AnswerWriter, Caller, RequestBody
from services.gateway.completions import Completions, CompletionSettings
from services.gateway.endpoints import TEXT
from services.gateway.failover import Generations
from services.gateway.identity import Tenant
from services.gateway.limits.limiter import Limiter
from services.gateway.openai_schema import ModelFacts
from services.gateway.request_spans import RequestSpans
from services.gateway.shared_prefixes import SharedPrefixes
from services.gateway.text_preparation import TextPreparation
from tests.unit.gateway.conftest import MODEL_NAME


class Values(list[Any]):
    """A list whose end can be seen."""


class Call:
    """A request whose body is given to whoever reads it first."""

    caller = Caller(Tenant("t", b"salt"), "/v1/completions", "11111111-1111-4111-8111-111111111111")
    remaining_seconds = None

    def __init__(self, body: RequestBody) -> None:
        self._body: list[RequestBody] = [body]

    async def read_body(self) -> RequestBody:
        return self._body.pop()

    def new_writer(self, deadline: float) -> AnswerWriter[None]:
        return cast(AnswerWriter[None], UnopenedWriter())


class UnopenedWriter:
    """Nothing is written before a refusal."""

    is_open = False


@pytest.fixture
def text(model_text: ModelText) -> Iterator[TextPreparation]:
    shared = SharedPrefixes([], salt=b"", block_size=16)
    preparation = TextPreparation(model_text, shared, block_size=16, num_threads=1)
    yield preparation
    preparation.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def completions_of(text: TextPreparation, metrics: GatewayMetrics, tasks: asyncio.TaskGroup) -> Completions:
    return Completions(
        model=ModelFacts(MODEL_NAME, vocab_size=49152),
        text=text,
        admission=Admission(max_requests=1),
        # No request here comes so far.
        generations=cast(Generations, None),
        limiter=cast(Limiter, None),
        ledger=Ledger(gateway_id="g", audit=NoAudit(), metrics=metrics, monotonic=time.monotonic, wall=time.time),
        settings=CompletionSettings(
            request_timeout_seconds=10.0,
            default_max_tokens=None,
            stall_bound_seconds=1.0,
            answers=AnswerSettings(heartbeat_seconds=10.0, abort_settle_seconds=1.0),
        ),
        max_model_len=lambda: 8192,
        draw_seed=lambda: random.Random(0).getrandbits(64),
        tasks=tasks,
        spans=RequestSpans(),
    )


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("num_bytes", [100, 1_000_000])
@pytest.mark.parametrize("prompt", [[1, -1], [1] * 9000])
async def test_a_refused_body_does_not_wait_for_the_garbage_collector(
    text: TextPreparation, metrics: GatewayMetrics, num_bytes: int, prompt: list[int]
) -> None:
    values = Values(prompt)
    is_held = weakref.ref(values)
    call = Call(RequestBody({"model": MODEL_NAME, "prompt": values}, num_bytes))
    del values

    async with asyncio.TaskGroup() as tasks:
        # Not by pytest, which would keep the error.
        with suppress(ClientError):
            await completions_of(text, metrics, tasks).serve(call, TEXT)
            pytest.fail("it was served")

    assert is_held() is None
