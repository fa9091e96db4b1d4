"""The scheduler: which tokens are computed in each step, and what the results mean.

One idea carries it: a sequence has ``num_computed_tokens`` chasing the tokens that are known. Chunked prefill,
prefix hits and resuming after a preemption are the same path; there is no prefill mode and no decode mode
(iteration-level scheduling of Orca, OSDI '22, §3; chunks beside decodes as in Sarathi-Serve, OSDI '24, §4; the
unified token budget as in vLLM's v1 scheduler). Time is an argument, never read.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np

from libs.errors import (
    ClientError,
    DeadlineExceeded,
    DuplicateRequest,
    InternalError,
    OctavoError,
    Overloaded,
    UnavailableError,
)
from services.engine.core.admission_rules import (
    AdmissionRule,
    BatchIsForming,
    Candidate,
    PredictedPeakFits,
    WholePromptFits,
    first_refusal,
)
from services.engine.core.block_layout import ContiguousLayout, PagedLayout
from services.engine.core.deadlines import DeadlineQueue
from services.engine.core.drafting import Drafting, ranges, refuse_wrong_drafts
from services.engine.core.finish import FinishRules
from services.engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from services.engine.core.logprobs import output_logprobs, prompt_logprobs
from services.engine.core.output_forecast import OutputForecast
from services.engine.core.preemption import choose_victim
from services.engine.core.prefix_work import PrefixWork
from services.engine.core.request import FinishReason, Request, Sequence, SequenceEnd
from services.engine.core.request_queue import RequestQueue
from services.engine.core.scheduler_config import Admission, Batching, Layout, SchedulerConfig
from services.engine.core.scheduler_load import KVUsage, SchedulerLoad
from services.engine.core.scheduler_output import (
    NewSequence,
    NewTokens,
    PageTableRow,
    SchedulerOutput,
    StepEvents,
    StepResult,
)
from services.engine.core.sequence_table import SequenceTable, Slots
from services.engine.core.stall_watch import StallWatch
from services.engine.core.step_cost import StepCostModel, StepWork
from services.engine.core.step_plan import Counts, Flags, StepPlan
from services.engine.core.submission_rules import refuse_unservable
from services.engine.core.timings import FirstToken, Timings
from services.engine.core.token_budget import TokenBudget

# A prompt leaves room for one behind it when it has so many times as much to compute. Prompts nearly alike are
# served one after the other: the first has its first token sooner if it need not share, and the second no later.
_YIELDS_FROM = 2

_NO_BLOCKS = np.empty(0, np.int32)


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
            PagedLayout(config.block_size)
            if config.layout is Layout.PAGED
            else ContiguousLayout(config.block_size, config.max_model_len),
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._queue = RequestQueue()
        self._prefix_work = PrefixWork()
        self._deadlines = DeadlineQueue()
        self._finish_rules = FinishRules(config.eos_token_ids)
        self._output_forecast = OutputForecast()
        self._cost_model = StepCostModel()
        self._stall_watch = StallWatch(self._table)
        self._admission_rules = self._make_admission_rules()
        self._drafting = (
            Drafting(config.speculation, self._table, self._manager, config.eos_token_ids)
            if config.speculation is not None
            else None
        )
        self._sequences: dict[str, list[Sequence]] = {}
        self._num_arrivals = 0
        self._next_step_id = 1
        self._ended_slots: list[int] = []
        # Steps with the terms of their slots.
        self._in_flight: deque[tuple[SchedulerOutput, Counts]] = deque()
        self._num_preemptions = 0
        self._refusals: Counter[str] = Counter()

    def _make_admission_rules(self) -> list[AdmissionRule]:
        config = self.config
        watermark = int(config.num_blocks * config.watermark_fraction)
        rules: list[AdmissionRule] = [WholePromptFits(self._manager, self._table, watermark)]
        if config.admission is Admission.PREDICTED_PEAK and config.layout is Layout.PAGED:
            rules.append(PredictedPeakFits(self._manager, self._table))
        if config.batching is Batching.STATIC:
            rules.append(BatchIsForming(self._table))
        return rules

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
    def can_schedule(self) -> bool:
        """Whether another step may be sent before one has been answered."""
        return len(self._in_flight) < self.config.max_steps_in_flight

    @property
    def num_steps_in_flight(self) -> int:
        """Steps sent and not answered."""
        return len(self._in_flight)

    @property
    def load(self) -> SchedulerLoad:
        """Current load."""
        slots = self._table.active_slots
        pending = self._pending_tokens(slots)
        return SchedulerLoad(
            num_running=self._table.num_active,
            num_waiting=len(self._queue),
            num_pending_prefill_tokens=int(pending[pending > 1].sum()) + self._queue.num_pending_tokens,
            num_available_blocks=self._manager.num_available_blocks,
            num_blocks=self._manager.num_blocks,
        )

    @property
    def kv_usage(self) -> KVUsage:
        """How much of what running sequences hold is in use."""
        slots = self._table.active_slots
        return KVUsage(
            num_allocated_tokens=int(self._table.num_blocks[slots].sum()) * self.config.block_size,
            num_computed_tokens=int(self._table.num_computed_tokens[slots].sum()),
        )

    @property
    def kv_cache(self) -> KVCacheManager:
        """The KV cache manager, for reading block counts and the prefix cache."""
        return self._manager

    def take_num_preemptions(self) -> int:
        """Return how many preemptions there were since the last call."""
        count, self._num_preemptions = self._num_preemptions, 0
        return count

    def take_refusals(self) -> dict[str, int]:
        """Return how often each rule made the first in line wait for a step since the last call."""
        refusals, self._refusals = dict(self._refusals), Counter()
        return refusals

    def owner_of(self, request_id: str) -> int | None:
        """Return the stream that asked for an open request, or None when there is none."""
        choices = self._sequences.get(request_id)
        return choices[0].request.owner if choices else None

    def page_table(self, request_id: str) -> tuple[PageTableRow, ...]:
        """Return where the computed tokens of a request lie: one row for each token of each running choice."""
        rows: list[PageTableRow] = []
        for sequence in self._sequences.get(request_id, ()):
            if sequence.slot is None:
                continue
            blocks = self._table.blocks(sequence.slot)
            counts = self._manager.reference_counts(sequence.slot)
            rows += [
                PageTableRow(
                    handle=sequence.handle,
                    logical_token_index=index,
                    physical_block_id=blocks[index // self.config.block_size],
                    reference_count=counts[index // self.config.block_size],
                )
                for index in range(int(self._table.num_computed_tokens[sequence.slot]))
            ]
        return tuple(rows)

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

    def audit(self) -> list[str]:
        """Check integrity and repair what is wrong with the blocks; returns one sentence per fault found."""
        faults = self.check_integrity()
        if faults:
            self._manager.repair()
        return faults

    # ---- the life of a request ----

    def add(self, request: Request, now: float) -> tuple[int, ...]:
        """Take a request; returns one handle for each choice.

        Raises:
            InvalidRequest, ContextLengthExceeded, RequestNeverFits, DuplicateRequest: it can never be served.
            Overloaded: too many wait.
        """
        refuse_unservable(request, self.config, self._manager.num_blocks_for)
        if request.request_id in self._sequences:
            raise DuplicateRequest(f"The request id {request.request_id} is in use.")
        if len(self._queue) + len(request.choices) > self.config.max_waiting_sequences:
            raise Overloaded(
                f"{len(self._queue)} sequences wait already, which is the limit. Please try again later.",
                retry_after_seconds=1.0,
            )
        indices = request.choice_indices or range(len(request.choices))
        choices = [
            Sequence(
                request=request,
                handle=next(self._handles),
                choice_index=choice_index,
                arrival_number=self._num_arrivals + place,
                arrival_time=now,
                place_time=now - request.priority * self.config.aging_seconds,
                token_ids=np.concatenate((request.prompt_token_ids, output_token_ids)),
                num_prior_output_tokens=len(output_token_ids),
                timings=None if request.stall_bound_seconds is None else Timings(),
            )
            for place, (choice_index, output_token_ids) in enumerate(zip(indices, request.choices, strict=True))
        ]
        self._num_arrivals += len(choices)
        self._sequences[request.request_id] = choices
        self._queue.push(choices[0])
        for sibling in choices[1:]:
            self._line_up_sibling(choices[0], sibling)
        for sequence in choices:
            self._deadlines.add(sequence)
        return tuple(sequence.handle for sequence in choices)

    def _line_up_sibling(self, parent: Sequence, sibling: Sequence) -> None:
        """Let a choice wait for the prompt that the first computes; one with prior output goes its own way."""
        if sibling.num_prior_output_tokens or parent.num_prior_output_tokens:
            self._queue.push(sibling)
            return
        sibling.parent = parent
        self._queue.push_parked(sibling, _prompt_of(parent))

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
        """Decide the next step, or return None when nothing can be computed before an answer or a request comes.

        The caller asks only while ``can_schedule``.
        """
        assert self.can_schedule, f"{len(self._in_flight)} steps are in flight already"
        if self._drafting is not None and self._in_flight and self._drafting.awaits_answer:
            return None
        plan = StepPlan(
            TokenBudget(
                self.config.max_num_batched_tokens,
                min_chunk_tokens=self.config.block_size,
                max_share=self.config.max_prefill_share,
                is_in_company=self._table.num_active + len(self._queue) - self._queue.num_parked > 1,
                target_seconds=self.config.target_itl_seconds,
                cost_model=self._cost_model,
            )
        )
        was_preempted = self._schedule_running(plan)
        if not was_preempted:
            self._admit_waiting(plan, now)
        if self._drafting is not None:
            self._drafting.add_drafts(plan, plan.decodes)
        return self._seal(plan) if plan.slots else None

    def apply(self, result: StepResult, now: float) -> StepEvents:
        """Take a step's result: append tokens, cache full blocks, end what is finished."""
        assert self._in_flight, f"step {result.step_id} was answered, but none is in flight"
        output, terms = self._in_flight.popleft()
        assert output.step_id == result.step_id, f"step {result.step_id} is not {output.step_id}"
        is_failed = self._find_failed(output, result)
        self._cost_model.note(output.work, result.step_seconds)
        table = self._table
        # Slots whose sequence has left meanwhile are left out, also if it has come back to the same slot.
        is_alive = table.terms[output.slots] == terms
        is_answered = is_alive & output.is_sampled
        table.num_unconfirmed_tokens[output.slots[is_answered]] -= 1
        # A failed sequence was counted a token that never came.
        table.num_tokens[output.slots[is_answered & is_failed]] -= 1
        errors = {failure.slot: failure.error for failure in result.failures}
        ends = [self._end_failed(slot, errors[slot], now) for slot in output.slots[is_alive & is_failed].tolist()]
        is_alive &= table.terms[output.slots] == terms
        new = self._append_tokens(output, result, is_alive, is_failed)
        alive_slots, slots = output.slots[is_alive], new.slots
        self._commit(alive_slots, new.num_computed_tokens[is_alive])
        of_prompts = prompt_logprobs(table, alive_slots, result.prompt_logprobs)
        first_tokens = self._note_first_tokens(slots, now)
        if table.num_wanting_timings:
            self._stall_watch.note(output, result.step_seconds, slots, now)
        handles, owners = table.handles[slots].copy(), table.owners[slots].copy()
        of_output = output_logprobs(table, slots, new.num_tokens, result.output_logprobs)
        # No draft is an end token, so none comes before the last one.
        is_stopped = self._finish_rules.find_stopped(table, slots, new.last_token_ids)
        is_ended = is_stopped | (new.num_known_tokens >= table.max_num_tokens[slots])
        ends += [
            self._end(
                table.sequence_at(int(slots[index])),
                now,
                reason=FinishReason.STOP if is_stopped[index] else FinishReason.LENGTH,
                stop_token_id=int(new.last_token_ids[index]) if is_stopped[index] else None,
            )
            for index in np.flatnonzero(is_ended).tolist()
        ]
        return StepEvents(
            output.step_id,
            handles,
            owners,
            new.num_tokens,
            new.token_ids,
            tuple(ends),
            of_output,
            of_prompts,
            first_tokens,
        )

    # ---- parts of schedule ----

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Give running sequences their tokens and blocks; returns whether one had to be preempted."""
        table = self._table
        was_preempted = False
        while True:
            decodes, prompts = self._split_running()
            if len(decodes) > plan.budget.num_tokens_left:
                decodes = table.in_line(decodes)[: plan.budget.num_tokens_left]
            missing = self._manager.missing_blocks(decodes, table.num_computed_tokens[decodes] + 1)
            if missing.sum() <= self._manager.num_available_blocks:
                break
            victim = choose_victim(table, table.active_slots)
            assert victim is not None, "a sequence that runs alone always has blocks"
            self._preempt(table.sequence_at(victim))
            was_preempted = True
        yielding = self._find_yielding(prompts, was_preempted=was_preempted)
        if len(decodes):
            plan.budget.take_decodes(len(decodes), int(table.num_computed_tokens[decodes].sum()))
            new_block_ids = self._manager.allocate(decodes, missing) if missing.any() else _NO_BLOCKS
            plan.add_decodes(decodes, missing, new_block_ids)
        for slot in table.in_line(prompts).tolist() if len(prompts) else ():
            was_preempted |= self._continue_prompt(plan, slot, yields=slot in yielding)
        return was_preempted

    def _find_yielding(self, prompts: Slots, *, was_preempted: bool) -> frozenset[int]:
        """Return the rows that leave room for a much shorter prompt, one that runs or the first in line."""
        if not len(prompts):
            return frozenset()
        pending = self._pending_tokens(prompts)
        shortest = int(pending.min())
        # Nobody joins a step for which somebody had to go.
        if not was_preempted:
            shortest = min(shortest, self._pending_of_first_in_line())
        return frozenset(prompts[pending >= _YIELDS_FROM * shortest].tolist())

    def _pending_of_first_in_line(self) -> int:
        """Return what the first that needs not wait for another's work has to compute; much if there is none."""
        while (sequence := self._queue.peek()) is not None:
            hit = self._find_start(sequence)
            if hit is not None:
                return len(sequence.token_ids) - hit.num_tokens
        return self.config.max_model_len

    def _pending_of_second_in_line(self) -> int:
        sequence = self._queue.peek_second()
        if sequence is None:
            return self.config.max_model_len
        return len(sequence.token_ids) - self._manager.find_longest_prefix(sequence).num_tokens

    def _split_running(self) -> tuple[Slots, Slots]:
        """Return the rows with one token to compute, and those with more."""
        slots = self._table.active_slots
        pending = self._pending_tokens(slots)
        if pending.all() and pending.sum() == len(slots):
            return slots, slots[:0]
        return slots[pending == 1], slots[pending > 1]

    def _pending_tokens(self, slots: Slots) -> Counts:
        """Return what is left to compute: none of a row whose last output token is already being sampled."""
        table = self._table
        pending = table.num_tokens[slots] - table.num_computed_tokens[slots]
        pending[table.num_tokens[slots] >= table.max_num_tokens[slots]] -= 1
        return pending

    def _continue_prompt(self, plan: StepPlan, slot: int, *, yields: bool) -> bool:
        """Give a prompt its next chunk; returns whether a sequence had to give up its blocks for it."""
        table, slots = self._table, np.array([slot])
        if table.sequences[slot] is None:
            # It was a victim itself, of a prompt before it in line.
            return False
        num_computed = int(table.num_computed_tokens[slot])
        num_tokens = plan.budget.grant_chunk(
            int(table.num_tokens[slot]) - num_computed, num_computed_tokens=num_computed, yields=yields
        )
        if not num_tokens:
            return False
        was_preempted = False
        missing = self._manager.missing_blocks(slots, np.array([num_computed + num_tokens]))
        while missing[0] > self._manager.num_available_blocks:
            unplanned = np.setdiff1d(table.active_slots, np.concatenate([slots, *plan.slots]))
            victim = choose_victim(table, unplanned)
            if victim is None:
                # Those that are in the step already give blocks back when they end.
                return was_preempted
            self._preempt(table.sequence_at(victim))
            was_preempted = True
        plan.add(slots, np.array([num_tokens]), missing, self._manager.allocate(slots, missing))
        return was_preempted

    def _admit_waiting(self, plan: StepPlan, now: float) -> None:
        """Let the first in line join while there is budget, a slot, and no rule against it."""
        for rule in self._admission_rules:
            rule.begin_pass()
        while plan.budget.has_room_for_prompts and self._table.has_free_slot:
            sequence = self._queue.peek()
            if sequence is None or not plan.joining_message.has_room_for(sequence):
                return
            hit = self._find_start(sequence)
            if hit is None:
                continue
            expected = self._output_forecast.expected_tokens(
                sequence.request.tenant_id, sequence.request.stop_criteria.max_output_tokens
            )
            refusal = first_refusal(self._admission_rules, Candidate(sequence, hit, expected))
            if refusal is not None:
                self._refusals[refusal] += 1
                return
            num_pending = len(sequence.token_ids) - hit.num_tokens
            num_tokens = plan.budget.grant_chunk(
                num_pending,
                num_computed_tokens=hit.num_tokens,
                yields=num_pending >= _YIELDS_FROM * self._pending_of_second_in_line(),
            )
            if not num_tokens:
                return
            self._queue.remove(sequence)
            self._start(plan, sequence, hit, num_tokens, expected, now)

    def _find_start(self, sequence: Sequence) -> PrefixHit | None:
        """Return what the first in line can start from; None when it was parked until another has computed it."""
        parent = sequence.parent
        if (
            parent is not None
            and parent.slot is not None
            # One that was preempted may have to compute its prompt again first.
            and self._table.num_computed_tokens[parent.slot] >= parent.num_prompt_tokens
        ):
            return self._manager.fork_of(parent.slot, parent.num_prompt_tokens)
        hit = self._manager.find_longest_prefix(sequence)
        # What must compute its prompt in any case gains nothing from waiting for another that does.
        if self.config.enable_prefix_caching and not sequence.num_prompt_logprobs_left:
            last_useful = (len(sequence.token_ids) - 1) // self.config.block_size
            common = self._prefix_work.last_common(sequence.prefix_hashes[len(hit.block_ids) : last_useful])
            if common is not None:
                self._queue.park_first(common)
                return None
        return hit

    def _start(
        self, plan: StepPlan, sequence: Sequence, hit: PrefixHit, num_tokens: int, expected: int, now: float
    ) -> None:
        slot = self._table.take(sequence, expected_output_tokens=expected)
        if self._drafting is not None:
            self._drafting.begin(slot)
        copy = self._manager.start(slot, hit)
        if copy is not None:
            plan.block_copies.append(copy)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            # Only prompt tokens count as cached; a resumed request may also hit its own output.
            sequence.num_cached_tokens = min(hit.num_tokens, sequence.num_prompt_tokens)
            if sequence.timings is not None:
                sequence.timings.misses = self._manager.explain_misses(sequence, hit)
        if self.config.enable_prefix_caching:
            self._prefix_work.begin(sequence.handle, sequence.prefix_hashes[len(hit.block_ids) :])
        slots, counts = np.array([slot]), np.array([num_tokens])
        missing = self._manager.missing_blocks(slots, counts + hit.num_tokens)
        plan.add(slots, counts, missing, self._manager.allocate(slots, missing))
        plan.joining_message.add(sequence)
        plan.new_sequences.append(
            NewSequence(
                slot=slot,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=hit.num_tokens,
                block_ids=hit.block_ids if copy is None else (*hit.block_ids, copy.target_block_id),
                sampling_params=sequence.request.sampling_params,
                choice_index=sequence.choice_index,
                is_resumed=sequence.num_preemptions > 0,
                wants_prompt_logprobs=sequence.num_prompt_logprobs_left > 0,
            )
        )

    def _seal(self, plan: StepPlan) -> SchedulerOutput:
        """Turn the plan into a step and count its tokens as computed."""
        table = self._table
        slots, num_tokens = np.concatenate(plan.slots), np.concatenate(plan.num_tokens)
        before = table.num_computed_tokens[slots]
        after = before + num_tokens
        drafts = plan.joined_drafts(len(slots))
        if drafts is not None:
            # They count as computed once they are accepted.
            after -= drafts.num_tokens
        table.num_computed_tokens[slots] = after
        table.work_done[slots] += num_tokens
        is_sampled = after == table.num_tokens[slots]
        sampled = slots[is_sampled]
        table.num_tokens[sampled] += 1
        table.num_unconfirmed_tokens[sampled] += 1
        is_chunk = num_tokens > 1
        chunks = num_tokens[is_chunk]
        output = SchedulerOutput(
            step_id=self._next_step_id,
            ended_slots=tuple(self._ended_slots),
            new_sequences=tuple(plan.new_sequences),
            slots=slots,
            num_scheduled_tokens=num_tokens,
            num_new_blocks=np.concatenate(plan.num_new_blocks),
            new_block_ids=np.concatenate(plan.new_block_ids),
            is_sampled=is_sampled,
            handles=table.handles[slots],
            num_computed_tokens=after,
            block_copies=tuple(plan.block_copies),
            work=StepWork(
                num_tokens=int(num_tokens.sum()),
                decode_context_tokens=int(before[~is_chunk].sum()),
                prefill_pairs=int((chunks * before[is_chunk] + chunks * chunks // 2).sum()),
            ),
            drafts=drafts,
        )
        self._next_step_id += 1
        self._ended_slots.clear()
        self._in_flight.append((output, table.terms[slots]))
        return output

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks from a running sequence; it waits in its old place to be computed again.

        A token that is being sampled for it is forgotten: the same draw gives it again.
        """
        self._leave_slot(sequence)
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._queue.push(sequence)

    # ---- parts of apply ----

    def _append_tokens(
        self, output: SchedulerOutput, result: StepResult, is_alive: Flags, is_failed: Flags
    ) -> NewTokens:
        """Write what the sequences got that are still there."""
        is_answered = is_alive & output.is_sampled
        is_taken = is_answered[output.is_sampled & ~is_failed]
        slots, num_tokens = output.slots[is_answered], result.num_tokens[is_taken]
        positions = output.num_computed_tokens[is_answered]
        if output.drafts is None or self._drafting is None:
            token_ids = result.token_ids[is_taken]
            self._table.token_ids[slots, positions] = token_ids
            return NewTokens(slots, num_tokens, token_ids, token_ids, positions + 1, output.num_computed_tokens)
        token_ids = result.token_ids[np.repeat(is_taken, result.num_tokens)]
        self._table.token_ids[np.repeat(slots, num_tokens), ranges(positions, num_tokens)] = token_ids
        self._drafting.take_answer(output, is_answered, num_tokens)
        num_computed_tokens = output.num_computed_tokens.copy()
        num_computed_tokens[is_answered] += num_tokens - 1
        last_token_ids = token_ids[np.cumsum(num_tokens) - 1]
        return NewTokens(slots, num_tokens, token_ids, last_token_ids, positions + num_tokens, num_computed_tokens)

    def _commit(self, slots: Slots, num_computed_tokens: Counts) -> None:
        """Make full blocks findable and wake those that waited for them."""
        for handle, hashes in self._manager.commit(slots, num_computed_tokens).items():
            for prefix_hash in self._prefix_work.finish(handle, hashes):
                self._queue.wake(prefix_hash)

    def _find_failed(self, output: SchedulerOutput, result: StepResult) -> Flags:
        """Mark the step's sequences that got an error; raises InternalError when the answer is not to this step."""
        is_failed = np.zeros(len(output.slots), np.bool_)
        failed = [failure.slot for failure in result.failures]
        is_foreign = False
        if failed:
            is_failed = np.isin(output.slots, failed)
            is_foreign = not np.isin(failed, output.slots).all()
        expected = output.slots[output.is_sampled & ~is_failed]
        if is_foreign or not np.array_equal(expected, result.slots):
            raise InternalError(
                f"Step {output.step_id} should have sampled slots {expected.tolist()}, "
                f"but the worker answered for {result.slots.tolist()} and failed {failed}."
            )
        refuse_wrong_drafts(output, result)
        return is_failed

    def _note_first_tokens(self, slots: Slots, now: float) -> tuple[FirstToken, ...]:
        first_tokens: list[FirstToken] = []
        for slot in slots[~self._table.has_first_token[slots]].tolist():
            sequence = self._table.sequence_at(slot)
            sequence.first_token_time = now
            if sequence.num_prompt_logprobs_left:
                raise InternalError(f"Slot {slot} has a token before all log-probabilities of its prompt.")
            self._queue.wake(_prompt_of(sequence))
            if sequence.timings is not None:
                first_tokens.append(sequence.first_token())
        self._table.has_first_token[slots] = True
        return tuple(first_tokens)

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
        num_discarded = 0
        if sequence.slot is None:
            self._queue.remove(sequence)
        else:
            num_discarded = int(self._table.num_unconfirmed_tokens[sequence.slot])
            self._leave_slot(sequence)
        self._queue.wake(_prompt_of(sequence))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
            self._output_forecast.note(sequence.request.tenant_id, num_output)
        self._deadlines.discard(sequence)
        choices = self._sequences[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self._sequences[sequence.request.request_id]
        return SequenceEnd(
            handle=sequence.handle,
            owner=sequence.request.owner,
            request_id=sequence.request.request_id,
            usage=sequence.usage(num_tokens=len(sequence.token_ids), now=now, num_discarded_tokens=num_discarded),
            reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            traceparent=sequence.request.traceparent,
        )

    def _end_failed(self, slot: int, error: OctavoError, now: float) -> SequenceEnd:
        # Nobody knows where numbers went wrong: no block of this sequence may be found again. What a client asked
        # for, or a busy worker, spoils none, and must not cost others their prefix.
        if not isinstance(error, ClientError | UnavailableError):
            self._manager.forget(slot)
        return self._end(self._table.sequence_at(slot), now, error=error)

    def _leave_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        self._manager.free(slot)
        self._table.give_back(slot)
        self._ended_slots.append(slot)
        for prefix_hash in self._prefix_work.leave(sequence.handle):
            self._queue.wake(prefix_hash)


def _prompt_of(sequence: Sequence) -> tuple[str, int]:
    """Return the key under which other choices wait for a sequence's prompt."""
    return ("prompt", sequence.handle)
