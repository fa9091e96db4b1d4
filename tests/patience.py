"""How long a test waits for what must come, before it is taken for hanging."""

from __future__ import annotations

# Nothing takes as long, but whoever measures something else beside the tests may stop them for seconds meanwhile.
PATIENCE_SECONDS = 60.0
