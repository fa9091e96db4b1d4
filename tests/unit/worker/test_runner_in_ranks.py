"""What depends on time in one rank must not make it go on with other sequences than the rest of its group."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from libs.text import ModelText
from services.worker.config import WeightsType, WorkerConfig
from services.worker.model_runner import TorchRunner
from services.worker.served_model import Matchers
from services.worker.step import NewSequence, SequenceFailure
from services.worker.token_mask import TokenMask, TokenMatcher
from tests.unit.worker.small_engine import SmallEngine, load_request
from tests.unit.worker.small_models import random_llama, save_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: several ranks")

HELD_SLOT = 1
PROMPT = list(range(20, 29))


class AllowsAll:
    """Allows every token, once it is prepared, which it is at once or never."""

    failure = None

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self.is_prepared = False

    def prepare(self, timeout_seconds: float) -> bool:
        self.is_prepared = not self._is_late
        return self.is_prepared

    def fill_mask(self, mask: TokenMask) -> None:
        mask[:] = -1

    def accept(self, token_id: int) -> None:
        assert self.is_prepared


class HoldsOne:
    """Holds one slot's sequence."""

    def __init__(self, text: ModelText, *, is_late: bool) -> None:
        self._is_late = is_late

    def matcher_of(self, sequence: NewSequence) -> TokenMatcher | None:
        return AllowsAll(is_late=self._is_late) if sequence.slot == HELD_SLOT else None

    def close(self) -> None:
        pass


def load_ranks(folder: Path, new_matchers: list[Callable[[ModelText], Matchers]]) -> list[SmallEngine]:
    config = WorkerConfig(model=str(folder), dtype=WeightsType.FLOAT32, kv_cache_memory="4MiB", num_threads=1)
    group_id = uuid.uuid4().hex

    def load(rank: int) -> SmallEngine:
        runner = TorchRunner(config, new_matchers[rank])
        request = load_request(rank=rank, tensor_parallel_size=len(new_matchers), group_id=group_id)
        return SmallEngine(runner, runner.load(request, lambda progress: None))

    with ThreadPoolExecutor(len(new_matchers)) as threads:
        return list(threads.map(load, range(len(new_matchers))))


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_grammar_that_is_late_on_one_rank_ends_its_sequence_on_all(tmp_path: Path, late_rank: int) -> None:
    folder = save_model(random_llama(), tmp_path)
    engines = load_ranks(folder, [partial(HoldsOne, is_late=rank == late_rank) for rank in range(2)])

    def run(engine: SmallEngine) -> tuple[list[tuple[int, SequenceFailure]], list[int]]:
        engine.add(0, PROMPT)
        engine.add(HELD_SLOT, PROMPT)
        failed = [(each.slot, each.failure) for each in engine.run_step().failed_sequences]
        for _ in range(3):
            engine.run_step()
        return failed, engine.running[0].output

    with ThreadPoolExecutor(2) as threads:
        of_first, of_second = threads.map(run, engines)

    assert of_first == of_second
    failed, output = of_first
    assert failed == [(HELD_SLOT, SequenceFailure.NOT_READY)]
    assert len(output) == 4
