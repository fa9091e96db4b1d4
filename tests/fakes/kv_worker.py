"""A worker that keeps a real KV memory, for tests of everything that decides what workers compute.

It knows only what a worker would know: steps as differences. The KV of a token is a digest of the KV of the token
before it, *read from memory through the block table*, and of its own id; the sampled token is a function of the
last digest. So it answers like a model would: a block table that points at wrong contents gives wrong tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np

from libs.errors import InvalidLogits, OctavoError
from libs.logprobs import TokenLogprobs
from services.engine.core.kv_cache_manager import BlockCopy
from services.engine.core.logprobs import SlotLogprobs, SlotPromptLogprobs
from services.engine.core.scheduler_output import NewSequence, SchedulerOutput, SlotFailure, StepResult
from services.engine.core.step_cost import StepWork

_MASK = (1 << 64) - 1
_ROOT = 0x9E3779B97F4A7C15
_GARBAGE = 0xDEAD_BEEF_DEAD_BEEF

# Chooses a token from the KV of the last known token, the place in the output and the choice.
Sampler = Callable[[int, int, int], int]
# Says how long a step takes.
Clock = Callable[[StepWork], float]


def extend_digest(previous: int, token_id: int) -> int:
    """Return the KV of a token after a prefix."""
    mixed = ((previous ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 31)


def digests_of(token_ids: Iterable[int]) -> list[int]:
    """Return the KV that each token of a sequence should have."""
    return list(accumulate(token_ids, extend_digest, initial=_ROOT))[1:]


def greedy(vocab_size: int) -> Sampler:
    """Sample like a model does: the token is a fixed function of the KV of the last one, and of the choice."""
    return lambda digest, output_position, choice_index: ((digest >> 17) + 7919 * choice_index) % vocab_size


def repetitive(vocab_size: int, period: int) -> Sampler:
    """Sample what comes round and round, and now and then something else, by the KV of the last token."""
    free = greedy(vocab_size)

    def sample(digest: int, output_position: int, choice_index: int) -> int:
        is_free = (digest >> 40) % 8 == 0
        return free(digest, 0, choice_index) if is_free else (11 * (output_position % period) + 3) % vocab_size

    return sample


def counting(first_token_id: int) -> Sampler:
    """Sample ascending ids, for transcripts that a reader can follow."""
    return lambda digest, output_position, choice_index: first_token_id + 50 * choice_index + output_position


def drafts_by_slot(output: SchedulerOutput) -> dict[int, list[int]]:
    """Return the drafts of each of a step's sequences."""
    slots = output.slots.tolist()
    if output.drafts is None:
        return {slot: [] for slot in slots}
    parts = np.split(output.drafts.token_ids, np.cumsum(output.drafts.num_tokens)[:-1])
    return {slot: part.tolist() for slot, part in zip(slots, parts, strict=True)}


def always(seconds: float) -> Clock:
    """Let every step take the same time."""
    return lambda work: seconds


def with_failures(
    output: SchedulerOutput,
    result: StepResult,
    failed_slots: Collection[int],
    error: OctavoError | None = None,
) -> StepResult:
    """Return the result of a step in which some sequences, sampled or not, could not go on."""
    if not failed_slots:
        return result
    is_kept = ~np.isin(result.slots, list(failed_slots))
    error = error or InvalidLogits("The logits are not numbers.")
    logprobs = result.output_logprobs
    if logprobs is not None:
        is_measured = ~np.isin(logprobs.slots, list(failed_slots))
        logprobs = SlotLogprobs(logprobs.slots[is_measured], logprobs.tokens.take(is_measured))
    failures = tuple(SlotFailure(slot, error) for slot in output.slots.tolist() if slot in failed_slots)
    return replace(
        result,
        slots=result.slots[is_kept],
        num_tokens=result.num_tokens[is_kept],
        token_ids=result.token_ids[np.repeat(is_kept, result.num_tokens)],
        failures=failures,
        output_logprobs=logprobs,
    )


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Sampling parameters of a request that wants log-probabilities."""

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


def logprobs_of(digest: int, token_id: int, num_alternatives: int) -> TokenLogprobs:
    """Return what the worker says of a token after the prefix with this KV."""
    alternatives = np.arange(num_alternatives)
    return TokenLogprobs(
        logprobs=np.array([-((digest ^ token_id) % 4096) / 8], np.float32),
        ranks=np.array([1 + digest % 100], np.int64),
        num_alternatives=np.array([num_alternatives], np.int64),
        alternative_token_ids=(token_id + alternatives) % 1000,
        alternative_logprobs=(-alternatives / 4 - digest % 7).astype(np.float32),
    )


@dataclass(slots=True)
class Row:
    """What the worker knows of the sequence in a slot; ``digests`` are those that its tokens should have."""

    handle: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    choice_index: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    # KV of the last computed token, as read from memory.
    last_digest: int = 0
    digests: list[int] = field(default_factory=list)

    def learn_digests(self) -> None:
        for token_id in self.token_ids[len(self.digests) :]:
            self.digests.append(extend_digest(self.digests[-1] if self.digests else _ROOT, token_id))


class FakeKVWorker:
    """Executes steps, in the order in which they are sent, in a flat KV memory of ``num_blocks * block_size``."""

    def __init__(self, num_blocks: int, block_size: int, sample: Sampler, seconds_of: Clock | None = None) -> None:
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self.num_copies = 0
        self._measured: list[tuple[int, int, TokenLogprobs]] = []
        self._sample = sample
        self._seconds_of = seconds_of or always(0.001)
        # Never cleared when a block changes hands, as on an accelerator.
        self._memory = [_GARBAGE] * (num_blocks * block_size)
        self._writers = [0] * (num_blocks * block_size)

    def take(self, output: SchedulerOutput) -> dict[int, Row]:
        """Apply a step's difference; returns the rows that ended, by slot."""
        ended = {slot: self.rows.pop(slot) for slot in output.ended_slots}
        handle_of = dict(zip(output.slots.tolist(), output.handles.tolist(), strict=True))
        for new in output.new_sequences:
            assert new.slot not in self.rows, f"slot {new.slot} is not free"
            self.rows[new.slot] = self._new_row(new, handle_of[new.slot])
        position = 0
        new_block_ids = output.new_block_ids.tolist()
        for slot, count in zip(output.slots.tolist(), output.num_new_blocks.tolist(), strict=True):
            if count:
                self.rows[slot].block_ids += new_block_ids[position : position + count]
                position += count
        assert position == len(new_block_ids), "new blocks that belong to no slot"
        return ended

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Copy blocks, then compute a step that was taken."""
        num_readers = Counter(chain.from_iterable(row.block_ids for row in self.rows.values()))
        self._measured = []
        for copy in output.block_copies:
            self._copy(copy, num_readers)
        drafts_of = drafts_by_slot(output)
        for slot, count in zip(output.slots.tolist(), output.num_scheduled_tokens.tolist(), strict=True):
            row = self.rows[slot]
            self._check_is_only_writer(slot, row, count, num_readers)
            self._compute(row, count, drafts_of[slot])
        sampled = output.slots[output.is_sampled]
        token_ids: list[int] = []
        counts: list[int] = []
        measured: list[tuple[int, TokenLogprobs]] = []
        for slot in sampled.tolist():
            row = self.rows[slot]
            assert row.num_computed_tokens == len(row.token_ids), f"slot {slot} is sampled before its last token"
            chosen = self._choose(row, drafts_of[slot])
            token_ids += [token_id for _, token_id in chosen]
            counts.append(len(chosen))
            if row.num_logprobs is not None:
                measured += [(slot, logprobs_of(digest, token_id, row.num_logprobs)) for digest, token_id in chosen]
        return StepResult(
            step_id=output.step_id,
            slots=sampled,
            num_tokens=np.array(counts, np.int64),
            token_ids=np.array(token_ids, np.uint32),
            failures=(),
            step_seconds=self._seconds_of(output.work),
            output_logprobs=SlotLogprobs(
                np.array([slot for slot, _ in measured], np.int64),
                TokenLogprobs.joined([tokens for _, tokens in measured]),
            )
            if measured
            else None,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _choose(self, row: Row, drafts: list[int]) -> list[tuple[int, int]]:
        """Append the tokens that come next, as long as drafts are right; returns each with the KV before it."""
        chosen: list[tuple[int, int]] = []
        for place in range(len(drafts) + 1):
            position = len(row.token_ids) - row.num_prompt_tokens
            chosen.append((row.last_digest, self._sample(row.last_digest, position, row.choice_index)))
            row.token_ids.append(chosen[-1][1])
            if place == len(drafts) or chosen[-1][1] != drafts[place]:
                break
            # The KV of the accepted draft was computed with it.
            row.last_digest = self._memory[self._place(row, row.num_computed_tokens)]
            row.num_computed_tokens += 1
        return chosen

    def _place(self, row: Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def wrong_contents(self) -> list[str]:
        """Compare memory with what each sequence's computed tokens should have left there."""
        faults = []
        for slot, row in self.rows.items():
            row.learn_digests()
            found = self._read(row)
            expected = row.digests[: row.num_computed_tokens]
            if found != expected:
                position = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
                faults.append(f"slot {slot} (handle {row.handle}) finds foreign contents at position {position}")
        return faults

    def writers(self, row: Row) -> set[int]:
        """Return the handles whose computed contents a sequence reads."""
        size, writers = self.block_size, self._writers
        return {
            writers[row.block_ids[position // size] * size + position % size]
            for position in range(row.num_computed_tokens)
        }

    def block_contents(self, block: int) -> list[int]:
        """Return the digests in a block."""
        return self._memory[block * self.block_size : (block + 1) * self.block_size]

    def _new_row(self, new: NewSequence, handle: int) -> Row:
        wanted = new.sampling_params if isinstance(new.sampling_params, WantedLogprobs) else WantedLogprobs()
        return Row(
            handle=handle,
            token_ids=new.token_ids.tolist(),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            choice_index=new.choice_index,
            num_logprobs=wanted.num_logprobs,
            num_prompt_logprobs=wanted.num_prompt_logprobs if new.wants_prompt_logprobs else None,
        )

    def _copy(self, copy: BlockCopy, num_readers: Counter[int]) -> None:
        source, target = copy.source_block_id, copy.target_block_id
        assert num_readers[source], f"block {source} is copied, but nobody holds it"
        assert num_readers[target] == 1, f"block {target} is overwritten with {num_readers[target]} holders"
        size = self.block_size
        for cells in (self._memory, self._writers):
            cells[target * size : (target + 1) * size] = cells[source * size : (source + 1) * size]
        self.num_copies += 1

    def _check_is_only_writer(self, slot: int, row: Row, count: int, num_readers: Counter[int]) -> None:
        first, last = row.num_computed_tokens, row.num_computed_tokens + count - 1
        assert last < len(row.block_ids) * self.block_size, f"{len(row.block_ids)} blocks for {last + 1} tokens"
        for block in row.block_ids[first // self.block_size : last // self.block_size + 1]:
            assert num_readers[block] == 1, f"slot {slot} writes to block {block}, which others read"

    def _compute(self, row: Row, count: int, drafts: list[int]) -> None:
        first, last = row.num_computed_tokens, row.num_computed_tokens + count - len(drafts)
        assert 1 <= last - first <= len(row.token_ids) - first, f"{count} tokens after {first} of {row.token_ids}"
        assert not drafts or last == len(row.token_ids), "drafts come before known tokens"
        digest = self._memory[self._place(row, first - 1)] if first else _ROOT
        for position in range(first, last):
            if row.num_prompt_logprobs is not None and first < position < row.num_prompt_tokens:
                self._measure(row, position, digest)
            digest = extend_digest(digest, row.token_ids[position])
            self._write(row, position, digest)
        if row.num_prompt_logprobs is not None and last < row.num_prompt_tokens:
            self._measure(row, last, digest)
        row.last_digest = digest
        row.num_computed_tokens = last
        for position, token_id in enumerate(drafts, start=last):
            digest = extend_digest(digest, token_id)
            self._write(row, position, digest)

    def _write(self, row: Row, position: int, digest: int) -> None:
        place = self._place(row, position)
        self._memory[place] = digest
        self._writers[place] = row.handle

    def _measure(self, row: Row, position: int, digest: int) -> None:
        assert row.num_prompt_logprobs is not None
        slot = next(slot for slot, each in self.rows.items() if each is row)
        self._measured.append(
            (slot, position, logprobs_of(digest, row.token_ids[position], row.num_prompt_logprobs))
        )

    def _prompt_logprobs(self) -> SlotPromptLogprobs | None:
        if not self._measured:
            return None
        # An entry for each token: slots may come several times.
        return SlotPromptLogprobs(
            slots=np.array([slot for slot, _, _ in self._measured], np.int64),
            positions=np.array([position for _, position, _ in self._measured], np.int64),
            num_tokens=np.ones(len(self._measured), np.int64),
            tokens=TokenLogprobs.joined([tokens for _, _, tokens in self._measured]),
        )

    def _read(self, row: Row) -> list[int]:
        contents = chain.from_iterable(self.block_contents(block) for block in row.block_ids)
        return list(contents)[: row.num_computed_tokens]


def step_times(
    per_step: float, per_token: float, per_read: float, per_pair: float, noise: Sequence[float]
) -> Clock:
    """Let steps take what the linear model says, times one plus a factor that comes round and round."""
    turn = 0

    def seconds_of(work: StepWork) -> float:
        nonlocal turn
        turn = (turn + 1) % len(noise)
        exact = (
            per_step
            + per_token * work.num_tokens
            + per_read * work.decode_context_tokens
            + per_pair * work.prefill_pairs
        )
        return exact * (1 + noise[turn])

    return seconds_of
