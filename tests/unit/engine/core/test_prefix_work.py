"""Who computes which block: nobody twice, and nobody is left waiting for a block that nobody computes."""

from __future__ import annotations

import random

from libs.kv import PrefixHash
from services.engine.core.prefix_work import PrefixWork


def _hashes(*numbers: int) -> list[PrefixHash]:
    return [PrefixHash(bytes([number]) * 32) for number in numbers]


def test_the_last_common_block_is_waited_for() -> None:
    work = PrefixWork()
    work.begin(1, _hashes(1, 2, 3))

    assert work.last_common(_hashes(1, 2, 9)) == _hashes(2)[0]
    assert work.last_common(_hashes(1, 2, 3, 4)) == _hashes(3)[0]


def test_nothing_is_waited_for_when_the_next_block_is_not_being_computed() -> None:
    work = PrefixWork()
    work.begin(1, _hashes(2, 3))

    assert work.last_common(_hashes(1, 2, 3)) is None
    assert work.last_common([]) is None


def test_blocks_are_told_as_they_are_done() -> None:
    work = PrefixWork()
    work.begin(1, _hashes(1, 2, 3))

    assert work.finish(1, set(_hashes(1, 2))) == _hashes(1, 2)
    assert work.finish(1, set(_hashes(3, 4))) == _hashes(3)
    assert work.last_common(_hashes(3)) is None


def test_what_is_left_undone_is_told() -> None:
    work = PrefixWork()
    work.begin(1, _hashes(1, 2, 3))
    work.finish(1, set(_hashes(1)))

    assert set(work.leave(1)) == set(_hashes(2, 3))
    assert work.leave(1) == []
    assert work.last_common(_hashes(2)) is None


def test_a_second_worker_takes_only_what_nobody_does() -> None:
    work = PrefixWork()
    work.begin(1, _hashes(1, 2))
    work.begin(2, _hashes(1, 2, 3))

    assert work.finish(2, set(_hashes(1, 2, 3))) == _hashes(3)
    assert work.last_common(_hashes(1, 2)) == _hashes(2)[0]
    assert set(work.leave(1)) == set(_hashes(1, 2))


def test_one_who_computes_nothing_finishes_nothing() -> None:
    work = PrefixWork()
    work.begin(1, [])

    assert work.finish(1, set(_hashes(1))) == []
    assert work.leave(1) == []


def test_every_key_that_is_waited_for_is_told_in_the_end() -> None:
    """Chains of several documents, worked off in any order: after all have left nothing is being computed."""
    draw = random.Random(3)
    for _ in range(300):
        work = PrefixWork()
        chains = [_hashes(*range(10 * document, 10 * document + draw.randint(1, 9))) for document in range(3)]
        running: dict[int, list[PrefixHash]] = {}
        awaited: set[PrefixHash] = set()
        for handle in range(1, 12):
            chain = draw.choice(chains)[: draw.randint(1, 9)]
            key = work.last_common(chain)
            if key is not None:
                awaited.add(key)
                continue
            work.begin(handle, chain)
            running[handle] = list(chain)
            worker = draw.choice(list(running))
            if draw.random() < 0.3:
                awaited -= set(work.leave(worker))
                del running[worker]
            else:
                count = draw.randint(0, len(running[worker]))
                awaited -= set(work.finish(worker, set(running[worker][:count])))
                running[worker] = running[worker][count:]
        for handle in running:
            awaited -= set(work.leave(handle))
        assert awaited == set()
        assert all(work.last_common(chain) is None for chain in chains)
