"""Structured logs: one event with fields per line, JSON for machines, plain for a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO

import structlog


def configure_logging(tier: str, instance_id: str, level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send log events of this process to stderr, each with its tier and instance.

    Args:
        tier: name of the tier, for example "router".
        instance_id: which process of the tier.
        level: least level shown: debug, info, warning or error.
        stream: where lines go; stderr by default. A terminal gets plain lines, all else JSON.
    """
    output = stream or sys.stderr
    # JSON escapes what a terminal would take for orders; clients choose some of the values.
    renderers: list[Any] = (
        [_printable, structlog.dev.ConsoleRenderer()] if output.isatty() else [structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _LossyLogger(output),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(tier=tier, instance_id=instance_id)


def _printable(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return an event without control characters, which would change what a terminal shows."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(
                char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in value
            )
    return event


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
