"""Random histories of gateways, engines and leases: whatever happens, everything is given back at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from libs.errors import EngineLost
from services.router.config import RouterConfig
from services.router.placement import GatewayId
from services.router.policy.facts import EngineId, EngineState
from services.router.prefix_index import ResyncNeeded
from tests.unit.router.builders import Gateway, RouterUnderTest, chain, identity, load, request, target

NUM_STEPS = 300
ENGINES = ("e0", "e1", "e2")
CONFIG = RouterConfig(
    max_waiting_requests=20,
    max_wait_seconds=5.0,
    max_requests_per_gateway=30,
    max_hashes_per_engine=50,
    max_hashes=80,
)


class History:
    """One router, and what a random source does to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.router = RouterUnderTest(CONFIG)
        self.asked: dict[GatewayId, list[str]] = {self.router.gateway_id: []}
        self.incarnations: dict[str, int] = {}
        self.num_asked = 0

    def run(self) -> None:
        """Do random things, and look at what must hold after each."""
        steps: list[Callable[[], None]] = [
            *(self.ask,) * 4,
            *(self.cancel, self.start, self.finish),
            *(self.snapshot, self.report, self.lose, self.lease, self.end_lease),
            *(self.open_gateway, self.close_gateway),
        ]
        for _ in range(NUM_STEPS):
            self.router.clock.now += self.random.random() * 0.3
            self.random.choice(steps)()
            self.router.placement.pump()
            index = self.router.directory.index
            assert index.num_hashes == sum(index.num_hashes_of(EngineId(engine)) for engine in ENGINES)
            assert index.num_hashes <= CONFIG.max_hashes

    def give_back(self) -> None:
        """Let all who wait wait too long, and all that was placed end."""
        self.router.clock.now += 100.0
        self.router.placement.pump()
        for gateway_id, asked in self.asked.items():
            for request_id in asked:
                self.router.placement.finish(gateway_id, request_id)

    # What gateways do.

    def ask(self) -> None:
        gateway_id = self.any_gateway()
        self.num_asked += 1
        request_id = f"r{self.num_asked}" if self.random.random() < 0.95 else self.any_request(gateway_id)
        self.asked[gateway_id].append(request_id)
        self.router.placement.enqueue(
            gateway_id,
            request(
                request_id,
                tenant_id=self.random.choice("abc"),
                priority=self.random.randint(-1, 1),
                num_prompt_tokens=self.random.choice([1, 50, 400, 9_000]),
                model_name=self.random.choice(["model", "model", "other"]),
                excluded=self.random.choice([(), ("e0",)]),
                remaining_seconds=self.random.choice([None, None, 0.5, 0.0]),
                prefix_hashes=chain(self.random.randint(0, 3)),
            ),
        )

    def cancel(self) -> None:
        gateway_id = self.any_gateway()
        self.router.placement.cancel(gateway_id, self.any_request(gateway_id))

    def start(self) -> None:
        gateway_id = self.any_gateway()
        self.router.placement.start(gateway_id, self.any_request(gateway_id))

    def finish(self) -> None:
        gateway_id = self.any_gateway()
        self.router.placement.finish(gateway_id, self.any_request(gateway_id))

    def open_gateway(self) -> None:
        if len(self.asked) < 3:
            self.asked[self.router.placement.open_gateway(Gateway())] = []

    def close_gateway(self) -> None:
        if len(self.asked) > 1:
            gateway_id = self.any_gateway()
            del self.asked[gateway_id]
            self.router.placement.close_gateway(gateway_id)

    # What engines and leases do.

    def snapshot(self) -> None:
        engine_id = self.random.choice(ENGINES)
        incarnation = self.incarnations.get(engine_id, 0) + self.random.randint(0, 1)
        engine = identity(
            engine_id,
            incarnation=incarnation,
            model_name="other" if engine_id == "e2" else "model",
            max_num_batched_tokens=self.random.choice([100, 1_000]),
            max_num_seqs=4,
            max_model_len=self.random.choice([512, 8_192]),
        )
        with suppress(EngineLost):
            self.router.add_engine(engine, hashes=chain(self.random.randint(0, 60)), engine_load=load())
            self.incarnations[engine_id] = incarnation

    def report(self) -> None:
        engine_id = self.random.choice(ENGINES)
        told = load(
            state=self.random.choice(list(EngineState)),
            num_running=self.random.randint(0, 5),
            num_waiting=self.random.randint(0, 3),
            num_pending=self.random.choice([0, 50, 500]),
            rate=self.random.choice([None, 1_000.0]),
        )
        if engine_id in self.incarnations:
            try:
                self.router.report(identity(engine_id, incarnation=self.incarnations[engine_id]), told)
            except ResyncNeeded:
                self.router.directory.suspend(target(engine_id))

    def lose(self) -> None:
        self.router.directory.lose(target(self.random.choice(ENGINES)))

    def lease(self) -> None:
        engine_id, incarnation = self.random.choice(ENGINES[:2]), self.random.randint(0, 3)
        self.router.directory.set_lease(identity(engine_id, incarnation=incarnation, is_loaded=False))

    def end_lease(self) -> None:
        self.router.directory.end_lease(EngineId(self.random.choice(ENGINES)))

    def any_gateway(self) -> GatewayId:
        return self.random.choice(list(self.asked))

    def any_request(self, gateway_id: GatewayId) -> str:
        return self.random.choice(self.asked[gateway_id] or ["nobody's"])


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_whatever_happens_nothing_is_held_when_all_is_over(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        history = History(seed)
        history.run()

        history.give_back()

        directory = history.router.directory
        held = [status.num_placed_requests for status in directory.statuses()]
        unseen = [facts.num_unseen_tokens for facts in directory.facts(history.router.clock.now)]
        assert not any(held), f"seed {seed}"
        assert not any(unseen), f"seed {seed}"
        assert history.router.metrics.registry.get_sample_value("octavo_router_waiting_requests") == 0
