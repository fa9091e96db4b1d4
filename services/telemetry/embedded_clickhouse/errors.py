"""Errors as ClickHouse's clients know them: a number, a name, an HTTP status, a line of text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

_CODE: Final = re.compile(r"Code: (\d+)\. DB::Exception: ")
_NAME: Final = re.compile(r"\(([A-Z][A-Z0-9_]+)\)(?: \(version [^)]*\))?\s*$")

# Which status a real server answers with; every other code is 500. From ClickHouse's
# exceptionCodeToHTTPStatus, for the codes that this process can give.
_STATUS_BY_CODE: Final = {
    6: 400, 26: 400, 27: 400, 32: 400, 33: 400, 36: 400, 38: 400, 41: 400, 42: 400, 43: 400, 53: 400, 62: 400,
    70: 400, 72: 400, 73: 400, 117: 400, 130: 400, 321: 400, 372: 404, 376: 400, 386: 400, 456: 400, 457: 400,
    16: 404, 46: 404, 47: 404, 50: 404, 60: 404, 79: 404, 81: 404, 115: 404,
    164: 403, 516: 403, 159: 408, 160: 408, 229: 413, 48: 501, 202: 503,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """An error that this process itself gives, by ClickHouse's code and name."""

    code: int
    name: str
    http_status: int


BAD_ARGUMENTS: Final = ErrorKind(36, "BAD_ARGUMENTS", 400)
NOT_IMPLEMENTED: Final = ErrorKind(48, "NOT_IMPLEMENTED", 501)
SYNTAX_ERROR: Final = ErrorKind(62, "SYNTAX_ERROR", 400)
TOO_MANY_QUERIES: Final = ErrorKind(202, "TOO_MANY_SIMULTANEOUS_QUERIES", 503)
TOO_LARGE: Final = ErrorKind(229, "QUERY_IS_TOO_LARGE", 413)
CANNOT_DECOMPRESS: Final = ErrorKind(271, "CANNOT_DECOMPRESS", 400)
RESULT_TOO_LARGE: Final = ErrorKind(396, "TOO_MANY_ROWS_OR_BYTES", 500)
SESSION_NOT_FOUND: Final = ErrorKind(372, "SESSION_NOT_FOUND", 404)
SESSION_IS_LOCKED: Final = ErrorKind(373, "SESSION_IS_LOCKED", 500)
AUTHENTICATION_FAILED: Final = ErrorKind(516, "AUTHENTICATION_FAILED", 403)


class ClickHouseError(Exception):
    """An error with its code, its HTTP status and the text that goes to the client."""

    def __init__(self, code: int, http_status: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.http_status = http_status
        self.text = text

    @classmethod
    def of(cls, kind: ErrorKind, message: str) -> Self:
        """Build an error of this process, in the engine's own form."""
        text = f"Code: {kind.code}. DB::Exception: {message} ({kind.name})"
        return cls(kind.code, kind.http_status, text)

    @classmethod
    def from_engine(cls, message: str) -> Self:
        """Read an error of the engine; one without a code is an unknown exception (1002)."""
        match = _CODE.search(message)
        if match is None:
            return cls(1002, 500, f"Code: 1002. DB::Exception: {message.strip()} (UNKNOWN_EXCEPTION)")
        code = int(match.group(1))
        return cls(code, _STATUS_BY_CODE.get(code, 500), message[match.start() :].strip())
