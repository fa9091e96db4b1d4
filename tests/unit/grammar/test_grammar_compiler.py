"""Grammars as masks of tokens: whatever is drawn from the masks belongs to the language."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from libs.errors import InvalidRequest
from libs.grammar import CompiledGrammar, Grammar, GrammarCompiler, GrammarForm
from libs.text import ModelText, load_model_text, resolve_model_path

MAX_TOKENS = 400

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 100},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"a": 'b\n"c"'}},
    {"type": ["string", "null"], "maxLength": 8},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "required": ["x"], "properties": {"x": {"type": "null"}}}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"kind": {"const": "a"}, "more": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["kind"],
        "additionalProperties": {"type": "integer"},
    },
    {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}, "^y_": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {"type": "object", "required": ["never declared"]},
    {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "boolean"}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "integer"}},
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "format": "no-such-format"}, "no-such-format"),
    ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
    ({"$ref": "https://example.com/other.json"}, "example.com"),
    ({"$ref": "#"}, "no output"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than maximum"),
    ({"type": "no-such-type"}, "no-such-type"),
    ({"type": "object", "properties": {"a": {"x-guidance": {"lenient": True}}}}, "x-guidance"),
]


@pytest.fixture(scope="module")
def model_text() -> ModelText:
    return load_model_text(resolve_model_path("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def compiler(model_text: ModelText) -> GrammarCompiler:
    return GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, (json.dumps(schema),))


def allowed_by(compiled: CompiledGrammar, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    compiled.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).astype(np.int64)


def draw(compiled: CompiledGrammar, text: ModelText, seed: int) -> tuple[str, bool]:
    """Return what a model without any idea says, and whether it came to an end."""
    token_ids, is_complete = draw_token_ids(compiled, text, seed)
    assert not any(map(text.tokenizer.is_special, token_ids))
    output = b"".join(map(text.tokenizer.token_bytes, token_ids))
    return output.decode(errors="strict" if is_complete else "replace"), is_complete


def draw_token_ids(compiled: CompiledGrammar, text: ModelText, seed: int) -> tuple[list[int], bool]:
    """Return the tokens of it, without the one that ended it."""
    rng = np.random.default_rng(seed)
    size = text.tokenizer.vocab_size
    short_token_ids = np.array([t for t in range(size) if len(text.tokenizer.token_bytes(t)) <= 1])
    token_ids: list[int] = []
    for _ in range(MAX_TOKENS):
        allowed = allowed_by(compiled, size)
        assert len(allowed), "the grammar led into a dead end"
        # Ends and quotation marks are few among tens of thousands of words; without help a string never ends.
        short = np.intersect1d(allowed, short_token_ids, assume_unique=True)
        token_id = int(rng.choice(short if len(short) and rng.random() < 0.6 else allowed))
        compiled.accept(token_id)
        if token_id in text.eos_token_ids:
            return token_ids, True
        token_ids.append(token_id)
    return token_ids, False


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_every_complete_output_validates(
    schema: dict[str, Any], compiler: GrammarCompiler, model_text: ModelText
) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    num_complete = 0

    for seed in range(30):
        if num_complete == 4:
            break
        output, is_complete = draw(compiler.compile(schema_grammar(schema)), model_text, seed)
        assert not re.search(r"\n\s*\n| {17}", re.sub(r'"(\\.|[^"\\])*("|$)', "string", output)), (
            "white space goes on"
        )
        if is_complete:
            num_complete += 1
            validator.validate(json.loads(output))

    assert num_complete


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_enforced_is_refused_by_name(
    schema: dict[str, Any], reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        compiler.compile(schema_grammar(schema))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarForm.JSON_SCHEMA, ("[]",)),
        Grammar(GrammarForm.JSON_SCHEMA, ("{",)),
        Grammar(GrammarForm.JSON_SCHEMA, ('{"items":' * 70 + "{}" + "}" * 70,)),
        Grammar(GrammarForm.JSON_SCHEMA, ('{"enum":' + "[" * 70 + "]" * 70 + "}",)),
        Grammar(GrammarForm.JSON_SCHEMA, (json.dumps({"description": "x" * 200_000}),)),
        Grammar(GrammarForm.REGEX, ("",)),
        Grammar(GrammarForm.REGEX, ("a" * 5000,)),
        Grammar(GrammarForm.REGEX, ("(",)),
        Grammar(GrammarForm.CHOICE, ()),
        Grammar(GrammarForm.CHOICE, ("a", "")),
        Grammar(GrammarForm.LARK, ("no start",)),
        Grammar(GrammarForm.LARK, ("start: start",)),
    ],
    ids=str,
)
def test_what_is_wrong_or_too_large_is_refused(grammar: Grammar, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(grammar)


class CountingCompiler(GrammarCompiler):
    """Counts its work."""

    num_tries = 0

    def _try(self, grammar: Grammar) -> CompiledGrammar | str:
        self.num_tries += 1
        return super()._try(grammar)


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"not": {}}, {"type": "string", "pattern": "(?=a)b"}])
def test_what_was_compiled_or_refused_is_remembered(model_text: ModelText, schema: dict[str, Any]) -> None:
    """SEC-03."""
    compiler = CountingCompiler(model_text.tokenizer, model_text.eos_token_ids)
    answers = []

    for _ in range(10):
        try:
            compiler.compile(schema_grammar(schema))
            answers.append("")
        except InvalidRequest as error:
            answers.append(error.message)

    assert compiler.num_tries == 1
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("grammar", "expression"),
    [
        (Grammar(GrammarForm.REGEX, (r"[A-Z]{2}\d{1,3}",)), r"[A-Z]{2}\d{1,3}"),
        (Grammar(GrammarForm.CHOICE, ("yes", 'n"o\n', "<|im_end|>", "é🙂")), 'yes|n"o\n|<\\|im_end\\|>|é🙂'),
        (Grammar(GrammarForm.LARK, ('start: "a" b+\nb: "x" | "y"',)), "a[xy]+"),
    ],
)
def test_other_forms_hold(
    grammar: Grammar, expression: str, compiler: GrammarCompiler, model_text: ModelText
) -> None:
    for seed in range(10):
        output, is_complete = draw(compiler.compile(grammar), model_text, seed)
        assert is_complete
        assert re.fullmatch(expression, output), output


def test_outputs_that_share_a_grammar_do_not_share_their_place(
    compiler: GrammarCompiler, model_text: ModelText
) -> None:
    grammar = Grammar(GrammarForm.CHOICE, ("left", "right"))
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    vocab_size = model_text.tokenizer.vocab_size
    before = allowed_by(second, vocab_size).tolist()

    first.accept(model_text.tokenizer.encode("left", allow_special=False)[0])

    assert allowed_by(second, vocab_size).tolist() == before
    assert allowed_by(first, vocab_size).tolist() != before


def test_after_the_end_nothing_but_the_end_may_come(compiler: GrammarCompiler, model_text: ModelText) -> None:
    compiled = compiler.compile(Grammar(GrammarForm.CHOICE, ("a",)))
    vocab_size = model_text.tokenizer.vocab_size
    for token_id in [*model_text.tokenizer.encode("a", allow_special=False), model_text.eos_token_ids[0]]:
        compiled.accept(token_id)

    assert allowed_by(compiled, vocab_size).tolist() == list(model_text.eos_token_ids)
    compiled.accept(model_text.eos_token_ids[0])
    assert allowed_by(compiled, vocab_size).tolist() == list(model_text.eos_token_ids)


def test_a_padded_vocabulary_has_no_tokens_beyond_the_tokenizer(
    compiler: GrammarCompiler, model_text: ModelText
) -> None:
    compiled = compiler.compile(Grammar(GrammarForm.REGEX, ("(.|\n)*",)))
    size = model_text.tokenizer.vocab_size

    assert allowed_by(compiled, size + 4096).max() < size


def test_a_token_that_is_not_allowed_leaves_none(compiler: GrammarCompiler, model_text: ModelText) -> None:
    compiled = compiler.compile(Grammar(GrammarForm.CHOICE, ("a",)))

    compiled.accept(model_text.tokenizer.encode("b", allow_special=False)[0])

    assert allowed_by(compiled, model_text.tokenizer.vocab_size).tolist() == []
    assert compiled.failure is not None


def test_counted_repetitions_take_little_memory(model_text: ModelText) -> None:
    """Each held some 380 MB, as long as it was known."""
    compiler = GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)
    doubling = "\n".join(f"A{level}: A{level + 1} A{level + 1}" for level in range(20))
    grammars = [Grammar(GrammarForm.REGEX, (f"a{{{10**9 + count}}}",)) for count in range(3)]
    grammars.append(Grammar(GrammarForm.LARK, (f'start: A0\n{doubling}\nA20: "a"',)))
    before = resident_megabytes()

    for grammar in grammars:
        compiler.compile(grammar)

    assert resident_megabytes() - before < 400


def resident_megabytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def test_a_mask_is_not_written_beyond_its_end(model_text: ModelText) -> None:
    # Tokenizers get tokens that the model's embedding was never enlarged for; what lies behind is not the mask's.
    compiler = GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)
    compiled = compiler.compile(Grammar(GrammarForm.REGEX, ("[a-z]+",)))
    num_words = -(-model_text.tokenizer.vocab_size // 32)
    whole = np.zeros(num_words, dtype=np.int32)
    compiled.fill_mask(whole)
    memory = np.full(num_words, 7, dtype=np.int32)

    compiled.fill_mask(memory[:-2])

    assert np.array_equal(memory[:-2], whole[:-2])
    assert memory[-2:].tolist() == [7, 7]


def test_a_choice_is_bounded_as_a_whole(compiler: GrammarCompiler) -> None:
    literals = tuple(f"{number:04d}" + "x" * 4000 for number in range(66))

    with pytest.raises(InvalidRequest, match="A choice as a whole has 1 to 262144 characters"):
        compiler.compile(Grammar(GrammarForm.CHOICE, literals))


def test_what_can_come_in_one_way_only_may_be_written_in_any_tokens(
    compiler: GrammarCompiler, model_text: ModelText
) -> None:
    # To find the one way beforehand took as long as the text was, for each mask anew.
    tokenizer = model_text.tokenizer
    compiled = compiler.compile(Grammar(GrammarForm.LARK, ('%llguidance {"no_forcing": false}\nstart: "there"',)))

    allowed = {tokenizer.token_bytes(token_id) for token_id in allowed_by(compiled, tokenizer.vocab_size).tolist()}

    assert {b"t", b"th", b"there"} <= allowed <= {b"t", b"th", b"the", b"ther", b"there"}


def test_a_long_repetition_is_followed(compiler: GrammarCompiler, model_text: ModelText) -> None:
    [token_id] = model_text.tokenizer.encode("a", allow_special=False)
    compiled = compiler.compile(Grammar(GrammarForm.REGEX, ("a{1000000000}",)))

    for _ in range(20):
        assert token_id in allowed_by(compiled, model_text.tokenizer.vocab_size)
        compiled.accept(token_id)


def test_terminals_that_take_too_long_for_a_mask_are_refused(compiler: GrammarCompiler) -> None:
    # Its first mask took 250 ms, in which no sequence of the worker got a token, and a later one 600 ms.
    terminals = [f"T{index}: /[a-z ]*{chr(97 + index % 26)}[a-z]{{{index // 26}}}/" for index in range(300)]
    names = "|".join(f"T{index}" for index in range(300))

    with pytest.raises(InvalidRequest, match="no output, or none that can be found"):
        compiler.compile(Grammar(GrammarForm.LARK, ("\n".join([f"start: ({names})*", *terminals]),)))
