"""What an engine's configuration refuses before anything starts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", -1),
        ("max_model_len", 0),
        # Steps are counted modulo this.
        ("integrity_interval_steps", 0),
        ("lease_seconds", 0.0),
        ("load_timeout_seconds", -1.0),
        ("step_timeout_seconds", 0.0),
        ("stall_seconds", math.nan),
        ("heartbeat_seconds", 0.0),
        ("drain_timeout_seconds", -1.0),
        ("drain_timeout_seconds", math.inf),
        ("aging_seconds", math.inf),
    ],
)
def test_numbers_that_no_engine_could_run_with_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})
