"""A grammar that is still on its way when its first mask is due."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from libs.errors import InvalidRequest
from libs.grammar import CompiledGrammar
from services.worker import grammar_matcher
from services.worker.grammar_matcher import GrammarMatcher


def test_a_grammar_that_is_not_compiled_in_time_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "_MAX_WAIT_SECONDS", 0.0)
    matcher = GrammarMatcher(Future[CompiledGrammar](), [])
    mask = np.ones(4, dtype=np.int32)

    matcher.fill_mask(mask)

    assert not mask.any()
    assert matcher.is_late


def test_a_grammar_that_is_refused_is_not_late() -> None:
    compiling = Future[CompiledGrammar]()
    compiling.set_exception(InvalidRequest("It allows nothing."))
    matcher = GrammarMatcher(compiling, [])
    mask = np.ones(4, dtype=np.int32)

    matcher.fill_mask(mask)

    assert not mask.any()
    assert not matcher.is_late
