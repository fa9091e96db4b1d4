"""Facts and parts of a router for tests, with everything that a test does not care about filled in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from libs.kv import HASH_ALGORITHM, HashContract, PrefixHash
from libs.obs.metrics import RouterMetrics
from services.router.config import RouterConfig
from services.router.engine_directory import EngineDirectory
from services.router.engine_events import SnapshotHead, SnapshotPart, WatchEvent, WatchTarget
from services.router.placement import Answer, GatewayId, Placed, Placement, Rejected, make_policy
from services.router.policy.facts import (
    EngineCapacity,
    EngineFacts,
    EngineId,
    EngineIdentity,
    EngineLoad,
    EngineState,
    PlacementRequest,
)

CONTRACT = HashContract(16, HASH_ALGORITHM, b"d" * 32)


def chain(num_blocks: int, name: str = "prompt") -> tuple[PrefixHash, ...]:
    """Hashes that stand for a prompt's blocks; the same name gives the same chain."""
    return tuple(PrefixHash(hashlib.sha256(f"{name}/{index}".encode()).digest()) for index in range(num_blocks))


def identity(
    engine_id: str = "engine-0",
    *,
    incarnation: int = 1,
    model_name: str = "model",
    hash_contract: HashContract = CONTRACT,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 100_000,
    max_model_len: int = 8192,
    is_loaded: bool = True,
) -> EngineIdentity:
    capacity = EngineCapacity(
        num_blocks=10_000,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return EngineIdentity(
        engine_id=EngineId(engine_id),
        incarnation=incarnation,
        address=f"{engine_id}:1",
        model_name=model_name,
        hash_contract=hash_contract,
        capacity=capacity if is_loaded else None,
        gpu_type="CPU",
        total_vram_bytes=0,
        tensor_parallel_size=1,
    )


def load(
    *,
    state: EngineState = EngineState.READY,
    num_running: int = 0,
    num_waiting: int = 0,
    num_pending: int = 0,
    rate: float | None = None,
    decode_step_seconds: float | None = None,
) -> EngineLoad:
    return EngineLoad(
        state=state,
        num_running_requests=num_running,
        num_waiting_requests=num_waiting,
        num_pending_prefill_tokens=num_pending,
        num_available_blocks=10_000,
        num_blocks=10_000,
        prefill_tokens_per_second=rate,
        decode_step_seconds=decode_step_seconds,
    )


def facts(
    engine_id: str = "engine-0",
    *,
    engine: EngineIdentity | None = None,
    state: EngineState = EngineState.READY,
    is_watched: bool = True,
    is_current: bool = True,
    engine_load: EngineLoad | None = None,
    num_unseen_tokens: int = 0,
    num_unseen_requests: int = 0,
    num_placed: int = 0,
) -> EngineFacts:
    return EngineFacts(
        identity=engine or identity(engine_id),
        state=state,
        is_watched=is_watched,
        is_current=is_current,
        load=engine_load,
        num_unseen_tokens=num_unseen_tokens,
        num_unseen_requests=num_unseen_requests,
        num_placed_requests=num_placed,
    )


def request(
    request_id: str = "request-0",
    *,
    tenant_id: str = "tenant",
    priority: int = 0,
    remaining_seconds: float | None = None,
    model_name: str = "model",
    num_prompt_tokens: int = 100,
    prefix_hashes: Sequence[PrefixHash] = (),
    hash_contract: HashContract | None = CONTRACT,
    excluded: Sequence[str] = (),
) -> PlacementRequest:
    return PlacementRequest(
        request_id=request_id,
        tenant_id=tenant_id,
        traceparent=None,
        priority=priority,
        remaining_seconds=remaining_seconds,
        model_name=model_name,
        num_prompt_tokens=num_prompt_tokens,
        max_output_tokens=16,
        prefix_hashes=tuple(prefix_hashes),
        hash_contract=hash_contract,
        excluded_engine_ids=frozenset(map(EngineId, excluded)),
    )


def target(engine_id: str = "engine-0") -> WatchTarget:
    return WatchTarget(f"{engine_id}:1", EngineId(engine_id))


def snapshot(
    engine: EngineIdentity,
    *,
    sequence_number: int = 0,
    hashes: Sequence[PrefixHash] = (),
    engine_load: EngineLoad | None = None,
    state: EngineState = EngineState.READY,
    is_last: bool = True,
) -> WatchEvent:
    head = SnapshotHead(engine, engine_load.state if engine_load else state, engine_load)
    return WatchEvent(engine.incarnation, sequence_number, SnapshotPart(head, tuple(hashes), is_last))


@dataclass
class Clock:
    """Time that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Gateway:
    """What one gateway was answered."""

    answers: list[Answer] = field(default_factory=list)

    def deliver(self, answer: Answer) -> None:
        self.answers.append(answer)

    @property
    def places(self) -> dict[str, str]:
        """Engine by request."""
        return {
            answer.request_id: answer.chosen.candidate.engine.engine_id
            for answer in self.answers
            if isinstance(answer, Placed)
        }

    @property
    def rejections(self) -> dict[str, Rejected]:
        """Rejection by request."""
        return {answer.request_id: answer for answer in self.answers if isinstance(answer, Rejected)}


class RouterUnderTest:
    """A placement over a real directory, with one gateway and a clock."""

    def __init__(self, config: RouterConfig | None = None, *, clock: Callable[[], float] | None = None) -> None:
        self.config = config or RouterConfig()
        self.clock = Clock()
        self.directory = EngineDirectory(
            report_lag_seconds=self.config.report_lag_seconds,
            load_stale_seconds=self.config.load_stale_seconds,
            max_hashes_per_engine=self.config.max_hashes_per_engine,
            max_hashes=self.config.max_hashes,
        )
        self.metrics = RouterMetrics(CollectorRegistry())
        self.placement = Placement(
            self.config,
            directory=self.directory,
            policy=make_policy(self.config),
            metrics=self.metrics,
            clock=clock or self.clock,
            on_placed=lambda request, chosen: None,
        )
        self.gateway = Gateway()
        self.gateway_id: GatewayId = self.placement.open_gateway(self.gateway)
        self._sequence_numbers: dict[str, int] = {}

    def add_engine(
        self,
        engine: EngineIdentity,
        *,
        hashes: Sequence[PrefixHash] = (),
        engine_load: EngineLoad | None = None,
    ) -> None:
        """Let an engine be watched."""
        event = snapshot(engine, hashes=hashes, engine_load=engine_load)
        self.directory.apply(target(engine.engine_id), event, self.clock.now)
        self._sequence_numbers[engine.engine_id] = 0

    def report(self, engine: EngineIdentity, engine_load: EngineLoad) -> None:
        """Let an engine report its load."""
        self._sequence_numbers[engine.engine_id] += 1
        event = WatchEvent(engine.incarnation, self._sequence_numbers[engine.engine_id], engine_load)
        self.directory.apply(target(engine.engine_id), event, self.clock.now)

    def enqueue(self, asked: PlacementRequest) -> None:
        """Ask for a place."""
        self.placement.enqueue(self.gateway_id, asked)

    def num_placed(self, engine_id: str) -> int:
        """Requests counted on an engine."""
        return next(
            status.num_placed_requests
            for status in self.directory.statuses()
            if status.identity.engine_id == engine_id
        )
