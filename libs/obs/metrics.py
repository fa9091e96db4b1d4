"""Every metric of Octavo: names, units and buckets in one file, one class for each tier.

Counters end in ``_total``; histograms carry their unit and explicit buckets that reach over a minute.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    start_http_server,
    values,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector, RestrictedRegistry
from prometheus_client.samples import Sample

from libs.errors import InternalError

# Each counter's time of birth would be half of what a scrape sends, and nothing here reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LATENCY_BUCKETS_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.1,
    0.2,
    0.4,
    0.8,
    1.5,
    3,
    6,
    12,
    25,
    50,
    100,
)
_GAP_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2.5, 10, 60)
_IDLE_GAP_BUCKETS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
# How a request may end at a gateway.
_ENDINGS = ("stop", "length", "aborted", "rejected", "error")
_TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 65_536, 262_144)


class _FrequentHistogram(Histogram):
    """A histogram for what happens for each token: observed by one thread, without locks, added up when read."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._num_new = [0] * len(self._upper_bounds)
        self._new_sum = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Observe an amount; exemplars are not kept."""
        self._num_new[bisect_left(self._upper_bounds, amount)] += 1
        self._new_sum += amount

    def add_up(self) -> None:
        """Add what was observed since the last time to what others can read."""
        for bucket, count in zip(self._buckets, self._num_new, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(self._new_sum)
        self._num_new, self._new_sum = [0] * len(self._upper_bounds), 0.0

    def _child_samples(self) -> Iterable[Sample]:
        self.add_up()
        return super()._child_samples()


def share_metrics(folder: Path, process_name: str) -> None:
    """Keep the values of all metrics made from now on in files, for all processes that share ``folder``.

    A process that is started again under its name goes on with the values of the one before, so counters never go
    back. Call it before any metric is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The library looks for its folder there and nowhere else.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: process_name)  # type: ignore[no-untyped-call]


class GatewayMetrics:
    """What a gateway counts; with ``shared_folder`` what all processes count that share it."""

    def __init__(self, registry: CollectorRegistry, shared_folder: Path | None = None) -> None:
        self.registry = self._read_registry = registry
        if shared_folder is not None:
            self._read_registry = CollectorRegistry()
            MultiProcessCollector(self._read_registry, str(shared_folder))  # type: ignore[no-untyped-call]
        self.requests_started = Counter(
            "octavo_gateway_requests_started", "Requests that reached a route of ours.", registry=registry
        )
        self.requests_ended = Counter(
            "octavo_gateway_requests_ended",
            "Requests by how they ended: stop, length, aborted, rejected, error.",
            ["status"],
            registry=registry,
        )
        self.requests_in_flight = Gauge(
            "octavo_gateway_requests_in_flight",
            "Requests accepted and not ended.",
            registry=registry,
            multiprocess_mode="sum",
        )
        # None are, whatever a process of this name before had when it was killed.
        self.requests_in_flight.set(0)
        self.prompt_tokens = Counter(
            "octavo_gateway_prompt_tokens",
            "Prompt tokens by how their request ended.",
            ["status"],
            registry=registry,
        )
        self.completion_tokens = Counter(
            "octavo_gateway_completion_tokens",
            "Output tokens that clients pay for, by how their request ended.",
            ["status"],
            registry=registry,
        )
        self.discarded_tokens = Counter(
            "octavo_gateway_discarded_tokens", "Tokens sampled and never shown or billed.", registry=registry
        )
        self.ttft = Histogram(
            "octavo_gateway_ttft_seconds",
            "Request received until the first token was written.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.itl = _FrequentHistogram(
            "octavo_gateway_itl_seconds",
            "Gap between two successive token deliveries of a request.",
            buckets=_GAP_BUCKETS_SECONDS,
            registry=registry,
        )
        self.e2e = Histogram(
            "octavo_gateway_e2e_seconds",
            "Request received until the last byte.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.own_placements = Counter(
            "octavo_gateway_own_placements",
            "Requests that the gateway placed itself because no router answered.",
            registry=registry,
        )
        self.resumptions = Counter(
            "octavo_gateway_resumptions",
            "Requests with tokens that lost their engine, by what became of them: resumed elsewhere, or failed.",
            ["outcome"],
            registry=registry,
        )
        self.resume_seconds = Histogram(
            "octavo_gateway_resume_seconds",
            "An engine was lost after a request's first token until another brought the next.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.audit_records_dropped = Counter(
            "octavo_gateway_audit_records_dropped",
            "Audit records lost: the spool was full, or telemetry refused them.",
            registry=registry,
        )
        self.limit_refusals = Counter(
            "octavo_gateway_limit_refusals",
            "Requests refused with 429, by the limit of their tenant.",
            ["limit"],
            registry=registry,
        )
        self.limit_local_decisions = Counter(
            "octavo_gateway_limit_local_decisions",
            "Requests of tenants with limits decided by this gateway's own counts because Redis did not answer.",
            registry=registry,
        )
        self.limit_store_losses = Counter(
            "octavo_gateway_limit_store_losses",
            "Times that Redis was lost for the limits of tenants: it was away, failed or took too long.",
            registry=registry,
        )
        self.limit_holds_restored = Counter(
            "octavo_gateway_limit_holds_restored",
            "Holds of running requests that were gone from Redis and were put back.",
            registry=registry,
        )
        self.limit_settlements_dropped = Counter(
            "octavo_gateway_limit_settlements_dropped",
            "Ended requests whose use was never counted in Redis.",
            registry=registry,
        )
        self.orphans_closed = Counter(
            "octavo_gateway_orphans_closed",
            "Requests of an earlier gateway process that were closed as gateway_lost.",
            registry=registry,
        )
        for outcome in ("resumed", "failed"):
            self.resumptions.labels(outcome)
        for counter in (self.requests_ended, self.prompt_tokens, self.completion_tokens):
            for ending in _ENDINGS:
                # There from the start: the first one to count would be no increase for who reads.
                counter.labels(ending)

    def add_up(self) -> None:
        """Let other processes see all that this one has counted."""
        self.itl.add_up()

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self.add_up()
        return render(self._read_registry)


class ScrapedEngineMetrics(Collector):
    """What engines say of themselves when a gateway is scraped; made anew for each scrape, so never stale.

    They are no metrics of this process, so they are not among the values that processes share.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.running_requests = _engine_gauge("octavo_engine_running_requests", "Sequences running.")
        self.waiting_requests = _engine_gauge("octavo_engine_waiting_requests", "Requests waiting.")
        self.kv_blocks_used = _engine_gauge(
            "octavo_engine_kv_blocks_used",
            "KV blocks that requests hold; blocks that can be evicted are not counted.",
        )
        self.kv_blocks_total = _engine_gauge("octavo_engine_kv_blocks_total", "KV blocks in total.")
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the figures of all engines."""
        return (self.running_requests, self.waiting_requests, self.kv_blocks_used, self.kv_blocks_total)

    def observe(
        self,
        engine_id: str,
        *,
        num_running_requests: int,
        num_waiting_requests: int,
        num_blocks_used: int,
        num_blocks: int,
    ) -> None:
        """Take one engine's figures."""
        self.running_requests.add_metric([engine_id], num_running_requests)
        self.waiting_requests.add_metric([engine_id], num_waiting_requests)
        self.kv_blocks_used.add_metric([engine_id], num_blocks_used)
        self.kv_blocks_total.add_metric([engine_id], num_blocks)


def _engine_gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=["engine_id"])


class RouterMetrics:
    """What a router counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.placements = Counter("octavo_router_placements", "Requests placed.", ["engine_id"], registry=registry)
        self.rejections = Counter("octavo_router_rejections", "Requests rejected.", ["reason"], registry=registry)
        self.waiting_requests = Gauge(
            "octavo_router_waiting_requests", "Requests without a place.", registry=registry
        )
        self.engines = Gauge(
            "octavo_router_engines",
            "Engines by whether their watch is alive.",
            ["is_watched"],
            registry=registry,
        )
        self.placement_seconds = Histogram(
            "octavo_router_placement_seconds",
            "Enqueued until placed or rejected.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.indexed_hashes = Gauge(
            "octavo_router_indexed_hashes", "Prefix hashes in the index.", registry=registry
        )
        self.resyncs = Counter(
            "octavo_router_resyncs", "Watches opened again after a gap or a break.", registry=registry
        )
        self.left_out_hashes = Gauge(
            "octavo_router_left_out_hashes",
            "Prefix hashes left out of the index since the start, because an engine has too many.",
            registry=registry,
        )
        self.prefix_rows_dropped = Counter(
            "octavo_router_prefix_rows_dropped",
            "Rows of prompt_prefix_cache not written: too many waited, or Redis was away.",
            registry=registry,
        )
        self._engine_ids: frozenset[str] = frozenset()

    def keep_engines(self, engine_ids: frozenset[str]) -> None:
        """Show these engines from now on and forget others: names of engines come and go without end."""
        for engine_id in self._engine_ids - engine_ids:
            self.placements.remove(engine_id)
        self._engine_ids = engine_ids


class EngineMetrics:
    """What an engine counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.running_requests = Gauge("octavo_engine_running_requests", "Sequences running.", registry=registry)
        self.waiting_requests = Gauge("octavo_engine_waiting_requests", "Requests waiting.", registry=registry)
        self.blocks = Gauge(
            "octavo_engine_kv_blocks",
            "KV blocks by state: free, evictable, held.",
            ["state"],
            registry=registry,
        )
        self.steps = Counter("octavo_engine_steps", "Steps executed.", registry=registry)
        self.step_seconds = Histogram(
            "octavo_engine_step_seconds",
            "Worker time of a step.",
            buckets=_GAP_BUCKETS_SECONDS,
            registry=registry,
        )
        self.idle_gap_seconds = Histogram(
            "octavo_engine_idle_gap_seconds",
            "Time between a step's result and the next step sent, while there is work.",
            buckets=_IDLE_GAP_BUCKETS_SECONDS,
            registry=registry,
        )
        self.scheduled_tokens = Counter("octavo_engine_scheduled_tokens", "Tokens computed.", registry=registry)
        self.step_tokens = Histogram(
            "octavo_engine_step_tokens",
            "Tokens computed in a step.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.cached_tokens = Counter(
            "octavo_engine_cached_tokens", "Prompt tokens taken from the prefix cache.", registry=registry
        )
        self.prompt_tokens = Counter(
            "octavo_engine_prompt_tokens", "Prompt tokens of requests first scheduled.", registry=registry
        )
        self.output_tokens = Counter("octavo_engine_output_tokens", "Tokens emitted.", registry=registry)
        self.draft_tokens = Counter(
            "octavo_engine_draft_tokens", "Drafts computed: tokens that were guessed.", registry=registry
        )
        self.accepted_draft_tokens = Counter(
            "octavo_engine_accepted_draft_tokens",
            "Drafts that were what the worker sampled in their place.",
            registry=registry,
        )
        self.admission_waits = Counter(
            "octavo_engine_admission_waits",
            "Steps for which the first in line had to wait, by the rule that said so.",
            ["rule"],
            registry=registry,
        )
        self.preemptions = Counter(
            "octavo_engine_preemptions", "Requests that gave up their blocks.", registry=registry
        )
        self.requests_ended = Counter(
            "octavo_engine_requests_ended",
            "Sequences by how they ended, one for each choice of a request.",
            ["status"],
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "octavo_engine_queue_seconds",
            "Accepted until first scheduled.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )
        self.worker_losses = Counter(
            "octavo_engine_worker_losses", "Times that a worker was lost.", registry=registry
        )
        self.integrity_faults = Counter(
            "octavo_engine_integrity_faults", "Faults found by check_integrity.", registry=registry
        )

    def show_nothing(self) -> None:
        """Set what an engine holds to none."""
        self.running_requests.set(0)
        self.waiting_requests.set(0)
        for state in ("free", "evictable", "held"):
            self.blocks.labels(state).set(0)


class WorkerMetrics:
    """What a worker counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.steps = Counter("octavo_worker_steps", "Steps executed.", registry=registry)
        self.step_seconds = Histogram(
            "octavo_worker_step_seconds",
            "Time of a step by kind: decode, prefill, mixed, or empty when nothing was computed.",
            ["kind"],
            buckets=_GAP_BUCKETS_SECONDS,
            registry=registry,
        )
        self.idle_gap_seconds = Histogram(
            "octavo_worker_idle_gap_seconds",
            "Time between the end of a step and the next one that goes on with a sequence of it.",
            buckets=_IDLE_GAP_BUCKETS_SECONDS,
            registry=registry,
        )
        self.exchange_wait_seconds = Counter(
            "octavo_worker_exchange_wait_seconds",
            "Time of steps that this rank waited for the other ranks of its group.",
            registry=registry,
        )
        self.tokens = Counter("octavo_worker_tokens", "Tokens computed.", registry=registry)
        self.model_operations = Counter(
            "octavo_worker_model_operations",
            "Multiplications and additions that the model needs for what was computed, by kind of step.",
            ["kind"],
            registry=registry,
        )
        self.memory_bytes = Counter(
            "octavo_worker_memory_bytes",
            "Bytes of weights and KV cache that steps have to move at least, by kind of step.",
            ["kind"],
            registry=registry,
        )
        self.peak_operations = Gauge(
            "octavo_worker_peak_operations_per_second",
            "Most operations a second of all threads in registers, measured at loading; 0 if not measured.",
            registry=registry,
        )
        self.peak_bandwidth = Gauge(
            "octavo_worker_peak_memory_bytes_per_second",
            "Most bytes a second that all threads read, measured at loading; 0 if not measured.",
            registry=registry,
        )
        self.flops_utilization = Gauge(
            "octavo_worker_model_flops_utilization",
            "Operations a second of about the last twenty steps of a kind, as a share of the peak.",
            ["kind"],
            registry=registry,
        )
        self.bandwidth_utilization = Gauge(
            "octavo_worker_memory_bandwidth_utilization",
            "Bytes a second of about the last twenty steps of a kind, as a share of the peak.",
            ["kind"],
            registry=registry,
        )
        self.failed_sequences = Counter(
            "octavo_worker_failed_sequences",
            "Sequences that could not go on.",
            ["failure"],
            registry=registry,
        )
        self.kv_cache_bytes = Gauge("octavo_worker_kv_cache_bytes", "Bytes of the KV cache.", registry=registry)
        self.weights_bytes = Gauge("octavo_worker_weights_bytes", "Bytes of the weights.", registry=registry)


class TelemetryMetrics:
    """What the telemetry tier counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.batches = Counter(
            "octavo_telemetry_batches",
            "Batches by what became of them: taken, duplicate, refused.",
            ["outcome"],
            registry=registry,
        )
        self.rows_inserted = Counter(
            "octavo_telemetry_rows_inserted", "Rows confirmed by the store.", registry=registry
        )
        self.rows_dead_lettered = Counter(
            "octavo_telemetry_rows_dead_lettered",
            "Rows that the store refuses by themselves.",
            registry=registry,
        )
        self.insert_failures = Counter(
            "octavo_telemetry_insert_failures", "Inserts that failed and are tried again.", registry=registry
        )
        self.spool_bytes = Gauge("octavo_telemetry_spool_bytes", "Bytes waiting on disk.", registry=registry)
        self.spool_lag = Gauge(
            "octavo_telemetry_spool_lag_seconds",
            "Age of the oldest batch that waits for the store; 0 when none does.",
            registry=registry,
        )
        self.spool_torn_bytes = Counter(
            "octavo_telemetry_spool_torn_bytes",
            "Bytes of batches cut off by a crash before they were acknowledged.",
            registry=registry,
        )
        self.spool_lost_bytes = Counter(
            "octavo_telemetry_spool_lost_bytes",
            "Bytes of batches that were acknowledged and that the disk has damaged.",
            registry=registry,
        )
        self.insert_seconds = Histogram(
            "octavo_telemetry_insert_seconds",
            "Time of an insert.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=registry,
        )


def render(registry: CollectorRegistry) -> bytes:
    """Return the registry in Prometheus' text format."""
    return generate_latest(registry)


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    listen_address: str = "",
    *,
    before_scrape: Callable[[], None] | None = None,
) -> WSGIServer | None:
    """Serve ``/metrics`` from a thread of its own; port 0 serves nothing.

    Whoever reaches the process at its ``listen_address`` reaches its metrics, and nobody else; without
    one, and for a Unix socket, only this machine does.
    ``before_scrape`` brings gauges up to date, so that they are true also while nothing happens.

    Raises:
        InternalError: the port cannot be had.
    """
    if port == 0:
        return None
    served = registry if before_scrape is None else _FreshRegistry(registry, before_scrape)
    try:
        server, _ = start_http_server(port, addr=_host_of(listen_address), registry=served)
    except (OSError, OverflowError) as error:
        raise InternalError(
            f"Metrics cannot be served on port {port}: {error}; set another metrics_port."
        ) from error
    return server


def _host_of(listen_address: str) -> str:
    if listen_address.startswith("unix:"):
        return "127.0.0.1"
    return listen_address.rpartition(":")[0].strip("[]") or "127.0.0.1"


class _FreshRegistry(CollectorRegistry):
    """A registry that runs a function before anything of it is read."""

    def __init__(self, registry: CollectorRegistry, function: Callable[[], None]) -> None:
        super().__init__()
        self._registry = registry
        self._function = function

    def collect(self) -> Iterator[Metric]:
        self._function()
        yield from self._registry.collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        self._function()
        return self._registry.restricted_registry(names)
