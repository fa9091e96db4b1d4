"""The gateway process: ``octavo gateway``. Builds the parts, serves, drains, hands over the last records."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import secrets
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from libs.config import load
from libs.errors import StoreUnavailable
from libs.kv import HashContract
from libs.lifecycle import Lifecycle, max_open_files, run
from libs.obs import configure_logging, get_logger
from libs.obs.metrics import GatewayMetrics, share_metrics
from libs.obs.tracers import open_tracer
from libs.obs.tracing import Tracer
from libs.rpc import RpcServer
from libs.text import default_served_model_name, load_model_text, resolve_model_path
from services.gateway.accepted_spool import AcceptedSpool
from services.gateway.accounting import Ledger
from services.gateway.admission import Admission, draining_error
from services.gateway.answers import AnswerSettings
from services.gateway.app import Parts, make_app
from services.gateway.audit import Audit, AuditSettings, AuditTrail, NoAudit
from services.gateway.body_memory import BodyMemory
from services.gateway.clients import RouterClient, TelemetryClient
from services.gateway.completions import Completions, CompletionSettings
from services.gateway.config import GatewayConfig
from services.gateway.engine_directory import EngineDirectory
from services.gateway.engine_streams import EngineStreams
from services.gateway.failover import FailoverSettings, Generations
from services.gateway.http_body import BodyLimits
from services.gateway.http_server import HttpServer
from services.gateway.identity import Authenticator, cache_salt_secret
from services.gateway.inference.servicer import InferenceServicer, make_inference_server
from services.gateway.key_stores import KeyFile, KeysInRedis, KeyStore, KeyWatch
from services.gateway.limits.limiter import Limiter
from services.gateway.limits.own_counts import LocalLimiter, OwnCounts
from services.gateway.limits.redis_counts import RedisCounts, make_limits_redis
from services.gateway.limits.shared_limiter import SharedLimiter, SharingSettings
from services.gateway.model_formats.model_format import AUTO, ModelFormat
from services.gateway.models import Models
from services.gateway.openai_schema import ModelFacts
from services.gateway.placement import Placements, RouterPlacements
from services.gateway.process_group import GroupSettings, run_group
from services.gateway.request_spans import RequestSpans
from services.gateway.sampling_defaults import checked_sampling_defaults
from services.gateway.shared_prefixes import SharedPrefixes
from services.gateway.text_preparation import TextPreparation
from services.gateway.tokenization import Tokenization

if TYPE_CHECKING:
    from libs.registry import NodeRegistry

log = get_logger("gateway")

# Interrupted requests need a moment to tell their clients.
_INTERRUPTION_SECONDS = 1.5
_LAST_ACCOUNTS_SECONDS = 0.5
# What a process of a group may take beyond its drain and its last records, before it is killed.
_AFTER_DRAIN_SECONDS = 6.0
# Who has connected before this process left the port sends a request within this time, or is turned away.
_LAST_REQUESTS_SECONDS = 0.5
# Time between two looks of other processes at what this one has counted.
_SHARE_METRICS_SECONDS = 0.5
_CLOSE_CALLS_SECONDS = 0.5
_LAST_SETTLEMENTS_SECONDS = 1.0
_OWNER_NONCE_BYTES = 4
# How long one thread keeps the interpreter from another that waits for it. On its way a text that goes to a thread
# waits for it three times, so beside a busy event loop 0.1 ms of text take 6 ms with Python's 5 ms and 1.8 ms with
# this. With a fifth of it text takes a third, but 2,000 streams took 3 to 5 % more processor time.
_THREAD_SWITCH_SECONDS = 0.0005
# A round of the garbage collector through all that lives stops everybody: for 100 ms beside 2,000 streams. There is
# one after so many middle rounds (Python's own is 10). Plain streams leave it nothing, so that little waits for it.
_MIDDLE_ROUNDS_BEFORE_A_FULL_ONE = 100


def main(argv: Sequence[str]) -> None:
    """Run a gateway until it is told to stop."""
    config = load(GatewayConfig, tier="gateway", argv=argv)
    if config.api_keys_file is not None:
        # Refused here, where a configuration that cannot be used ends with one clear line.
        KeyFile(Path(config.api_keys_file)).read_now()
    configure_logging("gateway", config.gateway_id, config.log_level)
    if config.gateway_processes > 1:
        run(functools.partial(run_group, _group_settings(config), argv), tier="gateway")
    else:
        run(functools.partial(_serve, config), tier="gateway")


def _group_settings(config: GatewayConfig) -> GroupSettings:
    return GroupSettings(
        num_processes=config.gateway_processes,
        gateway_id=config.gateway_id,
        host=config.host,
        port=config.port,
        grpc_host=config.grpc_host,
        grpc_port=config.grpc_port,
        shared_folder=Path(config.data_dir) / f"{config.gateway_id}-metrics",
        silence_seconds=config.process_silence_seconds,
        stop_seconds=config.drain_timeout_seconds + config.audit_shutdown_seconds + _AFTER_DRAIN_SECONDS,
    )


async def _serve(config: GatewayConfig, lifecycle: Lifecycle) -> None:
    sys.setswitchinterval(_THREAD_SWITCH_SECONDS)
    # Before there are threads.
    body_memory = BodyMemory(config.max_body_bytes)
    # What the stack holds is closed last, when no task uses it any more.
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        foundation = _lay_foundation(config, stack)
        keys = _make_key_watch(config, foundation.authenticator, stack)
        if keys is not None:
            with suppress(StoreUnavailable):
                # Requests wait for the keys where these cannot be had yet; everything else need not.
                await keys.refresh()
        background = [tasks.create_task(foundation.audit.run()), tasks.create_task(foundation.directory.run())]
        background.append(tasks.create_task(foundation.limiter.run()))
        background.append(tasks.create_task(body_memory.run()))
        if foundation.router is not None:
            background.append(tasks.create_task(foundation.router.run()))
        if keys is not None:
            background.append(tasks.create_task(keys.run()))
        streams = EngineStreams(max_requests=config.max_concurrent_requests, tasks=tasks)
        parts = _make_parts(config, foundation, streams, tasks, body_memory)
        app = make_app(parts, max_body_bytes=config.max_body_bytes)
        server = HttpServer(
            app,
            config.host,
            config.port,
            head_timeout_seconds=config.head_timeout_seconds,
            max_unread_seconds=config.request_timeout_seconds,
            max_connections=min(config.max_connections, max_open_files() * 3 // 4),
            shares_port=config.is_of_group,
        )
        stack.push_async_callback(server.stop)
        host, port = await server.start()
        grpc_server = _make_grpc_server(config, parts)
        stack.push_async_callback(grpc_server.stop, _CLOSE_CALLS_SECONDS)
        await grpc_server.start()
        background.append(tasks.create_task(_tell_readiness(config, foundation, grpc_server)))
        if config.is_of_group:
            background.append(tasks.create_task(_share_counts(foundation.metrics)))
        body_memory.take()
        # What lives as long as the process need not be looked through by each of the collector's rounds, which stop
        # all streams meanwhile.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _MIDDLE_ROUNDS_BEFORE_A_FULL_ONE)
        log.info("gateway listens", host=host, port=port, grpc_address=grpc_server.address)

        await lifecycle.wait_for_shutdown()

        if config.is_of_group:
            # The others take what comes from now on, and this one only ends what it has begun.
            await server.hand_over(_LAST_REQUESTS_SECONDS)

        await grpc_server.set_serving(False)
        await _drain(config, foundation)
        await foundation.limiter.flush(_LAST_SETTLEMENTS_SECONDS)
        await foundation.audit.flush(config.audit_shutdown_seconds)
        streams.close()
        for task in background:
            task.cancel()
    log.info("gateway stopped")


@dataclass(frozen=True, slots=True)
class _Foundation:
    """The parts that do not serve requests themselves."""

    metrics: GatewayMetrics
    authenticator: Authenticator
    text: TextPreparation
    model: ModelFacts
    admission: Admission
    limiter: Limiter
    directory: EngineDirectory
    router: RouterPlacements | None
    audit: Audit
    ledger: Ledger
    tracer: Tracer

    def max_model_len(self) -> int:
        """Return the context that the model's text side and all engines can serve."""
        own = self.text.model_text.max_model_len
        engines = self.directory.max_model_len
        return own if engines is None else min(own, engines)


def _lay_foundation(config: GatewayConfig, stack: AsyncExitStack) -> _Foundation:
    data_dir = Path(config.data_dir)
    salt_secret = cache_salt_secret(config.cache_salt_secret, data_dir)
    authenticator = Authenticator(salt_secret, is_open=not config.asks_for_keys)
    model_path = resolve_model_path(config.model)
    model_text = load_model_text(model_path)
    shared_prefixes = SharedPrefixes.read(
        config.shared_prompt_files, model_text, salt_secret=salt_secret, block_size=config.block_size
    )
    text = TextPreparation(
        model_text,
        shared_prefixes,
        block_size=config.block_size,
        num_threads=config.text_threads,
        model_format=ModelFormat.of(model_text, config.tool_format, config.reasoning_format),
    )
    stack.callback(text.close)
    model = ModelFacts(
        name=config.served_model_name or default_served_model_name(model_path),
        vocab_size=model_text.tokenizer.vocab_size,
        aliases=config.model_aliases,
        format=text.model_format,
        sampling_defaults=checked_sampling_defaults(
            model_text.sampling_defaults if config.generation_config == AUTO else {},
            model_text.tokenizer.vocab_size,
        ),
    )
    metrics = _make_metrics(config)
    audit = _make_audit(config, data_dir, metrics, stack)
    return _Foundation(
        metrics=metrics,
        authenticator=authenticator,
        text=text,
        model=model,
        admission=Admission(max_requests=config.max_concurrent_requests),
        limiter=_make_limiter(config, metrics, stack),
        directory=_make_directory(config, model, text.hash_contract, stack),
        router=_make_router(config),
        audit=audit,
        ledger=Ledger(
            gateway_id=config.gateway_id,
            audit=audit,
            metrics=metrics,
            # Finer than the event loop's clock, which stands still within one turn of the loop.
            monotonic=time.monotonic,
            wall=time.time,
        ),
        tracer=_make_tracer(config, stack),
    )


def _make_tracer(config: GatewayConfig, stack: AsyncExitStack) -> Tracer:
    tracer = open_tracer(
        config.otlp_endpoint,
        tier="gateway",
        instance_id=config.gateway_id,
        sample_fraction=config.trace_sample_fraction,
    )
    stack.push_async_callback(asyncio.to_thread, tracer.close)
    return tracer


def _make_metrics(config: GatewayConfig) -> GatewayMetrics:
    if config.group_folder is None:
        return GatewayMetrics(CollectorRegistry())
    folder = Path(config.group_folder)
    share_metrics(folder, config.gateway_id)
    return GatewayMetrics(CollectorRegistry(), folder)


async def _share_counts(metrics: GatewayMetrics) -> None:
    while True:
        await asyncio.sleep(_SHARE_METRICS_SECONDS)
        metrics.add_up()


def _make_key_watch(config: GatewayConfig, authenticator: Authenticator, stack: AsyncExitStack) -> KeyWatch | None:
    store: KeyStore
    if config.api_keys_file is not None:
        store = KeyFile(Path(config.api_keys_file))
    elif config.api_keys_in_redis:
        from libs.registry import make_redis

        assert config.redis_url is not None, "the configuration has been checked"
        redis = make_redis(config.redis_url)
        stack.push_async_callback(redis.aclose)
        store = KeysInRedis(redis)
    else:
        return None
    return KeyWatch(store, authenticator, poll_seconds=config.api_keys_poll_seconds)


def _make_limiter(config: GatewayConfig, metrics: GatewayMetrics, stack: AsyncExitStack) -> Limiter:
    start_ns = time.time_ns() - time.monotonic_ns()
    # A clock that is nowhere set back, which the one on the wall may be.
    counts = OwnCounts(now_ms=lambda: (start_ns + time.monotonic_ns()) // 1_000_000)
    if config.redis_url is None:
        if config.is_of_group and config.asks_for_keys:
            log.warning("without redis_url each process counts the limits of tenants alone")
        return LocalLimiter(counts, metrics)
    redis = make_limits_redis(config.redis_url, config.limit_timeout_seconds)
    stack.push_async_callback(redis.aclose)
    settings = SharingSettings(
        owner=f"{config.gateway_id}:{secrets.token_hex(_OWNER_NONCE_BYTES)}",
        lease_seconds=config.limit_lease_seconds,
        timeout_seconds=config.limit_timeout_seconds,
    )
    return SharedLimiter(RedisCounts(redis, config.limit_timeout_seconds), counts, settings, metrics)


def _make_audit(config: GatewayConfig, data_dir: Path, metrics: GatewayMetrics, stack: AsyncExitStack) -> Audit:
    if config.telemetry_address is None:
        log.warning("no telemetry address; no audit records are kept")
        return NoAudit()
    spool = AcceptedSpool(data_dir / config.gateway_id, max_bytes=config.audit_spool_max_bytes)
    stack.callback(spool.close)
    client = TelemetryClient(config.telemetry_address)
    stack.push_async_callback(client.close)
    settings = AuditSettings(gateway_id=config.gateway_id, flush_seconds=config.audit_flush_seconds)
    return AuditTrail(spool, client, settings, metrics)


def _make_directory(
    config: GatewayConfig, model: ModelFacts, hash_contract: HashContract, stack: AsyncExitStack
) -> EngineDirectory:
    registry: NodeRegistry | None = None
    if config.redis_url is not None:
        # Imported when needed: it takes as long as half of all other imports together.
        from libs.registry import NodeRegistry, make_redis

        redis = make_redis(config.redis_url)
        stack.push_async_callback(redis.aclose)
        registry = NodeRegistry(redis)
    router: RouterClient | None = None
    if config.router_address is not None:
        router = RouterClient(config.router_address)
        stack.push_async_callback(router.close)
    directory = EngineDirectory(
        model_name=model.name,
        hash_contract=hash_contract,
        configured_addresses=config.engine_addresses,
        registry=registry,
        router=router,
        refresh_seconds=config.directory_refresh_seconds,
        answer_timeout_seconds=config.readiness_timeout_seconds,
    )
    stack.push_async_callback(directory.close)
    return directory


def _make_router(config: GatewayConfig) -> RouterPlacements | None:
    if config.router_address is None:
        return None
    return RouterPlacements(
        config.router_address,
        timeout_seconds=config.router_timeout_seconds,
        max_requests=config.max_concurrent_requests,
    )


def _make_parts(
    config: GatewayConfig,
    foundation: _Foundation,
    streams: EngineStreams,
    tasks: asyncio.TaskGroup,
    body_memory: BodyMemory,
) -> Parts:
    random_source = random.Random()
    placements = Placements(
        router=foundation.router,
        directory=foundation.directory,
        metrics=foundation.metrics,
        random_source=random_source,
    )
    failover = FailoverSettings(
        max_retries=config.max_placement_retries,
        retry_placement_timeout_seconds=config.retry_placement_timeout_seconds,
        accept_timeout_seconds=config.engine_accept_timeout_seconds,
        suspicion_seconds=config.engine_suspicion_seconds,
        patience_seconds=config.resume_patience_seconds,
    )
    body_limits = BodyLimits(config.max_body_bytes, config.body_timeout_seconds)
    completions = Completions(
        model=foundation.model,
        text=foundation.text,
        admission=foundation.admission,
        limiter=foundation.limiter,
        generations=Generations(placements, streams, failover, foundation.metrics),
        ledger=foundation.ledger,
        settings=CompletionSettings(
            request_timeout_seconds=config.request_timeout_seconds,
            default_max_tokens=config.default_max_tokens,
            stall_bound_seconds=config.receipt_stall_seconds,
            answers=AnswerSettings(config.sse_heartbeat_seconds, config.abort_settle_seconds),
        ),
        max_model_len=foundation.max_model_len,
        draw_seed=lambda: random_source.getrandbits(64),
        tasks=tasks,
        spans=RequestSpans(foundation.tracer),
    )
    return Parts(
        completions=completions,
        tokenization=Tokenization(
            model=foundation.model,
            text=foundation.text,
            admission=foundation.admission,
            max_model_len=foundation.max_model_len,
        ),
        authenticator=foundation.authenticator,
        admission=foundation.admission,
        directory=foundation.directory,
        metrics=foundation.metrics,
        body_limits=body_limits,
        body_memory=body_memory,
        models=Models(foundation.model, max_model_len=foundation.max_model_len, start_time=int(time.time())),
        readiness_timeout_seconds=config.readiness_timeout_seconds,
        is_local_only=not (config.asks_for_keys or config.allow_unauthenticated),
    )


def _make_grpc_server(config: GatewayConfig, parts: Parts) -> RpcServer:
    servicer = InferenceServicer(
        authenticator=parts.authenticator,
        completions=parts.completions,
        tokenization=parts.tokenization,
        models=parts.models,
        new_request_id=lambda: str(uuid.uuid4()),
        max_message_bytes=config.max_body_bytes,
    )
    host = f"[{config.grpc_host}]" if ":" in config.grpc_host else config.grpc_host
    address = f"{host}:{config.grpc_port}"
    return make_inference_server(address, servicer, parts.authenticator, shares_port=config.is_of_group)


async def _tell_readiness(config: GatewayConfig, foundation: _Foundation, server: RpcServer) -> None:
    """Keep the health of the gRPC server true to what ``/readyz`` says, until cancelled."""
    while True:
        is_ready = await foundation.directory.has_ready_engine(config.readiness_timeout_seconds)
        await server.set_serving(is_ready and not foundation.admission.is_draining)
        await asyncio.sleep(config.directory_refresh_seconds)


async def _drain(config: GatewayConfig, foundation: _Foundation) -> None:
    """Let running requests finish within their time, then end those that are left with an error."""
    admission = foundation.admission
    admission.start_draining()
    log.info("gateway drains")
    if not await admission.wait_empty(config.drain_timeout_seconds):
        num_requests = admission.interrupt_all(draining_error())
        log.warning("requests outlived the drain", num_requests=num_requests)
        await admission.wait_empty(_INTERRUPTION_SECONDS)
    await foundation.ledger.wait_all_closed(config.abort_settle_seconds + _LAST_ACCOUNTS_SECONDS)
