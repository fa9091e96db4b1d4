"""Fixtures of the tests that run the whole system."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.integration.octavo import RunningOctavo, start_octavo

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]


@pytest.fixture
def running_octavo(tmp_path: Path) -> StartOctavo:
    """Start ``octavo up`` in a fresh data folder: ``with running_octavo("--engines", "2") as octavo: …``."""
    numbers = count()

    def start(*flags: str, **options: Any) -> AbstractContextManager[RunningOctavo]:
        return start_octavo(tmp_path / f"data-{next(numbers)}", *flags, **options)

    return start
