"""Follows sequences that a grammar holds: compiled beside the forward pass, waited for when the first mask is due.

Owns the threads that compile and how long a step waits for them. It must not know how masks are applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from libs.errors import ClientError, UnsupportedField
from libs.grammar import CompiledGrammar, GrammarCompiler
from libs.obs import get_logger
from libs.text import ModelText
from services.worker.step import NewSequence
from services.worker.token_mask import TokenMask

_log = get_logger("grammar")

_NUM_THREADS: Final = 2
# A step waits so long for a grammar at most. The gateway has compiled it before, within the same limits of work,
# so this is reached only on a machine that is far slower or overloaded.
_MAX_WAIT_SECONDS: Final = 1.0


class GrammarMatcher:
    """A ``TokenMatcher`` whose grammar may still be on its way.

    A grammar that cannot be followed allows no token, which ends its sequence and no other.
    """

    def __init__(self, compiling: Future[CompiledGrammar], output_token_ids: Sequence[int]) -> None:
        self._compiling = compiling
        self._output_token_ids = output_token_ids
        self._compiled: CompiledGrammar | None = None
        self._is_late = False

    @property
    def is_late(self) -> bool:
        """Whether the grammar was not compiled when it was due; nothing is wrong with it then."""
        return self._is_late

    def fill_mask(self, mask: TokenMask) -> None:
        """Write which tokens may come next; waits for the grammar at the first time."""
        compiled = self._compiled or self._wait()
        if compiled is None:
            mask[:] = 0
            return
        compiled.fill_mask(mask)
        if compiled.failure is not None:
            _log.warning("grammar failed", error=compiled.failure)

    def accept(self, token_id: int) -> None:
        """Go on with a token that the last mask allowed."""
        assert self._compiled is not None, "a token was accepted before the first mask"
        self._compiled.accept(token_id)

    def _wait(self) -> CompiledGrammar | None:
        try:
            compiled = self._compiling.result(timeout=_MAX_WAIT_SECONDS)
        except (ClientError, TimeoutError) as error:
            self._is_late = isinstance(error, TimeoutError)
            _log.warning("grammar not compiled", error=str(error) or type(error).__name__)
            return None
        # A sequence that comes back brings its output along; the grammar follows it again.
        for token_id in self._output_token_ids:
            compiled.accept(token_id)
        self._compiled = compiled
        return compiled


class GrammarMatchers:
    """Makes the matchers of one model's sequences."""

    def __init__(self, text: ModelText) -> None:
        self._compiler = GrammarCompiler(text.tokenizer, text.eos_token_ids) if text.eos_token_ids else None
        # Its queue is bounded by the sequences that a step may bring.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def matcher_of(self, sequence: NewSequence) -> GrammarMatcher | None:
        """Begin to compile a sequence's grammar, and return what follows it; None for a sequence without one.

        Raises:
            UnsupportedField: the model has no end token, so that no output could end where its grammar does.
        """
        grammar = sequence.sampling_params.grammar
        if grammar is None:
            return None
        if self._compiler is None:
            raise UnsupportedField("A model without an end token cannot follow a grammar.", param="grammar")
        output_token_ids = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
        return GrammarMatcher(self._threads.submit(self._compiler.compile, grammar), output_token_ids)

    def close(self) -> None:
        """Stop the threads; grammars that nobody has begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
