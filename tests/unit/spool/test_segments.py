"""The spool's files: order, rotation, the bound, and crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import StoreUnavailable
from libs.spool import SegmentNumber, SpoolWriter, encode_frame, read_segments, spool_size_bytes


def open_writer(
    directory: Path, max_bytes: int = 1 << 20, segment_bytes: int = 1 << 10, fsync: bool = False
) -> SpoolWriter:
    return SpoolWriter(directory, max_bytes=max_bytes, segment_bytes=segment_bytes, fsync=fsync)


def read_all(directory: Path) -> list[bytes]:
    return [record for segment in read_segments(directory) for record in segment.records()]


@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(["seal", "reopen"])), max_size=30),
    st.integers(1, 100),
)
def test_records_come_back_in_order_over_restarts(steps: list[bytes | str], segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = open_writer(Path(folder), segment_bytes=segment_bytes)
        for step in steps:
            if isinstance(step, bytes):
                writer.append(step)
            elif step == "seal":
                writer.seal()
            else:
                writer.close()
                writer = open_writer(Path(folder), segment_bytes=segment_bytes)

        read = read_all(Path(folder))
        writer.close()

        assert read == [step for step in steps if isinstance(step, bytes)]


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.data())
def test_a_crash_at_any_byte_loses_only_the_torn_record_and_later_ones_follow(
    records: list[bytes], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with open_writer(directory) as writer:
            for record in records:
                writer.append(record)
        (segment,) = read_segments(directory)
        cut = data.draw(st.integers(0, segment.path.stat().st_size))
        os.truncate(segment.path, cut)

        with open_writer(directory) as writer:
            writer.append(b"after the crash")

        ends = accumulate(len(encode_frame(record)) for record in records)
        survivors = records[: sum(end <= cut for end in ends)]
        assert read_all(directory) == [*survivors, b"after the crash"]


def test_append_names_the_segment_that_holds_the_record(tmp_path: Path) -> None:
    with open_writer(tmp_path, segment_bytes=20) as writer:
        numbers = [writer.append(b"0123456789") for _ in range(3)]

        assert numbers == [SegmentNumber(1), SegmentNumber(2), SegmentNumber(3)]
        assert writer.active_number == SegmentNumber(3)
        writer.seal()
        assert writer.active_number is None


def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    with open_writer(tmp_path, max_bytes=100, segment_bytes=100) as writer:
        writer.append(b"a" * 80)

        with pytest.raises(StoreUnavailable, match="holds 88 of at most 100 bytes"):
            writer.append(b"b" * 20)

        assert read_all(tmp_path) == [b"a" * 80]


def test_room_comes_back_when_a_reader_deletes_a_segment(tmp_path: Path) -> None:
    with open_writer(tmp_path, max_bytes=100, segment_bytes=100) as writer:
        writer.append(b"a" * 80)
        writer.seal()
        for segment in read_segments(tmp_path):
            segment.delete()

        writer.append(b"b" * 80)

        assert read_all(tmp_path) == [b"b" * 80]


def test_the_bound_counts_what_an_earlier_writer_left(tmp_path: Path) -> None:
    with open_writer(tmp_path, max_bytes=100, segment_bytes=100) as writer:
        writer.append(b"a" * 80)

    with open_writer(tmp_path, max_bytes=100, segment_bytes=100) as writer, pytest.raises(StoreUnavailable):
        writer.append(b"b" * 80)


def test_a_record_that_the_disk_refused_is_not_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write

    def write_half_then_fail(fd: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real_write(fd, data[: len(data) - 10])

    with open_writer(tmp_path) as writer:
        writer.append(b"kept")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half_then_fail)
            with pytest.raises(StoreUnavailable, match="No space left on device"):
                writer.append(b"r" * 20)
        writer.append(b"after")

        assert read_all(tmp_path) == [b"kept", b"after"]
        assert all(segment.scan().num_torn_bytes == 0 for segment in read_segments(tmp_path))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with open_writer(tmp_path), pytest.raises(StoreUnavailable, match="another process writes"):
        open_writer(tmp_path)

    open_writer(tmp_path).close()


def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.close()
    writer.close()

    with pytest.raises(StoreUnavailable, match="closed"):
        writer.append(b"late")


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.spool").write_bytes(b"not ours")
    with open_writer(tmp_path) as writer:
        writer.append(b"ours")

    assert read_all(tmp_path) == [b"ours"]
    assert spool_size_bytes(tmp_path) == len(encode_frame(b"ours"))


def test_a_writer_killed_while_appending_leaves_what_it_had_acknowledged(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from libs.spool import SpoolWriter\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "writer = SpoolWriter(folder, max_bytes=1 << 28, segment_bytes=1 << 16, fsync=False)\n"
        "for number in range(1 << 30):\n"
        "    writer.append(b'%d' % number * 50); print(number, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 500:
                break
        process.send_signal(signal.SIGKILL)
        acknowledged = [500, *(int(line) for line in process.stdout if line.endswith("\n"))]

    records = read_all(tmp_path)

    assert records == [b"%d" % number * 50 for number in range(len(records))]
    assert len(records) > acknowledged[-1]
