"""How long state machines run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_EXPLORE_FACTOR = 50


def machine_settings(*, max_examples: int, step_count: int) -> settings:
    """Return settings with ``max_examples`` runs of ``step_count`` rules; far more runs under ``explore``."""
    factor = _EXPLORE_FACTOR if settings.get_current_profile_name() == "explore" else 1
    return settings(
        max_examples=max_examples * factor,
        stateful_step_count=step_count,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
