"""Hypothesis profiles: ``ci`` is the same on every run, ``--hypothesis-profile=explore`` looks for new faults."""

from __future__ import annotations

import faulthandler

from hypothesis import HealthCheck, settings

_END_SECONDS = 60
# The file itself: what stands for it in Python may be closed by then.
_STDERR = 2


def pytest_unconfigure() -> None:
    """Say what keeps this process alive after its last test, and end it, instead of waiting for ever."""
    faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=_STDERR)


# A busy machine is slow for seconds, which says nothing of what is tested.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, print_blob=True)
if settings.get_current_profile_name() != "explore":
    settings.load_profile("ci")
