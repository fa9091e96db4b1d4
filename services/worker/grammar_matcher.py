"""Follows sequences that a grammar holds: compiled beside the forward pass, waited for when the first mask is due.

Owns the threads that compile and how long a step waits for them. It must not know how masks are applied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.errors import ClientError, UnsupportedField
from libs.grammar import CompiledGrammar, Grammar, GrammarCompiler
from libs.obs import get_logger
from libs.text import ModelText
from services.worker.step import NewSequence
from services.worker.token_mask import TokenMask, TokenMatcher

_log = get_logger("grammar")

_NUM_THREADS: Final = 2
# A step waits so long for all of its grammars at most. The gateway has compiled them before, within the same limits
# of work, so this is reached only on a machine that is far slower or overloaded.
_MAX_WAIT_SECONDS: Final = 1.0
_TOO_MUCH_WORK: Final = (
    "The grammar cannot be followed further, because its next token takes more work than is allowed. "
    "Make it simpler, with fewer or shorter repetitions and alternatives."
)


class GrammarMatcher:
    """A ``TokenMatcher`` whose grammar may still be on its way.

    A grammar that cannot be followed allows no token, which ends its sequence and no other.
    """

    def __init__(self, compiling: Future[CompiledGrammar]) -> None:
        self._compiling = compiling
        self._compiled: CompiledGrammar | None = None
        self._failure: str | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether the grammar is there, or will never be."""
        return self._compiled is not None or self._failure is not None

    @property
    def failure(self) -> str | None:
        """Why masks allow nothing, as a sentence; None while nothing is wrong."""
        return self._failure

    def prepare(self, timeout_seconds: float) -> bool:
        """Wait until the grammar is there; False when that takes longer than ``timeout_seconds``."""
        try:
            self._compiled = self._compiling.result(timeout=max(0.0, timeout_seconds))
        except TimeoutError:
            return False
        except ClientError as error:
            _log.warning("grammar not compiled", error=error.message)
            self._failure = error.message
        return True

    def fill_mask(self, mask: TokenMask) -> None:
        """Write which tokens may come next: none where something is wrong."""
        assert self.is_prepared, "a mask was filled before its grammar was there"
        if self._compiled is None:
            mask[:] = 0
            return
        self._compiled.fill_mask(mask)
        if self._compiled.failure is not None:
            _log.warning("grammar failed", error=self._compiled.failure)
            self._failure = _TOO_MUCH_WORK

    def accept(self, token_id: int) -> None:
        """Go on with a token that the last mask allowed."""
        assert self._compiled is not None, "a token was accepted before the first mask"
        self._compiled.accept(token_id)


def prepare_all(matchers: Sequence[TokenMatcher]) -> NDArray[np.bool_]:
    """Wait for all matchers of a step within one bound; return which are prepared, ``[num_matchers]``."""
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    return np.array([matcher.prepare(deadline - time.monotonic()) for matcher in matchers], dtype=np.bool_)


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
        return GrammarMatcher(self._threads.submit(_compile, self._compiler, grammar, output_token_ids))

    def close(self) -> None:
        """Stop the threads; grammars that nobody has begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _compile(compiler: GrammarCompiler, grammar: Grammar, output_token_ids: Sequence[int]) -> CompiledGrammar:
    """Return the grammar where the output has come to; one of a sequence that comes back has some already."""
    compiled = compiler.compile(grammar)
    for token_id in output_token_ids:
        compiled.accept(token_id)
    return compiled
