"""The main line of the router: a request comes in, an engine or an error goes out.

Owns the order of events: filters, scorers, picker, counting the pick, telling the gateway; who waits; what is
counted for which gateway. It must not know gRPC or Redis. All of it runs on one event loop without awaiting, so
that no pick is made on figures that another pick has changed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NewType, Protocol, TypeAlias

from libs.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    HashContractMismatch,
    ModelNotFound,
    NoEngineAvailable,
    OctavoError,
    Overloaded,
    spec_of,
)
from libs.obs import get_logger
from libs.obs.metrics import RouterMetrics
from libs.obs.tracing import NO_TRACER, SpanKind, Tracer
from services.router.config import RouterConfig
from services.router.engine_directory import EngineDirectory
from services.router.fair_queue import FairQueue, LaneKey, QueueFull, WaitingRequest
from services.router.placed_load import PlacementKey
from services.router.policy.facts import (
    Candidate,
    EngineFacts,
    EngineId,
    EngineIdentity,
    PlacementRequest,
    ScoredCandidate,
)
from services.router.policy.filters import (
    Filter,
    FitsPrompt,
    HasRoom,
    IsAlive,
    IsNotExcluded,
    IsReady,
    ServesModel,
    SharesHashContract,
    Shortage,
    filter_engines,
)
from services.router.policy.forecast import NeutralLoad, UnmeasuredRates, forecast, seconds_until_room
from services.router.policy.pickers import HighestScorePicker
from services.router.policy.scorers import PredictedWait, PrefixMatch, Scorer, score_candidates

GatewayId = NewType("GatewayId", int)

# Retry-After is in whole seconds.
_MIN_RETRY_AFTER_SECONDS = 1.0
_NANOS_PER_SECOND = 1_000_000_000

_log = get_logger("placement")


@dataclass(frozen=True, slots=True)
class Placed:
    """A request has a place."""

    request_id: str
    chosen: ScoredCandidate
    candidates: tuple[ScoredCandidate, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request has no place."""

    request_id: str
    error: OctavoError


Answer: TypeAlias = Placed | Rejected


class AnswerSink(Protocol):
    """Takes answers to one gateway."""

    def deliver(self, answer: Answer) -> None:
        """Queue an answer without waiting."""


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The parts that choose an engine."""

    filters: tuple[Filter, ...]
    scorers: tuple[Scorer, ...]
    picker: HighestScorePicker
    unmeasured: UnmeasuredRates


def make_policy(config: RouterConfig) -> PlacementPolicy:
    """Build the policy: the least predicted wait, with a share for what is cached."""
    return PlacementPolicy(
        filters=(
            ServesModel(),
            IsAlive(),
            IsReady(),
            SharesHashContract(),
            FitsPrompt(),
            IsNotExcluded(),
            HasRoom(config.max_waiting_steps, config.max_requests_ratio),
        ),
        scorers=(
            PredictedWait(weight=1.0, tolerance_seconds=config.wait_tolerance_seconds),
            PrefixMatch(weight=config.prefix_match_weight),
        ),
        picker=HighestScorePicker(),
        unmeasured=UnmeasuredRates(
            config.unmeasured_prefill_tokens_per_second, config.unmeasured_decode_step_seconds
        ),
    )


@dataclass(slots=True)
class _Gateway:
    """One gateway's stream: where answers go, and its requests."""

    sink: AnswerSink
    waiting: set[str] = field(default_factory=set)
    placed: dict[str, EngineId] = field(default_factory=dict)


class Placement:
    """Places the requests of all gateways."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        directory: EngineDirectory,
        policy: PlacementPolicy,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        on_placed: Callable[[PlacementRequest, ScoredCandidate], None],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._tracer = tracer
        self._config = config
        self._directory = directory
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._on_placed = on_placed
        self._queue = FairQueue(config.max_waiting_requests)
        self._gateways: dict[GatewayId, _Gateway] = {}
        self._num_gateways_seen = 0
        self._is_draining = False
        self._woken = asyncio.Event()

    def open_gateway(self, sink: AnswerSink) -> GatewayId:
        """Begin to serve one gateway's stream."""
        self._num_gateways_seen += 1
        gateway_id = GatewayId(self._num_gateways_seen)
        self._gateways[gateway_id] = _Gateway(sink)
        return gateway_id

    def enqueue(self, gateway_id: GatewayId, request: PlacementRequest) -> None:
        """Answer a request with a place, let it wait for one, or reject it."""
        now = self._clock()
        waiting = self._as_waiting(gateway_id, request, now)
        try:
            self._check_admissible(gateway_id, request)
            if self._queue.has_lane(waiting.lane_key) or not self._try_to_place(waiting, now):
                self._wait(waiting, now)
        except OctavoError as error:
            self._reject(waiting, error, now)

    def cancel(self, gateway_id: GatewayId, request_id: str) -> None:
        """Withdraw a request. It may have been placed while the cancellation was on its way."""
        if self._queue.remove(_key(gateway_id, request_id)) is not None:
            self._gateways[gateway_id].waiting.discard(request_id)
            self._metrics.waiting_requests.set(len(self._queue))
            self.wake()
        else:
            self.finish(gateway_id, request_id)

    def start(self, gateway_id: GatewayId, request_id: str) -> None:
        """Note that a request's prefill is over."""
        engine_id = self._gateways[gateway_id].placed.get(request_id)
        if engine_id is not None:
            self._directory.count_started(engine_id, _key(gateway_id, request_id))
            self.wake()

    def finish(self, gateway_id: GatewayId, request_id: str) -> None:
        """Give a request's place back; one that holds none changes nothing."""
        engine_id = self._gateways[gateway_id].placed.pop(request_id, None)
        if engine_id is not None:
            self._directory.count_finished(engine_id, _key(gateway_id, request_id))
            self.wake()

    def close_gateway(self, gateway_id: GatewayId) -> None:
        """Drop what a gateway has waiting and release what it has placed: its stream ended."""
        gateway = self._gateways.pop(gateway_id)
        for request_id in gateway.waiting:
            self._queue.remove(_key(gateway_id, request_id))
        for request_id, engine_id in gateway.placed.items():
            self._directory.count_finished(engine_id, _key(gateway_id, request_id))
        self._metrics.waiting_requests.set(len(self._queue))
        self.wake()

    def drain(self) -> None:
        """Reject what waits and what still comes."""
        self._is_draining = True
        now = self._clock()
        for waiting in self._queue.take_all():
            self._reject(waiting, _draining_error(), now)

    def wake(self) -> None:
        """Ask for a look at the queue: engines or placed requests have changed."""
        self._woken.set()

    async def run(self) -> None:
        """Look at the queue whenever something changes or somebody has waited too long."""
        while True:
            self._woken.clear()
            self.pump()
            expiry = self._queue.next_expiry()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if expiry is None else max(0.0, expiry - self._clock())):
                    await self._woken.wait()

    def pump(self) -> None:
        """Reject who has waited too long, then place as many as the engines have room for."""
        now = self._clock()
        for waiting in self._queue.take_expired(now):
            self._reject(waiting, self._expiry_error(waiting, now), now)
        held_up: set[LaneKey] = set()
        while (first := self._queue.first(passing_over=held_up)) is not None:
            try:
                if self._try_to_place(first, now):
                    self._queue.serve(first.key)
                else:
                    held_up.add(first.lane_key)
            except OctavoError as error:
                self._queue.remove(first.key)
                self._reject(first, error, now)
        self._metrics.waiting_requests.set(len(self._queue))

    def _as_waiting(self, gateway_id: GatewayId, request: PlacementRequest, now: float) -> WaitingRequest:
        patience = self._config.max_wait_seconds
        if request.remaining_seconds is not None:
            patience = min(patience, request.remaining_seconds)
        return WaitingRequest(_key(gateway_id, request.request_id), request, now, now + patience)

    def _check_admissible(self, gateway_id: GatewayId, request: PlacementRequest) -> None:
        gateway = self._gateways[gateway_id]
        if self._is_draining:
            raise _draining_error()
        if request.request_id in gateway.waiting or request.request_id in gateway.placed:
            raise DuplicateRequest(f"Request {request.request_id} is waiting or placed already on this stream.")
        if request.remaining_seconds is not None and request.remaining_seconds <= 0:
            raise DeadlineExceeded("The deadline passed before the request came to the router.")
        if len(gateway.waiting) + len(gateway.placed) >= self._config.max_requests_per_gateway:
            raise Overloaded(
                f"This gateway has {self._config.max_requests_per_gateway} requests waiting or placed, which is "
                "the most that a router keeps for one.",
                retry_after_seconds=_MIN_RETRY_AFTER_SECONDS,
            )

    def _try_to_place(self, waiting: WaitingRequest, now: float) -> bool:
        """Place a request; False when it must wait.

        Raises:
            OctavoError: when waiting would not help.
        """
        request, engines = waiting.request, self._directory.facts(now)
        admitted = filter_engines(self._policy.filters, engines, request)
        if admitted.shortage is not None:
            self._raise_if_hopeless(admitted.shortage, engines, request)
            return False
        neutral = self._neutral_load(engines, request.model_name)
        candidates = [self._candidate(engine, request, neutral) for engine in admitted.engines]
        scored = score_candidates(self._policy.scorers, candidates, request)
        chosen = self._policy.picker.pick(scored)
        # The pick is counted before anybody learns of it.
        self._count(waiting, chosen.candidate, now)
        self._announce(waiting, Placed(request.request_id, chosen, tuple(scored)), now)
        return True

    def _neutral_load(self, engines: Sequence[EngineFacts], model_name: str) -> NeutralLoad:
        peers = [engine for engine in engines if engine.identity.model_name == model_name and engine.is_watched]
        return NeutralLoad.of(peers, self._policy.unmeasured)

    def _candidate(self, engine: EngineFacts, request: PlacementRequest, neutral: NeutralLoad) -> Candidate:
        num_cached_tokens = self._directory.num_cached_tokens(
            engine, request.prefix_hashes, request.num_prompt_tokens
        )
        return Candidate(engine, forecast(engine, request, num_cached_tokens, neutral))

    def _count(self, waiting: WaitingRequest, chosen: Candidate, now: float) -> None:
        gateway_id, request_id = waiting.key
        engine_id = chosen.engine.engine_id
        num_uncached_tokens = waiting.request.num_prompt_tokens - chosen.forecast.num_cached_tokens
        self._directory.count_placed(engine_id, waiting.key, num_uncached_tokens, now)
        gateway = self._gateways[GatewayId(gateway_id)]
        gateway.waiting.discard(request_id)
        gateway.placed[request_id] = engine_id

    def _announce(self, waiting: WaitingRequest, placed: Placed, now: float) -> None:
        engine_id = placed.chosen.candidate.engine.engine_id
        self._gateway_of(waiting).sink.deliver(placed)
        self._on_placed(waiting.request, placed.chosen)
        self._metrics.placements.labels(engine_id=engine_id).inc()
        self._metrics.placement_seconds.observe(now - waiting.enqueued_at)
        request, expected = waiting.request, placed.chosen.candidate.forecast
        _log.debug(
            "request placed",
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            traceparent=request.traceparent,
            engine_id=engine_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            num_cached_tokens=expected.num_cached_tokens,
            predicted_wait_seconds=expected.wait_seconds,
        )
        self._trace(waiting, now, engine_id=engine_id, error=None)

    def _wait(self, waiting: WaitingRequest, now: float) -> None:
        try:
            self._queue.push(waiting)
        except QueueFull as error:
            raise Overloaded(
                f"The router's queue is full with {len(self._queue)} requests.",
                retry_after_seconds=self._seconds_until_room(waiting.request, now),
            ) from error
        self._gateway_of(waiting).waiting.add(waiting.request.request_id)
        self._metrics.waiting_requests.set(len(self._queue))
        # The loop must learn of an expiry that is earlier than the one that it sleeps for.
        self.wake()

    def _reject(self, waiting: WaitingRequest, error: OctavoError, now: float) -> None:
        gateway, request = self._gateway_of(waiting), waiting.request
        if not isinstance(error, DuplicateRequest):
            gateway.waiting.discard(request.request_id)
        gateway.sink.deliver(Rejected(request.request_id, error))
        reason = spec_of(error).reason
        self._metrics.rejections.labels(reason=reason).inc()
        self._metrics.placement_seconds.observe(now - waiting.enqueued_at)
        _log.debug(
            "request rejected",
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            traceparent=request.traceparent,
            reason=reason,
        )
        self._trace(waiting, now, engine_id="", error=reason)

    def _trace(self, waiting: WaitingRequest, now: float, *, engine_id: str, error: str | None) -> None:
        """Make the span of a request's wait, where it is traced."""
        request = waiting.request
        if request.traceparent is None:
            return
        span = self._tracer.start(
            "octavo.router.place",
            traceparent=request.traceparent,
            start_ns=round(waiting.enqueued_at * _NANOS_PER_SECOND),
            kind=SpanKind.SERVER,
            attributes={"octavo.request_id": request.request_id, "octavo.engine_id": engine_id},
        )
        span.end(round(now * _NANOS_PER_SECOND), error=error)

    def _raise_if_hopeless(
        self, shortage: Shortage, engines: Sequence[EngineFacts], request: PlacementRequest
    ) -> None:
        """Raise when no engine that is known could ever take the request; otherwise it waits.

        One that is lost or loads just now counts as well: it comes back.
        """
        name = request.model_name
        served = [engine.identity for engine in engines if engine.identity.model_name == name]
        limits = [identity.capacity.max_model_len for identity in served if identity.capacity]
        match shortage:
            case Shortage.MODEL_NOT_SERVED if engines and not self._directory.may_serve(name):
                raise ModelNotFound(f"The model {name!r} does not exist here.", param="model")
            case Shortage.CONTRACT_DIFFERS if not any(_may_share(identity, request) for identity in served):
                ids = ", ".join(identity.engine_id for identity in served)
                raise HashContractMismatch(
                    f"The gateway's tokenizer or block size for {name!r} is not that of its engines ({ids}); give "
                    "gateways and engines the same model files and block size."
                )
            case Shortage.PROMPT_TOO_LONG if request.num_prompt_tokens >= max(limits):
                raise ContextLengthExceeded.of(
                    num_prompt_tokens=request.num_prompt_tokens, max_output_tokens=1, max_model_len=max(limits)
                )

    def _expiry_error(self, waiting: WaitingRequest, now: float) -> OctavoError:
        request, waited_seconds = waiting.request, waiting.expires_at - waiting.enqueued_at
        if request.remaining_seconds is not None and request.remaining_seconds <= self._config.max_wait_seconds:
            return DeadlineExceeded(f"The deadline passed while the request waited {waited_seconds:.3g} s.")
        shortage = filter_engines(self._policy.filters, self._directory.facts(now), request).shortage
        if shortage is Shortage.NO_ROOM or shortage is None:
            return Overloaded(
                f"No engine had room for {request.model_name!r} within {waited_seconds:.3g} s.",
                retry_after_seconds=self._seconds_until_room(request, now),
            )
        return NoEngineAvailable(
            f"No engine was ready for {request.model_name!r} within {waited_seconds:.3g} s.",
            retry_after_seconds=self._config.no_engine_retry_seconds,
        )

    def _seconds_until_room(self, request: PlacementRequest, now: float) -> float:
        engines = [
            engine
            for engine in self._directory.facts(now)
            if engine.is_watched and engine.identity.model_name == request.model_name
        ]
        if not engines:
            return self._config.no_engine_retry_seconds
        neutral = NeutralLoad.of(engines, self._policy.unmeasured)
        seconds = seconds_until_room(self._queue.num_prompt_tokens, engines, neutral)
        return min(max(seconds, _MIN_RETRY_AFTER_SECONDS), self._config.max_retry_after_seconds)

    def _gateway_of(self, waiting: WaitingRequest) -> _Gateway:
        gateway_id, _ = waiting.key
        return self._gateways[GatewayId(gateway_id)]


def _may_share(identity: EngineIdentity, request: PlacementRequest) -> bool:
    """Tell whether an engine has the request's hash contract or may turn out to; one that loads has none yet."""
    contract = identity.hash_contract
    return contract == request.hash_contract or not contract.tokenizer_digest


def _key(gateway_id: GatewayId, request_id: str) -> PlacementKey:
    return PlacementKey((gateway_id, request_id))


def _draining_error() -> Draining:
    return Draining("This router is going away; ask another.", retry_after_seconds=_MIN_RETRY_AFTER_SECONDS)
