"""How long a test waits for what must come, before it is taken for hanging."""

from __future__ import annotations

# Nothing takes as long, but a virtual machine may stand still in between: pauses of 17 s were seen.
PATIENCE_SECONDS = 60.0
