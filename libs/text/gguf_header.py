"""The metadata of a GGUF file, read without touching its tensors.

Owns the layout of a GGUF header (little-endian, versions 2 and 3). ``gguf.GGUFReader`` makes a numpy view for
every string and so takes 1.7 s for a vocabulary of 49,152 tokens; a gateway has to start in less, so this module
walks the header once with ``struct``, in 30 ms. A test compares the two. It must not know what a tokenizer is.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.errors import ModelLoadFailed
from libs.text.pointer_files import refuse_pointer

GgufScalar = str | int | float | bool
GgufValue = GgufScalar | tuple[GgufScalar, ...]

_MAGIC: Final = b"GGUF"
_READABLE_VERSIONS: Final = (2, 3)
_MAX_KEYS: Final = 65_536
_STRING: Final = 8
_ARRAY: Final = 9
_SCALAR_FORMATS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The key-value pairs of one file; each getter checks the type of what it returns."""

    path: Path
    values: Mapping[str, GgufValue]

    def string(self, key: str) -> str | None:
        """Return the string at ``key``, or None when the file lacks it."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_type(key, "a string")

    def integer(self, key: str) -> int | None:
        """Return the integer at ``key``, or None when the file lacks it."""
        value = self.values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._wrong_type(key, "an integer")

    def boolean(self, key: str) -> bool | None:
        """Return the boolean at ``key``, or None when the file lacks it."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong_type(key, "a boolean")

    def strings(self, key: str) -> tuple[str, ...] | None:
        """Return the array of strings at ``key``, or None when the file lacks it."""
        value = self.values.get(key)
        if value is None:
            return None
        # An array has one element type, so the first element speaks for all.
        if isinstance(value, tuple) and (not value or isinstance(value[0], str)):
            return value  # type: ignore[return-value]
        raise self._wrong_type(key, "an array of strings")

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """Return the array of numbers at ``key``, or None when the file lacks it."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, tuple) and (not value or isinstance(value[0], int | float)):
            return value  # type: ignore[return-value]
        raise self._wrong_type(key, "an array of numbers")

    def _wrong_type(self, key: str, expected: str) -> ModelLoadFailed:
        return ModelLoadFailed(f"{self.path.name}: the GGUF key {key} is not {expected}; convert the model again.")


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the metadata of the GGUF file at ``path``."""
    try:
        refuse_pointer(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            values = _HeaderParser(data, path).parse()
    except OSError as error:
        raise ModelLoadFailed(f"{path.name} cannot be read: {error.strerror or error}.") from error
    except (struct.error, ValueError, OverflowError) as error:
        # mmap refuses an empty file with ValueError; a text that is not UTF-8 is a ValueError, too.
        raise ModelLoadFailed(f"{path.name} is not a complete GGUF file ({error}); fetch it again.") from error
    return GgufHeader(path=path, values=values)


class _HeaderParser:
    """One walk over a header. A length that points past the file ends in ``struct.error``."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = 0

    def parse(self) -> dict[str, GgufValue]:
        if self._data[:4] != _MAGIC:
            raise ModelLoadFailed(f"{self._path.name} is not a GGUF file.")
        self._offset = 4
        (version,) = self._unpack("I")
        if version not in _READABLE_VERSIONS:
            raise ModelLoadFailed(
                f"{self._path.name} is GGUF version {version} or big-endian; "
                "versions 2 and 3, little-endian, can be read."
            )
        _num_tensors, num_keys = self._unpack("QQ")
        if num_keys > _MAX_KEYS:
            raise ModelLoadFailed(
                f"{self._path.name} claims {num_keys} metadata keys; at most {_MAX_KEYS} are read."
            )
        values: dict[str, GgufValue] = {}
        for _ in range(num_keys):
            key = self._string()
            (value_type,) = self._unpack("I")
            values[key] = self._array() if value_type == _ARRAY else self._scalar(value_type)
        return values

    def _unpack(self, layout: str) -> tuple[int, ...]:
        parsed = struct.unpack_from("<" + layout, self._data, self._offset)
        self._offset += struct.calcsize("<" + layout)
        return parsed

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> tuple[str, ...]:
        # Local names: this loop runs once for each token and merge of a vocabulary.
        data, offset, length_at, size = self._data, self._offset, struct.Struct("<Q").unpack_from, len(self._data)
        texts: list[str] = []
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            if offset > size:
                raise struct.error("a string ends after the file")
            texts.append(data[start:offset].decode())
        self._offset = offset
        return tuple(texts)

    def _scalar(self, value_type: int) -> GgufScalar:
        if value_type == _STRING:
            return self._string()
        return self._unpack(self._format_of(value_type))[0]

    def _array(self) -> tuple[GgufScalar, ...]:
        (item_type,) = self._unpack("I")
        (count,) = self._unpack("Q")
        if count > len(self._data):
            raise struct.error("an array is longer than the file")
        if item_type == _STRING:
            return self._strings(count)
        return self._unpack(f"{count}{self._format_of(item_type)}")

    def _format_of(self, value_type: int) -> str:
        layout = _SCALAR_FORMATS.get(value_type)
        if layout is None:
            raise ModelLoadFailed(f"{self._path.name} has a metadata value of the unknown type {value_type}.")
        return layout
