"""Grammars to masks of tokens, with llguidance.

Owns the vocabulary as llguidance wants it, the form of white space, and the limits of compiling and of a step. All
methods may be called from several threads at once; llguidance gives the interpreter's lock back while it works. It
must not know requests or samplers.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import llguidance
import numpy as np
import orjson
from numpy.typing import NDArray

from libs.errors import InvalidRequest
from libs.grammar.grammar import Grammar, GrammarForm, check_grammar
from libs.grammar.schema_faults import explained
from libs.grammar.simpler_schema import may_be_simpler, simpler_schema
from libs.text import Tokenizer

# Between the tokens of JSON: a line break and indentation at most, so that a model cannot go on with white space.
WHITE_SPACE: Final = r"\n?[ ]{0,16}"
JSON_OPTIONS: Final[llguidance._lib.JsonCompileOptions] = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
# In llguidance's units of work, 10,000 to 50,000 to a millisecond: they bound the time of a compilation and of a
# mask, for which all sequences of its step wait, the same on every machine, so that what a gateway has compiled a
# worker compiles too. A unit can be a state that is kept, of some 80 bytes: with 5,000,000 each of ``a{1000000}``
# and its like took 2 s and 380 MB.
_LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=400_000, max_grammar_size=500_000, verbose_errors=False
)
# Otherwise each mask first finds all that can only come in one way, however long: 20 ms for a constant of 100,000
# characters, 110 ms for a grammar of such. Of options that are said twice the last count; the empty lines keep
# these out of what an error shows of a text.
_OPTIONS: Final = '\n\n\n%llguidance {"no_forcing": true}\n'
_MAX_KNOWN_GRAMMARS: Final = 32
# The empty lines of it, where an error shows the end of a text.
_EMPTY_LINES: Final = re.compile(r"(\n +\d+ \| )+\n*\Z")
_MAX_REASON_CHARACTERS: Final = 500


class CompiledGrammar:
    """Where an output is in a grammar. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._end_token_ids = end_token_ids
        self._has_ended = False

    def copy(self) -> CompiledGrammar:
        """Return another that is in the same place and goes on by itself."""
        return CompiledGrammar(self._matcher.deep_copy(), self._num_words, self._end_token_ids)

    def accept(self, token_id: int) -> None:
        """Go on with a token; one that is not allowed leaves no token to follow."""
        # Steps are sent ahead: after an end token one more may be sampled, which nobody will see.
        if not self._has_ended:
            self._matcher.consume_token(token_id)
            self._has_ended = token_id in self._end_token_ids

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next, packed, ``[num_words]``; none when the work exceeds the limits."""
        if len(mask) < self._num_words:
            # A tokenizer may have more tokens than the model; llguidance writes a bit for each of them.
            whole = np.zeros(self._num_words, dtype=np.int32)
            self.fill_mask(whole)
            mask[:] = whole[: len(mask)]
            return
        # A model's vocabulary is often padded beyond what its tokenizer has tokens for.
        mask[self._num_words :] = 0
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._num_words * mask.itemsize)
        if self._matcher.is_error():
            # llguidance would end the output here, as if it were complete.
            mask[:] = 0

    @property
    def failure(self) -> str | None:
        """Why no token can follow, if the grammar or its work failed."""
        return self._matcher.get_error() if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and remembers some of what it has compiled or refused."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Sequence[int]) -> None:
        """Prepare the vocabulary; at least one end token is needed, or no output could end."""
        self._end_token_ids = frozenset(end_token_ids)
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, end_token_ids)), eos_token=list(end_token_ids)
        )
        self._lock = threading.Lock()
        # What became of grammars, the last used at the end: compiled, or the reason why not.
        self._known: OrderedDict[Grammar, CompiledGrammar | str] = OrderedDict()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the grammar at its beginning.

        Raises:
            InvalidRequest: it is too large, wrong, or asks for what cannot be enforced; the message says what.
        """
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
        if known is None:
            known = self._try(grammar)
            with self._lock:
                self._known[grammar] = known
                while len(self._known) > _MAX_KNOWN_GRAMMARS:
                    self._known.popitem(last=False)
        if isinstance(known, str):
            raise InvalidRequest(known)
        with self._lock:
            return known.copy()

    def _try(self, grammar: Grammar) -> CompiledGrammar | str:
        try:
            check_grammar(grammar)
            return self._compile(grammar)
        except InvalidRequest as error:
            # Kept too: who sends a bad grammar again and again is answered without work.
            return error.message

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = CompiledGrammar(
            llguidance.LLMatcher(
                self._vocabulary,
                llguidance.LLMatcher.grammar_from_lark(_lark_of(grammar) + _OPTIONS),
                log_level=0,
                limits=_LIMITS,
            ),
            self._num_words,
            self._end_token_ids,
        )
        if compiled.failure is None:
            # Some grammars prove to be empty or endless only when their first tokens are looked for.
            mask = np.zeros(self._num_words, dtype=np.int32)
            compiled.copy().fill_mask(mask)
            if not mask.any():
                raise InvalidRequest(f"The {_NAMES[grammar.form]} allows no output, or none that can be found.")
        if compiled.failure is not None:
            reason = _EMPTY_LINES.sub("\n", compiled.failure)
            if grammar.form is GrammarForm.JSON_SCHEMA:
                reason = explained(grammar.text, reason)
            raise InvalidRequest(
                f"The {_NAMES[grammar.form]} cannot be enforced: {reason[:_MAX_REASON_CHARACTERS]}"
            )
        return compiled


_NAMES: Final = {
    GrammarForm.JSON_SCHEMA: "JSON schema",
    GrammarForm.REGEX: "regular expression",
    GrammarForm.LARK: "grammar",
    GrammarForm.CHOICE: "choice",
}


class _Vocabulary:
    """A tokenizer as ``llguidance.TokenizerWrapper`` takes it."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_token_ids[0]
        self.bos_token_id: int | None = None
        token_ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in token_ids]
        # No grammar of text allows these, whatever letters their names have.
        self.special_token_ids = [
            token_id for token_id in token_ids if tokenizer.is_special(token_id) or token_id in end_token_ids
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, allow_special=False)


def _lark_of(grammar: Grammar) -> str:
    """Return the grammar in llguidance's form of Lark."""
    match grammar.form:
        case GrammarForm.JSON_SCHEMA:
            return f"start: %json {compiler_schema(orjson.loads(grammar.text))}"
        case GrammarForm.REGEX:
            # A digit is one of ten, as in JSON, not any of Unicode's.
            return f"start: /{llguidance.regex_to_lark(grammar.text, 'd')}/"
        case GrammarForm.LARK:
            return grammar.text
        case GrammarForm.CHOICE:
            return "start: " + " | ".join(map(lark_literal, grammar.texts))


def compiler_schema(schema: Mapping[str, Any]) -> str:  # Any: a JSON document.
    """Return a schema as the compiler is given it, as JSON: with its options, in words that it takes."""
    text = orjson.dumps({**schema, "x-guidance": JSON_OPTIONS})
    if may_be_simpler(text):
        text = orjson.dumps({**simpler_schema(schema), "x-guidance": JSON_OPTIONS})
    return text.decode()


def lark_literal(text: str) -> str:
    """Return a text as a string of Lark, which takes no control character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
