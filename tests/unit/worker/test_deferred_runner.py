from __future__ import annotations

import threading

import pytest

from libs.errors import ModelLoadFailed
from services.worker.config import RunnerKind, WorkerConfig
from services.worker.deferred_runner import DeferredRunner
from services.worker.step import ModelRunner
from services.worker.stub_runner import StubRunner
from tests.unit.worker.small_engine import SmallEngine, load_request


def test_the_first_load_waits_for_the_runner() -> None:
    may_make, is_loading = threading.Event(), threading.Event()

    def make() -> ModelRunner:
        assert is_loading.wait(10)
        assert may_make.wait(10)
        return StubRunner(WorkerConfig(runner=RunnerKind.STUB))

    runner = DeferredRunner(make)
    threading.Timer(0.05, may_make.set).start()
    is_loading.set()
    model = runner.load(load_request(), lambda progress: None)
    engine = SmallEngine(runner, model)
    engine.add(0, [1, 2, 3])

    assert len(engine.run_until(2)[0]) == 2
    runner.reset()


def test_a_runner_that_is_not_installed_fails_the_load() -> None:
    def make() -> ModelRunner:
        raise ImportError("No module named 'torch'")

    with pytest.raises(ModelLoadFailed, match=r"No module named 'torch'.*octavo\[worker\]"):
        DeferredRunner(make).load(load_request(), lambda progress: None)
