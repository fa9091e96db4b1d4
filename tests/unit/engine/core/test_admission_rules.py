"""What makes the first in line wait, and how good the predicted peak is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.engine.core.admission_rules import (
    AdmissionRule,
    BatchIsForming,
    Candidate,
    PredictedPeakFits,
    WholePromptFits,
    first_refusal,
)
from services.engine.core.block_layout import PagedLayout
from services.engine.core.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from services.engine.core.sequence_table import SequenceTable
from tests.fakes.requests import make_request, make_sequence

_BLOCK_SIZE = 4
_LIMIT = 60


class _Engine:
    """Running sequences, by how many tokens they have and how many are to come."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.table = SequenceTable(max_num_seqs=16, max_model_len=200, block_size=_BLOCK_SIZE)
        self.manager = KVCacheManager(
            self.table,
            PagedLayout(_BLOCK_SIZE),
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=True,
        )
        self.num_sequences = 0

    def run(self, num_tokens: int, remaining: int, hit: PrefixHit = NO_HIT) -> int:
        """Add a sequence with one output token, which has computed all but this one."""
        self.num_sequences += 1
        token_ids = [1000 * self.num_sequences + n for n in range(num_tokens - 1)]
        request = make_request(f"r{self.num_sequences}", token_ids, max_output_tokens=_LIMIT)
        sequence = make_sequence(self.num_sequences, token_ids, request=request)
        slot = self.table.take(sequence, expected_output_tokens=remaining + 1)
        self.manager.start(slot, hit)
        slots = np.array([slot])
        self.manager.allocate(slots, self.manager.missing_blocks(slots, np.array([num_tokens - 1])))
        self.table.num_computed_tokens[slot] = num_tokens - 1
        self.table.num_tokens[slot] = num_tokens
        return slot

    def candidate(
        self, num_tokens: int, expected: int, *, hit: PrefixHit = NO_HIT, num_output: int = 0
    ) -> Candidate:
        ids = list(range(num_tokens))
        request = make_request("candidate", ids[: num_tokens - num_output], max_output_tokens=_LIMIT)
        return Candidate(make_sequence(99, ids, request=request), hit, expected)


def _brute_force_peak(rows: list[tuple[int, int, set[int]]]) -> int:
    """Let sequences of so many tokens, with so many to come, run token by token; return the most blocks held.

    Each row names the blocks that it shares with others; they stand at its head.
    """
    peak = 0
    for elapsed in range(max(remaining for _, remaining, _ in rows)):
        running = [(tokens + elapsed, shared) for tokens, remaining, shared in rows if remaining > elapsed]
        private = sum(-(-num_tokens // _BLOCK_SIZE) - len(shared) for num_tokens, shared in running)
        peak = max(peak, private + len(set().union(*(shared for _, shared in running))))
    return peak


@pytest.mark.parametrize("seed", range(100))
def test_predicted_peak_is_never_too_low_and_at_most_a_block_for_each_too_high(seed: int) -> None:
    draw = random.Random(seed)
    engine = _Engine(num_blocks=1_000)
    rows = [(draw.randint(2, 60), draw.randint(1, 50)) for _ in range(draw.randint(1, 10))]
    for num_tokens, remaining in rows:
        engine.run(num_tokens, remaining)
    num_tokens, expected = draw.randint(1, 60), draw.randint(1, 50)

    peak = PredictedPeakFits(engine.manager, engine.table).peak_blocks(engine.candidate(num_tokens, expected))

    actual = _brute_force_peak([(tokens, left, set()) for tokens, left in [*rows, (num_tokens, expected)]])
    count = len(rows) + 1
    # The last block of each counts whole, and so does its last token, which is never computed.
    assert actual <= peak <= actual + count + -(-count // _BLOCK_SIZE)


@pytest.mark.parametrize("seed", range(100))
def test_shared_blocks_make_the_predicted_peak_too_low_by_as_many_at_most(seed: int) -> None:
    draw = random.Random(seed)
    engine = _Engine(num_blocks=1_000)
    parent = engine.run(num_tokens := draw.randint(20, 60), remaining := draw.randint(1, 50))
    rows = [(num_tokens, remaining, set[int]())]
    for _ in range(draw.randint(1, 5)):
        blocks = engine.table.blocks(parent)[: draw.randint(0, 4)]
        rows[0][2].update(blocks)
        num_tokens, remaining = draw.randint(4 * _BLOCK_SIZE + 2, 60), draw.randint(1, 50)
        engine.run(num_tokens, remaining, PrefixHit(tuple(blocks), len(blocks) * _BLOCK_SIZE, 0))
        rows.append((num_tokens, remaining, set(blocks)))
    rows.append((num_tokens := draw.randint(1, 60), expected := draw.randint(1, 50), set()))

    peak = PredictedPeakFits(engine.manager, engine.table).peak_blocks(engine.candidate(num_tokens, expected))

    actual, count = _brute_force_peak(rows), len(rows)
    num_shared = sum(len(shared) for _, _, shared in rows[1:])
    assert actual - num_shared <= peak <= actual + count + -(-count // _BLOCK_SIZE)


def test_peak_compares_with_the_pool() -> None:
    # Two of 12 tokens, 8 to come: 40 tokens are ten blocks, and two for the last ones.
    for num_blocks, is_allowed in ((11, False), (12, True)):
        engine = _Engine(num_blocks)
        engine.run(12, 8)

        assert PredictedPeakFits(engine.manager, engine.table).allows(engine.candidate(12, 8)) == is_allowed


def test_alone_what_fits_may_start() -> None:
    engine = _Engine(num_blocks=3)

    assert PredictedPeakFits(engine.manager, engine.table).allows(engine.candidate(12, 50))


def test_one_that_was_preempted_past_its_expectation_is_expected_to_go_on_as_long_as_it_has() -> None:
    engine = _Engine()
    engine.run(10, 1)
    rule = PredictedPeakFits(engine.manager, engine.table)

    # Twenty output tokens when ten were expected: as for those that run, twenty more.
    resumed = rule.peak_blocks(engine.candidate(30, 10, num_output=20))

    assert resumed == rule.peak_blocks(engine.candidate(30, 20))


def test_one_that_was_preempted_is_not_expected_to_pass_its_limit() -> None:
    engine = _Engine()
    engine.run(10, 1)
    rule = PredictedPeakFits(engine.manager, engine.table)

    resumed = rule.peak_blocks(engine.candidate(60, 10, num_output=50))

    assert resumed == rule.peak_blocks(engine.candidate(60, _LIMIT - 50))


@pytest.mark.parametrize(
    ("num_tokens", "watermark", "is_allowed"),
    [
        pytest.param(15, 0, True, id="what is there suffices for the next token too"),
        pytest.param(16, 0, False, id="no room for the next token"),
        pytest.param(11, 1, True, id="the watermark is left"),
        pytest.param(12, 1, False, id="the watermark would be used"),
    ],
)
def test_capacity_counts_blocks(num_tokens: int, watermark: int, is_allowed: bool) -> None:
    engine = _Engine(num_blocks=7)
    # It holds three blocks; its next token has a place in them.
    engine.run(12, 5)

    rule = WholePromptFits(engine.manager, engine.table, watermark)

    assert rule.allows(engine.candidate(num_tokens, 5)) == is_allowed


def test_capacity_counts_what_running_prompts_will_still_take() -> None:
    engine = _Engine(num_blocks=8)
    slot = engine.run(12, 5)
    engine.table.num_tokens[slot] = 20

    rule = WholePromptFits(engine.manager, engine.table, 0)

    assert rule.allows(engine.candidate(11, 5))
    assert not rule.allows(engine.candidate(12, 5))


def test_the_last_token_that_may_be_sampled_needs_no_place() -> None:
    engine = _Engine(num_blocks=4)
    ids = list(range(16))
    request = make_request("r", ids, max_output_tokens=1)

    rule = WholePromptFits(engine.manager, engine.table, 0)

    assert rule.allows(Candidate(make_sequence(1, ids, request=request), NO_HIT, 1))


def test_a_hit_that_nobody_holds_takes_from_what_is_available() -> None:
    engine = _Engine(num_blocks=7)
    engine.run(12, 5)
    rule = WholePromptFits(engine.manager, engine.table, 0)
    held, evictable = PrefixHit((0, 1), 8, 0), PrefixHit((3, 4), 8, 2)

    # Four are available: with two of the 23 tokens' six blocks held by others it fits, else not.
    assert rule.allows(engine.candidate(22, 5, hit=held))
    assert not rule.allows(engine.candidate(22, 5, hit=evictable))


def test_a_static_batch_forms_only_when_nobody_runs() -> None:
    engine = _Engine()
    rule = BatchIsForming(engine.table)
    rule.begin_pass()
    assert rule.allows(engine.candidate(5, 5))

    slot = engine.run(12, 5)

    # Those of the same pass may still join.
    assert rule.allows(engine.candidate(5, 5))
    rule.begin_pass()
    assert not rule.allows(engine.candidate(5, 5))
    engine.manager.free(slot)
    engine.table.give_back(slot)
    rule.begin_pass()
    assert rule.allows(engine.candidate(5, 5))


def test_the_first_rule_that_refuses_is_named() -> None:
    engine = _Engine(num_blocks=7)
    engine.run(12, 30)
    rules: list[AdmissionRule] = [
        WholePromptFits(engine.manager, engine.table, 0),
        PredictedPeakFits(engine.manager, engine.table),
    ]

    assert first_refusal(rules, engine.candidate(2, 1)) == "predicted_peak"
    assert first_refusal(rules, engine.candidate(20, 1)) == "capacity"
    assert first_refusal([], engine.candidate(2, 1)) is None
