"""The audit's spool: what was taken is kept, in order, once, over any restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from uuid import uuid4

import pytest

from libs.errors import StoreUnavailable
from libs.spool import SpoolWriter, read_segments
from services.telemetry.audit_record import AuditBatch, AuditRecord, BatchId
from services.telemetry.audit_spool import NUM_RECENT_BATCHES, AuditSpool, SealedBatches
from tests.fakes.fake_audit_store import make_batch


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def open_spool(directory: Path, max_bytes: int = 1 << 20, clock: FakeClock | None = None) -> AuditSpool:
    return AuditSpool(directory, max_bytes=max_bytes, clock=clock or FakeClock())


def read_all(spool: AuditSpool) -> list[AuditRecord]:
    return [record for segment in spool.seal() for record in spool.read(segment).records]


def confirm_all(spool: AuditSpool) -> None:
    for segment in spool.seal():
        spool.confirm(spool.read(segment))


def test_batches_come_back_in_order_after_a_restart(tmp_path: Path) -> None:
    batches = [make_batch(3) for _ in range(4)]
    spool = open_spool(tmp_path)
    for batch in batches[:2]:
        spool.append(batch)
    spool.close()
    spool = open_spool(tmp_path)
    for batch in batches[2:]:
        spool.append(batch)

    records = read_all(spool)

    assert records == [record for batch in batches for record in batch.records]


@pytest.mark.parametrize("is_confirmed", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_batch_sent_again_is_not_taken_again(tmp_path: Path, is_confirmed: bool, is_restarted: bool) -> None:
    batch = make_batch()
    spool = open_spool(tmp_path)
    assert spool.append(batch) is True
    if is_confirmed:
        confirm_all(spool)
    if is_restarted:
        spool.close()
        spool = open_spool(tmp_path)

    is_new = spool.append(batch)

    assert is_new is False
    assert len(read_all(spool)) == (0 if is_confirmed else 1)


def test_what_the_store_confirmed_is_forgotten(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.append(make_batch(5))

    confirm_all(spool)

    assert read_all(spool) == []
    assert spool.size_bytes == 0


def test_a_full_spool_refuses_and_takes_the_batch_when_there_is_room(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_bytes=5_000)
    first, second = make_batch(6), make_batch(6)
    spool.append(first)
    with pytest.raises(StoreUnavailable, match="at most 5000 bytes"):
        spool.append(second)
    confirm_all(spool)

    is_new = spool.append(second)

    assert is_new is True
    assert read_all(spool) == list(second.records)


def test_lag_is_the_age_of_the_oldest_batch_also_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    spool = open_spool(tmp_path, clock=clock)
    assert spool.lag_seconds == 0.0
    spool.append(make_batch())
    clock.now += 30
    spool.append(make_batch())
    spool.close()

    spool = open_spool(tmp_path, clock=clock)

    assert spool.lag_seconds == 30.0
    confirm_all(spool)
    assert spool.lag_seconds == 0.0


def test_a_batch_torn_by_a_crash_is_cut_counted_and_may_be_sent_again(tmp_path: Path) -> None:
    whole, torn = make_batch(2), make_batch(2)
    spool = open_spool(tmp_path)
    spool.append(whole)
    spool.append(torn)
    spool.close()
    (segment,) = read_segments(tmp_path / "batches")
    os.truncate(segment.path, segment.path.stat().st_size - 7)

    spool = open_spool(tmp_path)

    assert spool.num_torn_bytes > 0
    assert spool.append(whole) is False
    assert spool.append(torn) is True
    assert read_all(spool) == [*whole.records, *torn.records]


@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_bit_that_the_disk_turns_costs_one_batch_and_is_told(
    tmp_path: Path, damaged: int, is_restarted: bool
) -> None:
    batches = [make_batch(2) for _ in range(3)]
    spool = open_spool(tmp_path)
    ends = []
    for batch in batches:
        spool.append(batch)
        ends.append(spool.size_bytes)
    if is_restarted:
        spool.close()
        spool = open_spool(tmp_path)
    (segment,) = spool.seal()
    content = bytearray(segment.path.read_bytes())
    content[ends[damaged] - 20] ^= 4
    segment.path.write_bytes(content)

    contents = spool.read(segment)

    kept = [batch for index, batch in enumerate(batches) if index != damaged]
    assert contents.batch_ids == tuple(batch.batch_id for batch in kept)
    assert contents.num_lost_bytes == ends[damaged] - (ends[damaged - 1] if damaged else 0)


def test_what_a_crash_has_torn_is_not_told_as_lost(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.append(make_batch())
    spool.append(make_batch())
    spool.close()
    (segment,) = read_segments(tmp_path / "batches")
    os.truncate(segment.path, segment.path.stat().st_size - 7)
    spool = open_spool(tmp_path)

    (sealed,) = spool.seal()

    assert spool.num_torn_bytes > 0
    assert spool.read(sealed).num_lost_bytes == 0


def test_a_disk_that_is_full_gets_room_by_what_the_store_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the spool that fills the disk would keep itself for ever."""
    spool = open_spool(tmp_path)
    spool.append(make_batch())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        confirm_all(spool)

    assert spool.size_bytes == 0
    assert spool.append(make_batch()) is True


def test_what_cannot_be_decoded_is_handed_out_as_it_is_beside_the_rest(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "batches", max_bytes=1 << 20, segment_bytes=1 << 20, fsync=False) as writer:
        writer.append(b"short")
        writer.append(b"\x63" + bytes(100))
        writer.append(b"\x01" + bytes(24) + b"not msgpack")
    spool = open_spool(tmp_path)
    batch = make_batch()
    spool.append(batch)

    contents = [spool.read(segment) for segment in spool.seal()]

    assert [len(data) for one in contents for data in one.undecodable] == [5, 101, 36]
    assert [record for one in contents for record in one.records] == list(batch.records)


def test_the_memory_of_batch_ids_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    ids = [BatchId(uuid4()) for _ in range(3 * NUM_RECENT_BATCHES)]
    for start in range(0, len(ids), NUM_RECENT_BATCHES // 20):
        spool.append(make_batch())
        (segment,) = spool.seal()
        confirmed = tuple(ids[start : start + NUM_RECENT_BATCHES // 20])
        spool.confirm(SealedBatches(segment, confirmed, (), ()))
    spool.close()

    spool = open_spool(tmp_path)

    assert spool.append(AuditBatch(ids[-NUM_RECENT_BATCHES // 2], make_batch().records)) is False
    assert spool.append(AuditBatch(ids[0], make_batch().records)) is True
    assert sum(path.stat().st_size for path in (tmp_path / "taken").glob("*.spool")) < 4 * 16 * NUM_RECENT_BATCHES


def test_one_process_at_a_time_has_the_spool(tmp_path: Path) -> None:
    open_spool(tmp_path)

    with pytest.raises(StoreUnavailable, match="another process"):
        open_spool(tmp_path)
