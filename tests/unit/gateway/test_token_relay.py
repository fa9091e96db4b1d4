"""Tokens written from within a step: the same bytes as by the long way, and none lost where it is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.obs.metrics import GatewayMetrics
from libs.text import ModelText
from services.gateway.accounting import Ledger, RequestAccount, RequestIdentity
from services.gateway.answer_format import AnswerFormat, AnswerHead, ChoiceDelta, WholeChoice
from services.gateway.anthropic_answers import MessageFormat
from services.gateway.audit import NoAudit
from services.gateway.engine_streams import EngineStreams
from services.gateway.generation_options import GenerationOptions, parse_generation_options
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.openai_answers import ChatFormat
from services.gateway.openai_text_answers import TextFormat
from services.gateway.output_text import OutputText
from services.gateway.text_preparation import PreparedPrompt
from services.gateway.token_relay import JsonPieces, TokenRelay, WholeRelay
from tests.fakes.fake_generation_engine import Script
from tests.patience import PATIENCE_SECONDS
from tests.unit.gateway.conftest import StartEngine, submission
from tests.unit.gateway.test_engine_streams import Reader

HEAD = AnswerHead("id", 1700000000, "tiny")
PROMPT = PreparedPrompt([5, 6], [])
VOCAB_SIZE = 49152


class Wire:
    """A connection that takes everything, until it is full."""

    def __init__(self) -> None:
        self.data = b""
        self.is_clear = True

    def write_now(self, data: bytes) -> None:
        assert self.is_clear
        self.data += data


def new_account() -> RequestAccount:
    metrics = GatewayMetrics(CollectorRegistry())
    ledger = Ledger(
        gateway_id="g", audit=NoAudit(), metrics=metrics, monotonic=lambda: 5.0, wall=lambda: 1700000000.0
    )
    return ledger.open(RequestIdentity("r", None, "t", "/v1/chat/completions"))


def options_of(**fields: object) -> GenerationOptions:
    return parse_generation_options(
        fields, vocab_size=VOCAB_SIZE, max_output_tokens=None, num_logprobs=None, num_echoed_logprobs=None
    )


def formats(options: GenerationOptions, model_text: ModelText) -> list[AnswerFormat]:
    shapes = LogprobShapes(model_text.tokenizer)
    return [
        ChatFormat(HEAD, options, PROMPT, shapes),
        TextFormat(HEAD, options, [PROMPT], shapes),
        MessageFormat(HEAD, PROMPT),
    ]


def by_the_long_way(answer: AnswerFormat, output: OutputText, steps: Sequence[Sequence[int]]) -> bytes:
    return b"".join(answer.events(ChoiceDelta(0, output.take(step, None))) for step in steps)


def by_relay(answer: AnswerFormat, output: OutputText, steps: Sequence[Sequence[int]], pieces: JsonPieces) -> bytes:
    wire, account = Wire(), new_account()
    first = by_the_long_way(answer, output, steps[:1])
    template = answer.text_template(0)
    if template is None:
        # A message has no block of text yet; its tokens come to its task until it has.
        assert isinstance(answer, MessageFormat)
        return first + by_the_long_way(answer, output, steps[1:])
    relay = TokenRelay(wire, template, output, account, pieces)
    for step in steps[1:]:
        assert relay.take(step, 5.0)
        # Some steps are written together.
        if len(step) == 1:
            relay.flush()
    relay.flush()
    assert account.num_completion_tokens == sum(map(len, steps[1:]))
    return first + wire.data


def draw_steps(model_text: ModelText, data: st.DataObject) -> list[list[int]]:
    """Tokens of difficult text, of bytes and of anything, cut into steps; the first one is a whole word."""
    text = data.draw(st.text(alphabet='a\\"\n\x00 é😀🦜e\u0301<|', max_size=12))
    mixed = model_text.tokenizer.encode(text, allow_special=False)
    others = st.integers(0, 300) | st.integers(0, VOCAB_SIZE + 3)
    token_ids = data.draw(st.permutations(mixed)) + data.draw(st.lists(others, max_size=8))
    sizes = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=len(token_ids), max_size=len(token_ids)))
    steps, rest = [[7]], list(token_ids)
    for size in sizes:
        steps += [rest[:size]] if rest else []
        rest = rest[size:]
    return steps


@given(data=st.data())
def test_a_relay_writes_what_the_long_way_writes(model_text: ModelText, data: st.DataObject) -> None:
    steps = draw_steps(model_text, data)
    options = options_of(skip_special_tokens=data.draw(st.booleans()))

    for long, short in zip(formats(options, model_text), formats(options, model_text), strict=True):
        outputs = [OutputText(model_text.tokenizer, options) for _ in range(2)]
        relayed = by_relay(short, outputs[1], steps, JsonPieces(model_text.tokenizer))

        assert relayed == by_the_long_way(long, outputs[0], steps)
        assert outputs[0].num_tokens == outputs[1].num_tokens
        # What is not yet a character is still there.
        assert outputs[0].take([], None) == outputs[1].take([], None)


@given(data=st.data())
def test_a_whole_answer_has_what_the_long_way_gives(model_text: ModelText, data: st.DataObject) -> None:
    steps, options = draw_steps(model_text, data), options_of()
    outputs = [OutputText(model_text.tokenizer, options) for _ in range(2)]
    long, short, account = WholeChoice(), WholeChoice(), new_account()
    relay = WholeRelay(short, outputs[1], account)

    for step in steps:
        long.add(ChoiceDelta(0, outputs[0].take(step, None)))
        assert relay.take(step, 5.0)
        relay.flush()

    assert short == long
    assert account.num_completion_tokens == outputs[1].num_tokens == outputs[0].num_tokens


def test_a_full_connection_takes_no_token(model_text: ModelText) -> None:
    options = options_of()
    (answer, *_) = formats(options, model_text)
    output, account, wire = OutputText(model_text.tokenizer, options), new_account(), Wire()
    by_the_long_way(answer, output, [[7]])
    template = answer.text_template(0)
    assert template is not None
    relay = TokenRelay(wire, template, output, account, JsonPieces(model_text.tokenizer))
    wire.is_clear = False

    assert not relay.take([8], 5.0)
    relay.flush()

    assert wire.data == b""
    assert (output.num_tokens, account.num_completion_tokens) == (1, 0)


def test_chunks_that_say_more_than_text_have_no_template(model_text: ModelText) -> None:
    continuous = {"stream_options": {"continuous_usage_stats": True}, "stream": True}
    for fields in ({"return_token_ids": True}, continuous):
        options = options_of(**fields)
        for answer in formats(options, model_text)[:2]:
            by_the_long_way(answer, OutputText(model_text.tokenizer, options), [[7]])
            assert answer.text_template(0) is None


class Bucket:
    """A relay that takes tokens until it is full."""

    def __init__(self, size: int) -> None:
        self.token_ids: list[int] = []
        self.is_flushed = True
        self._size = size

    def take(self, token_ids: Sequence[int], now: float) -> bool:
        if len(self.token_ids) + len(token_ids) > self._size:
            return False
        self.token_ids += token_ids
        self.is_flushed = False
        return True

    def flush(self) -> None:
        self.is_flushed = True


async def test_what_a_relay_refuses_comes_to_the_reader_in_order(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine(script=Script(token_ids=list(range(1, 11)), step_delay_seconds=0.001))
    reader, bucket = Reader(streams, engine.address, submission()), Bucket(4)
    reader.request.relay_choice(0, bucket)

    async with asyncio.timeout(PATIENCE_SECONDS):
        await reader.request.wait_ended()
    step = await reader.next_step()

    assert bucket.token_ids == [1, 2, 3, 4]
    assert bucket.is_flushed
    assert step.token_ids == [5, 6, 7, 8, 9, 10]
    assert step.end is not None
    assert reader.request.num_received_tokens == 10
