"""How many connections a gateway holds, and which one gives way when there are too many.

Each takes a file descriptor, and without one the gateway cannot reach an engine either: whoever opens thousands and
sends nothing would stop everybody. Owns the bound and the order; it must not know HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

# Looked at for one that is idle; those that are not go to the end of the line.
_MAX_LOOKS: Final = 64


class Connection(Protocol):
    """A client's connection."""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, or for the rest of one's head."""

    def force_close(self) -> None:
        """Close it now."""


class OpenConnections:
    """The connections of one server, the one that has waited longest first."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._waiting: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection) -> None:
        """Take one more; beyond the bound an idle one is closed for it, or itself where none is found."""
        if len(self._waiting) >= self._max_connections:
            (self._longest_idle() or connection).force_close()
        self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget one that is closed."""
        self._waiting.pop(connection, None)

    def _longest_idle(self) -> Connection | None:
        for _ in range(min(_MAX_LOOKS, len(self._waiting))):
            connection = next(iter(self._waiting))
            if connection.is_idle:
                del self._waiting[connection]
                return connection
            self._waiting.move_to_end(connection)
        return None
