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
from services.engine.core.scheduler_config import Admission, Batching, Layout, SchedulerConfig, SpeculationConfig
from tests.fakes.kv_worker import greedy, repetitive, step_times
from tests.fakes.requests import make_request
from tests.fakes.watched_scheduler import WatchedScheduler

NUM_REQUESTS = 300
_VOCAB_SIZE = 500
_EOS_TOKEN_ID = 7
_BLOCK_SIZE = 8
_MAX_MODEL_LEN = 160
_NUM_OWNERS = 4
_TENANTS = ("red", "blue", "green")
_STEPS_BETWEEN_FULL_CHECKS = 25
_MAX_STEPS_PER_REQUEST = 200
_NOISE = (0.0, 0.1, -0.05, 0.2, -0.15)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened; equal for equal seeds."""

    seed: int
    config: SchedulerConfig
    num_steps: int
    ends: dict[str, int]
    num_refused: int
    num_preemptions: int
    num_evictions: int
    num_copies: int
    num_sleeps: int
    num_aborted_in_flight: int
    num_worker_losses: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_discarded_tokens: int
    num_accepted_drafts: int
    num_rejected_drafts: int


class Simulation:
    """One engine; each loss of a worker begins a new scheduler, as the engine's loop does."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self._seed = seed
        self._draw = random.Random(seed)
        self._documents = [self._random_ids(_MAX_MODEL_LEN) for _ in range(4)]
        self._num_requests = self._requests_left = num_requests
        self._handles: Iterator[int] = itertools.count(1)
        self._config = self._draw_config()
        self._chance = self._draw.choice((0.2, 0.4))
        self._ends: list[SequenceEnd] = []
        self._tally: Counter[str] = Counter()
        self._watched = self._begin()

    def run(self) -> Outcome:
        num_steps = 0
        while self._requests_left or self._watched.lives or self._watched.num_in_flight:
            assert num_steps < _MAX_STEPS_PER_REQUEST * self._num_requests, f"no end after {num_steps} steps"
            num_steps += 1
            self._let_requests_arrive()
            self._watched.expire()
            self._watched.fill_pipeline()
            if not self._watched.num_in_flight:
                self._watched.wait(1.0)
                continue
            self._disturb()
            if self._watched.num_in_flight:
                self._watched.apply(self._is_failing, seconds=self._draw.choice((0.5, 1.0)))
            if num_steps % _STEPS_BETWEEN_FULL_CHECKS == 0:
                self._note_evictions()
                self._watched.check()
        self._watched.check_idle()
        self._finish()
        return self._outcome(num_steps)

    # ---- events ----

    def _let_requests_arrive(self) -> None:
        # Bursts and pauses, so that the pool is now empty and now full; seldom so many that some are refused.
        is_crowded = self._watched.scheduler.load.num_waiting > 8
        if self._draw.random() > (0.01 if is_crowded else self._chance):
            return
        for _ in range(min(self._requests_left, self._draw.randint(1, 30 if is_crowded else 8))):
            self._requests_left -= 1
            try:
                self._watched.add(self._request(f"r{self._requests_left}"))
            except Overloaded:
                self._tally["refused"] += 1

    def _disturb(self) -> None:
        """Do something between steps and their results, seldom."""
        chance = self._draw.random()
        if chance > 0.03 or not self._watched.lives:
            return
        life = self._draw.choice(list(self._watched.lives.values()))
        if chance < 0.016:
            self._tally["aborted in flight"] += len(self._watched.abort(life.request.request_id))
        elif chance < 0.018:
            self._tally["aborted in flight"] += len(self._watched.abort_owner(life.request.owner))
        elif chance < 0.028:
            self._watched.abort(life.request.request_id, (life.handle,))
        else:
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

    def _draw_config(self) -> SchedulerConfig:
        draw = self._draw
        return SchedulerConfig(
            num_blocks=draw.choice((20, 26, 34, 50)),
            block_size=_BLOCK_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=draw.choice((4, 8, 16, 16)),
            max_num_batched_tokens=draw.choice((24, 48, 96, 128)),
            max_waiting_sequences=24,
            eos_token_ids=(_EOS_TOKEN_ID,),
            enable_prefix_caching=draw.random() < 0.9,
            watermark_fraction=draw.choice((0.0, 0.05)),
            aging_seconds=draw.choice((0.0, 5.0, 30.0)),
            target_itl_seconds=draw.choice((None, None, 0.004)),
            max_prefill_share=draw.choice((0.5, 0.5, 1.0)),
            max_steps_in_flight=draw.choice((1, 2, 2)),
            admission=draw.choice((Admission.PREDICTED_PEAK, Admission.WATERMARK, Admission.WATERMARK)),
            batching=draw.choice((*[Batching.CONTINUOUS] * 7, Batching.STATIC)),
            layout=draw.choice((*[Layout.PAGED] * 7, Layout.CONTIGUOUS)),
            speculation=self._draw_speculation(),
        )

    def _draw_speculation(self) -> SpeculationConfig | None:
        # A generator of its own, so that who does not speculate lives as before.
        draw = random.Random(f"speculation {self._seed}")
        if draw.random() < 0.5:
            return None
        min_ngram_tokens = draw.choice((1, 1, 2, 2, 3))
        return SpeculationConfig(
            num_draft_tokens=draw.choice((1, 3, 4, 8)),
            min_ngram_tokens=min_ngram_tokens,
            max_ngram_tokens=min_ngram_tokens + draw.choice((0, 2)),
            max_drafting_seqs=draw.choice((2, 8, 16)),
        )

    def _begin(self) -> WatchedScheduler:
        return WatchedScheduler(
            self._config,
            greedy(_VOCAB_SIZE) if self._config.speculation is None else repetitive(_VOCAB_SIZE, period=5),
            handles=self._handles,
            seconds_of=step_times(1e-3, 1e-4, 1e-6, 1e-6, _NOISE),
        )

    def _finish(self) -> None:
        self._note_evictions()
        self._ends += self._watched.ends.values()
        self._tally["preemptions"] += self._watched.num_preemptions
        self._tally["copies"] += self._watched.worker.num_copies
        self._tally["accepted drafts"] += self._watched.num_accepted_drafts
        self._tally["rejected drafts"] += self._watched.num_rejected_drafts
        self._tally["sleeps"] += self._watched.referee.num_sleeps

    def _note_evictions(self) -> None:
        self._tally["evictions"] += len(self._watched.scheduler.kv_cache.take_changes().removed)

    def _outcome(self, num_steps: int) -> Outcome:
        return Outcome(
            seed=self._seed,
            config=self._config,
            num_steps=num_steps,
            ends=dict(Counter(end.reason.value if end.reason else type(end.error).__name__ for end in self._ends)),
            num_refused=self._tally["refused"],
            num_preemptions=self._tally["preemptions"],
            num_evictions=self._tally["evictions"],
            num_copies=self._tally["copies"],
            num_sleeps=self._tally["sleeps"],
            num_aborted_in_flight=self._tally["aborted in flight"],
            num_worker_losses=self._tally["worker losses"],
            num_cached_tokens=sum(end.usage.num_cached_tokens for end in self._ends),
            num_computed_tokens=sum(end.usage.num_computed_tokens for end in self._ends),
            num_discarded_tokens=sum(end.usage.num_discarded_tokens for end in self._ends),
            num_accepted_drafts=self._tally["accepted drafts"],
            num_rejected_drafts=self._tally["rejected drafts"],
        )

    def _request(self, request_id: str) -> Request:
        draw = self._draw
        document = draw.choice(self._documents)
        prompt = document[: draw.choice((0, 8, 24, 40, 64))] + self._random_ids(draw.choice((1, 3, 8, 20, 40)))
        num_prior = draw.choice((0, 0, 0, 0, 5))
        return make_request(
            request_id,
            prompt,
            owner=draw.randint(1, _NUM_OWNERS),
            # Most outputs are short and some are long, as real ones.
            max_output_tokens=num_prior + draw.choice((1, 1, 2, 2, 3, 4, 5, 6, 12, 40)),
            stop_token_ids=frozenset(draw.sample(range(_VOCAB_SIZE), draw.choice((0, 0, 20)))),
            ignore_eos=draw.random() < 0.2,
            tenant_id=draw.choice(_TENANTS),
            priority=draw.choice((0, 0, 0, 0, 1, -1)),
            cache_salt=draw.choice((b"", b"", b"tenant")),
            deadline=self._watched.now + draw.uniform(3, 60) if draw.random() < 0.1 else None,
            prior_outputs=[self._random_ids(num_prior) for _ in range(draw.choice((1, 1, 1, 1, 1, 2, 3)))],
        )

    def _random_ids(self, count: int) -> list[int]:
        return self._draw.choices(range(_VOCAB_SIZE), k=count)


def simulate(seed: int, num_requests: int = NUM_REQUESTS) -> Outcome:
    """Run one life to its end."""
    try:
        return Simulation(seed, num_requests).run()
    except Exception as error:
        error.add_note(f"Replay: python -m tests.sim.simulation {seed} --requests {num_requests}")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="requests in each life")
    parser.add_argument("--through", action="store_true", help="all seeds from the first to the last given")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds[0], arguments.seeds[-1] + 1) if arguments.through else arguments.seeds
    for seed in seeds:
        print(simulate(seed, arguments.requests))


if __name__ == "__main__":
    main()
