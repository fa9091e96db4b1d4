"""Ranks find each other, share memory, and hear of each other's end: threads, and processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import pytest

from libs.errors import Cancelled, ModelLoadFailed, OctavoError, WorkerLost
from services.worker.exchange import ExchangeLayout
from services.worker.rank_group import LoneRank, Membership, RankGroup
from services.worker.rendezvous import form_group

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux: memfd and abstract sockets"
)

ResultT = TypeVar("ResultT")

_SPAWN = multiprocessing.get_context("spawn")
# Much longer than what the end of a process takes to be heard.
_WAIT_SECONDS = 30.0


def membership(rank: int, group_id: str, *, num_ranks: int = 2, timeout_seconds: float = 60.0) -> Membership:
    return Membership(
        group_id=group_id,
        rank=rank,
        layout=ExchangeLayout(num_ranks=num_ranks, max_num_tokens=4, max_head_rows=2, hidden_size=8, vocab_size=10),
        contract="a model",
        num_blocks=100 - rank,
        exchange_timeout_seconds=timeout_seconds,
    )


def new_id() -> str:
    return uuid.uuid4().hex


def never_mind() -> None:
    """Wait on."""


def formed(*memberships: Membership) -> list[RankGroup]:
    with ThreadPoolExecutor(len(memberships)) as threads:
        return list(threads.map(lambda member: form_group(member, never_mind), memberships))


def together(groups: list[RankGroup], work: Callable[[RankGroup], ResultT]) -> list[ResultT]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


def meet_until_the_end(group: RankGroup) -> None:
    # One that has ended may have come to the next meeting already.
    while True:
        group.meet()


@pytest.fixture
def group_id() -> str:
    return new_id()


def test_a_lone_rank_needs_nobody() -> None:
    group = form_group(membership(0, "", num_ranks=1), never_mind)

    assert group == LoneRank(num_blocks=100)
    group.meet()


def test_ranks_share_memory_and_the_smallest_number_of_blocks(group_id: str) -> None:
    groups = formed(*(membership(rank, group_id, num_ranks=3) for rank in (2, 0, 1)))

    def add(group: RankGroup) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        assert group.exchange is not None
        return group.exchange.add(np.full((2, 8), 10.0**group.exchange.rank, dtype=np.float32))

    for total in together(groups, add):
        np.testing.assert_array_equal(total, np.full((2, 8), 111.0))
    assert [group.num_blocks for group in groups] == [98, 98, 98]
    for group in groups:
        group.leave()


def test_ranks_that_serve_something_else_are_refused(group_id: str) -> None:
    other = replace(membership(1, group_id), contract="another model")

    with ThreadPoolExecutor(2) as threads:
        first, second = (
            threads.submit(form_group, member, never_mind) for member in (membership(0, group_id), other)
        )

        with pytest.raises(ModelLoadFailed, match="Rank 1 serves another model, rank 0 serves a model"):
            first.result(_WAIT_SECONDS)
        with pytest.raises(WorkerLost, match="left while the group was forming"):
            second.result(_WAIT_SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_caller_raises_ends_the_waiting(rank: int, group_id: str) -> None:
    def no_longer() -> None:
        raise Cancelled("Nobody wants it any more.")

    with pytest.raises(Cancelled):
        form_group(membership(rank, group_id), no_longer)

    # Nothing is left that could be in the way.
    for group in formed(membership(0, group_id), membership(1, group_id)):
        group.leave()


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_lets_the_other_go(leaver: int, group_id: str) -> None:
    groups = formed(membership(0, group_id), membership(1, group_id))

    groups[leaver].leave()
    groups[leaver].leave()

    with pytest.raises(WorkerLost):
        groups[1 - leaver].meet()
    groups[1 - leaver].leave()


def test_a_group_has_no_listener_once_it_has_formed(group_id: str) -> None:
    groups = formed(membership(0, group_id), membership(1, group_id))
    ends_at = time.monotonic() + 0.3

    def for_a_while() -> None:
        if time.monotonic() > ends_at:
            raise Cancelled("Long enough.")

    # As a rank that was started again would do if it still knew the old id.
    with pytest.raises(Cancelled):
        form_group(membership(1, group_id), for_a_while)
    together(groups, lambda group: group.meet())
    for group in groups:
        group.leave()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_heard_of_at_once(killed: int, group_id: str) -> None:
    with _Other(membership(killed, group_id)) as other:
        own = form_group(membership(1 - killed, group_id), never_mind)
        own.meet()

        os.kill(other.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="has left"):
            meet_until_the_end(own)

    # The exchange itself would wait for a minute.
    assert time.monotonic() - started < _WAIT_SECONDS
    own.leave()


def test_a_rank_that_is_stopped_is_given_up_and_hears_of_it_when_it_goes_on(group_id: str) -> None:
    with _Other(membership(1, group_id)) as other:
        own = form_group(membership(0, group_id, timeout_seconds=2.0), never_mind)
        own.meet()
        os.kill(other.pid, signal.SIGSTOP)

        with pytest.raises(WorkerLost, match="Rank 1 of 2 did not come"):
            meet_until_the_end(own)
        os.kill(other.pid, signal.SIGCONT)

        assert other.last_words() == "Rank 1 of 2 did not come to an exchange within 60 seconds."
    own.leave()


class _Other:
    """Another process that meets again and again until it cannot."""

    def __init__(self, member: Membership) -> None:
        self._words, words = _SPAWN.Pipe(duplex=False)
        self._process = _SPAWN.Process(target=_meet_for_ever, args=(member, words))

    def __enter__(self) -> _Other:
        self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join(_WAIT_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def last_words(self) -> str:
        assert self._words.poll(_WAIT_SECONDS)
        return str(self._words.recv())


def _meet_for_ever(member: Membership, words: Connection) -> None:
    group = form_group(member, never_mind)
    try:
        meet_until_the_end(group)
    except OctavoError as error:
        words.send(error.message)
