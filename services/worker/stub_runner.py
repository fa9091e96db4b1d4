"""A runner without a model: deterministic tokens, and a check of every block.

Owns a rule for the next token and a fake KV cache that holds, in each block slot, the token that was written
there. At every step it reads back the whole context of every scheduled sequence through its block table and
compares it with the tokens that it was told: a block given to two sequences, freed too early, named in the
wrong order or wrongly found in the prefix cache ends the step with an InternalError. It must not know torch.

The next token after tokens ``t[0..n)`` is ``first_token_id + mix(h) % num_token_ids`` where ``h`` starts as
``seed * 0x9E3779B97F4A7C15 + choice_index`` for a drawn sequence and 0 for a greedy one, takes each token as
``h = h * 0x100000001B3 + t + 1``, all modulo 2**64, and ``mix`` is the finalizer of SplitMix64. So it depends on
the full content, and a resumed sequence goes on as if it had never stopped. Where a grammar holds the sequence, the
token is one of the ``n`` that may come next, in the order of their ids: the one at ``mix(h) % n``.

Log-probabilities follow a rule as well: of the ids that the stub emits, taken in a circle, the one ``n`` places
after the next token has ``-(n + 1) / 2`` and rank ``n + 1``; all other tokens come after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.errors import InternalError, ModelLoadFailed, UnsupportedField
from libs.logprobs import TokenLogprobs
from libs.text import ModelText, load_model_text, resolve_model_path
from services.worker.config import WorkerConfig
from services.worker.grammar_matcher import GrammarMatcher, GrammarMatchers, prepare_all
from services.worker.input_batch import BatchLimits, FlatBatch, InputBatch
from services.worker.step import (
    IntArray,
    LoadedModel,
    LoadProgress,
    LoadRequest,
    NewSequence,
    OutputLogprobs,
    PromptLogprobs,
    SampledTokens,
    SamplingParams,
    SequenceFailure,
    StepInput,
    StepResult,
)
from services.worker.token_mask import allowed_of, num_mask_words

_MULTIPLIER = 0x100000001B3
_SEED_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_UNWRITTEN = -1  # What a block slot holds that nobody has written; no token has this id.


class StubRunner:
    """A ``ModelRunner`` without a model."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._loaded: _StubState | None = None

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        """Pretend to load: only the text side of the model is read, for its digest and end tokens.

        Raises:
            ModelLoadFailed: when the model cannot be found, or is asked for more than the stub has.
        """
        config = self._config
        text = load_model_text(resolve_model_path(config.model))
        limit = min(config.stub_max_model_len, text.max_model_len)
        if request.max_model_len is not None and request.max_model_len > limit:
            raise ModelLoadFailed(f"max_model_len was asked to be {request.max_model_len}; the limit is {limit}.")
        limits = BatchLimits(
            max_num_seqs=request.max_num_seqs,
            max_model_len=request.max_model_len or limit,
            max_num_batched_tokens=request.max_num_batched_tokens,
            num_blocks=config.stub_num_blocks,
            block_size=request.block_size,
            vocab_size=config.stub_vocab_size,
        )
        if config.stub_eos_after_tokens is not None and not text.eos_token_ids:
            raise ModelLoadFailed(f"stub_eos_after_tokens is set, but {config.model} has no end token.")
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = _StubState(config, limits, text)
        on_progress(LoadProgress("preparing the stub", 1, 1))
        return LoadedModel(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=text.eos_token_ids,
            tokenizer_digest=text.tokenizer_digest,
            vocab_size=limits.vocab_size,
            gpu_type="stub",
            total_vram_bytes=0,
            kv_cache_bytes=0,
            weights_bytes=0,
        )

    def reset(self) -> None:
        """Forget all sequences; what is in the fake KV cache stays."""
        if self._loaded is not None:
            self._loaded.batch.reset()

    def execute(self, step: StepInput) -> StepResult:
        """Run one step, and let it take as long as configured."""
        started = time.perf_counter()
        if self._loaded is None:
            raise InternalError("A step came before the model was loaded.")
        self._loaded.copy_blocks(step.copy_source_block_ids, step.copy_target_block_ids)
        prepared = self._loaded.batch.prepare(step, self._loaded.admit)
        sampled, num_computed_tokens = SampledTokens.none(), 0
        if prepared.batch is not None:
            sampled, num_computed_tokens = self._loaded.compute(prepared.batch), len(prepared.batch.token_ids)
        due_seconds = (
            self._config.stub_step_seconds + self._config.stub_seconds_per_token * num_computed_tokens
        ) - (time.perf_counter() - started)
        if due_seconds > 0:
            time.sleep(due_seconds)
        return StepResult.of(
            step,
            sampled,
            prepared.failed_sequences,
            num_computed_tokens=num_computed_tokens,
            duration_seconds=time.perf_counter() - started,
        )


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Which ids the stub emits."""

    first_token_id: int
    num_token_ids: int

    def next_token_id(self, token_ids: NDArray[np.int32], start: int) -> int:
        """Return the token after ``token_ids``; ``start`` is the hash's first value."""
        return self.first_token_id + self.draw(token_ids, start) % self.num_token_ids

    def draw(self, token_ids: NDArray[np.int32], start: int) -> int:
        """Return the number that decides on the token after ``token_ids``."""
        exponents = np.arange(len(token_ids) - 1, -1, -1)
        terms = _powers(len(token_ids))[exponents] * (token_ids.astype(np.uint64) + np.uint64(1))
        value = (start * pow(_MULTIPLIER, len(token_ids), 2**64) + int(terms.sum(dtype=np.uint64))) & _MASK
        return _mix(value)

    def measure(self, next_token_id: int, token_id: int, num_alternatives: int) -> TokenLogprobs:
        """Return the log-probability of ``token_id`` where the rule gives ``next_token_id``."""
        place = token_id - self.first_token_id
        distance = self.num_token_ids
        if 0 <= place < self.num_token_ids:
            distance = (token_id - next_token_id) % self.num_token_ids
        distances = np.arange(min(num_alternatives, self.num_token_ids))
        return TokenLogprobs(
            logprobs=np.array([-(distance + 1) / 2], dtype=np.float32),
            ranks=np.array([distance + 1], dtype=np.int64),
            num_alternatives=np.array([len(distances)], dtype=np.int64),
            alternative_token_ids=self.first_token_id
            + (next_token_id - self.first_token_id + distances) % self.num_token_ids,
            alternative_logprobs=(-(distances + 1) / 2).astype(np.float32),
        )


class _StubState:
    """Sequences and the fake KV cache."""

    def __init__(self, config: WorkerConfig, limits: BatchLimits, text: ModelText) -> None:
        self.batch = InputBatch(limits)
        self._limits = limits
        self._rule = TokenRule(config.stub_first_token_id, config.stub_num_token_ids)
        self._eos_after_tokens = config.stub_eos_after_tokens
        self._eos_token_ids = text.eos_token_ids
        self._grammars = GrammarMatchers(text)
        self._matchers: dict[int, GrammarMatcher | None] = {}  # by slot
        self._stored = np.full((limits.num_blocks + 1, limits.block_size), _UNWRITTEN, dtype=np.int32)
        self._starts: dict[int, int] = {}  # the hash's first value by slot
        self._params: dict[int, SamplingParams] = {}  # by slot

    def admit(self, sequence: NewSequence) -> None:
        """Take a new sequence; raises UnsupportedField when its sampling asks for what needs logits."""
        _refuse_what_needs_logits(sequence.sampling_params)
        params = self._params[sequence.slot] = sequence.sampling_params
        self._starts[sequence.slot] = (
            0 if params.is_greedy else (params.seed * _SEED_MULTIPLIER + sequence.choice_index) & _MASK
        )
        self._matchers[sequence.slot] = self._grammars.matcher_of(sequence)

    def close(self) -> None:
        """Stop what compiles grammars."""
        self._grammars.close()

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        """Copy contents between blocks."""
        self._stored[targets] = self._stored[sources]

    def compute(self, batch: FlatBatch) -> SampledTokens:
        """Write the step's tokens, check every context, and choose the next tokens."""
        self._stored.reshape(-1)[batch.slot_mapping] = batch.token_ids
        for index, slot in enumerate(batch.slots.tolist()):
            self._check_context(
                slot, batch.block_tables[index], int(batch.context_lens[index]), int(batch.num_drafts[index])
            )
        sampled_slots, num_drafts = (
            batch.slots[batch.is_sampled].tolist(),
            batch.num_drafts[batch.is_sampled].tolist(),
        )
        chosen = {
            slot: self._next_token_ids(slot, count) for slot, count in zip(sampled_slots, num_drafts, strict=True)
        }
        failed = [
            self.batch.fail(slot, SequenceFailure.NO_TOKEN_LEFT, "The grammar lets no token come next.")
            for slot, token_ids in chosen.items()
            if not token_ids
        ]
        chosen = {slot: token_ids for slot, token_ids in chosen.items() if token_ids}
        sampled = SampledTokens(
            slots=np.array(list(chosen), dtype=np.int64),
            num_tokens=np.array(list(map(len, chosen.values())), dtype=np.int64),
            token_ids=np.array(
                [token_id for token_ids in chosen.values() for token_id in token_ids], dtype=np.int64
            ),
            failed_sequences=tuple(failed),
            logprobs=self._measure_output(chosen),
            prompt_logprobs=self._measure_prompts(batch),
        )
        self.batch.commit(batch, sampled.slots, sampled.num_tokens, sampled.token_ids)
        return sampled

    def _next_token_ids(self, slot: int, num_drafts: int) -> list[int]:
        """Return the drafts that are right and the token after them; none when the grammar lets none come next."""
        drafts = self.batch.token_ids_of(slot, num_drafts)[len(self.batch.token_ids_of(slot)) :].tolist()
        token_ids: list[int] = []
        for place in range(num_drafts + 1):
            token_id = self._next_token_id(slot, place)
            if token_id is None:
                # Behind accepted drafts the next step finds the same.
                break
            token_ids.append(token_id)
            if token_ids != drafts[: place + 1]:
                break
        return token_ids

    def _measure_output(self, chosen: dict[int, list[int]]) -> OutputLogprobs:
        slots: list[int] = []
        tokens: list[TokenLogprobs] = []
        for slot, token_ids in chosen.items():
            wanted = self._params[slot].num_logprobs
            if wanted is None:
                continue
            slots += [slot] * len(token_ids)
            tokens += [
                self._measure(slot, len(self.batch.token_ids_of(slot)) + place, token_id, wanted)
                for place, token_id in enumerate(token_ids)
            ]
        return OutputLogprobs(np.array(slots, dtype=np.int64), TokenLogprobs.joined(tokens))

    def _measure_prompts(self, batch: FlatBatch) -> PromptLogprobs:
        parts: list[tuple[int, int, int]] = []
        tokens: list[TokenLogprobs] = []
        for slot, first_row, count in zip(
            batch.slots.tolist(), batch.first_rows.tolist(), batch.num_queries.tolist(), strict=True
        ):
            wanted, position = self._params[slot].num_prompt_logprobs, int(batch.positions[first_row]) + 1
            end = min(position + count, self.batch.num_prompt_tokens(slot))
            if wanted is None or position >= end:
                continue
            parts.append((slot, position, end - position))
            prompt = self.batch.token_ids_of(slot)
            tokens += [self._measure(slot, index, int(prompt[index]), wanted) for index in range(position, end)]
        slots, positions, counts = np.array(parts, dtype=np.int64).reshape(-1, 3).T
        return PromptLogprobs(slots, positions, counts, TokenLogprobs.joined(tokens))

    def _measure(self, slot: int, position: int, token_id: int, num_alternatives: int) -> TokenLogprobs:
        num_known = len(self.batch.token_ids_of(slot))
        before = self.batch.token_ids_of(slot, max(0, position - num_known))[:position]
        next_token_id = self._rule.next_token_id(before, self._starts[slot])
        return self._rule.measure(next_token_id, token_id, num_alternatives)

    def _next_token_id(self, slot: int, place: int) -> int | None:
        """Return the token after the known ones and the drafts before ``place``."""
        token_ids = self.batch.token_ids_of(slot, place)
        matcher = self._matchers[slot]
        if matcher is not None:
            return self._allowed_token_id(matcher, self._rule.draw(token_ids, self._starts[slot]))
        num_output_tokens = len(token_ids) - self.batch.num_prompt_tokens(slot)
        if self._eos_after_tokens is not None and num_output_tokens >= self._eos_after_tokens:
            return self._eos_token_ids[0]
        return self._rule.next_token_id(token_ids, self._starts[slot])

    def _allowed_token_id(self, matcher: GrammarMatcher, draw: int) -> int | None:
        mask = np.zeros(num_mask_words(self._limits.vocab_size), dtype=np.int32)
        if not matcher.is_prepared and not prepare_all([matcher]).all():
            return None
        matcher.fill_mask(mask)
        allowed = np.flatnonzero(allowed_of(mask, self._limits.vocab_size))
        if not len(allowed):
            return None
        token_id = int(allowed[draw % len(allowed)])
        matcher.accept(token_id)
        return token_id

    def _check_context(self, slot: int, block_table: NDArray[np.int32], context_len: int, num_drafts: int) -> None:
        stored = self._stored[block_table].reshape(-1)[:context_len]
        expected = self.batch.token_ids_of(slot, num_drafts)[:context_len]
        differing = np.flatnonzero(stored != expected)
        if len(differing):
            position = int(differing[0])
            block_id = int(block_table[position // self._limits.block_size])
            raise InternalError(
                f"Slot {slot} expects token {expected[position]} at position {position}, but block {block_id} "
                f"holds {'nothing' if stored[position] == _UNWRITTEN else stored[position]} there; its block "
                f"table is {block_table[: -(-context_len // self._limits.block_size)].tolist()}."
            )


def _refuse_what_needs_logits(params: SamplingParams) -> None:
    neutral = SamplingParams()
    for name in ("logit_bias", "allowed_token_ids", "bad_words", "min_output_tokens"):
        if getattr(params, name) != getattr(neutral, name):
            raise UnsupportedField(f"The stub runner has no logits, so it cannot apply {name}.", param=name)


def _powers(count: int) -> NDArray[np.uint64]:
    powers = np.full(max(count, 1), _MULTIPLIER, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
