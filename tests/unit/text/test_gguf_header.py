from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.errors import ModelLoadFailed
from libs.text.gguf_header import read_gguf_header


@pytest.fixture
def every_type(tmp_path: Path) -> Path:
    path = tmp_path / "every-type.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "é 🎉\n")
    writer.add_array("texts", ["a", "", "▁ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [1.5, -2.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_reference_reader_reads(every_type: Path) -> None:
    reference = gguf.GGUFReader(str(every_type))

    values = read_gguf_header(every_type).values

    expected = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()} == expected


def test_missing_keys_are_none_and_wrong_types_are_named(every_type: Path) -> None:
    header = read_gguf_header(every_type)

    assert header.string("absent") is None
    assert header.numbers("absent") is None
    assert header.boolean("yes") is True
    assert header.strings("texts") == ("a", "", "▁ü")
    with pytest.raises(ModelLoadFailed, match="text is not an integer"):
        header.integer("text")
    with pytest.raises(ModelLoadFailed, match="yes is not an integer"):
        header.integer("yes")
    with pytest.raises(ModelLoadFailed, match="numbers is not an array of strings"):
        header.strings("numbers")
    with pytest.raises(ModelLoadFailed, match="texts is not an array of numbers"):
        header.numbers("texts")


def test_every_truncation_is_a_clear_error(every_type: Path, tmp_path: Path) -> None:
    complete = every_type.read_bytes()
    # The last value is the end of the file but for padding; its own zero bytes do not count.
    header_size = len(complete.rstrip(b"\0")) - 4
    cut_file = tmp_path / "cut.gguf"

    for size in range(header_size):
        cut_file.write_bytes(complete[:size])
        with pytest.raises(ModelLoadFailed):
            read_gguf_header(cut_file)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 700), value=st.integers(0, 255))
def test_a_broken_byte_is_read_or_refused_but_never_worse(every_type: Path, position: int, value: int) -> None:
    broken = bytearray(every_type.read_bytes())
    broken[position % len(broken)] = value
    path = every_type.with_name("broken.gguf")
    path.write_bytes(broken)

    # Any other exception fails the test.
    with contextlib.suppress(ModelLoadFailed):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "keys"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 2**60), "not a complete GGUF"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "unknown type 77"),
    ],
)
def test_refuses_what_it_cannot_read(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelLoadFailed, match=sentence):
        read_gguf_header(path)
