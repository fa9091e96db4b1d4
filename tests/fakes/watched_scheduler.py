"""A scheduler with a fake worker behind it and an observer that checks every answer.

The observer sees what a worker and a gateway would see, never the scheduler's own state. It holds each step
against a plain reading of the rules (``tests/fakes/scheduling_rules.py``) and each token against what the model
would say after the tokens before it. The worker computes a step as soon as it is sent; its answer is applied later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from libs.errors import DeadlineExceeded, InvalidLogits, OctavoError
from libs.kv import PrefixHash, PrefixHasher
from services.engine.core.request import FinishReason, Request, SequenceEnd
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepEvents, StepResult
from tests.fakes.kv_worker import (
    Clock,
    FakeKVWorker,
    Row,
    Sampler,
    digests_of,
    drafts_by_slot,
    extend_digest,
    with_failures,
)
from tests.fakes.scheduling_rules import Referee, Running


@dataclass(slots=True)
class Life:
    """What the outside knows of an open handle."""

    handle: int
    request: Request
    choice_index: int
    order: tuple[float, int]
    parent: int | None
    arrival_time: float
    token_ids: list[int]
    num_prior_output_tokens: int
    digests: list[int]
    chain: list[PrefixHash] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_output_expected: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_output_tokens(self) -> int:
        return self.request.stop_criteria.max_output_tokens

    @property
    def tenant_id(self) -> str:
        return self.request.tenant_id

    def end_token_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        criteria = self.request.stop_criteria
        return criteria.stop_token_ids | frozenset(() if criteria.ignore_eos else eos_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def ends_with(self, token_id: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Say what the end should be once ``token_id`` is the last token."""
        if token_id in self.end_token_ids(eos_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_tokens >= self.max_output_tokens else None


@dataclass(frozen=True, slots=True)
class Step:
    """A step as scheduled, with what it means for handles."""

    output: SchedulerOutput
    preempted: tuple[int, ...]
    admitted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was sent and computed; ``terms`` says which of a sequence's stays in a slot it was sent for."""

    step: Step
    result: StepResult
    handle_of: dict[int, int]
    terms: dict[int, int]
    drafts_of: dict[int, list[int]]


class WatchedScheduler:
    """Calls go through to the scheduler; every answer is checked; time moves only in ``apply`` and ``wait``."""

    def __init__(
        self,
        config: SchedulerConfig,
        sample: Sampler,
        *,
        handles: Iterable[int] | None = None,
        seconds_of: Clock | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, iter(handles) if handles is not None else None)
        self.worker = FakeKVWorker(config.num_blocks, config.block_size, sample, seconds_of)
        self.referee = Referee(config)
        self.now = 0.0
        self.lives: dict[int, Life] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.num_preemptions = 0
        self.num_discarded_tokens = 0
        self.num_accepted_drafts = 0
        self.num_rejected_drafts = 0
        self._flights: deque[_Flight] = deque()
        # Preempted in a pass that sent no step: the worker has not heard of it.
        self._silently_preempted: set[int] = set()
        self._sample = sample
        # Accepted drafts of which the worker knows already and the scheduler not yet.
        self._num_unanswered_drafts: dict[int, int] = {}
        self._num_arrivals = 0
        self._salts: dict[int, bytes] = {}
        # What a block with this hash must contain, for all prefixes that ever were.
        self._contents_of: dict[PrefixHash, list[int]] = {}

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not applied."""
        return len(self._flights)

    @property
    def can_schedule(self) -> bool:
        return len(self._flights) < self.config.max_steps_in_flight

    # ---- what a caller does ----

    def add(self, request: Request) -> tuple[int, ...]:
        handles = self.scheduler.add(request, self.now)
        assert len(handles) == len(request.choices)
        indices = request.choice_indices or range(len(handles))
        for choice_index, handle, prior in zip(indices, handles, request.choices, strict=True):
            assert handle not in self.lives, f"handle {handle} is given out twice"
            assert handle not in self.ends, f"handle {handle} is given out again"
            token_ids = [*request.prompt_token_ids.tolist(), *prior.tolist()]
            is_sibling = handle != handles[0] and not len(prior) and not len(request.choices[0])
            life = Life(
                handle=handle,
                request=request,
                choice_index=choice_index,
                order=(self.now - request.priority * self.config.aging_seconds, self._num_arrivals),
                parent=handles[0] if is_sibling else None,
                arrival_time=self.now,
                token_ids=token_ids,
                num_prior_output_tokens=len(prior),
                digests=digests_of(token_ids),
            )
            self.lives[handle] = life
            self._learn_contents(life)
            self.referee.note_arrival(life)
            self._salts[handle] = request.cache_salt
            self._num_arrivals += 1
        return handles

    def schedule(self) -> Step | None:
        assert self.scheduler.can_schedule == self.can_schedule
        assert self.scheduler.num_steps_in_flight == len(self._flights)
        rows = self._open_rows()
        running = [self._view(row) for row in rows]
        waiting = self.waiting()
        cached_before = dict(self.scheduler.kv_cache.cached_hashes())
        output = self.scheduler.schedule(self.now)
        facts = self.referee.check_step(
            output,
            is_in_flight=bool(self._flights),
            running=running,
            waiting=waiting,
            cached_before=cached_before,
            cached_after=dict(self.scheduler.kv_cache.cached_hashes()),
        )
        for handle, num_expected in zip(facts.admitted, facts.expected_outputs, strict=True):
            self.lives[handle].num_output_expected = num_expected
        self._note_preemptions(facts.preempted)
        if output is None:
            assert self._flights or not self.lives, f"nothing is scheduled, but {len(self.lives)} are open"
            self._silently_preempted.update(facts.preempted)
            return None
        step = Step(output, facts.preempted, facts.admitted)
        self._send(step)
        return step

    def apply(self, is_failing: Callable[[int], bool] = lambda handle: False, seconds: float = 1.0) -> StepEvents:
        """Take the answer to the oldest step in flight; those that fail need not have been sampled."""
        flight = self._flights.popleft()
        output, handle_of = flight.step.output, flight.handle_of
        failed_slots = {slot for slot, handle in handle_of.items() if is_failing(handle)}
        result = with_failures(output, flight.result, failed_slots)
        self.now += seconds
        events = self.scheduler.apply(result, self.now)
        assert events.step_id == output.step_id
        self.referee.note_answer(output.work, result.step_seconds)
        alive = {slot: handle for slot, handle in handle_of.items() if self._is_current(flight, handle)}
        expected_tokens = {
            alive[slot]: token_ids
            for slot, token_ids in _tokens_by(result.slots, result.num_tokens, result.token_ids).items()
            if slot in alive
        }
        assert len(events.handles) == len(events.owners)
        assert _tokens_by(events.handles, events.num_tokens, events.token_ids) == expected_tokens
        assert events.owners.tolist() == [self.lives[h].request.owner for h in events.handles.tolist()]
        failed = {handle for slot, handle in alive.items() if slot in failed_slots}
        if failed:
            untrusted = {b for row in self.worker.rows.values() if row.handle in failed for b in row.block_ids}
            cached = dict(self.scheduler.kv_cache.cached_hashes())
            assert not untrusted.intersection(cached.values()), "blocks of a failed sequence can be found"
        for slot, after in zip(output.slots.tolist(), output.num_computed_tokens.tolist(), strict=True):
            if slot in alive and slot not in failed_slots:
                num_accepted = max(len(expected_tokens.get(alive[slot], ())) - 1, 0)
                self.referee.note_computed(self.lives[alive[slot]], after + num_accepted)
                self._note_answered_drafts(alive[slot], len(flight.drafts_of[slot]), num_accepted)
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

    def fill_pipeline(self) -> list[Step]:
        """Send as many steps as may be in flight, as the engine's loop does."""
        sent: list[Step] = []
        while self.can_schedule and (step := self.schedule()) is not None:
            sent.append(step)
        return sent

    @property
    def max_steps_left(self) -> int:
        """Steps that suffice when nobody comes: each computes something, and the first in line never goes back."""
        return 20 + 2 * sum(life.num_prompt_tokens + life.max_output_tokens for life in self.lives.values())

    def run_until_idle(self, max_steps: int | None = None) -> None:
        """Step until nothing is open; a scheduler that makes no progress is caught by the bound."""
        for _ in range(max_steps or self.max_steps_left):
            self.fill_pipeline()
            if not self._flights:
                self.check_idle()
                return
            self.apply()
        raise AssertionError(f"{len(self.lives)} sequences are open after as many steps as there are tokens")

    # ---- what must hold ----

    def check(self) -> None:
        """Check what must hold between any two calls."""
        assert self.scheduler.check_integrity() == []
        counts = self.scheduler.kv_cache.block_counts
        assert min(counts.num_free, counts.num_evictable, counts.num_held) >= 0
        assert counts.num_free + counts.num_evictable + counts.num_held == self.config.num_blocks
        # Rows as sent are what the scheduler holds; ended rows are given back at once.
        rows = self._open_rows()
        held = {block for row in rows for block in row.block_ids}
        assert counts.num_held == len(held), f"{counts.num_held} blocks are held, {len(held)} are in block tables"
        cached = dict(self.scheduler.kv_cache.cached_hashes())
        assert counts.num_evictable == len(set(cached.values()) - held)
        assert self.scheduler.kv_cache.num_available_blocks == self.config.num_blocks - len(held)
        self._check_load(rows)
        self._check_page_tables(rows)
        assert self.worker.wrong_contents() == []
        for prefix_hash, block in cached.items():
            assert self.worker.block_contents(block) == self._contents_of[prefix_hash], (
                f"block {block} is not its hash"
            )
        for row in rows:
            salts = {self._salts[writer] for writer in self.worker.writers(row)}
            assert salts <= {self._salts[row.handle]}, f"handle {row.handle} reads blocks of another salt"

    def check_idle(self) -> None:
        """Check that nothing is left over once everything has ended."""
        assert not self.lives
        assert not self._flights
        assert self.scheduler.schedule(self.now) is None
        assert self.scheduler.kv_cache.block_counts.num_held == 0
        assert self.scheduler.load.num_pending_prefill_tokens == 0
        assert self.referee.asleep == {}
        self.check()

    def waiting(self) -> dict[int, Life]:
        running = {row.handle for row in self._open_rows()}
        return {handle: life for handle, life in self.lives.items() if handle not in running}

    # ---- parts ----

    def _check_load(self, rows: list[Row]) -> None:
        load, usage = self.scheduler.load, self.scheduler.kv_usage
        assert load.num_running == len(rows) <= self.config.max_num_seqs
        assert load.num_running + load.num_waiting == len(self.lives)
        pending = [view.num_pending for view in map(self._view, rows) if view.num_pending > 1]
        assert load.num_pending_prefill_tokens == sum(pending) + sum(
            len(life.token_ids) for life in self.waiting().values()
        )
        assert usage.num_allocated_tokens == sum(len(row.block_ids) for row in rows) * self.config.block_size
        assert usage.num_computed_tokens == sum(map(self._num_computed_tokens, rows))
        assert self.scheduler.has_work == bool(self.lives)
        assert self.scheduler.num_requests == len({life.request.request_id for life in self.lives.values()})

    def _check_page_tables(self, rows: list[Row]) -> None:
        num_lists: dict[int, int] = {}
        for row in rows:
            for block in row.block_ids:
                num_lists[block] = num_lists.get(block, 0) + 1
        row_of, size = {row.handle: row for row in rows}, self.config.block_size
        for request_id in {life.request.request_id for life in self.lives.values()}:
            expected = [
                (handle, position, held.block_ids[position // size], num_lists[held.block_ids[position // size]])
                for handle, life in self.lives.items()
                if life.request.request_id == request_id and (held := row_of.get(handle)) is not None
                for position in range(self._num_computed_tokens(held))
            ]
            assert [
                (entry.handle, entry.logical_token_index, entry.physical_block_id, entry.reference_count)
                for entry in self.scheduler.page_table(request_id)
            ] == expected

    def _note_preemptions(self, preempted: tuple[int, ...]) -> None:
        for handle in preempted:
            self.lives[handle].num_preemptions += 1
            self._num_unanswered_drafts.pop(handle, None)
        self.num_preemptions += len(preempted)
        assert self.scheduler.take_num_preemptions() == len(preempted)

    def _send(self, step: Step) -> None:
        output = step.output
        for handle, new in zip(step.admitted, output.new_sequences, strict=True):
            life = self.lives[handle]
            assert new.token_ids.tolist() == life.token_ids
            assert new.num_prompt_tokens == life.num_prompt_tokens
            assert (new.choice_index, new.sampling_params) == (life.choice_index, life.request.sampling_params)
            assert new.is_resumed == (life.num_preemptions > 0)
            if life.first_scheduled_time is None:
                life.first_scheduled_time = self.now
                life.num_cached_tokens = min(new.num_computed_tokens, new.num_prompt_tokens)
        ended = {row.handle for row in self.worker.take(output).values()}
        assert ended & self.lives.keys() == {*step.preempted, *self._silently_preempted} & self.lives.keys()
        self._silently_preempted.clear()
        assert {row.handle for row in self.worker.rows.values()} <= self.lives.keys(), "the worker keeps a dead row"
        result = self.worker.execute(output)
        handle_of = dict(zip(output.slots.tolist(), output.handles.tolist(), strict=True))
        terms = {handle: self.lives[handle].num_preemptions for handle in handle_of.values()}
        for handle, count in zip(output.handles.tolist(), output.num_scheduled_tokens.tolist(), strict=True):
            self.lives[handle].num_computed_tokens += count
        drafts_of = drafts_by_slot(output)
        self._note_sent_drafts(drafts_of, result)
        self._flights.append(_Flight(step, result, handle_of, terms, drafts_of))

    def _note_sent_drafts(self, drafts_of: dict[int, list[int]], result: StepResult) -> None:
        num_accepted = dict(zip(result.slots.tolist(), (result.num_tokens - 1).tolist(), strict=True))
        for slot, drafts in drafts_of.items():
            if drafts:
                life = self.lives[self.worker.rows[slot].handle]
                life.num_drafts += len(drafts)
                # The last token that may come is sampled in any case, and never computed.
                assert life.num_output_tokens + len(drafts) < life.max_output_tokens
                assert len(life.token_ids) + len(drafts) < self.config.max_model_len
                assert not life.end_token_ids(self.config.eos_token_ids).intersection(drafts)
                self._num_unanswered_drafts[life.handle] = num_accepted[slot]

    def _note_answered_drafts(self, handle: int, num_drafts: int, num_accepted: int) -> None:
        if num_drafts:
            del self._num_unanswered_drafts[handle]
            self.lives[handle].num_accepted_drafts += num_accepted
            self.num_accepted_drafts += num_accepted
            self.num_rejected_drafts += num_drafts - num_accepted
            self.referee.note_drafts(handle, num_accepted)

    def _is_current(self, flight: _Flight, handle: int) -> bool:
        """Say whether a sequence is still in the slot for which a step was sent."""
        life = self.lives.get(handle)
        return life is not None and life.num_preemptions == flight.terms.get(handle)

    def _learn_contents(self, life: Life) -> None:
        size, first = self.config.block_size, len(life.chain)
        num_tokens = len(life.token_ids)
        if num_tokens // size == first:
            return
        hasher = PrefixHasher(size, life.request.cache_salt)
        hasher.extend(life.chain, np.array(life.token_ids, np.uint32), num_tokens)
        for index in range(first, len(life.chain)):
            self._contents_of[life.chain[index]] = life.digests[index * size : (index + 1) * size]

    def _check_ends(self, events: StepEvents, tokens_of: dict[int, list[int]], failed: set[int]) -> None:
        expected: dict[int, FinishReason | None] = dict.fromkeys(failed)
        for handle, token_ids in tokens_of.items():
            life = self.lives[handle]
            for token_id in token_ids:
                assert handle not in expected, f"handle {handle} got a token after its end"
                self._take_token(life, token_id)
                reason = life.ends_with(token_id, self.config.eos_token_ids)
                if reason is not None:
                    expected[handle] = reason
            if life.first_token_time is None:
                life.first_token_time = self.now
                self.referee.note_first_token(handle)
        assert {end.handle for end in events.ends} == expected.keys()
        for end in events.ends:
            reason = expected[end.handle]
            is_stop = reason is FinishReason.STOP
            assert end.stop_token_id == (tokens_of[end.handle][-1] if is_stop else None)
            self._close(end, reason=reason, error=None if reason else InvalidLogits)

    def _take_token(self, life: Life, token_id: int) -> None:
        next_token_id = self._sample(life.digests[-1], life.num_output_tokens, life.choice_index)
        assert token_id == next_token_id, f"handle {life.handle} got {token_id}, the model says {next_token_id}"
        life.token_ids.append(token_id)
        life.digests.append(extend_digest(life.digests[-1], token_id))
        self._learn_contents(life)

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
        num_discarded = self._num_discarded(end.handle)
        life, usage = self.lives.pop(end.handle), end.usage
        self.ends[end.handle] = end
        self._num_unanswered_drafts.pop(end.handle, None)
        self.referee.note_end(end.handle)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.referee.forecast.note(life.tenant_id, life.num_output_tokens)
        assert (end.owner, end.request_id) == (life.request.owner, life.request.request_id)
        assert end.reason == reason
        assert (end.error is None) if error is None else isinstance(end.error, error)
        assert usage.num_output_tokens == life.num_output_tokens - life.num_prior_output_tokens
        assert usage.num_preemptions == life.num_preemptions
        assert usage.num_discarded_tokens == num_discarded
        self.num_discarded_tokens += num_discarded
        # A limit in tokens is known beforehand: nothing is sampled past it.
        assert reason is not FinishReason.LENGTH or not num_discarded
        # Recomputing after a preemption adds to what was computed, never to what was cached.
        assert usage.num_cached_tokens == life.num_cached_tokens
        assert usage.num_computed_tokens == life.num_computed_tokens
        scheduled = self.now if life.first_scheduled_time is None else life.first_scheduled_time
        first_token = self.now if life.first_token_time is None else life.first_token_time
        assert usage.queue_seconds == scheduled - life.arrival_time
        assert usage.prefill_seconds == first_token - scheduled
        assert usage.decode_seconds == self.now - first_token
        if not life.num_preemptions and not life.num_prior_output_tokens and life.first_token_time is not None:
            # The last token is never computed, but for those that were sampled in vain or failed.
            num_known = (
                usage.num_cached_tokens + usage.num_computed_tokens - life.num_drafts + life.num_accepted_drafts
            )
            is_failed = error is InvalidLogits
            assert num_known - len(life.token_ids) == num_discarded - 1 + is_failed

    def _num_discarded(self, handle: int) -> int:
        """Count the steps in flight that sample a token for a sequence that ends now."""
        return sum(
            1
            for flight in self._flights
            if self._is_current(flight, handle)
            and handle in flight.step.output.handles[flight.step.output.is_sampled]
        )

    def _open_rows(self) -> list[Row]:
        return [
            row
            for row in self.worker.rows.values()
            if row.handle in self.lives and row.handle not in self._silently_preempted
        ]

    def _num_computed_tokens(self, row: Row) -> int:
        """Return how many tokens the scheduler knows to be computed."""
        return row.num_computed_tokens - self._num_unanswered_drafts.get(row.handle, 0)

    def _view(self, row: Row) -> Running:
        life = self.lives[row.handle]
        return Running(
            handle=row.handle,
            order=life.order,
            priority=life.request.priority,
            known_token_ids=life.token_ids,
            end_token_ids=life.end_token_ids(self.config.eos_token_ids),
            has_unanswered_drafts=row.handle in self._num_unanswered_drafts,
            num_prompt_tokens=row.num_prompt_tokens,
            num_tokens=len(row.token_ids) - self._num_unanswered_drafts.get(row.handle, 0),
            num_computed_tokens=self._num_computed_tokens(row),
            max_num_tokens=row.num_prompt_tokens + life.max_output_tokens,
            num_output_expected=life.num_output_expected,
            block_ids=list(row.block_ids),
        )


def _tokens_by(keys: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> dict[int, list[int]]:
    assert num_tokens.sum() == len(token_ids)
    parts = np.split(token_ids, np.cumsum(num_tokens)[:-1])
    return {key: part.tolist() for key, part in zip(keys.tolist(), parts, strict=False)}
