"""Log-probabilities through the core: nobody's are lost, sent twice or given to another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from libs.errors import InternalError, InvalidRequest
from libs.logprobs import TokenLogprobs
from services.engine.core.logprobs import HandleLogprobs
from services.engine.core.request import Request, SequenceEnd
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import Admission, SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult
from tests.fakes.kv_worker import FakeKVWorker, digests_of, greedy, logprobs_of
from tests.fakes.requests import make_request

CONFIG = SchedulerConfig(
    num_blocks=64,
    block_size=4,
    max_model_len=200,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_waiting_sequences=64,
    eos_token_ids=(),
    watermark_fraction=0.0,
    max_steps_in_flight=2,
)


class Engine:
    """A scheduler, a worker, and what reached each handle."""

    def __init__(self, **limits: object) -> None:
        self.config = replace(CONFIG, **limits)  # type: ignore[arg-type]  # Limits pass through.
        self.scheduler = Scheduler(self.config)
        self.worker = FakeKVWorker(self.config.num_blocks, self.config.block_size, greedy(1000))
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.output: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.prompt: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.ends: dict[int, SequenceEnd] = {}
        self._flights: deque[tuple[SchedulerOutput, StepResult]] = deque()

    def add(self, request: Request) -> tuple[int, ...]:
        return self.scheduler.add(request, 0.0)

    def run_step(self) -> bool:
        """Send what can be sent and take one answer; returns whether there was anything to do."""
        while self.scheduler.can_schedule and (output := self.scheduler.schedule(0.0)) is not None:
            self.worker.take(output)
            self._flights.append((output, self.worker.execute(output)))
        if not self._flights:
            return False
        events = self.scheduler.apply(self._flights.popleft()[1], 0.0)
        for handle, token_id in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            self.tokens[handle].append(token_id)
        _note(events.output_logprobs, self.output)
        _note(events.prompt_logprobs, self.prompt)
        self.ends.update((end.handle, end) for end in events.ends)
        assert self.scheduler.check_integrity() == []
        return True

    def run(self) -> None:
        for _ in range(2_000):
            if not self.run_step():
                return
        raise AssertionError("the engine does not come to rest")


def _note(came: HandleLogprobs | None, by_handle: dict[int, list[TokenLogprobs]]) -> None:
    if came is None:
        return
    first = 0
    for handle, count in zip(came.handles.tolist(), came.num_tokens.tolist(), strict=True):
        is_mine = np.zeros(len(came.tokens), np.bool_)
        is_mine[first : first + count] = True
        by_handle[handle].append(came.tokens.take(is_mine))
        first += count


def as_lists(parts: Sequence[TokenLogprobs]) -> list[list[float]]:
    joined = TokenLogprobs.joined(parts)
    return [
        joined.logprobs.tolist(),
        joined.ranks.tolist(),
        joined.num_alternatives.tolist(),
        joined.alternative_token_ids.tolist(),
        joined.alternative_logprobs.tolist(),
    ]


def expected_of(token_ids: Sequence[int], first: int, num_alternatives: int) -> list[list[float]]:
    """Return those of the tokens from ``first`` on, each after all before it."""
    digests = digests_of(token_ids)
    return as_lists(
        [logprobs_of(digests[i - 1], token_ids[i], num_alternatives) for i in range(first, len(token_ids))]
    )


def prompt_of(seed: int, count: int) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    return token_ids


def test_output_logprobs_belong_to_those_who_asked() -> None:
    engine = Engine()
    handles = {
        wanted: engine.add(
            make_request(f"r{wanted}", prompt_of(index, 9), max_output_tokens=6, num_logprobs=wanted)
        )[0]
        for index, wanted in enumerate((None, 0, 3))
    }

    engine.run()

    assert handles[None] not in engine.output
    for index, wanted in ((1, 0), (2, 3)):
        tokens = [*prompt_of(index, 9), *engine.tokens[handles[wanted]]]
        assert as_lists(engine.output[handles[wanted]]) == expected_of(tokens, 9, wanted)


def test_prompt_logprobs_come_in_chunks_without_the_first_token() -> None:
    engine = Engine()
    prompt = prompt_of(1, 61)
    (handle,) = engine.add(make_request("r", prompt, num_prompt_logprobs=2))

    engine.run()

    assert len(engine.prompt[handle]) > 1
    assert as_lists(engine.prompt[handle]) == expected_of(prompt, 1, 2)


def test_a_cached_prompt_is_computed_again_for_its_logprobs_and_stays_cached_for_others() -> None:
    engine = Engine()
    prompt = prompt_of(2, 40)
    engine.add(make_request("warm", prompt))
    engine.run()

    (scored,) = engine.add(make_request("scored", prompt, num_prompt_logprobs=1))
    (other,) = engine.add(make_request("other", [*prompt[:32], *prompt_of(3, 8)], num_prompt_logprobs=1))
    engine.run()
    (plain,) = engine.add(make_request("plain", prompt))
    engine.run()

    assert as_lists(engine.prompt[scored]) == expected_of(prompt, 1, 1)
    assert as_lists(engine.prompt[other]) == expected_of([*prompt[:32], *prompt_of(3, 8)], 1, 1)
    assert [engine.ends[handle].usage.num_cached_tokens for handle in (scored, other, plain)] == [0, 0, 36]
    assert engine.tokens[scored] == engine.tokens[plain]


def test_what_a_scored_prompt_computes_is_shared() -> None:
    engine = Engine()
    prompt = prompt_of(4, 40)
    engine.add(make_request("scored", prompt, num_prompt_logprobs=0))
    engine.run()

    (plain,) = engine.add(make_request("plain", prompt))
    engine.run()

    assert engine.ends[plain].usage.num_cached_tokens == 36


def test_a_request_with_several_choices_reports_its_prompt_once() -> None:
    engine = Engine()
    prompt = prompt_of(5, 30)
    handles = engine.add(
        make_request("r", prompt, prior_outputs=[[], [], []], num_prompt_logprobs=1, num_logprobs=1)
    )

    engine.run()

    assert list(engine.prompt) == [handles[0]]
    assert as_lists(engine.prompt[handles[0]]) == expected_of(prompt, 1, 1)
    for handle in handles:
        assert as_lists(engine.output[handle]) == expected_of([*prompt, *engine.tokens[handle]], 30, 1)


def test_a_choice_that_was_begun_elsewhere_has_reported_its_prompt() -> None:
    engine = Engine()
    (handle,) = engine.add(
        make_request("r", prompt_of(6, 20), prior_outputs=[[7]], num_prompt_logprobs=1, num_logprobs=0)
    )

    engine.run()

    assert engine.prompt == {}
    assert len(TokenLogprobs.joined(engine.output[handle])) == len(engine.tokens[handle]) == 3


def test_a_prompt_of_one_token_has_none() -> None:
    engine = Engine()
    engine.add(make_request("r", [5], num_prompt_logprobs=3))

    engine.run()

    assert engine.prompt == {}


@pytest.mark.parametrize("seed", range(12))
def test_preemption_loses_and_repeats_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    engine = Engine(
        num_blocks=int(random.integers(18, 30)),
        max_num_batched_tokens=int(random.choice([3, 8, 24])),
        max_steps_in_flight=int(random.choice([1, 2])),
        admission=Admission.WATERMARK,
    )
    wanted: dict[int, tuple[list[int], int | None, int | None]] = {}
    common = prompt_of(99, 24)
    for index in range(14):
        prompt = [*common[: int(random.integers(0, 24))], *prompt_of(index, int(random.integers(1, 20)))]
        num_logprobs = [None, 0, 2][int(random.integers(3))]
        num_prompt_logprobs = [None, 1, 1][int(random.integers(3))]
        choices: list[list[int]] = [[]] * int(random.integers(1, 4))
        handles = engine.add(
            make_request(
                f"r{index}",
                prompt,
                max_output_tokens=int(random.integers(1, 24)),
                prior_outputs=choices,
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
            )
        )
        for choice, handle in enumerate(handles):
            wanted[handle] = (prompt, num_logprobs, None if choice else num_prompt_logprobs)
        for _ in range(int(random.integers(0, 6))):
            engine.run_step()

    engine.run()

    assert len(engine.ends) == len(wanted)
    for handle, (prompt, num_logprobs, num_prompt_logprobs) in wanted.items():
        tokens = [*prompt, *engine.tokens[handle]]
        assert (handle in engine.output) == (num_logprobs is not None)
        if num_logprobs is not None:
            assert as_lists(engine.output[handle]) == expected_of(tokens, len(prompt), num_logprobs)
        if num_prompt_logprobs is not None:
            assert as_lists(engine.prompt[handle]) == expected_of(prompt, 1, num_prompt_logprobs)
        else:
            assert handle not in engine.prompt


def test_a_scored_prompt_that_is_preempted_is_reported_once() -> None:
    engine = Engine(num_blocks=20, admission=Admission.WATERMARK, max_num_batched_tokens=6, aging_seconds=0.0)
    engine.add(make_request("old", prompt_of(1, 20), max_output_tokens=40))
    (scored,) = engine.add(make_request("scored", prompt_of(2, 50), num_prompt_logprobs=0))

    engine.run()

    assert engine.ends[scored].usage.num_preemptions > 0
    assert as_lists(engine.prompt[scored]) == expected_of(prompt_of(2, 50), 1, 0)


@pytest.mark.parametrize("param", ["num_logprobs", "num_prompt_logprobs"])
def test_more_alternatives_than_the_limit_are_refused(param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{param} must be from 0 to 20, not 21"):
        Engine().add(make_request("r", [1, 2], **{param: 21}))  # type: ignore[arg-type]


def test_a_worker_that_measures_nothing_is_a_fault() -> None:
    engine = Engine()
    engine.add(make_request("r", [1, 2], num_logprobs=1, sampling_params="nothing that the worker knows"))

    with pytest.raises(InternalError, match=r"wanted of .* tokens of slots"):
        engine.run()


def test_a_worker_that_measures_no_prompt_is_a_fault() -> None:
    engine = Engine()
    engine.add(make_request("r", [1, 2], num_prompt_logprobs=1, sampling_params="nothing that the worker knows"))

    with pytest.raises(InternalError, match="before all log-probabilities of its prompt"):
        engine.run()
