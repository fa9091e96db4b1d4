"""Structured logs: one event with fields per line, JSON for machines, plain for a terminal."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, Final, TextIO

import structlog

# Its lines are its own.
_TRACEBACK_FIELD: Final = "exception"


def configure_logging(tier: str, instance_id: str, level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send log events of this process to stderr, each with its tier and instance.

    Args:
        tier: name of the tier, for example "router".
        instance_id: which process of the tier.
        level: least level shown: debug, info, warning or error.
        stream: where lines go; stderr by default. A terminal gets plain lines, all else JSON.
    """
    output = stream or sys.stderr
    shape: list[Any] = [structlog.processors.JSONRenderer()]
    if output.isatty():
        shape = [_escape_control_characters, structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *shape,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _LossyLogger(output),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(tier=tier, instance_id=instance_id)
    _take_over_library_logs()


def _escape_control_characters(_logger: object, _name: str, event: dict[str, Any]) -> dict[str, Any]:
    """Show what would move a terminal's cursor or begin a line: a field may be what a stranger has sent."""
    return {name: value if name == _TRACEBACK_FIELD else _escaped(value) for name, value in event.items()}


def _escaped(value: Any) -> Any:
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in value)


class _LibraryLog(logging.Handler):
    """Brings what libraries have to complain about into our log, where it would be lines of another shape."""

    def emit(self, record: logging.LogRecord) -> None:
        tell = _library_log.error if record.levelno >= logging.ERROR else _library_log.warning
        tell("library complains", library=record.name, detail=record.getMessage(), exc_info=record.exc_info)


def _take_over_library_logs() -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, _LibraryLog) for handler in root.handlers):
        root.addHandler(_LibraryLog(logging.WARNING))


class _LossyLogger(structlog.WriteLogger):
    """Writes lines, or loses them where nobody reads them any more: no request fails for the want of a log.

    A line and its end are one write, so that processes which share a stderr never write into each other's lines.
    """

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def get_logger(name: str) -> Any:  # Any: structlog's bound logger is built from the configuration.
    """Return a logger whose events carry the name of the module or part."""
    return structlog.get_logger(part=name)


_library_log = get_logger("libraries")
