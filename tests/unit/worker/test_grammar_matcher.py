"""A grammar that is still on its way when its first mask is due."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from libs.errors import InvalidRequest
from libs.grammar import CompiledGrammar
from services.worker import grammar_matcher
from services.worker.grammar_matcher import GrammarMatcher, prepare_all


def test_a_grammar_that_is_not_compiled_in_time_is_not_prepared() -> None:
    matcher = GrammarMatcher(Future[CompiledGrammar]())

    assert not matcher.prepare(0.0)
    assert not matcher.is_prepared
    assert matcher.failure is None


def test_a_grammar_that_is_refused_allows_nothing_and_says_why() -> None:
    compiling = Future[CompiledGrammar]()
    compiling.set_exception(InvalidRequest("It allows nothing."))
    matcher = GrammarMatcher(compiling)
    mask = np.ones(4, dtype=np.int32)

    assert matcher.prepare(0.0)
    matcher.fill_mask(mask)

    assert not mask.any()
    assert matcher.failure == "It allows nothing."


def test_all_grammars_of_a_step_share_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "_MAX_WAIT_SECONDS", 0.0)
    refused = Future[CompiledGrammar]()
    refused.set_exception(InvalidRequest("It allows nothing."))

    is_prepared = prepare_all([GrammarMatcher(compiling) for compiling in (Future(), refused, Future())])

    assert is_prepared.tolist() == [False, True, False]
