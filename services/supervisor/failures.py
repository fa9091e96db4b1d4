"""Why ``octavo up`` cannot start or cannot go on."""

from __future__ import annotations


class UpFailed(Exception):
    """A reason to stop, as a clear sentence for the one who typed ``octavo up``."""
