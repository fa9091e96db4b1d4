"""Frames: what is cut off is lost, what is whole survives, nothing is invented."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.spool import encode_frame, scan_frames
from libs.spool.frames import MAX_DAMAGE_BYTES

RECORDS = st.lists(st.binary(max_size=40), max_size=8)


@given(RECORDS)
def test_reads_back_what_was_framed(records: list[bytes]) -> None:
    scan = scan_frames(b"".join(map(encode_frame, records)))

    assert list(scan.records) == records
    assert scan.num_torn_bytes == 0


@given(RECORDS, st.data())
def test_a_cut_keeps_every_whole_record_and_invents_none(records: list[bytes], data: st.DataObject) -> None:
    frames = [encode_frame(record) for record in records]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))

    scan = scan_frames(whole[:cut])

    ends = [sum(map(len, frames[: index + 1])) for index in range(len(frames))]
    num_whole = sum(end <= cut for end in ends)
    assert list(scan.records) == records[:num_whole]
    assert scan.num_whole_bytes + scan.num_torn_bytes == cut


@given(RECORDS.filter(bool), st.data())
def test_a_flipped_bit_costs_its_own_record_alone(records: list[bytes], data: st.DataObject) -> None:
    frames = list(map(encode_frame, records))
    damaged = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[damaged])
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    frames[damaged] = bytes(frame)

    scan = scan_frames(b"".join(frames))

    assert list(scan.records) == records[:damaged] + records[damaged + 1 :]
    is_last = damaged == len(frames) - 1
    assert (scan.num_damaged_bytes, scan.num_torn_bytes) == ((0, len(frame)) if is_last else (len(frame), 0))


def test_the_search_behind_damage_is_bounded() -> None:
    far, near = bytes(MAX_DAMAGE_BYTES + 1), bytes(MAX_DAMAGE_BYTES)

    assert scan_frames(far + encode_frame(b"a")).records == ()
    assert scan_frames(near + encode_frame(b"a")).records == (b"a",)


@given(RECORDS, st.integers(1, 64))
def test_a_tail_of_zeros_holds_no_record(records: list[bytes], num_zeros: int) -> None:
    scan = scan_frames(b"".join(map(encode_frame, records)) + bytes(num_zeros))

    assert list(scan.records) == records
    assert scan.num_torn_bytes == num_zeros
