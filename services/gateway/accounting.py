"""The account of each request: its counts, its times and its one end, for audit, metrics and the log.

Owns what is counted and when. It must not know HTTP, text or engines. Clocks are passed in: durations come from
one that only moves forward, points in time from the wall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from libs.errors import ClientError, EngineLost, OctavoError, UnavailableError, WorkerLost, spec_of
from libs.obs import get_logger
from libs.obs.metrics import GatewayMetrics
from services.gateway.audit import Audit
from services.gateway.audit_record import AcceptedRequest, AuditRecord, RequestStatus
from services.gateway.generation import EngineUsage, FinishReason

log = get_logger("completions")

_HTTP_OK = 200
# Refused before any token: the request was wrong or there was no place. An engine's loss is a fault of ours.
_REJECTIONS = (ClientError, UnavailableError)
_FAULTS = (EngineLost, WorkerLost)
_FINISHED_STATUSES = {FinishReason.STOP: RequestStatus.STOP, FinishReason.LENGTH: RequestStatus.LENGTH}


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What is known of a request before its body is read."""

    request_id: str
    client_request_id: str | None
    tenant_id: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How and when a request ended for its client."""

    status: RequestStatus
    error: OctavoError | None
    http_status: int
    time: float


class RequestAccount:
    """One request's account. It is opened by the ledger, told what happens, ended once and closed once."""

    def __init__(self, ledger: Ledger, identity: RequestIdentity) -> None:
        self._ledger = ledger
        self.identity = identity
        self.start_time = ledger.monotonic()
        self.accepted_time = ledger.wall()
        self.model_name = ""
        self.is_streaming = False
        self.user: str | None = None
        self.metadata: Mapping[str, str] = {}
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self._first_token_time: float | None = None
        self._last_token_time = 0.0
        self._num_deliveries = 0
        self._end: RequestEnd | None = None

    @property
    def end(self) -> RequestEnd | None:
        """How the request ended for its client; None while it has not."""
        return self._end

    @property
    def has_delivered(self) -> bool:
        """Whether a first token, or an end without one, was on its way to the client."""
        return self._first_token_time is not None

    @property
    def num_billed_tokens(self) -> int:
        """Prompt and completion as ``usage`` and the audit tell them; none if all that came of it is an error."""
        if self._end is not None and self._end.error is not None and not self.num_completion_tokens:
            return 0
        return self.num_prompt_tokens + self.num_completion_tokens

    def accept(self) -> None:
        """Report the request before it is placed."""
        self._ledger.audit.accepted(
            AcceptedRequest(
                request_id=self.identity.request_id,
                client_request_id=self.identity.client_request_id or "",
                tenant_id=self.identity.tenant_id,
                model_name=self.model_name,
                endpoint=self.identity.endpoint,
                is_streaming=self.is_streaming,
                accepted_time=self.accepted_time,
            )
        )

    def deliver(self) -> None:
        """Note that tokens are on their way to the client."""
        now = self._ledger.monotonic()
        if self._first_token_time is None:
            self._first_token_time = now
            self._ledger.metrics.ttft.observe(now - self.start_time)
        else:
            self._ledger.metrics.itl.observe(now - self._last_token_time)
        self._last_token_time = now
        self._num_deliveries += 1

    def deliver_more(self, num_tokens: int, now: float) -> None:
        """Note that tokens after the first are on their way, at ``now`` on the ledger's clock."""
        self.num_completion_tokens += num_tokens
        self._ledger.metrics.itl.observe(now - self._last_token_time)
        self._last_token_time = now
        self._num_deliveries += 1

    @property
    def silent_seconds(self) -> float:
        """Time since tokens were last on their way."""
        return self._ledger.monotonic() - self._last_token_time

    def finish(self, reason: FinishReason) -> None:
        """End well."""
        self._set_end(_FINISHED_STATUSES[reason], None, _HTTP_OK)

    def fail(self, error: OctavoError, *, is_head_sent: bool) -> None:
        """End with an error that the client is told."""
        if self._end is None and not is_head_sent:
            # All that the client sees is the error. What was taken for an answer as a whole is surplus.
            self.num_completion_tokens = 0
        is_rejection = (
            isinstance(error, _REJECTIONS) and not isinstance(error, _FAULTS) and self._first_token_time is None
        )
        status = RequestStatus.REJECTED if is_rejection else RequestStatus.ERROR
        self._set_end(status, error, _HTTP_OK if is_head_sent else spec_of(error).http_status)

    def abort(self, *, is_head_sent: bool) -> None:
        """End because the client left."""
        self._set_end(RequestStatus.ABORTED, None, _HTTP_OK if is_head_sent else 0)

    def close(
        self, *, usage: EngineUsage | None, num_received_tokens: int, engine_id: str, num_retries: int
    ) -> None:
        """Report the end, with what the engine said if it could."""
        assert self._end is not None, f"{self.identity.request_id} is closed without an end"
        num_sampled = num_received_tokens
        if usage is not None:
            num_sampled = max(num_sampled, usage.num_output_tokens) + usage.num_discarded_tokens
        record = AuditRecord(
            request_id=self.identity.request_id,
            client_request_id=self.identity.client_request_id or "",
            tenant_id=self.identity.tenant_id,
            model_name=self.model_name,
            endpoint=self.identity.endpoint,
            is_streaming=self.is_streaming,
            accepted_time=self.accepted_time,
            finished_time=self.accepted_time + (self._end.time - self.start_time),
            status=self._end.status,
            gateway_id=self._ledger.gateway_id,
            error_reason="" if self._end.error is None else spec_of(self._end.error).reason.value,
            http_status=self._end.http_status,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=0 if usage is None else usage.num_cached_tokens or 0,
            completion_tokens=self.num_completion_tokens,
            discarded_tokens=max(0, num_sampled - self.num_completion_tokens),
            num_preemptions=0 if usage is None else usage.num_preemptions,
            num_retries=num_retries,
            ttft_seconds=self._ttft_seconds,
            mean_itl_seconds=self._mean_itl_seconds,
            e2e_seconds=self._end.time - self.start_time,
            queue_seconds=0.0 if usage is None else usage.queue_seconds,
            engine_id=engine_id,
        )
        self._ledger.close(self, record, self._end.error)

    @property
    def _ttft_seconds(self) -> float | None:
        return None if self._first_token_time is None else self._first_token_time - self.start_time

    @property
    def _mean_itl_seconds(self) -> float | None:
        if self._first_token_time is None or self._num_deliveries < 2:
            return None
        return (self._last_token_time - self._first_token_time) / (self._num_deliveries - 1)

    def _set_end(self, status: RequestStatus, error: OctavoError | None, http_status: int) -> None:
        # The first end counts: what goes wrong while it is being told does not change it.
        if self._end is None:
            self._end = RequestEnd(status, error, http_status, self._ledger.monotonic())


class Ledger:
    """All accounts of a gateway."""

    def __init__(
        self,
        *,
        gateway_id: str,
        audit: Audit,
        metrics: GatewayMetrics,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.gateway_id = gateway_id
        self.audit = audit
        self.metrics = metrics
        self.monotonic = monotonic
        self.wall = wall
        self._num_open = 0
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def open(self, identity: RequestIdentity) -> RequestAccount:
        """Open the account of a request that has reached a route of ours."""
        self._num_open += 1
        self._all_closed.clear()
        self.metrics.requests_started.inc()
        self.metrics.requests_in_flight.inc()
        return RequestAccount(self, identity)

    def close(self, account: RequestAccount, record: AuditRecord, error: OctavoError | None) -> None:
        """Take the end of a request; called by its account."""
        status = record.status.value
        self.metrics.requests_in_flight.dec()
        self.metrics.requests_ended.labels(status).inc()
        self.metrics.prompt_tokens.labels(status).inc(record.prompt_tokens)
        self.metrics.completion_tokens.labels(status).inc(record.completion_tokens)
        self.metrics.discarded_tokens.inc(record.discarded_tokens)
        self.metrics.e2e.observe(record.e2e_seconds or 0.0)
        self.audit.ended(record)
        _log_end(account, record, error)
        self._num_open -= 1
        if not self._num_open:
            self._all_closed.set()

    async def wait_all_closed(self, timeout_seconds: float) -> None:
        """Wait until no account is open, but not for longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._all_closed.wait()


def _log_end(account: RequestAccount, record: AuditRecord, error: OctavoError | None) -> None:
    optional = {
        "client_request_id": record.client_request_id,
        "user": account.user,
        "metadata": dict(account.metadata),
        "error_reason": record.error_reason,
        "error": None if error is None else error.message,
        "engine_id": record.engine_id,
        "num_retries": record.num_retries,
    }
    log.info(
        "request finished",
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        model_name=record.model_name,
        status=record.status.value,
        http_status=record.http_status,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        discarded_tokens=record.discarded_tokens,
        ttft_seconds=record.ttft_seconds,
        e2e_seconds=record.e2e_seconds,
        **{name: value for name, value in optional.items() if value},
    )
