"""The scheduler: which tokens are computed in each step, and what the results mean.

One idea carries it: a sequence has ``num_computed_tokens`` chasing the tokens that are known. Chunked prefill,
prefix hits and resuming after a preemption are the same path; there is no prefill mode and no decode mode
(iteration-level scheduling of Orca, OSDI '22, §3; chunks beside decodes as in Sarathi-Serve, OSDI '24, §4; the
unified token budget as in vLLM's v1 scheduler). Time is an argument, never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InternalError,
    InvalidLogits,
    InvalidRequest,
    OctavoError,
    Overloaded,
    RequestNeverFits,
)
from services.engine.core.admission_rules import AdmissionRule, WholePromptFits, first_refusal
from services.engine.core.deadlines import DeadlineQueue
from services.engine.core.finish import FinishRules
from services.engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from services.engine.core.request import FinishReason, Request, Sequence, SequenceEnd
from services.engine.core.request_queue import RequestQueue
from services.engine.core.scheduler_output import NewSequence, SchedulerOutput, StepEvents, StepResult
from services.engine.core.sequence_table import SequenceTable, Slots

_NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the core. Tokens, sequences and blocks are counts."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_sequences: int
    eos_token_ids: tuple[int, ...]
    enable_prefix_caching: bool = True
    watermark_fraction: float = 0.01


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """How busy the core is."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_available_blocks: int
    num_blocks: int


@dataclass(slots=True)
class _Plan:
    """What a pass has decided so far: parallel lists of arrays, joined at the end."""

    budget: int
    slots: list[Slots]
    num_tokens: list[npt.NDArray[np.int64]]
    num_new_blocks: list[npt.NDArray[np.int64]]
    new_block_ids: list[npt.NDArray[np.int32]]
    new_sequences: list[NewSequence]

    @classmethod
    def empty(cls, budget: int) -> _Plan:
        return cls(budget, [], [], [], [], [])

    def add(
        self,
        slots: Slots,
        num_tokens: npt.NDArray[np.int64],
        num_new_blocks: npt.NDArray[np.int64],
        new_block_ids: npt.NDArray[np.int32],
    ) -> None:
        self.slots.append(slots)
        self.num_tokens.append(num_tokens)
        self.num_new_blocks.append(num_new_blocks)
        self.new_block_ids.append(new_block_ids)
        self.budget -= int(num_tokens.sum())


class Scheduler:
    """Owns requests from ``add`` to their ends; the caller runs ``schedule`` → workers → ``apply`` in turn."""

    def __init__(self, config: SchedulerConfig, handles: Iterator[int] | None = None) -> None:
        """Start empty; ``handles`` yields the handles to give out, so that they can outlive this object."""
        self.config = config
        self._handles = handles or itertools.count(1)
        self._table = SequenceTable(
            max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len, block_size=config.block_size
        )
        self._manager = KVCacheManager(
            self._table,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._queue = RequestQueue()
        self._deadlines = DeadlineQueue()
        self._finish_rules = FinishRules(config.eos_token_ids)
        watermark = int(config.num_blocks * config.watermark_fraction)
        self._admission_rules: tuple[AdmissionRule, ...] = (WholePromptFits(self._manager, self._table, watermark),)
        self._sequences: dict[str, list[Sequence]] = {}
        self._num_arrivals = 0
        self._next_step_id = 1
        self._ended_slots: list[int] = []
        self._in_flight: SchedulerOutput | None = None
        self._num_preemptions = 0

    # ---- what callers ask ----

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self._table.num_active or len(self._queue))

    @property
    def num_requests(self) -> int:
        """Requests with an open choice."""
        return len(self._sequences)

    @property
    def load(self) -> SchedulerLoad:
        """Current load."""
        slots = self._table.active_slots
        pending = self._table.num_tokens[slots] - self._table.num_computed_tokens[slots]
        return SchedulerLoad(
            num_running=self._table.num_active,
            num_waiting=len(self._queue),
            num_pending_prefill_tokens=int(pending[pending > 1].sum()) + self._queue.num_pending_tokens,
            num_available_blocks=self._manager.num_available_blocks,
            num_blocks=self._manager.num_blocks,
        )

    @property
    def kv_cache(self) -> KVCacheManager:
        """The KV cache manager, for reading block counts and the prefix cache."""
        return self._manager

    def take_num_preemptions(self) -> int:
        """Return how many preemptions there were since the last call."""
        count, self._num_preemptions = self._num_preemptions, 0
        return count

    def check_integrity(self) -> list[str]:
        """Check that no block is lost or held twice; returns one sentence per fault."""
        faults = self._manager.check_integrity()
        open_handles = {sequence.handle for choices in self._sequences.values() for sequence in choices}
        running = set(self._table.handles[self._table.active_slots].tolist())
        waiting = {sequence.handle for sequence in self._queue}
        if running & waiting:
            faults.append(f"{len(running & waiting)} sequences run and wait at once")
        if open_handles != running | waiting:
            faults.append(f"{len(open_handles ^ (running | waiting))} sequences are neither running nor waiting")
        return faults

    # ---- the life of a request ----

    def add(self, request: Request, now: float) -> tuple[int, ...]:
        """Take a request; returns one handle for each choice.

        Raises:
            InvalidRequest, ContextLengthExceeded, RequestNeverFits, DuplicateRequest: it can never be served.
            Overloaded: too many wait.
        """
        self._refuse_unservable(request)
        handles = []
        for choice_index, output_token_ids in enumerate(request.choices):
            sequence = Sequence(
                request=request,
                handle=next(self._handles),
                choice_index=choice_index,
                arrival_number=self._num_arrivals,
                arrival_time=now,
                token_ids=np.concatenate((request.prompt_token_ids, output_token_ids)),
                num_prior_output_tokens=len(output_token_ids),
            )
            self._num_arrivals += 1
            self._sequences.setdefault(request.request_id, []).append(sequence)
            self._queue.push(sequence)
            self._deadlines.add(sequence)
            handles.append(sequence.handle)
        return tuple(handles)

    def abort(self, request_id: str, now: float, handles: tuple[int, ...] = ()) -> tuple[SequenceEnd, ...]:
        """End a request, or only some of its choices, from outside. An unknown one has ended already."""
        return tuple(
            self._end(sequence, now, reason=FinishReason.ABORTED)
            for sequence in list(self._sequences.get(request_id, ()))
            if not handles or sequence.handle in handles
        )

    def abort_owner(self, owner: int, now: float) -> tuple[SequenceEnd, ...]:
        """End everything that one stream asked for, because it is gone."""
        orphans = [
            sequence
            for choices in self._sequences.values()
            for sequence in choices
            if sequence.request.owner == owner
        ]
        return tuple(self._end(sequence, now, reason=FinishReason.ABORTED) for sequence in orphans)

    def expire(self, now: float) -> tuple[SequenceEnd, ...]:
        """End the requests whose deadline has passed, before they cost another step."""
        error = DeadlineExceeded("The request did not finish before its deadline.")
        return tuple(self._end(sequence, now, error=error) for sequence in self._deadlines.late(now))

    def fail_all(self, error: OctavoError, now: float) -> tuple[SequenceEnd, ...]:
        """End everything with an error."""
        everything = [sequence for choices in self._sequences.values() for sequence in choices]
        return tuple(self._end(sequence, now, error=error) for sequence in everything)

    # ---- a step ----

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step, or return None when nothing can be computed."""
        assert self._in_flight is None, "the last step has not been applied"
        plan = _Plan.empty(self.config.max_num_batched_tokens)
        was_preempted = self._schedule_running(plan)
        if not was_preempted:
            self._admit_waiting(plan, now)
        if not plan.slots:
            return None
        return self._commit_plan(plan)

    def apply(self, result: StepResult, now: float) -> StepEvents:
        """Take a step's result: append tokens, cache full blocks, end what is finished."""
        output = self._in_flight
        assert output is not None, f"step {result.step_id} was answered, but none is in flight"
        assert output.step_id == result.step_id, f"step {result.step_id} is not {output.step_id}"
        self._in_flight = None
        self._refuse_surprises(output, result)
        table = self._table
        ends = [self._end_invalid(slot, now) for slot in result.failed_slots if self._is_alive(output, slot)]
        # Slots whose sequence was ended from outside meanwhile are left out: their handle is another or none.
        alive = output.slots[table.handles[output.slots] == output.handles]
        self._manager.commit(alive)
        sampled_handles = output.handles[np.isin(output.slots, result.slots)]
        is_alive = table.handles[result.slots] == sampled_handles
        slots, token_ids = result.slots[is_alive], result.token_ids[is_alive]
        table.token_ids[slots, table.num_tokens[slots]] = token_ids
        table.num_tokens[slots] += 1
        self._note_first_tokens(slots, now)
        handles, owners = table.handles[slots].copy(), table.owners[slots].copy()
        is_stopped = self._finish_rules.find_stopped(table, slots, token_ids)
        is_ended = is_stopped | self._finish_rules.find_at_limit(table, slots)
        ends += [
            self._end(
                table.sequence_at(int(slots[index])),
                now,
                reason=FinishReason.STOP if is_stopped[index] else FinishReason.LENGTH,
                stop_token_id=int(token_ids[index]) if is_stopped[index] else None,
            )
            for index in np.flatnonzero(is_ended).tolist()
        ]
        return StepEvents(output.step_id, handles, owners, token_ids, tuple(ends))

    # ---- parts of schedule ----

    def _schedule_running(self, plan: _Plan) -> bool:
        """Give running sequences their tokens and blocks; returns whether one had to be preempted."""
        was_preempted = False
        while True:
            slots, num_tokens = self._share_budget(plan.budget)
            if not len(slots):
                return was_preempted
            missing = self._manager.missing_blocks(slots, self._table.num_computed_tokens[slots] + num_tokens)
            if missing.sum() <= self._manager.num_available_blocks:
                break
            self._preempt(self._table.sequence_at(int(self._table.in_line(self._table.active_slots)[-1])))
            was_preempted = True
        new_block_ids = self._manager.allocate(slots, missing) if missing.any() else _NO_BLOCKS
        plan.add(slots, num_tokens, missing, new_block_ids)
        return was_preempted

    def _share_budget(self, budget: int) -> tuple[Slots, npt.NDArray[np.int64]]:
        """Return running slots and the tokens each computes: decodes first, then prompts by place in line."""
        table = self._table
        slots = table.active_slots
        pending = table.num_tokens[slots] - table.num_computed_tokens[slots]
        if len(slots) > budget or (pending > 1).any():
            slots = table.in_line(slots)
            pending = table.num_tokens[slots] - table.num_computed_tokens[slots]
            decodes_first = np.argsort(pending > 1, kind="stable")
            slots, pending = slots[decodes_first], pending[decodes_first]
            granted = np.clip(budget - (np.cumsum(pending) - pending), 0, pending)
            slots, pending = slots[granted > 0], granted[granted > 0]
        return slots, pending

    def _admit_waiting(self, plan: _Plan, now: float) -> None:
        """Let the first in line join while there is budget, a slot, and no rule against it."""
        while plan.budget > 0 and self._table.has_free_slot:
            sequence = self._queue.peek()
            if sequence is None:
                return
            hit = self._manager.find_longest_prefix(sequence)
            if first_refusal(self._admission_rules, sequence, hit) is not None:
                return
            self._queue.remove(sequence)
            self._start(plan, sequence, hit, now)

    def _start(self, plan: _Plan, sequence: Sequence, hit: PrefixHit, now: float) -> None:
        slot = self._table.take(sequence)
        self._manager.start(slot, hit)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            # Only prompt tokens count as cached; a resumed request may also hit its own output.
            sequence.num_cached_tokens = min(hit.num_tokens, sequence.num_prompt_tokens)
        num_tokens = min(len(sequence.token_ids) - hit.num_tokens, plan.budget)
        slots, counts = np.array([slot]), np.array([num_tokens])
        missing = self._manager.missing_blocks(slots, counts + hit.num_tokens)
        plan.add(slots, counts, missing, self._manager.allocate(slots, missing))
        plan.new_sequences.append(
            NewSequence(
                slot=slot,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=hit.num_tokens,
                block_ids=hit.block_ids,
                sampling_params=sequence.request.sampling_params,
                choice_index=sequence.choice_index,
                is_resumed=sequence.num_preemptions > 0,
            )
        )

    def _commit_plan(self, plan: _Plan) -> SchedulerOutput:
        table = self._table
        slots = np.concatenate(plan.slots)
        num_tokens = np.concatenate(plan.num_tokens)
        table.num_computed_tokens[slots] += num_tokens
        table.work_done[slots] += num_tokens
        output = SchedulerOutput(
            step_id=self._next_step_id,
            ended_slots=tuple(self._ended_slots),
            new_sequences=tuple(plan.new_sequences),
            slots=slots,
            num_scheduled_tokens=num_tokens,
            num_new_blocks=np.concatenate(plan.num_new_blocks),
            new_block_ids=np.concatenate(plan.new_block_ids),
            is_sampled=table.num_computed_tokens[slots] == table.num_tokens[slots],
            handles=table.handles[slots].copy(),
            num_tokens=int(num_tokens.sum()),
        )
        self._next_step_id += 1
        self._ended_slots.clear()
        self._in_flight = output
        return output

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks from a running sequence; it waits in its old place to be computed again."""
        self._leave_slot(sequence)
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._queue.push(sequence)

    # ---- parts of apply ----

    def _refuse_surprises(self, output: SchedulerOutput, result: StepResult) -> None:
        expected = output.slots[output.is_sampled & ~np.isin(output.slots, result.failed_slots)]
        is_foreign = not np.isin(result.failed_slots, output.slots).all()
        if is_foreign or not np.array_equal(expected, result.slots) or len(result.slots) != len(result.token_ids):
            raise InternalError(
                f"Step {output.step_id} should have sampled slots {expected.tolist()}, "
                f"but the worker answered for {result.slots.tolist()} and failed {list(result.failed_slots)}."
            )

    def _is_alive(self, output: SchedulerOutput, slot: int) -> bool:
        return bool((output.handles[output.slots == slot] == self._table.handles[slot]).any())

    def _note_first_tokens(self, slots: Slots, now: float) -> None:
        for slot in slots[~self._table.has_first_token[slots]].tolist():
            self._table.sequence_at(slot).first_token_time = now
        self._table.has_first_token[slots] = True

    # ---- ends: the one place that frees ----

    def _end(
        self,
        sequence: Sequence,
        now: float,
        *,
        reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: OctavoError | None = None,
    ) -> SequenceEnd:
        if sequence.slot is None:
            self._queue.remove(sequence)
        else:
            self._leave_slot(sequence)
        self._deadlines.discard(sequence)
        choices = self._sequences[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self._sequences[sequence.request.request_id]
        return SequenceEnd(
            handle=sequence.handle,
            owner=sequence.request.owner,
            request_id=sequence.request.request_id,
            usage=sequence.usage(
                num_tokens=len(sequence.token_ids), now=now, num_discarded_tokens=self._num_discarded(sequence)
            ),
            reason=reason,
            stop_token_id=stop_token_id,
            error=error,
        )

    def _end_invalid(self, slot: int, now: float) -> SequenceEnd:
        # Nobody knows where the numbers went wrong: no block of this sequence may be found again.
        self._manager.forget(slot)
        error = InvalidLogits("The model gave logits that are not numbers.")
        return self._end(self._table.sequence_at(slot), now, error=error)

    def _num_discarded(self, sequence: Sequence) -> int:
        """Count the token that a step in flight samples for a sequence that ends before the result."""
        output = self._in_flight
        return 0 if output is None else int(output.is_sampled[output.handles == sequence.handle].sum())

    def _leave_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        self._manager.free(slot)
        self._table.give_back(slot)
        self._ended_slots.append(slot)

    # ---- parts of add ----

    def _refuse_unservable(self, request: Request) -> None:
        config, criteria = self.config, request.stop_criteria
        num_prompt_tokens = len(request.prompt_token_ids)
        num_prior = max((len(choice) for choice in request.choices), default=0)
        if not num_prompt_tokens:
            raise InvalidRequest("The prompt has no tokens; send at least one.", param="prompt_token_ids")
        if not request.choices:
            raise InvalidRequest("The request asks for no choices; ask for at least one.", param="choices")
        if criteria.max_output_tokens <= num_prior:
            raise InvalidRequest(
                f"max_output_tokens is {criteria.max_output_tokens} and {num_prior} tokens were emitted already.",
                param="max_output_tokens",
            )
        max_num_tokens = num_prompt_tokens + criteria.max_output_tokens
        if max_num_tokens > config.max_model_len:
            raise ContextLengthExceeded.of(
                num_prompt_tokens=num_prompt_tokens,
                max_output_tokens=criteria.max_output_tokens,
                max_model_len=config.max_model_len,
            )
        if self._manager.num_blocks_for(max_num_tokens) > config.num_blocks:
            raise RequestNeverFits(
                f"The request may grow to {max_num_tokens} tokens, but the KV cache holds "
                f"{config.num_blocks * config.block_size}. Shorten the prompt or lower the output limit."
            )
        if request.request_id in self._sequences:
            raise DuplicateRequest(f"The request id {request.request_id} is in use.")
        if len(request.choices) > config.max_waiting_sequences:
            raise InvalidRequest(
                f"The request asks for {len(request.choices)} choices; this engine takes "
                f"{config.max_waiting_sequences} at most.",
                param="choices",
            )
        if len(self._queue) + len(request.choices) > config.max_waiting_sequences:
            raise Overloaded(
                f"{len(self._queue)} sequences wait already, which is the limit. Please try again later.",
                retry_after_seconds=1.0,
            )
