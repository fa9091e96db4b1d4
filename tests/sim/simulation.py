"""A seeded life of a small engine: traffic, clients that leave, deadlines, bad logits, full pools, lost workers.

Replay one with ``python -m tests.sim.simulation SEED``. ``tests/fakes/watched_scheduler.py`` checks every step.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from libs.errors import Overloaded, WorkerLost
from services.engine.core.request import Request, SequenceEnd
from services.engine.core.scheduler import SchedulerConfig
from tests.fakes.kv_worker import greedy
from tests.fakes.requests import make_request
from tests.fakes.watched_scheduler import WatchedScheduler

_VOCAB_SIZE = 500
_EOS_TOKEN_ID = 7
_BLOCK_SIZE = 8
_MAX_MODEL_LEN = 160
_NUM_OWNERS = 4
_STEPS_BETWEEN_FULL_CHECKS = 8
_MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened; equal for equal seeds."""

    seed: int
    num_steps: int
    ends: dict[str, int]
    num_refused: int
    num_preemptions: int
    num_evictions: int
    num_aborted_in_flight: int
    num_worker_losses: int
    num_cached_tokens: int
    num_computed_tokens: int


class Simulation:
    """One engine; each loss of a worker begins a new scheduler, as the engine's loop does."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self._seed = seed
        self._draw = random.Random(seed)
        self._documents = [self._random_ids(_MAX_MODEL_LEN) for _ in range(4)]
        self._requests_left = num_requests
        self._handles: Iterator[int] = itertools.count(1)
        self._config = SchedulerConfig(
            num_blocks=self._draw.choice((20, 26, 40)),
            block_size=_BLOCK_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=self._draw.choice((4, 8, 16)),
            max_num_batched_tokens=self._draw.choice((16, 48, 128)),
            max_waiting_sequences=24,
            eos_token_ids=(_EOS_TOKEN_ID,),
            enable_prefix_caching=self._draw.random() < 0.9,
            watermark_fraction=self._draw.choice((0.0, 0.05)),
        )
        self._ends: list[SequenceEnd] = []
        self._tally: Counter[str] = Counter()
        self._watched = self._begin()

    def run(self) -> Outcome:
        num_steps = 0
        while self._requests_left or self._watched.lives:
            assert num_steps < _MAX_STEPS, f"no end after {num_steps} steps"
            num_steps += 1
            self._let_requests_arrive()
            self._watched.expire()
            if self._watched.schedule() is None:
                self._watched.wait(1.0)
                continue
            self._disturb()
            if self._watched.in_flight is not None:
                self._watched.apply(self._is_failing, seconds=self._draw.choice((0.5, 1.0)))
            self._note_evictions()
            if num_steps % _STEPS_BETWEEN_FULL_CHECKS == 0:
                self._watched.check()
        self._watched.check_idle()
        self._finish()
        return Outcome(
            seed=self._seed,
            num_steps=num_steps,
            ends=dict(Counter(end.reason.value if end.reason else type(end.error).__name__ for end in self._ends)),
            num_refused=self._tally["refused"],
            num_preemptions=self._tally["preemptions"],
            num_evictions=self._tally["evictions"],
            num_aborted_in_flight=self._tally["aborted in flight"],
            num_worker_losses=self._tally["worker losses"],
            num_cached_tokens=sum(end.usage.num_cached_tokens for end in self._ends),
            num_computed_tokens=sum(end.usage.num_computed_tokens for end in self._ends),
        )

    # ---- events ----

    def _let_requests_arrive(self) -> None:
        # Bursts and pauses, so that the pool is now empty and now overrun.
        if self._draw.random() > 0.07:
            return
        for _ in range(min(self._requests_left, self._draw.randint(1, 5))):
            self._requests_left -= 1
            try:
                self._watched.add(self._request(f"r{self._requests_left}"))
            except Overloaded:
                self._tally["refused"] += 1

    def _disturb(self) -> None:
        """Do something between a step and its result, seldom."""
        chance = self._draw.random()
        lives = list(self._watched.lives.values())
        if not lives:
            return
        life = self._draw.choice(lives)
        if chance < 0.012:
            self._tally["aborted in flight"] += len(self._watched.abort(life.request.request_id))
        elif chance < 0.015:
            self._tally["aborted in flight"] += len(self._watched.abort_owner(life.request.owner))
        elif chance < 0.025:
            self._watched.abort(life.request.request_id, (life.handle,))
        elif chance < 0.0265:
            self._lose_worker()

    def _lose_worker(self) -> None:
        self._tally["worker losses"] += 1
        self._watched.fail_all(WorkerLost("A worker was lost.", retry_after_seconds=1.0))
        self._watched.check()
        self._finish()
        now = self._watched.now
        self._watched = self._begin()
        self._watched.wait(now)

    def _is_failing(self, handle: int) -> bool:
        return self._draw.random() < 0.001

    # ---- parts ----

    def _begin(self) -> WatchedScheduler:
        return WatchedScheduler(self._config, greedy(_VOCAB_SIZE), handles=self._handles)

    def _finish(self) -> None:
        self._ends += self._watched.ends.values()
        self._tally["preemptions"] += self._watched.num_preemptions

    def _note_evictions(self) -> None:
        self._tally["evictions"] += len(self._watched.scheduler.kv_cache.take_changes().removed)

    def _request(self, request_id: str) -> Request:
        draw = self._draw
        document = draw.choice(self._documents)
        shared = document[: draw.choice((0, 8, 24, 40, 64))]
        prompt = (shared + self._random_ids(draw.randint(1, 40)))[:100]
        num_prior = draw.choice((0, 0, 0, 0, 5))
        return make_request(
            request_id,
            prompt,
            owner=draw.randint(1, _NUM_OWNERS),
            max_output_tokens=num_prior + draw.randint(1, 50),
            stop_token_ids=frozenset(draw.sample(range(_VOCAB_SIZE), draw.choice((0, 0, 3)))),
            ignore_eos=draw.random() < 0.2,
            priority=draw.choice((0, 0, 0, 0, 1, -1)),
            cache_salt=draw.choice((b"", b"", b"tenant")),
            deadline=self._watched.now + draw.uniform(5, 200) if draw.random() < 0.1 else None,
            prior_outputs=[self._random_ids(num_prior) for _ in range(draw.choice((1, 1, 1, 1, 2)))],
        )

    def _random_ids(self, count: int) -> list[int]:
        return [self._draw.randrange(_VOCAB_SIZE) for _ in range(count)]


def simulate(seed: int, num_requests: int = 200) -> Outcome:
    """Run one life to its end."""
    return Simulation(seed, num_requests).run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    for seed in parser.parse_args().seeds:
        print(simulate(seed))


if __name__ == "__main__":
    main()
