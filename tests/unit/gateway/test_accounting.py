"""Every account is closed once, and its numbers agree in record, metrics and log."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from libs.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    InternalError,
    InvalidRequest,
    NoEngineAvailable,
    OctavoError,
)
from libs.obs.metrics import GatewayMetrics
from services.gateway.accounting import Ledger, RequestAccount, RequestIdentity
from services.gateway.audit import NoAudit
from services.gateway.audit_record import AcceptedRequest, AuditRecord, RequestStatus
from services.gateway.generation import EngineUsage, FinishReason

IDENTITY = RequestIdentity(
    request_id="r-1", client_request_id="c-1", tenant_id="t", endpoint="/v1/chat/completions"
)
USAGE = EngineUsage(
    num_cached_tokens=16, num_output_tokens=5, num_discarded_tokens=1, num_preemptions=2, queue_seconds=0.5
)


class KeepingAudit(NoAudit):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.requests: list[AcceptedRequest] = []
        self.records: list[AuditRecord] = []

    def accepted(self, request: AcceptedRequest) -> None:
        self.requests.append(request)

    def ended(self, record: AuditRecord) -> None:
        self.records.append(record)


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A ledger with its surroundings."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.audit = KeepingAudit()
        self.clock = Clock()
        self.metrics = metrics
        self.ledger = Ledger(
            gateway_id="g", audit=self.audit, metrics=metrics, monotonic=self.clock, wall=lambda: 1700000000.0
        )

    def open(self) -> RequestAccount:
        account = self.ledger.open(IDENTITY)
        account.model_name, account.is_streaming = "tiny", True
        return account

    def close(self, account: RequestAccount, usage: EngineUsage | None = USAGE, received: int = 5) -> AuditRecord:
        account.close(usage=usage, num_received_tokens=received, engine_id="e", num_retries=1)
        return self.audit.records[-1]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"octavo_gateway_{name}", labels) or 0.0


@pytest.fixture
def bench(metrics: GatewayMetrics) -> Bench:
    return Bench(metrics)


def test_a_finished_request_has_all_its_times_and_counts(bench: Bench) -> None:
    account = bench.open()
    account.accept()
    account.num_prompt_tokens = 40
    for delay in (0.2, 0.05, 0.15):
        bench.clock.now += delay
        account.deliver()
    account.num_completion_tokens = 4
    bench.clock.now += 0.1
    account.finish(FinishReason.LENGTH)
    bench.clock.now += 9.0
    record = bench.close(account)

    assert record.status is RequestStatus.LENGTH
    assert (record.http_status, record.error_reason) == (200, "")
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (40, 16, 4)
    # Five came and one was never emitted; four are paid for.
    assert record.discarded_tokens == 2
    assert (record.num_preemptions, record.num_retries, record.engine_id) == (2, 1, "e")
    assert record.ttft_seconds == pytest.approx(0.2)
    assert record.mean_itl_seconds == pytest.approx(0.1)
    assert record.e2e_seconds == pytest.approx(0.5)
    assert record.finished_time == pytest.approx(1700000000.5)
    assert bench.audit.requests[0].request_id == "r-1"
    assert bench.metric("ttft_seconds_count") == 1
    assert bench.metric("itl_seconds_count") == 2


@pytest.mark.parametrize(
    ("error", "has_token", "status"),
    [
        (InvalidRequest("no"), False, RequestStatus.REJECTED),
        (NoEngineAvailable("none"), False, RequestStatus.REJECTED),
        (Draining("bye"), False, RequestStatus.REJECTED),
        (Draining("bye"), True, RequestStatus.ERROR),
        (EngineLost("gone"), False, RequestStatus.ERROR),
        (EngineLost("gone"), True, RequestStatus.ERROR),
        (DeadlineExceeded("late"), False, RequestStatus.ERROR),
        (InternalError("oops"), False, RequestStatus.ERROR),
    ],
)
def test_an_error_is_a_rejection_only_before_any_token(
    bench: Bench, error: OctavoError, has_token: bool, status: RequestStatus
) -> None:
    account = bench.open()
    if has_token:
        account.deliver()
    account.fail(error, is_head_sent=has_token)
    record = bench.close(account, usage=None, received=0)

    assert record.status is status
    assert record.error_reason
    assert (record.http_status == 200) is has_token


def test_what_is_billed_is_prompt_and_completion_unless_all_that_came_is_an_error(bench: Bench) -> None:
    finished, left, failed, broken, never_shown = (bench.open() for _ in range(5))
    for account in (finished, left, failed, broken, never_shown):
        account.num_prompt_tokens = 40
    for account in (finished, broken, never_shown):
        account.deliver()
        account.num_completion_tokens = 4
    finished.finish(FinishReason.STOP)
    left.abort(is_head_sent=False)
    failed.fail(EngineLost("gone"), is_head_sent=False)
    broken.fail(EngineLost("gone"), is_head_sent=True)
    # An answer as a whole of which the client only hears that it failed.
    never_shown.fail(EngineLost("gone"), is_head_sent=False)

    accounts = (finished, left, failed, broken, never_shown)
    assert [account.num_billed_tokens for account in accounts] == [44, 40, 0, 44, 0]
    record = bench.close(never_shown, usage=None, received=4)
    assert (record.prompt_tokens, record.completion_tokens, record.discarded_tokens) == (40, 0, 4)


def test_a_client_that_left_saw_a_status_or_none(bench: Bench) -> None:
    for is_head_sent, http_status in ((True, 200), (False, 0)):
        account = bench.open()
        account.abort(is_head_sent=is_head_sent)
        assert bench.close(account).http_status == http_status
        assert bench.audit.records[-1].status is RequestStatus.ABORTED


def test_the_first_end_counts(bench: Bench) -> None:
    account = bench.open()
    account.finish(FinishReason.STOP)
    account.abort(is_head_sent=True)

    assert bench.close(account).status is RequestStatus.STOP


async def test_started_equals_the_sum_of_ends_and_tokens_add_up(bench: Bench) -> None:
    ends: list[Callable[[RequestAccount], None]] = [
        lambda account: account.finish(FinishReason.STOP),
        lambda account: account.finish(FinishReason.LENGTH),
        lambda account: account.abort(is_head_sent=True),
        lambda account: account.fail(InvalidRequest("no"), is_head_sent=False),
        lambda account: account.fail(EngineLost("gone"), is_head_sent=True),
    ]
    for end in ends:
        account = bench.open()
        account.num_prompt_tokens, account.num_completion_tokens = 10, 3
        end(account)
        bench.close(account)

    statuses = ("stop", "length", "aborted", "rejected", "error")
    assert bench.metric("requests_started_total") == 5
    assert [bench.metric("requests_ended_total", status=status) for status in statuses] == [1] * 5
    assert sum(bench.metric("prompt_tokens_total", status=status) for status in statuses) == 50
    # The rejected one has shown none.
    assert sum(bench.metric("completion_tokens_total", status=status) for status in statuses) == 12
    assert bench.metric("requests_in_flight") == 0
    await bench.ledger.wait_all_closed(0.0)
