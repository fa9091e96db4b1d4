"""A scheduler with a fake worker behind it and an observer that checks every answer.

The observer sees what a worker and a gateway would see, never the scheduler's own state. It holds each step
against a plain reading of the rules (``tests/fakes/scheduling_rules.py``) and each token against what the model
would say after the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from libs.errors import DeadlineExceeded, InvalidLogits, OctavoError
from libs.kv import PrefixHash, PrefixHasher
from services.engine.core.request import FinishReason, Request, SequenceEnd
from services.engine.core.scheduler import Scheduler, SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepEvents
from tests.fakes.kv_worker import FakeKVWorker, Row, Sampler, digests_of, extend_digest
from tests.fakes.scheduling_rules import RunningView, WaitingView, check_step


@dataclass(slots=True)
class Life:
    """What the outside knows of an open handle."""

    handle: int
    request: Request
    choice_index: int
    arrival_number: int
    arrival_time: float
    token_ids: list[int]
    num_prior_output_tokens: int
    digests: list[int]
    chain: list[PrefixHash] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        return (-self.request.priority, self.arrival_number)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def ends_with(self, token_id: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Say what the end should be once ``token_id`` is the last token."""
        criteria = self.request.stop_criteria
        is_eos = token_id in eos_token_ids and not criteria.ignore_eos
        if is_eos or token_id in criteria.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_tokens >= criteria.max_output_tokens else None


@dataclass(frozen=True, slots=True)
class Step:
    """A step as scheduled, with what it means for handles."""

    output: SchedulerOutput
    preempted: tuple[int, ...]
    admitted: tuple[int, ...]


class WatchedScheduler:
    """Calls go through to the scheduler; every answer is checked; time moves only in ``apply`` and ``wait``."""

    def __init__(self, config: SchedulerConfig, sample: Sampler, *, handles: Iterable[int] | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config, iter(handles) if handles is not None else None)
        self.worker = FakeKVWorker(config.num_blocks, config.block_size, sample)
        self.now = 0.0
        self.lives: dict[int, Life] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.num_preemptions = 0
        self.in_flight: Step | None = None
        self._sample = sample
        self._num_arrivals = 0
        self._salts: dict[int, bytes] = {}
        # What a block with this hash must contain, for all prefixes that ever were.
        self._contents_of: dict[PrefixHash, list[int]] = {}

    # ---- what a caller does ----

    def add(self, request: Request) -> tuple[int, ...]:
        handles = self.scheduler.add(request, self.now)
        assert len(handles) == len(request.choices)
        for choice_index, (handle, prior) in enumerate(zip(handles, request.choices, strict=True)):
            assert handle not in self.lives, f"handle {handle} is given out twice"
            assert handle not in self.ends, f"handle {handle} is given out again"
            token_ids = [*request.prompt_token_ids.tolist(), *prior.tolist()]
            self.lives[handle] = Life(
                handle=handle,
                request=request,
                choice_index=choice_index,
                arrival_number=self._num_arrivals,
                arrival_time=self.now,
                token_ids=token_ids,
                num_prior_output_tokens=len(prior),
                digests=digests_of(token_ids),
            )
            self._salts[handle] = request.cache_salt
            self._num_arrivals += 1
        return handles

    def schedule(self) -> Step | None:
        running = {row.handle: self._running_view(row) for row in self._open_rows()}
        cached_before = dict(self.scheduler.kv_cache.cached_hashes())
        output = self.scheduler.schedule(self.now)
        if output is None:
            assert not self.lives, f"nothing is scheduled, but {len(self.lives)} sequences are open"
            return None
        ended = self.worker.take(output)
        assert {row.handle for row in self.worker.rows.values()} <= self.lives.keys(), "the worker keeps a dead row"
        preempted = tuple(row.handle for row in ended.values() if row.handle in self.lives)
        handle_of = dict(zip(output.slots.tolist(), output.handles.tolist(), strict=True))
        step = Step(output, preempted, tuple(handle_of[new.slot] for new in output.new_sequences))
        self._note(step)
        check_step(
            step.output,
            config=self.config,
            running=running,
            preempted=preempted,
            admitted={handle: self._waiting_view(self.lives[handle]) for handle in step.admitted},
            waiting=[self._waiting_view(life) for life in self.waiting()],
            cached_before=cached_before,
            cached_after=dict(self.scheduler.kv_cache.cached_hashes()),
        )
        self.in_flight = step
        return step

    def apply(self, is_failing: Callable[[int], bool] = lambda handle: False, seconds: float = 1.0) -> StepEvents:
        assert self.in_flight is not None
        output, self.in_flight = self.in_flight.output, None
        handle_of = dict(zip(output.slots.tolist(), output.handles.tolist(), strict=True))
        failed_slots = tuple(s for s in output.slots[output.is_sampled].tolist() if is_failing(handle_of[s]))
        result = self.worker.execute(output, failed_slots)
        self.now += seconds
        events = self.scheduler.apply(result, self.now)
        assert events.step_id == output.step_id
        expected_tokens = {
            handle_of[slot]: token_id
            for slot, token_id in zip(result.slots.tolist(), result.token_ids.tolist(), strict=True)
            if handle_of[slot] in self.lives
        }
        assert len(events.handles) == len(events.token_ids) == len(events.owners)
        assert dict(zip(events.handles.tolist(), events.token_ids.tolist(), strict=True)) == expected_tokens
        assert events.owners.tolist() == [self.lives[h].request.owner for h in events.handles.tolist()]
        failed = {handle_of[slot] for slot in failed_slots} & self.lives.keys()
        untrusted = {b for row in self.worker.rows.values() if row.handle in failed for b in row.block_ids}
        cached = dict(self.scheduler.kv_cache.cached_hashes())
        assert not untrusted.intersection(cached.values()), "blocks of a failed sequence can be found"
        self._check_ends(events, expected_tokens, failed)
        return events

    def abort(self, request_id: str, handles: tuple[int, ...] = ()) -> tuple[SequenceEnd, ...]:
        expected = {
            life.handle
            for life in self.lives.values()
            if life.request.request_id == request_id and (not handles or life.handle in handles)
        }
        ends = self.scheduler.abort(request_id, self.now, handles)
        self._close_all(ends, expected, reason=FinishReason.ABORTED)
        return ends

    def abort_owner(self, owner: int) -> tuple[SequenceEnd, ...]:
        expected = {life.handle for life in self.lives.values() if life.request.owner == owner}
        ends = self.scheduler.abort_owner(owner, self.now)
        self._close_all(ends, expected, reason=FinishReason.ABORTED)
        return ends

    def expire(self) -> tuple[SequenceEnd, ...]:
        late = {
            life.handle
            for life in self.lives.values()
            if life.request.deadline is not None and life.request.deadline <= self.now
        }
        ends = self.scheduler.expire(self.now)
        self._close_all(ends, late, error=DeadlineExceeded)
        return ends

    def fail_all(self, error: OctavoError) -> tuple[SequenceEnd, ...]:
        ends = self.scheduler.fail_all(error, self.now)
        self._close_all(ends, set(self.lives), error=type(error))
        return ends

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def run_until_idle(self, max_steps: int = 100_000) -> None:
        """Step until nothing is open; a scheduler that makes no progress is caught by the bound."""
        if self.in_flight is not None:
            self.apply()
        for _ in range(max_steps):
            if self.schedule() is None:
                self.check_idle()
                return
            self.apply()
        raise AssertionError(f"{len(self.lives)} sequences are open after {max_steps} steps")

    # ---- what must hold ----

    def check(self) -> None:
        """Check what must hold between any two calls."""
        assert self.scheduler.check_integrity() == []
        counts = self.scheduler.kv_cache.block_counts
        assert min(counts.num_free, counts.num_evictable, counts.num_held) >= 0
        assert counts.num_free + counts.num_evictable + counts.num_held == self.config.num_blocks
        # While a step is in flight its rows are what the scheduler holds; ended rows are given back at once.
        held = {block for row in self._open_rows() for block in row.block_ids}
        assert counts.num_held == len(held), f"{counts.num_held} blocks are held, {len(held)} are in block tables"
        cached = dict(self.scheduler.kv_cache.cached_hashes())
        assert counts.num_evictable == len(set(cached.values()) - held)
        assert self.scheduler.kv_cache.num_available_blocks == self.config.num_blocks - len(held)
        load = self.scheduler.load
        assert load.num_running == len(self._open_rows()) <= self.config.max_num_seqs
        assert load.num_running + load.num_waiting == len(self.lives)
        assert self.scheduler.has_work == bool(self.lives)
        assert self.scheduler.num_requests == len({life.request.request_id for life in self.lives.values()})
        assert self.worker.wrong_contents() == []
        for prefix_hash, block in cached.items():
            assert self.worker.block_contents(block) == self._contents_of[prefix_hash], (
                f"block {block} is not its hash"
            )
        for row in self._open_rows():
            salts = {self._salts[writer] for writer in self.worker.writers(row)}
            assert salts <= {self._salts[row.handle]}, f"handle {row.handle} reads blocks of another salt"

    def check_idle(self) -> None:
        """Check that nothing is left over once everything has ended."""
        assert not self.lives
        assert self.scheduler.schedule(self.now) is None
        assert self.scheduler.kv_cache.block_counts.num_held == 0
        assert self.scheduler.load.num_pending_prefill_tokens == 0
        self.check()

    # ---- parts ----

    def _note(self, step: Step) -> None:
        for handle in step.preempted:
            self.lives[handle].num_preemptions += 1
        self.num_preemptions += len(step.preempted)
        assert self.scheduler.take_num_preemptions() == len(step.preempted)
        for handle, new in zip(step.admitted, step.output.new_sequences, strict=True):
            life = self.lives[handle]
            assert new.token_ids.tolist() == life.token_ids
            assert new.num_prompt_tokens == len(life.request.prompt_token_ids)
            assert (new.choice_index, new.sampling_params) == (life.choice_index, life.request.sampling_params)
            if life.first_scheduled_time is None:
                life.first_scheduled_time = self.now
                life.num_cached_tokens = min(new.num_computed_tokens, new.num_prompt_tokens)
        scheduled = zip(step.output.handles.tolist(), step.output.num_scheduled_tokens.tolist(), strict=True)
        for handle, count in scheduled:
            life = self.lives[handle]
            life.num_computed_tokens += count
            self._learn_contents(life)

    def _learn_contents(self, life: Life) -> None:
        size, first = self.config.block_size, len(life.chain)
        hasher = PrefixHasher(size, life.request.cache_salt)
        hasher.extend(life.chain, np.array(life.token_ids, np.uint32), len(life.token_ids))
        for index in range(first, len(life.chain)):
            self._contents_of[life.chain[index]] = life.digests[index * size : (index + 1) * size]

    def _check_ends(self, events: StepEvents, token_of: dict[int, int], failed: set[int]) -> None:
        expected: dict[int, FinishReason | None] = dict.fromkeys(failed)
        for handle, token_id in token_of.items():
            life = self.lives[handle]
            next_token_id = self._sample(life.digests[-1], life.num_output_tokens, life.choice_index)
            assert token_id == next_token_id, f"handle {handle} got {token_id}, the model says {next_token_id}"
            life.token_ids.append(token_id)
            life.digests.append(extend_digest(life.digests[-1], token_id))
            if life.first_token_time is None:
                life.first_token_time = self.now
            reason = life.ends_with(token_id, self.config.eos_token_ids)
            if reason is not None:
                expected[handle] = reason
        assert {end.handle for end in events.ends} == expected.keys()
        for end in events.ends:
            reason = expected[end.handle]
            is_stop = reason is FinishReason.STOP
            assert end.stop_token_id == (token_of[end.handle] if is_stop else None)
            self._close(end, reason=reason, error=None if reason else InvalidLogits)

    def _close_all(
        self,
        ends: tuple[SequenceEnd, ...],
        expected: set[int],
        *,
        reason: FinishReason | None = None,
        error: type[OctavoError] | None = None,
    ) -> None:
        assert {end.handle for end in ends} == expected
        for end in ends:
            self._close(end, reason=reason, error=error)

    def _close(self, end: SequenceEnd, *, reason: FinishReason | None, error: type[OctavoError] | None) -> None:
        assert end.handle not in self.ends, f"handle {end.handle} ends twice"
        life, usage = self.lives.pop(end.handle), end.usage
        self.ends[end.handle] = end
        assert (end.owner, end.request_id) == (life.request.owner, life.request.request_id)
        assert end.reason == reason
        assert (end.error is None) if error is None else isinstance(end.error, error)
        assert usage.num_output_tokens == life.num_output_tokens - life.num_prior_output_tokens
        assert usage.num_preemptions == life.num_preemptions
        assert usage.num_discarded_tokens == self._num_discarded(end.handle)
        # Recomputing after a preemption adds to what was computed, never to what was cached.
        assert usage.num_cached_tokens == life.num_cached_tokens
        assert usage.num_computed_tokens == life.num_computed_tokens
        scheduled = self.now if life.first_scheduled_time is None else life.first_scheduled_time
        first_token = self.now if life.first_token_time is None else life.first_token_time
        assert usage.queue_seconds == scheduled - life.arrival_time
        assert usage.prefill_seconds == first_token - scheduled
        assert usage.decode_seconds == self.now - first_token
        if not life.num_preemptions and not life.num_prior_output_tokens and life.first_token_time is not None:
            # The last token is never computed.
            total = usage.num_cached_tokens + usage.num_computed_tokens
            is_cut_short = reason is not FinishReason.STOP and reason is not FinishReason.LENGTH
            assert total - len(life.token_ids) in ((-1, 0) if is_cut_short else (-1,))

    def _num_discarded(self, handle: int) -> int:
        """Return 1 when a step in flight samples a token for a handle that has ended."""
        if self.in_flight is None:
            return 0
        output = self.in_flight.output
        return int(handle in output.handles[output.is_sampled])

    def _open_rows(self) -> list[Row]:
        return [row for row in self.worker.rows.values() if row.handle in self.lives]

    def waiting(self) -> list[Life]:
        running = {row.handle for row in self.worker.rows.values()}
        return [life for life in self.lives.values() if life.handle not in running]

    def _running_view(self, row: Row) -> RunningView:
        life = self.lives[row.handle]
        assert row.token_ids == life.token_ids
        return RunningView(life.order, len(row.token_ids), row.num_computed_tokens, tuple(row.block_ids))

    def _waiting_view(self, life: Life) -> WaitingView:
        self._learn_contents(life)
        return WaitingView(life.order, len(life.token_ids), tuple(life.chain))
