"""The runner of real models: loads one, and runs steps with it.

Owns which model serves, and when it is given up. It must not know the wire or who owns a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from libs.errors import InternalError
from libs.text import ModelText
from services.worker.config import WorkerConfig
from services.worker.grammar_matcher import GrammarMatchers
from services.worker.model_loading import ModelLoading
from services.worker.rank_group import FormGroup
from services.worker.rendezvous import form_group
from services.worker.served_model import Matchers, ServedModel
from services.worker.settling import Settling
from services.worker.step import LoadedModel, LoadProgress, LoadRequest, SampledTokens, StepInput, StepResult
from services.worker.warm_up import plan_warm_up


class TorchRunner:
    """A ``ModelRunner`` on torch. All methods are called from one thread: torch's thread count belongs to it."""

    def __init__(
        self,
        config: WorkerConfig,
        new_matchers: Callable[[ModelText], Matchers] = GrammarMatchers,
        form_group: FormGroup = form_group,
    ) -> None:
        """Begin without a model; ``new_matchers`` and ``form_group`` are called with each that is loaded."""
        self._config = config
        self._form_group = form_group
        self._new_matchers = new_matchers
        self._loaded: ServedModel | None = None
        self._settling: Settling | None = None

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        """Load the weights and allocate the KV cache; what was loaded before is given up first.

        Raises:
            ModelLoadFailed: when the model cannot be served here.
        """
        self.unload()
        torch.set_num_threads(self._config.num_threads_used)
        loading = ModelLoading.begin(self._config, request, on_progress)
        statement = loading.memory.state()
        with torch.inference_mode():
            model = loading.read_weights()
            machine_limits = model.measure_limits()
            group, cache = loading.join_others(model, self._form_group)
        self._loaded = loading.put_together(model, group, cache, self._new_matchers(loading.text))
        loading.tell("warming up")
        self._warm_up(self._loaded)
        self._settling = Settling(cache.populate, statement)
        return loading.describe(self._loaded, machine_limits)

    def unload(self) -> None:
        """Give up what was loaded, and leave the group of ranks."""
        if self._settling is not None:
            self._settling.stop()
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = None

    def wait_until_settled(self) -> None:
        """Wait until the cache is resident and the memory in use has been compared with what was stated."""
        if self._settling is not None:
            self._settling.wait()

    def reset(self) -> None:
        """Forget all sequences; what is in the KV cache stays."""
        if self._loaded is not None:
            self._loaded.batch.reset()

    def execute(self, step: StepInput) -> StepResult:
        """Run one step: apply the difference, compute, sample, append.

        Raises:
            WorkerLost: another rank of the group is gone.
        """
        if self._loaded is None:
            raise InternalError("A step came before the model was loaded.")
        try:
            return self._execute(self._loaded, step)
        except Exception:
            # The other ranks would wait for this one, which is not where they are.
            self._loaded.group.leave()
            raise

    @torch.inference_mode()
    def _execute(self, loaded: ServedModel, step: StepInput) -> StepResult:
        started, waited_before = time.perf_counter(), loaded.model.exchange_wait_seconds
        if len(step.copy_source_block_ids):
            loaded.cache.copy_blocks(
                torch.from_numpy(step.copy_source_block_ids), torch.from_numpy(step.copy_target_block_ids)
            )
        prepared = loaded.batch.prepare(step, loaded.admit)
        sampled, num_computed_tokens, work = SampledTokens.none(), 0, None
        if prepared.batch is None:
            # A step without work is a question for a sign of life, and this rank's answer speaks for all.
            loaded.group.meet()
        else:
            sampled, num_computed_tokens = loaded.compute(prepared.batch), len(prepared.batch.token_ids)
            work = loaded.work.work_of(prepared.batch)
        return StepResult.of(
            step,
            sampled,
            prepared.failed_sequences,
            num_computed_tokens=num_computed_tokens,
            duration_seconds=time.perf_counter() - started,
            exchange_wait_seconds=loaded.model.exchange_wait_seconds - waited_before,
            work=work,
        )

    @torch.inference_mode()
    def _warm_up(self, loaded: ServedModel) -> None:
        plan = plan_warm_up(loaded.limits)
        for step in plan.steps:
            self.execute(step)
        loaded.batch.reset()
        loaded.cache.clear_slots(torch.from_numpy(plan.written_slots))
