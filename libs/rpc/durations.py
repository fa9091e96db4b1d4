"""Durations on the wire and inside: protobuf's Duration and seconds as a float."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

_NANOS_PER_SECOND = 1_000_000_000


def duration_from_seconds(seconds: float) -> Duration:
    """Convert non-negative seconds; a negative value is a fault of the caller and becomes zero."""
    nanos = max(0, round(seconds * _NANOS_PER_SECOND))
    return Duration(seconds=nanos // _NANOS_PER_SECOND, nanos=nanos % _NANOS_PER_SECOND)


def seconds_from_duration(duration: Duration) -> float:
    """Convert to seconds."""
    return duration.seconds + duration.nanos / _NANOS_PER_SECOND
