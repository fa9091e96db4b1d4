"""A runner that is imported while the worker already listens.

Owns the thread that imports it. It must not know what a runner needs. Importing torch takes a second or more; an
engine that finds nobody listening meanwhile would wait longer before each new try.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from libs.errors import ModelLoadFailed
from services.worker.step import LoadedModel, LoadProgress, LoadRequest, ModelRunner, StepInput, StepResult


class DeferredRunner:
    """A ``ModelRunner`` that is made in a thread from now on, and waited for by the first load."""

    def __init__(self, make: Callable[[], ModelRunner]) -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="import")
        self._made = thread.submit(make)
        thread.shutdown(wait=False)

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        """Load the model as soon as the runner is there.

        Raises:
            ModelLoadFailed: when the model cannot be served here, or what the runner needs is not installed.
        """
        try:
            runner = self._made.result()
        except ImportError as error:
            raise ModelLoadFailed(f"The runner cannot be imported: {error}; install octavo[worker].") from error
        return runner.load(request, on_progress)

    def execute(self, step: StepInput) -> StepResult:
        """Run one step."""
        return self._made.result().execute(step)

    def reset(self) -> None:
        """Forget all sequences; what is in the KV cache stays."""
        self._made.result().reset()
