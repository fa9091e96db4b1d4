"""Fixtures of the tests that run the whole system."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import Stand, open_stand
from tests.integration.octavo import RunningOctavo, start_octavo

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]


@pytest.fixture
def running_octavo(tmp_path: Path) -> StartOctavo:
    """Start ``octavo up`` in a fresh data folder: ``with running_octavo("--engines", "2") as octavo: …``."""
    numbers = count()

    def start(*flags: str, **options: Any) -> AbstractContextManager[RunningOctavo]:
        return start_octavo(tmp_path / f"data-{next(numbers)}", *flags, **options)

    return start


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fault_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """One gateway for all tests of known faults, which so also proves that it lives through them."""
    async with open_stand(tmp_path_factory.mktemp("faults"), "--sse-heartbeat-seconds", "0.1") as stand:
        yield stand


@pytest.fixture
def stand(fault_stand: Stand) -> Stand:
    """That gateway, with fakes that do nothing wrong unless they are told to."""
    fault_stand.engine.scripts.clear()
    fault_stand.engine.default_script = Script(token_ids=fault_stand.encode("Hello there"), num_cached_tokens=0)
    fault_stand.router.refusal, fault_stand.router.holds = None, False
    fault_stand.router.engines[:] = [fault_stand.engine]
    return fault_stand
