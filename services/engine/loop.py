"""The engine's loop: load the model, then schedule → execute → apply → publish, over and over.

Owns the scheduler, the engine's state and its incarnation. A lost worker ends all requests, empties the prefix
cache and raises the incarnation; then the loop starts again from loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable

from libs.errors import (
    Draining,
    InternalError,
    ModelLoadFailed,
    NoEngineAvailable,
    OctavoError,
    Overloaded,
    WorkerLost,
)
from libs.kv import HASH_ALGORITHM, HashContract
from libs.obs import get_logger
from libs.obs.metrics import EngineMetrics
from libs.obs.tracing import NO_TRACER, Tracer
from services.engine import wire
from services.engine.config import EngineConfig
from services.engine.core.request import Request, SequenceEnd
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import SchedulerConfig
from services.engine.core.scheduler_output import PageTableRow, SchedulerOutput, StepEvents, StepResult
from services.engine.feed import EngineFeed, FeedEvent
from services.engine.identity import EngineIdentity, EngineState, EngineStatus, LoadedModel
from services.engine.outbox import Outbox
from services.engine.registry_writer import RegistryWriter
from services.engine.request_spans import RequestSpans
from services.engine.speedometer import Speedometer
from services.engine.wire import Outgoing
from services.engine.worker_group import StepRunner, WorkerGroup

_log = get_logger("engine_loop")

_MAX_MESSAGES_BEHIND = 2048
_RECONNECT_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# While nothing is computed the loop still looks at deadlines and tells its load this often.
_IDLE_TICK_SECONDS = 0.25
_LOAD_INTERVAL_SECONDS = 0.05


class EngineLoop:
    """One engine. All methods run on one event loop; nothing here is touched by another thread."""

    def __init__(
        self,
        config: EngineConfig,
        workers: WorkerGroup,
        feed: EngineFeed,
        registry: RegistryWriter,
        metrics: EngineMetrics,
        *,
        first_incarnation: int,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._config = config
        self._spans = RequestSpans(tracer, config.engine_id)
        self._workers = workers
        self._feed = feed
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._incarnation = first_incarnation
        self._model: LoadedModel | None = None
        self._scheduler: Scheduler | None = None
        self._is_draining = False
        self._in_flight: deque[SchedulerOutput] = deque()
        self._step_started: float | None = None
        self._last_result: float | None = None
        self._last_answer = self._clock()
        self._last_load_told = float("-inf")
        self._last_load_was_idle = False
        self._handles = itertools.count(1)
        self._owners = itertools.count(1)
        self._outboxes: dict[int, Outbox[Outgoing]] = {}
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._speed = Speedometer()

    async def run(self) -> None:
        """Serve until cancelled; raises ModelLoadFailed when the model can never be served."""
        num_failures = 0
        while True:
            try:
                self._begin(await self._workers.load_model())
                num_failures = 0
                async with self._workers.open_steps(on_lost=self._wake.set) as steps:
                    await self._serve(steps)
            except ModelLoadFailed:
                raise
            except OctavoError as error:
                self._on_workers_lost(error)
            await asyncio.sleep(_RECONNECT_DELAYS_SECONDS[min(num_failures, len(_RECONNECT_DELAYS_SECONDS) - 1)])
            num_failures += 1

    async def _serve(self, steps: StepRunner) -> None:
        scheduler = self._require_scheduler()
        while True:
            steps.raise_if_lost()
            self._publish_ends(scheduler.expire(self._clock()))
            await self._fill_pipeline(scheduler, steps)
            if not self._in_flight:
                self._tell_load()
                await self._wait_for_work()
                await self._beat_if_due(steps)
                continue
            result = await steps.next_result()
            output = self._in_flight.popleft()
            self._note_answer()
            now = self._clock()
            self._publish(scheduler.apply(result, now), now)
            self._account(output, result)

    async def _fill_pipeline(self, scheduler: Scheduler, steps: StepRunner) -> None:
        """Send steps until as many are in flight as may be: the worker computes one while the next is decided."""
        while scheduler.can_schedule:
            output = scheduler.schedule(self._clock())
            if output is None:
                return
            if not self._in_flight:
                self._note_start()
            self._in_flight.append(output)
            await steps.send(output)

    # ---- what servicers ask ----

    @property
    def status(self) -> EngineStatus:
        """Who the engine is and how it fares."""
        return EngineStatus(
            state=self._state(),
            identity=self._identity(),
            load=self._scheduler.load if self._scheduler else None,
            prefill_tokens_per_second=self._speed.prefill_tokens_per_second,
            decode_step_seconds=self._speed.decode_step_seconds,
        )

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self._scheduler.num_requests if self._scheduler else 0

    def open_owner(self) -> tuple[int, Outbox[Outgoing]]:
        """Register a gateway's stream; returns its number and what is to be sent to it."""
        owner, outbox = next(self._owners), Outbox[Outgoing](_MAX_MESSAGES_BEHIND)
        self._outboxes[owner] = outbox
        return owner, outbox

    def close_owner(self, owner: int) -> None:
        """Forget a gateway's stream and end its requests."""
        del self._outboxes[owner]
        if self._scheduler is not None:
            self._count_ends(self._scheduler.abort_owner(owner, self._clock()))
            self._wake.set()

    def submit(self, owner: int, request: Request) -> None:
        """Take a request or refuse it; either way its owner hears of its handles."""
        outbox = self._outboxes[owner]
        try:
            if self._is_draining:
                raise Draining("This engine is going away and takes no new requests.", retry_after_seconds=1.0)
            if self._scheduler is None or self._model is None:
                raise NoEngineAvailable("This engine is still loading its model.", retry_after_seconds=2.0)
            wire.refuse_unknown_tokens(request, self._model.vocab_size)
            self._give_up_earlier_try(self._scheduler, owner, request.request_id)
            handles = self._scheduler.add(request, self._clock())
        except OctavoError as error:
            if isinstance(error, Overloaded):
                error.retry_after_seconds = self._drain_seconds()
            handles = tuple(next(self._handles) for _ in request.choices)
            self._metrics.requests_ended.labels("refused").inc()
            outbox.put(Outgoing(wire.refusal_message(request.request_id, handles, error)))
            return
        outbox.put(Outgoing(wire.started_message(request.request_id, handles)))
        self._wake.set()

    def _give_up_earlier_try(self, scheduler: Scheduler, owner: int, request_id: str) -> None:
        """End what another stream still has of a request: its gateway has lost that stream, and asks again here.

        The end of a connection may be heard of later than what comes on the next one.
        """
        if scheduler.owner_of(request_id) not in (None, owner):
            self._publish_ends(scheduler.abort(request_id, self._clock()))

    def abort(self, owner: int, request_id: str, handles: tuple[int, ...]) -> None:
        """End a request of a stream, or some of its choices, from outside; one of another stream goes on."""
        if self._scheduler is not None and self._scheduler.owner_of(request_id) == owner:
            self._publish_ends(self._scheduler.abort(request_id, self._clock(), handles))
            self._wake.set()

    def page_table(self, request_id: str) -> tuple[PageTableRow, ...]:
        """Return where the computed tokens of a request lie."""
        return self._scheduler.page_table(request_id) if self._scheduler else ()

    def drain(self) -> None:
        """Take no new requests; those that run or wait go on."""
        self._is_draining = True
        self._tell_load(force=True)

    async def wait_until_idle(self, timeout_seconds: float) -> None:
        """Wait for the last request; after ``timeout_seconds`` the rest end with an error."""
        deadline = self._clock() + timeout_seconds
        while self.num_requests and (left_seconds := deadline - self._clock()) > 0:
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), left_seconds)
        if self._scheduler is not None:
            error = Draining("The engine was stopped before the request could finish.", retry_after_seconds=1.0)
            self._publish_ends(self._scheduler.fail_all(error, self._clock()))

    def watch(self) -> Outbox[FeedEvent]:
        """Open a watch that starts with the present state."""
        hashes = tuple(value for value, _ in self._scheduler.kv_cache.cached_hashes()) if self._scheduler else ()
        if self._scheduler is not None:
            # What has changed since the last step is in the snapshot; tell the others now, not later and twice.
            self._tell_cache_changes(self._scheduler)
        return self._feed.watch(self.status, hashes)

    def unwatch(self, outbox: Outbox[FeedEvent]) -> None:
        """Close a watch."""
        self._feed.unwatch(outbox)

    def refresh_gauges(self) -> None:
        """Bring gauges up to date, as before a scrape; counters are always."""
        # Scrapes come from a thread of their own, during which workers may be lost.
        scheduler = self._scheduler
        if scheduler is None:
            # What was held at their loss is gone.
            self._metrics.show_nothing()
            return
        load, blocks = scheduler.load, scheduler.kv_cache.block_counts
        self._metrics.running_requests.set(load.num_running)
        self._metrics.waiting_requests.set(load.num_waiting)
        for state, count in (
            ("free", blocks.num_free),
            ("evictable", blocks.num_evictable),
            ("held", blocks.num_held),
        ):
            self._metrics.blocks.labels(state).set(count)

    # ---- beginnings and losses ----

    def _begin(self, model: LoadedModel) -> None:
        config = self._config
        if model.block_size != config.block_size:
            raise ModelLoadFailed(f"The worker uses blocks of {model.block_size} tokens, not {config.block_size}.")
        num_blocks = min(model.num_blocks, config.num_blocks or model.num_blocks)
        max_model_len = min(model.max_model_len, num_blocks * config.block_size)
        self._model = model
        self._incarnation += 1
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=config.block_size,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting_sequences=config.max_waiting_sequences,
                eos_token_ids=model.eos_token_ids,
                enable_prefix_caching=config.enable_prefix_caching,
                watermark_fraction=config.watermark_fraction,
                aging_seconds=config.aging_seconds,
                target_itl_seconds=config.target_itl,
                max_prefill_share=config.max_prefill_share,
                max_steps_in_flight=config.max_steps_in_flight,
                admission=config.admission,
                batching=config.batching,
                layout=config.layout,
                speculation=config.speculation_config,
            ),
            self._handles,
        )
        self._feed.begin_incarnation(self._incarnation, self.status)
        self._registry.begin_incarnation()
        _log.info("engine ready", incarnation=self._incarnation, num_blocks=num_blocks, max_model_len=max_model_len)

    def _on_workers_lost(self, error: OctavoError) -> None:
        if self._scheduler is None:
            _log.warning("workers not reachable", error=error.message)
            return
        _log.error("workers lost", error=error.message, num_requests=self.num_requests)
        self._metrics.worker_losses.inc()
        lost = WorkerLost(f"A worker of the engine was lost: {error.message}", retry_after_seconds=1.0)
        self._publish_ends(self._scheduler.fail_all(lost, self._clock()))
        self._scheduler = None
        self._in_flight.clear()
        self._step_started = None
        self._incarnation += 1
        self._feed.begin_incarnation(self._incarnation, self.status)
        self._registry.begin_incarnation()

    # ---- one step ----

    def _note_start(self) -> None:
        """Note that the worker begins a step now: it had nothing to do."""
        self._step_started = self._clock()
        if self._last_result is not None:
            self._metrics.idle_gap_seconds.observe(self._step_started - self._last_result)

    def _note_answer(self) -> None:
        """Note that the worker has answered a step, and begins the next if it has one already."""
        now = self._last_answer = self._clock()
        if self._in_flight:
            self._step_started, self._last_result = now, None
            self._metrics.idle_gap_seconds.observe(0.0)
        else:
            self._step_started, self._last_result = None, now

    async def _beat_if_due(self, steps: StepRunner) -> None:
        """Ask an idle worker for a sign of life; while it owes one the engine counts as stalled after a while."""
        now = self._clock()
        if self._require_scheduler().has_work or now - self._last_answer < self._config.heartbeat_seconds:
            return
        self._step_started = now
        await steps.beat()
        self._step_started, self._last_answer = None, self._clock()

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(_IDLE_TICK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            # A gap counts only while there is work.
            self._last_result = None
        self._wake.clear()

    def _account(self, output: SchedulerOutput, result: StepResult) -> None:
        scheduler, metrics = self._require_scheduler(), self._metrics
        num_sequences = len(output.slots)
        self._speed.note_step(
            num_tokens=output.num_tokens - output.num_draft_tokens,
            num_sequences=num_sequences,
            step_seconds=result.step_seconds,
        )
        metrics.steps.inc()
        metrics.step_seconds.observe(result.step_seconds)
        metrics.scheduled_tokens.inc(output.num_tokens)
        metrics.step_tokens.observe(output.num_tokens)
        metrics.output_tokens.inc(len(result.token_ids))
        metrics.draft_tokens.inc(output.num_draft_tokens)
        metrics.accepted_draft_tokens.inc(len(result.token_ids) - len(result.slots))
        metrics.preemptions.inc(scheduler.take_num_preemptions())
        for rule, count in scheduler.take_refusals().items():
            metrics.admission_waits.labels(rule).inc(count)
        for new in output.new_sequences:
            # What is computed again after a preemption adds neither to prompts nor to hits.
            if not new.is_resumed:
                metrics.prompt_tokens.inc(new.num_prompt_tokens)
                metrics.cached_tokens.inc(min(new.num_computed_tokens, new.num_prompt_tokens))
        self._tell_cache_changes(scheduler)
        self._tell_load()
        if output.step_id % self._config.integrity_interval_steps == 0:
            self._check_integrity(scheduler)

    def _check_integrity(self, scheduler: Scheduler) -> None:
        for fault in scheduler.audit():
            self._metrics.integrity_faults.inc()
            _log.error("integrity fault repaired", fault=fault)

    # ---- telling others ----

    def _publish(self, events: StepEvents, applied_time: float) -> None:
        for owner, message in wire.messages_by_owner(events):
            self._put(owner, Outgoing(message, applied_time))
        self._count_ends(events.ends)

    def _publish_ends(self, ends: Iterable[SequenceEnd]) -> None:
        for end in ends:
            self._put(end.owner, Outgoing(wire.ends_message([end])))
            self._count_ends([end])

    def _put(self, owner: int, message: Outgoing) -> None:
        # A gateway that has left needs no answer.
        outbox = self._outboxes.get(owner)
        if outbox is not None:
            outbox.put(message)

    def _count_ends(self, ends: Iterable[SequenceEnd]) -> None:
        for end in ends:
            self._metrics.requests_ended.labels(end.reason.value if end.reason else "error").inc()
            self._metrics.queue_seconds.observe(end.usage.queue_seconds)
            self._spans.note(end)
        self._ended.set()

    def _tell_cache_changes(self, scheduler: Scheduler) -> None:
        changes = scheduler.kv_cache.take_changes()
        self._feed.tell_changes(changes)
        self._registry.note_changes(changes)

    def _tell_load(self, *, force: bool = False) -> None:
        now = self._clock()
        is_idle = self._scheduler is not None and not self._scheduler.has_work
        interval = _IDLE_TICK_SECONDS if is_idle and self._last_load_was_idle else _LOAD_INTERVAL_SECONDS
        # The change to idle is told at once: a router must not go on believing in a load that is gone.
        if force or now - self._last_load_told >= interval or (is_idle and not self._last_load_was_idle):
            self._last_load_told, self._last_load_was_idle = now, is_idle
            self._feed.tell_status(self.status)

    # ---- derived ----

    def _state(self) -> EngineState:
        if self._is_draining:
            return EngineState.DRAINING
        is_stalled = (
            self._step_started is not None and self._clock() - self._step_started > self._config.stall_seconds
        )
        return EngineState.STARTING if self._scheduler is None or is_stalled else EngineState.READY

    def _identity(self) -> EngineIdentity:
        model = self._model if self._scheduler else None
        limits = self._scheduler.config if self._scheduler else None
        return EngineIdentity(
            engine_id=self._config.engine_id,
            incarnation=self._incarnation,
            address=self._config.address,
            model_name=self._config.model_name,
            hash_contract=HashContract(self._config.block_size, HASH_ALGORITHM, model.tokenizer_digest)
            if model
            else None,
            num_blocks=limits.num_blocks if limits else 0,
            max_model_len=limits.max_model_len if limits else 0,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            gpu_type=model.gpu_type if model else "",
            total_vram_bytes=model.total_vram_bytes if model else 0,
            tensor_parallel_size=self._workers.size,
        )

    def _drain_seconds(self) -> float:
        """Estimate when the waiting tokens will have been computed."""
        rate = self._speed.prefill_tokens_per_second
        if self._scheduler is None or not rate:
            return 1.0
        return max(1.0, self._scheduler.load.num_pending_prefill_tokens / rate)

    def _require_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise InternalError("The engine has no scheduler: no model is loaded.")
        return self._scheduler
