"""The rules of scheduling in plain loops, to hold a step against.

1. Running sequences come first: those with one token to compute, by place in line, then the others, by place in
   line, as far as the token budget goes.
2. If their blocks do not suffice, the last in line gives up all of its blocks, as often as needed and no more;
   nobody is admitted in such a step.
3. Otherwise the first in line is admitted while budget and slots last and blocks for all of its known tokens are
   available besides those that running sequences still need for theirs, with the watermark left over if any run.
4. A hit is the longest cached prefix, at least one token short of all that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.kv import PrefixHash
from services.engine.core.scheduler import SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput

Cached = Mapping[PrefixHash, int]


@dataclass(frozen=True, slots=True)
class RunningView:
    """A running sequence before the step."""

    order: tuple[int, int]
    num_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A sequence without a slot, with the hashes of all its full blocks."""

    order: tuple[int, int]
    num_tokens: int
    chain: tuple[PrefixHash, ...]


def share_budget(running: Mapping[int, RunningView], budget: int) -> dict[int, int]:
    """Return the tokens that each handle computes (rule 1)."""
    shares: dict[int, int] = {}
    for is_prefill in (False, True):
        for handle, view in sorted(running.items(), key=lambda item: item[1].order):
            pending = view.num_tokens - view.num_computed_tokens
            if (pending > 1) == is_prefill and min(pending, budget) > 0:
                shares[handle] = min(pending, budget)
                budget -= shares[handle]
    return shares


def longest_prefix(view: WaitingView, cached: Cached, block_size: int) -> list[int]:
    """Return the blocks of the hit (rule 4)."""
    blocks: list[int] = []
    for prefix_hash in view.chain[: (view.num_tokens - 1) // block_size]:
        if prefix_hash not in cached:
            break
        blocks.append(cached[prefix_hash])
    return blocks


@dataclass(slots=True)
class _Pool:
    """Who holds what while a step is planned."""

    config: SchedulerConfig
    held: set[int]
    num_promised: int
    num_active: int

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    @property
    def num_available(self) -> int:
        return self.config.num_blocks - len(self.held)

    def fits(self, view: WaitingView, hit: Sequence[int]) -> bool:
        """Say whether a sequence may be admitted (rule 3)."""
        needed = self.blocks_for(view.num_tokens) - len(hit)
        available = self.num_available - len(set(hit) - self.held)
        watermark = int(self.config.num_blocks * self.config.watermark_fraction) if self.num_active else 0
        return needed + self.num_promised + watermark <= available


def check_step(
    output: SchedulerOutput,
    *,
    config: SchedulerConfig,
    running: Mapping[int, RunningView],
    preempted: Sequence[int],
    admitted: Mapping[int, WaitingView],
    waiting: Sequence[WaitingView],
    cached_before: Cached,
    cached_after: Cached,
) -> None:
    """Raise AssertionError when a step breaks a rule; ``waiting`` is who waits after it."""
    counts = dict(zip(output.handles.tolist(), output.num_scheduled_tokens.tolist(), strict=True))
    _check_form(output, config, counts, {**running, **admitted})
    survivors = {handle: view for handle, view in running.items() if handle not in preempted}
    assert {h: n for h, n in counts.items() if h not in admitted} == share_budget(
        survivors, config.max_num_batched_tokens
    )
    if preempted:
        _check_preemption(config, running, survivors, preempted)
        assert not admitted, "a step that preempts admits nobody"
        return
    blocks_of = _new_blocks(output)
    pool = _pool_after_running(config, survivors, counts, blocks_of)
    budget = config.max_num_batched_tokens - sum(n for h, n in counts.items() if h not in admitted)
    for new in output.new_sequences:
        handle = output.handles[output.slots == new.slot].item()
        view = admitted[handle]
        assert pool.fits(view, new.block_ids), f"handle {handle} was admitted without room"
        assert all(view.order < other.order for other in waiting), "somebody who stands behind was admitted"
        _check_hit(view, new.block_ids, new.num_computed_tokens, config.block_size, cached_before, cached_after)
        assert counts[handle] == min(view.num_tokens - new.num_computed_tokens, budget)
        budget -= counts[handle]
        blocks = {*new.block_ids, *blocks_of[handle]}
        pool.held |= blocks
        pool.num_promised += pool.blocks_for(view.num_tokens) - len(blocks)
        pool.num_active += 1
    if waiting and budget > 0 and pool.num_active < config.max_num_seqs:
        first = min(waiting, key=lambda view: view.order)
        hit = longest_prefix(first, cached_after, config.block_size)
        assert not pool.fits(first, hit), "the first in line waits although it fits"


def _check_form(
    output: SchedulerOutput,
    config: SchedulerConfig,
    counts: Mapping[int, int],
    known: Mapping[int, RunningView | WaitingView],
) -> None:
    computed = {h: view.num_computed_tokens for h, view in known.items() if isinstance(view, RunningView)}
    for new in output.new_sequences:
        computed[output.handles[output.slots == new.slot].item()] = new.num_computed_tokens
    assert output.num_tokens == sum(counts.values()) <= config.max_num_batched_tokens
    assert len(output.slots) == len(set(output.slots.tolist())) == len(counts) <= config.max_num_seqs
    assert all(0 <= slot < config.max_num_seqs for slot in output.slots.tolist())
    assert min(counts.values()) >= 1
    for handle, is_sampled in zip(output.handles.tolist(), output.is_sampled.tolist(), strict=True):
        last = computed[handle] + counts[handle]
        assert last <= known[handle].num_tokens, f"handle {handle} computes tokens that are not known"
        assert is_sampled == (last == known[handle].num_tokens)


def _check_preemption(
    config: SchedulerConfig,
    running: Mapping[int, RunningView],
    survivors: Mapping[int, RunningView],
    preempted: Sequence[int],
) -> None:
    assert survivors, "everybody was preempted"
    victims = sorted(preempted, key=lambda handle: running[handle].order)
    assert running[victims[0]].order > max(view.order for view in survivors.values()), "the last in line goes first"
    spared = {**survivors, victims[0]: running[victims[0]]}
    pool = _Pool(config, {block for view in spared.values() for block in view.block_ids}, 0, len(spared))
    missing = 0
    for handle, count in share_budget(spared, config.max_num_batched_tokens).items():
        view = spared[handle]
        missing += max(pool.blocks_for(view.num_computed_tokens + count) - len(view.block_ids), 0)
    assert missing > pool.num_available, f"handle {victims[0]} was preempted without need"


def _pool_after_running(
    config: SchedulerConfig,
    survivors: Mapping[int, RunningView],
    counts: Mapping[int, int],
    blocks_of: Mapping[int, list[int]],
) -> _Pool:
    pool = _Pool(config, set(), 0, len(survivors))
    for handle, view in survivors.items():
        blocks = [*view.block_ids, *blocks_of.get(handle, [])]
        assert len(blocks) == max(
            pool.blocks_for(view.num_computed_tokens + counts.get(handle, 0)), len(view.block_ids)
        )
        pool.held |= set(blocks)
        pool.num_promised += max(pool.blocks_for(view.num_tokens) - len(blocks), 0)
    return pool


def _check_hit(
    view: WaitingView, hit: Sequence[int], num_tokens: int, block_size: int, before: Cached, after: Cached
) -> None:
    assert num_tokens == len(hit) * block_size < view.num_tokens
    # Blocks are evicted while a step is planned, so the cache at the time of the look-up lies between the two.
    at_most = longest_prefix(view, before, block_size)
    at_least = longest_prefix(view, {h: b for h, b in before.items() if after.get(h) == b}, block_size)
    assert list(hit) == at_most[: len(hit)]
    assert len(at_least) <= len(hit), "the hit is shorter than the cached prefix"


def _new_blocks(output: SchedulerOutput) -> dict[int, list[int]]:
    blocks: dict[int, list[int]] = {}
    position = 0
    for handle, count in zip(output.handles.tolist(), output.num_new_blocks.tolist(), strict=True):
        blocks[handle] = output.new_block_ids[position : position + count].tolist()
        position += count
    return blocks
