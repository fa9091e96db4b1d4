"""What the audit needs of a store, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.telemetry.audit_record import AuditRecord


class RowsRefused(Exception):
    """The store refuses these rows for what they say; sending them again as they are does not help."""


class AuditStore(Protocol):
    """A table of audit records where a request_id occurs once."""

    async def open(self) -> None:
        """Connect and make the table, if that has not happened; raises StoreUnavailable."""

    async def insert(self, records: Sequence[AuditRecord], token: str) -> None:
        """Insert all records or none; they are durable when this returns.

        An insert whose token was seen lately changes nothing. Raises StoreUnavailable when it may work later
        (`retry_after_seconds` says when, if the store is only busy), RowsRefused when it never will.
        """

    async def close(self) -> None:
        """Close connections."""
