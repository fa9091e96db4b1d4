"""The journal: what a restart makes of it, and that it does not grow."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing

from libs.errors import StoreUnavailable
from libs.spool import read_segments
from services.gateway.accepted_spool import AcceptedSpool, RecordBatch
from services.gateway.audit_record import AcceptedRequest, AuditRecord, RequestStatus

MAX_BYTES = 4 * 1024 * 1024


def accepted(request_id: str) -> AcceptedRequest:
    return AcceptedRequest(
        request_id=request_id,
        client_request_id="",
        tenant_id="default",
        model_name="tiny",
        endpoint="/v1/chat/completions",
        is_streaming=True,
        accepted_time=1700000000.25,
    )


def record(request_id: str, status: RequestStatus = RequestStatus.STOP) -> AuditRecord:
    return AuditRecord(
        request_id=request_id,
        client_request_id="c",
        tenant_id="default",
        model_name="tiny",
        endpoint="/v1/chat/completions",
        is_streaming=True,
        accepted_time=1700000000.25,
        finished_time=1700000001.5,
        status=status,
        gateway_id="gateway-0",
        completion_tokens=3,
        ttft_seconds=0.25,
    )


def crash(spool: AcceptedSpool) -> None:
    """Give the folder up as the death of the process would: nothing else is done."""
    spool._writer.close()


def test_a_fresh_folder_has_no_leftovers(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)

    assert spool.leftovers.orphans == ()
    assert spool.leftovers.records == ()
    assert spool.leftovers.batches == ()


def test_a_request_without_an_end_is_an_orphan(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.accept(accepted("a"))
    spool.accept(accepted("b"))
    spool.end(record("b"))
    crash(spool)

    leftovers = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES).leftovers

    assert leftovers.orphans == (accepted("a"),)
    assert leftovers.records == (record("b"),)


def test_a_batch_without_acknowledgement_keeps_its_id_and_its_records(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    for request_id in "abc":
        spool.accept(accepted(request_id))
        spool.end(record(request_id))
    batch = RecordBatch("batch-1", (record("a"), record("b")))
    spool.batch(batch)
    crash(spool)

    leftovers = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES).leftovers

    assert leftovers.batches == (batch,)
    assert leftovers.records == (record("c"),)
    assert leftovers.orphans == ()


def test_what_was_acknowledged_is_gone(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.accept(accepted("a"))
    spool.end(record("a"))
    batch = RecordBatch("batch-1", (record("a"),))
    spool.batch(batch)
    spool.acknowledge(batch)
    crash(spool)

    leftovers = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES).leftovers

    assert (leftovers.orphans, leftovers.records, leftovers.batches) == ((), (), ())


def test_a_second_crash_finds_the_same(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.accept(accepted("a"))
    spool.end(record("b"))
    crash(spool)
    once = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    first = once.leftovers
    once.accept(accepted("c"))
    crash(once)

    twice = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES).leftovers

    assert first.orphans == (accepted("a"),)
    assert twice.orphans == (accepted("a"), accepted("c"))
    assert twice.records == (record("b"),)


def test_a_torn_tail_and_a_strange_entry_are_left_out(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.accept(accepted("a"))
    spool._writer.append(b'{"type":"unheard-of"}')
    crash(spool)
    segment = next(iter(read_segments(tmp_path)))
    segment.path.write_bytes(segment.path.read_bytes() + b"\x20\x00\x00\x00half")

    leftovers = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES).leftovers

    assert leftovers.orphans == (accepted("a"),)


def test_a_bit_that_the_disk_turns_costs_one_entry_and_is_told(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    for request_id in "abc":
        spool.accept(accepted(request_id))
    crash(spool)
    (segment,) = read_segments(tmp_path)
    content = bytearray(segment.path.read_bytes())
    content[len(content) // 2] ^= 1
    segment.path.write_bytes(content)

    with structlog.testing.capture_logs() as logs:
        leftovers = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES).leftovers

    assert leftovers.orphans == (accepted("a"), accepted("c"))
    assert [entry["event"] for entry in logs] == ["the disk has damaged the spool"]


def test_segments_go_in_order_once_all_their_requests_are_acknowledged(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.accept(accepted("slow"))
    for number in range(6000):
        spool.end(record(f"r-{number}"))
    assert len(list(read_segments(tmp_path))) >= 3

    spool.forget(f"r-{number}" for number in range(6000))
    kept = spool.take_finished()
    spool.forget(["slow"])
    finished = spool.take_finished()

    assert kept == []
    assert [segment.number for segment in finished] == sorted(segment.number for segment in finished)
    assert len(finished) == len(list(read_segments(tmp_path))) - 1


def test_a_spool_that_closes_with_all_acknowledged_leaves_no_file(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.accept(accepted("a"))
    spool.forget(["a"])

    spool.close()

    assert list(read_segments(tmp_path)) == []


def test_a_full_spool_refuses(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=1000)

    with pytest.raises(StoreUnavailable):
        for number in range(10):
            spool.end(record(f"r-{number}"))


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)

    with pytest.raises(StoreUnavailable):
        AcceptedSpool(tmp_path, max_bytes=MAX_BYTES)
    spool.close()
