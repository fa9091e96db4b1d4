"""The rules of scheduling in plain loops: a referee who says what each step must be.

1. *Running sequences come first*: those with one token to compute, then the others, each by place in line, as far
   as the budget goes. One whose last token is being sampled has nothing to compute.
2. *The budget* is in tokens; while anyone else runs or waits awake, prompts together take at most their share, and
   of it one takes at most that share that has at least twice as much to compute as another prompt that runs, or as
   the next in line, if it can join, and where one ends the others come whole or not at all; with a target for the
   inter-token latency, and while somebody decodes, prompts take what the predicted time leaves, and the first of
   them a block at least.
3. *When blocks do not suffice* the one gives up all of its blocks that has the lowest priority, then has computed
   least, then came last, but never the first in line; as often as needed and no more. For a decode anyone may have
   to go, for a prompt only those that are not in the step yet. Nobody is admitted in such a step.
4. *Otherwise* the first in line is admitted while budget and slots last and no admission rule is against it.
5. *Nobody computes what another is computing*: who finds that its next missing block is being computed by a running
   sequence sleeps until the last such block of their common prefix is done or given up. The other choices of a
   request sleep until the first has its first token.
6. *A hit* is the longest cached prefix, at least one token short of all that is known. A choice whose sibling has
   computed the prompt shares all of its blocks but the last, which is copied.
7. *Drafts come last*: with speculation, and while few run, a sequence with one token to compute whose tokens are
   all known computes drafts behind it, as far as budget and blocks reach that all others have left, short of its
   last token and of any end token. After drafts that come to nothing it computes 1, 2, 4 … tokens without. While
   a step with drafts is in flight, or one behind which somebody could draft, no other is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from libs.kv import PrefixHash
from services.engine.core.drafting import MAX_PAUSE_TOKENS
from services.engine.core.output_forecast import OutputForecast
from services.engine.core.scheduler_config import (
    Admission,
    Batching,
    Layout,
    SchedulerConfig,
    SpeculationConfig,
)
from services.engine.core.scheduler_output import NewSequence, SchedulerOutput
from services.engine.core.step_cost import StepCostModel, StepWork

Cached = Mapping[PrefixHash, int]


class Known(Protocol):
    """What the outside knows of an open sequence."""

    @property
    def handle(self) -> int: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def chain(self) -> list[PrefixHash]: ...

    @property
    def order(self) -> tuple[float, int]: ...

    @property
    def parent(self) -> int | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def max_output_tokens(self) -> int: ...


@dataclass(slots=True)
class Running:
    """A running sequence before the step; ``num_tokens`` counts those that are being sampled."""

    handle: int
    order: tuple[float, int]
    priority: int
    known_token_ids: list[int]
    end_token_ids: frozenset[int]
    has_unanswered_drafts: bool
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    max_num_tokens: int
    num_output_expected: int
    block_ids: list[int]

    @property
    def num_unconfirmed(self) -> int:
        return self.num_tokens - len(self.known_token_ids)

    @property
    def num_pending(self) -> int:
        is_last_sampled = self.num_tokens >= self.max_num_tokens
        return self.num_tokens - self.num_computed_tokens - is_last_sampled

    @property
    def num_remaining(self) -> int:
        """Output tokens to come: as expected, and past that as many as there are already."""
        num_output = self.num_tokens - self.num_prompt_tokens
        expected = self.num_output_expected - num_output
        return min(expected if expected > 0 else num_output, self.max_num_tokens - self.num_tokens)


@dataclass(frozen=True, slots=True)
class Facts:
    """Who left and who joined in a step; ``expected_outputs`` is the forecast for each that joined."""

    preempted: tuple[int, ...]
    admitted: tuple[int, ...]
    expected_outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who is admitted: the blocks it shares, the block it has copied, and its first chunk."""

    life: Known
    count: int
    num_expected: int
    hit: list[int]
    num_hit_tokens: int
    source: int | None


@dataclass(slots=True)
class _Budget:
    config: SchedulerConfig
    cost_model: StepCostModel
    num_left: int
    max_prompt: int
    num_prompt_left: int
    seconds_left: float | None = None
    is_first_chunk: bool = True
    has_end: bool = False

    @property
    def has_room_for_prompts(self) -> bool:
        return self.num_left > 0 and self.num_prompt_left > 0

    def take_decodes(self, rows: Sequence[Running]) -> None:
        self.num_left -= len(rows)
        target = self.config.target_itl_seconds
        if rows and target is not None and self.cost_model.is_fitted:
            work = StepWork(len(rows), sum(row.num_computed_tokens for row in rows), 0)
            self.seconds_left = target - self.cost_model.predict_seconds(work)

    def take_drafts(self, count: int, num_computed: int) -> int:
        count = min(count, self.num_left)
        if self.seconds_left is not None and count:
            count = min(
                count, self.cost_model.max_chunk_tokens(self.seconds_left, num_computed_tokens=num_computed)
            )
            self._pay(count, num_computed)
        self.num_left -= count
        return count

    def _pay(self, count: int, num_computed: int) -> None:
        assert self.seconds_left is not None
        chunk = StepWork(count, 0, count * num_computed + count * count // 2)
        nothing = StepWork(0, 0, 0)
        self.seconds_left -= self.cost_model.predict_seconds(chunk) - self.cost_model.predict_seconds(nothing)

    def take_chunk(self, num_pending: int, num_computed: int, *, yields: bool) -> int:
        count = min(num_pending, self.num_left, self.num_prompt_left)
        if self.has_end and count < num_pending and self.max_prompt < self.config.max_num_batched_tokens:
            return 0
        if yields:
            count = min(count, share_of(self.config, self.max_prompt))
        if self.seconds_left is not None and count:
            affordable = self.cost_model.max_chunk_tokens(self.seconds_left, num_computed_tokens=num_computed)
            count = min(count, max(affordable, self.config.block_size if self.is_first_chunk else 0))
            self._pay(count, num_computed)
        self.is_first_chunk &= not count
        self.has_end |= count == num_pending
        self.num_left -= count
        self.num_prompt_left -= count
        return count


@dataclass(slots=True)
class _Step:
    """What the referee knows while a step is planned."""

    config: SchedulerConfig
    budget: _Budget
    rows: dict[int, Running]
    num_holders: Counter[int]
    # Handed out in this step: what was cached there is gone.
    taken: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    decode_reads: int = 0
    prefill_pairs: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        if self.config.layout is Layout.CONTIGUOUS:
            num_tokens = self.config.max_model_len
        return -(-num_tokens // self.config.block_size)

    @property
    def num_available(self) -> int:
        return self.config.num_blocks - len(self.num_holders)

    def lacks(self, row: Running, num_tokens: int) -> int:
        return max(self.blocks_for(num_tokens) - len(row.block_ids), 0)

    @property
    def is_crowded(self) -> bool:
        return self.config.speculation is None or len(self.rows) > self.config.speculation.max_drafting_seqs

    def plan_drafts(self, row: Running, count: int, missing: int) -> None:
        self.counts[row.handle] += count
        self.missing[row.handle] += missing
        self.decode_reads -= row.num_computed_tokens
        total = count + 1
        self.prefill_pairs += total * row.num_computed_tokens + total * total // 2

    def plan(self, row: Running, count: int, missing: int) -> None:
        self.counts[row.handle], self.missing[row.handle] = count, missing
        if count == 1:
            self.decode_reads += row.num_computed_tokens
        else:
            self.prefill_pairs += count * row.num_computed_tokens + count * count // 2

    def hold(self, blocks: Iterable[int], *, is_new: bool) -> None:
        for block in blocks:
            if is_new:
                assert block not in self.num_holders, f"block {block} is handed out twice"
                self.taken.add(block)
            self.num_holders[block] += 1

    def preempt_one_of(self, candidates: Iterable[Running]) -> bool:
        """Take the blocks of the right victim (rule 3); returns whether there was one."""
        first = min(self.rows.values(), key=lambda row: row.order)
        choices = [row for row in candidates if row is not first]
        if not choices:
            return False
        victim = min(choices, key=lambda row: (row.priority, row.num_computed_tokens, -row.order[1]))
        for block in victim.block_ids:
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                del self.num_holders[block]
        del self.rows[victim.handle]
        self.preempted.append(victim.handle)
        return True


class Referee:
    """Knows the rules and what they need to know of the past; judges one step after the other."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.asleep: dict[int, Hashable] = {}
        self.forecast = OutputForecast()
        self.num_sleeps = 0
        self._cost_model = StepCostModel()
        self._worker_of: dict[PrefixHash, int] = {}
        self._work_of: dict[int, list[PrefixHash]] = {}
        # How much of its hash chain the engine knows of each: a choice that forks is not hashed beforehand.
        self._num_hashed: dict[int, int] = {}
        # After failed drafts: how many tokens a sequence went without, and how many it still does.
        self._pauses: dict[int, tuple[int, int]] = {}

    # ---- what happens between steps ----

    def note_arrival(self, life: Known) -> None:
        if life.parent is not None:
            self.asleep[life.handle] = ("prompt", life.parent)

    def note_answer(self, work: StepWork, step_seconds: float) -> None:
        if self.config.target_itl_seconds is not None:
            self._cost_model.note(work, step_seconds)

    def note_first_token(self, handle: int) -> None:
        self._wake(("prompt", handle))

    def note_computed(self, life: Known, num_tokens: int) -> None:
        """Note that a step was answered that left a sequence with so many computed tokens."""
        num_full = num_tokens // self.config.block_size
        self._num_hashed[life.handle] = max(self._num_hashed.get(life.handle, 0), num_full)
        mine = self._work_of.get(life.handle)
        if mine:
            done = set(life.chain[:num_full])
            self._drop(life.handle, [prefix_hash for prefix_hash in mine if prefix_hash in done])

    def note_drafts(self, handle: int, num_accepted: int) -> None:
        """Note how many of a sequence's drafts were right."""
        if num_accepted:
            self._pauses[handle] = (0, 0)
        else:
            self._pause(handle)

    def note_leaving(self, handle: int) -> None:
        """Note that a sequence has no slot any more."""
        self._pauses.pop(handle, None)
        self._drop(handle, self._work_of.get(handle, ()))

    def note_end(self, handle: int) -> None:
        self.note_leaving(handle)
        self.asleep.pop(handle, None)
        self._num_hashed.pop(handle, None)
        self._wake(("prompt", handle))

    # ---- a step ----

    def check_step(
        self,
        output: SchedulerOutput | None,
        *,
        is_in_flight: bool,
        running: Sequence[Running],
        waiting: Mapping[int, Known],
        cached_before: Cached,
        cached_after: Cached,
    ) -> Facts:
        """Raise AssertionError when a step is not as the rules say; ``waiting`` is who waits before it."""
        config = self.config
        max_tokens = config.max_num_batched_tokens
        num_awake = sum(1 for handle in waiting if handle not in self.asleep)
        max_prompt = share_of(config, max_tokens) if len(running) + num_awake > 1 else max_tokens
        step = _Step(
            config,
            _Budget(config, self._cost_model, max_tokens, max_prompt, max_prompt),
            {row.handle: row for row in running},
            Counter(block for row in running for block in row.block_ids),
        )
        if is_in_flight and self._must_wait(step, running):
            assert output is None, "a step was sent though one with drafts, or before some, is in flight"
            assert cached_after == cached_before
            return Facts((), (), ())
        was_empty = not running
        self._plan_running(step, waiting, cached_before)
        for handle in step.preempted:
            self.note_leaving(handle)
        news = iter(output.new_sequences if output else ())
        self._check_running(output, step)
        admitted: list[int] = []
        expected: list[int] = []
        if not step.preempted:
            line = dict(waiting)
            while (choice := self._choose(step, line, cached_before, was_empty)) is not None:
                new, handle = next(news, None), choice.life.handle
                assert new is not None, f"handle {handle} is first in line and fits, but is not admitted"
                assert output is not None
                self._admit(step, choice, new, output)
                del line[handle]
                admitted.append(handle)
                expected.append(choice.num_expected)
        assert next(news, None) is None, "somebody was admitted who must wait"
        self._check_drafts(output, step)
        assert cached_after == {h: b for h, b in cached_before.items() if b not in step.taken}
        if output is None:
            assert not step.counts, f"nothing is scheduled, but {sorted(step.counts)} could go on"
        else:
            self._check_form(output, step)
        return Facts(tuple(step.preempted), tuple(admitted), tuple(expected))

    def _plan_running(self, step: _Step, waiting: Mapping[int, Known], cached: Cached) -> None:
        """Apply rules 1 to 3."""
        while True:
            rows = sorted(step.rows.values(), key=lambda row: row.order)
            decodes = [row for row in rows if row.num_pending == 1][: step.budget.num_left]
            lacking = [step.lacks(row, row.num_computed_tokens + 1) for row in decodes]
            if sum(lacking) <= step.num_available:
                break
            assert step.preempt_one_of(rows), "a sequence alone lacks blocks"
        prompts = [row for row in rows if row.num_pending > 1]
        shortest = min((row.num_pending for row in prompts), default=0)
        if prompts and not step.preempted:
            shortest = min(shortest, self._pending_of_first(step, waiting, cached))
        step.budget.take_decodes(decodes)
        num_promised = 0
        for row, missing in zip(decodes, lacking, strict=True):
            step.plan(row, 1, missing)
            step.decodes.append(row.handle)
            num_promised += missing
        for row in prompts:
            if row.handle not in step.rows:
                continue
            yields = row.num_pending >= 2 * shortest
            count = step.budget.take_chunk(row.num_pending, row.num_computed_tokens, yields=yields)
            if not count:
                continue
            missing = step.lacks(row, row.num_computed_tokens + count)
            while missing > step.num_available - num_promised:
                unplanned = [r for r in step.rows.values() if r.handle not in step.counts and r is not row]
                if not step.preempt_one_of(unplanned):
                    break
            else:
                step.plan(row, count, missing)
                num_promised += missing

    def _check_running(self, output: SchedulerOutput | None, step: _Step) -> None:
        if output is None:
            return
        num_old = len(output.slots) - len(output.new_sequences)
        num_known = output.num_scheduled_tokens[:num_old].copy()
        if output.drafts is not None:
            num_known -= output.drafts.num_tokens[:num_old]
            assert not output.drafts.num_tokens[num_old:].any(), "one that joins has drafts"
        assert dict(zip(output.handles[:num_old].tolist(), num_known.tolist(), strict=True)) == {**step.counts}
        blocks_of = _new_blocks(output)
        for handle in output.handles[:num_old].tolist():
            # What comes behind these is for drafts.
            blocks = blocks_of[handle][: step.missing[handle]]
            assert len(blocks) == step.missing[handle], f"blocks of handle {handle}"
            step.hold(blocks, is_new=True)
            step.rows[handle].block_ids = step.rows[handle].block_ids + blocks

    def _must_wait(self, step: _Step, running: Sequence[Running]) -> bool:
        if any(row.has_unanswered_drafts for row in running):
            return True
        return not step.is_crowded and any(self._could_draft(row) for row in running)

    def _could_draft(self, row: Running) -> bool:
        """Say whether drafts are likely behind the token that is being sampled."""
        return self._pause_left(row.handle) == 0 and row.num_unconfirmed > 0 and bool(self._guess(row))

    def _check_drafts(self, output: SchedulerOutput | None, step: _Step) -> None:
        """Apply rule 7."""
        given = _drafts(output)
        blocks_of = _new_blocks(output) if output is not None else {}
        for handle in step.decodes:
            row, drafts = step.rows[handle], list[int]()
            pause, left = self._pauses.get(handle, (0, 0))
            if left:
                self._pauses[handle] = (pause, left - 1)
            elif not step.is_crowded and not row.num_unconfirmed:
                guess = self._guess(row)
                drafts = self._granted(step, row, guess)
                if guess and not drafts:
                    self._pause(handle)
            assert given.pop(handle, []) == drafts, f"drafts of handle {handle}"
            missing = step.lacks(row, row.num_computed_tokens + 1 + len(drafts))
            blocks = blocks_of[handle][step.missing[handle] :]
            assert len(blocks) == missing, f"blocks for the drafts of handle {handle}"
            step.hold(blocks, is_new=True)
            row.block_ids = row.block_ids + blocks
            if drafts:
                step.plan_drafts(row, len(drafts), missing)
        assert not given, f"handles {sorted(given)} do not compute one token, but have drafts"

    def _guess(self, row: Running) -> list[int]:
        speculation = self.config.speculation
        assert speculation is not None
        num_wanted = min(speculation.num_draft_tokens, row.max_num_tokens - row.num_tokens - 1)
        drafts = read_on(row.known_token_ids, speculation, num_wanted)
        num_usable = next((i for i, token_id in enumerate(drafts) if token_id in row.end_token_ids), len(drafts))
        return drafts[:num_usable]

    def _granted(self, step: _Step, row: Running, drafts: list[int]) -> list[int]:
        num_computed = row.num_computed_tokens + 1
        room = (len(row.block_ids) + step.num_available) * self.config.block_size - num_computed
        return drafts[: step.budget.take_drafts(min(len(drafts), room), num_computed)]

    def _pause(self, handle: int) -> None:
        pause, _ = self._pauses.get(handle, (0, 0))
        pause = min(max(1, 2 * pause), MAX_PAUSE_TOKENS)
        self._pauses[handle] = (pause, pause)

    def _pause_left(self, handle: int) -> int:
        return self._pauses.get(handle, (0, 0))[1]

    def _choose(self, step: _Step, line: Mapping[int, Known], cached: Cached, was_empty: bool) -> _Choice | None:
        """Return who is admitted next, and how (rules 4 to 6)."""
        while step.budget.has_room_for_prompts and len(step.rows) < self.config.max_num_seqs:
            awake = self._line(line)
            if not awake:
                return None
            life = awake[0]
            start = self._find_start(step, life, cached)
            if start is None:
                continue
            hit, num_hit_tokens, source = start
            num_expected = self.forecast.expected_tokens(life.tenant_id, life.max_output_tokens)
            if not self._is_let_in(step, life, hit, num_expected, was_empty):
                return None
            pending = len(life.token_ids) - num_hit_tokens
            yields = pending >= 2 * self._pending_of_second(step, awake, cached)
            count = step.budget.take_chunk(pending, num_hit_tokens, yields=yields)
            return _Choice(life, count, num_expected, hit, num_hit_tokens, source) if count else None
        return None

    def _find_start(self, step: _Step, life: Known, cached: Cached) -> tuple[list[int], int, int | None] | None:
        """Return blocks and tokens of the hit and the block to copy; None for one that falls asleep."""
        sibling, size = self._computed_sibling(step, life), self.config.block_size
        if sibling is not None:
            num_shared = (life.num_prompt_tokens - 1) // size
            return sibling.block_ids[:num_shared], life.num_prompt_tokens - 1, sibling.block_ids[num_shared]
        self._num_hashed[life.handle] = len(life.chain)
        hit = self._longest_prefix(step, life, cached)
        return None if self._falls_asleep(life, len(hit)) else (hit, len(hit) * size, None)

    def _line(self, waiting: Mapping[int, Known]) -> list[Known]:
        """Return who waits awake, by place in line."""
        awake = [life for handle, life in waiting.items() if handle not in self.asleep]
        return sorted(awake, key=lambda life: life.order)

    def _pending_of_first(self, step: _Step, waiting: Mapping[int, Known], cached: Cached) -> int:
        """Return what the first in line has to compute that does not fall asleep."""
        for life in self._line(waiting):
            start = self._find_start(step, life, cached)
            if start is not None:
                return len(life.token_ids) - start[1]
        return self.config.max_model_len

    def _pending_of_second(self, step: _Step, awake: list[Known], cached: Cached) -> int:
        for life in awake[1:2]:
            self._num_hashed[life.handle] = len(life.chain)
            return len(life.token_ids) - len(self._longest_prefix(step, life, cached)) * self.config.block_size
        return self.config.max_model_len

    def _computed_sibling(self, step: _Step, life: Known) -> Running | None:
        parent = step.rows.get(life.parent) if life.parent is not None else None
        is_done = parent is not None and parent.num_computed_tokens >= parent.num_prompt_tokens
        return parent if is_done else None

    def _longest_prefix(self, step: _Step, life: Known, cached: Cached) -> list[int]:
        blocks: list[int] = []
        for prefix_hash in life.chain[: (len(life.token_ids) - 1) // self.config.block_size]:
            block = cached.get(prefix_hash)
            if block is None or block in step.taken:
                break
            blocks.append(block)
        return blocks

    def _falls_asleep(self, life: Known, num_hit_blocks: int) -> bool:
        last = None
        for prefix_hash in life.chain[num_hit_blocks : (len(life.token_ids) - 1) // self.config.block_size]:
            if prefix_hash not in self._worker_of:
                break
            last = prefix_hash
        if last is None:
            return False
        self.asleep[life.handle] = last
        self.num_sleeps += 1
        return True

    def _is_let_in(self, step: _Step, life: Known, hit: list[int], num_expected: int, was_empty: bool) -> bool:
        config, rows = self.config, step.rows.values()
        promised = sum(step.lacks(row, row.num_tokens) for row in rows)
        watermark = int(config.num_blocks * config.watermark_fraction) if rows else 0
        # The last token that may be sampled needs no place.
        num_tokens = min(len(life.token_ids) + 1, life.num_prompt_tokens + life.max_output_tokens - 1)
        needed = step.blocks_for(num_tokens) - len(hit)
        num_revived = sum(1 for block in hit if block not in step.num_holders)
        if needed + promised + watermark > step.num_available - num_revived:
            return False
        if config.admission is Admission.PREDICTED_PEAK and config.layout is Layout.PAGED and rows:
            num_output = len(life.token_ids) - life.num_prompt_tokens
            ends = [(row.num_remaining, row.num_tokens) for row in rows]
            left = num_expected - num_output if num_expected > num_output else num_output
            ends.append((min(left, life.max_output_tokens - num_output), len(life.token_ids)))
            num_listed = sum(len(row.block_ids) for row in rows) + len(hit)
            num_shared = num_listed - len(step.num_holders) - num_revived
            if predicted_peak(ends, config.block_size) - max(0, num_shared) > config.num_blocks:
                return False
        return config.batching is not Batching.STATIC or was_empty

    def _admit(self, step: _Step, choice: _Choice, new: NewSequence, output: SchedulerOutput) -> None:
        life, hit = choice.life, choice.hit
        index = output.slots.tolist().index(new.slot)
        assert output.handles[index] == life.handle, f"handle {life.handle} is first in line and fits"
        assert output.num_scheduled_tokens[index] == choice.count
        assert new.num_computed_tokens == choice.num_hit_tokens
        copies = [c.source_block_id for c in output.block_copies if c.target_block_id in new.block_ids[len(hit) :]]
        assert list(new.block_ids[: len(hit)]) == hit
        assert copies == ([] if choice.source is None else [choice.source])
        assert len(new.block_ids) == len(hit) + len(copies)
        row = Running(
            handle=life.handle,
            order=life.order,
            priority=0,
            known_token_ids=life.token_ids,
            end_token_ids=frozenset(),
            has_unanswered_drafts=False,
            num_prompt_tokens=life.num_prompt_tokens,
            num_tokens=len(life.token_ids),
            num_computed_tokens=new.num_computed_tokens,
            max_num_tokens=life.num_prompt_tokens + life.max_output_tokens,
            num_output_expected=choice.num_expected,
            block_ids=list(new.block_ids),
        )
        step.hold(hit, is_new=False)
        step.hold(new.block_ids[len(hit) :], is_new=True)
        missing = step.lacks(row, row.num_computed_tokens + choice.count)
        blocks = _new_blocks(output)[life.handle]
        assert len(blocks) == missing
        step.hold(blocks, is_new=True)
        row.block_ids += blocks
        step.rows[life.handle] = row
        step.plan(row, choice.count, missing)
        self._begin_work(life, len(hit))

    def _begin_work(self, life: Known, num_hit_blocks: int) -> None:
        if self.config.enable_prefix_caching:
            hashes = life.chain[num_hit_blocks : self._num_hashed.get(life.handle, 0)]
            mine = [prefix_hash for prefix_hash in hashes if prefix_hash not in self._worker_of]
            self._worker_of.update(dict.fromkeys(mine, life.handle))
            self._work_of[life.handle] = mine

    def _check_form(self, output: SchedulerOutput, step: _Step) -> None:
        """Check that arrays say the same as the plan."""
        assert output.handles.tolist() == list(dict.fromkeys(output.handles.tolist())), "a handle comes twice"
        assert output.num_tokens == sum(step.counts.values()) <= self.config.max_num_batched_tokens
        assert len(set(output.slots.tolist())) == len(output.slots) <= self.config.max_num_seqs
        assert all(0 <= slot < self.config.max_num_seqs for slot in output.slots.tolist())
        assert output.work == StepWork(output.num_tokens, step.decode_reads, step.prefill_pairs)
        drafts_of = _drafts(output)
        assert len(output.block_copies) == sum(1 for new in output.new_sequences if _is_copied(new, output))
        for handle, count, after, is_sampled in zip(
            output.handles.tolist(),
            output.num_scheduled_tokens.tolist(),
            output.num_computed_tokens.tolist(),
            output.is_sampled.tolist(),
            strict=True,
        ):
            row = step.rows[handle]
            num_drafts = len(drafts_of.get(handle, ()))
            assert count == step.counts[handle] >= 1
            assert after == row.num_computed_tokens + count - num_drafts <= row.num_tokens
            assert is_sampled == (after == row.num_tokens)

    # ---- who works on what ----

    def _drop(self, handle: int, hashes: Iterable[PrefixHash]) -> None:
        dropped = set(hashes)
        if not dropped:
            return
        self._work_of[handle] = [h for h in self._work_of[handle] if h not in dropped]
        if not self._work_of[handle]:
            del self._work_of[handle]
        for prefix_hash in dropped:
            del self._worker_of[prefix_hash]
            self._wake(prefix_hash)

    def _wake(self, key: Hashable) -> None:
        if key in self.asleep.values():
            self.asleep = {handle: other for handle, other in self.asleep.items() if other != key}


def share_of(config: SchedulerConfig, num_tokens: int) -> int:
    """Return the prompts' share of so many tokens; a block at least."""
    return max(config.block_size, int(num_tokens * config.max_prefill_share))


def read_on(token_ids: list[int], speculation: SpeculationConfig, num_wanted: int) -> list[int]:
    """Return what followed the last time that the longest of the last n-grams was said."""
    if num_wanted < 1:
        return []
    for length in range(speculation.max_ngram_tokens, speculation.min_ngram_tokens - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                following = list(token_ids)
                for place in range(num_wanted):
                    following.append(following[end + place])
                return following[len(token_ids) :]
    return []


def predicted_peak(ends: Iterable[tuple[int, int]], block_size: int) -> int:
    """Return the blocks at the worst moment, for sequences given by what remains and what is there.

    Just before one of them ends, all that end later have grown by as much; the last block of each counts whole.
    """
    longest_first = sorted(ends, key=lambda end: -end[0])
    peak = num_tokens = 0
    for rank, (remaining, present) in enumerate(longest_first, start=1):
        num_tokens += present
        peak = max(peak, (num_tokens + rank * remaining) // block_size + rank)
    return peak


def _drafts(output: SchedulerOutput | None) -> dict[int, list[int]]:
    if output is None or output.drafts is None:
        return {}
    parts = np.split(output.drafts.token_ids, np.cumsum(output.drafts.num_tokens)[:-1])
    return {h: part.tolist() for h, part in zip(output.handles.tolist(), parts, strict=True) if len(part)}


def _is_copied(new: NewSequence, output: SchedulerOutput) -> bool:
    return any(copy.target_block_id in new.block_ids for copy in output.block_copies)


def _new_blocks(output: SchedulerOutput) -> dict[int, list[int]]:
    blocks: dict[int, list[int]] = {}
    position, new_block_ids = 0, output.new_block_ids.tolist()
    for handle, count in zip(output.handles.tolist(), output.num_new_blocks.tolist(), strict=True):
        blocks[handle] = new_block_ids[position : position + count]
        position += count
    return blocks
