"""Descriptions that end the compiler's process, keep it for ever or are held wrongly are refused before.

Found by trying llguidance; most of them are small bodies that any client can send.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from libs.errors import InvalidRequest
from libs.grammar import Grammar, GrammarCompiler, GrammarForm, check_grammar
from libs.text import ModelText
from tests.unit.grammar.test_grammar_compiler import compiler, draw, model_text, schema_grammar

__all__ = ["compiler", "model_text"]

Schema = dict[str, Any]


def chain(length: int, link: Any, last: Schema) -> Schema:
    """A schema whose definitions name each the next; ``link`` makes one of a reference."""
    defs = {f"a{index}": link({"$ref": f"#/$defs/a{index + 1}"}) for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{length}": last}}


def lark(text: str) -> Grammar:
    return Grammar(GrammarForm.LARK, (text,))


PATTERNS = [f"a{index}.*b{index}" for index in range(24)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        # Each of these ended the process.
        (chain(3500, lambda ref: ref, {"type": "null"}), "levels"),
        (chain(2000, lambda ref: {"allOf": [ref, {"minimum": 1}]}, {"type": "integer"}), "levels"),
        (chain(1500, lambda ref: {"type": "array", "items": ref, "minItems": 1}, {"type": "null"}), "levels"),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e29}, "minimum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 8}, "minimum"),
        # Each of these kept a thread for minutes.
        ({"allOf": [{"type": "string", "pattern": one} for one in PATTERNS]}, "patterns?"),
        (
            chain(24, lambda ref: ref | {"pattern": PATTERNS[int(ref["$ref"][9:]) - 1]}, {"type": "string"}),
            "pattern",
        ),
        ({"allOf": [{"properties": {"x": {"pattern": one}}} for one in PATTERNS]}, "pattern"),
        # These allowed what the schema forbids.
        ({"type": "integer", "minimum": 2**64 - 6, "maximum": 2**64 - 1}, "minimum"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
        ({"anyOf": [{"type": "array", "items": {"type": "number", "maximum": -1e20}}]}, "maximum"),
        ({"enum": [1, 12345678901234567890123.0]}, "enum"),
        # Every answer ended with an error.
        ({"type": "number", "multipleOf": 65536, "minimum": 0, "maximum": 10**9}, "multipleOf"),
        ({"type": "integer", "multipleOf": 20000, "exclusiveMinimum": 0}, "multipleOf.*beside bounds"),
        # guidance-ai/llguidance#265: an answer ended in the middle.
        (
            {
                "type": "object",
                "properties": {"score": {"type": "integer", "multipleOf": 5}},
                "patternProperties": {"^score$": {"type": "integer"}},
            },
            "score",
        ),
    ],
)
def test_schemas_that_the_compiler_cannot_be_trusted_with_are_refused(schema: Schema, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_grammar(schema_grammar(schema))
    with pytest.raises(InvalidRequest, match=reason):
        check_grammar(lark(f"start: %json {json.dumps(schema)}"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: a0\n" + "\n".join(f"a{index}: a{index + 1}" for index in range(4000)) + '\na4000: "x"', "rules"),
        ("start: A0\n" + "\n".join(f"A{index}: A{index + 1}" for index in range(4000)) + '\nA4000: "x"', "rules"),
        ("start: A\nA: " + " & ".join(f"/(.|\\n)*{one}.*/" for one in PATTERNS), "&"),
        ("start: %json {", "%json"),
        ('start: %json {"const": "\\ud83d"}', "surrogate"),
        ('start: %json {"const": 123456789012345678901234567890}', "64 bits"),
    ],
)
def test_grammars_that_the_compiler_cannot_be_trusted_with_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_grammar(lark(text))


@pytest.mark.parametrize(
    "schema",
    [
        # What real schemas have much of.
        chain(150, lambda ref: {"type": "object", "properties": {"next": ref}}, {"type": "null"}),
        {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"^x{i}$"} for i in range(40)}},
        {
            "anyOf": [{"type": "object"}, {"type": "null"}],
            "type": ["object", "null"],
            "properties": {f"p{i}": {"type": "string", "pattern": f"^x{i}$"} for i in range(40)},
        },
        {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$", "maxLength": 5}]},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"const": 2**64 - 1},
        {"type": "number", "multipleOf": 16_384, "minimum": 0, "maximum": 10**9},
        {"type": "number", "multipleOf": 32_768},
    ],
)
def test_what_schemas_have_much_of_is_compiled(schema: Schema, compiler: GrammarCompiler) -> None:
    compiler.compile(schema_grammar(schema))


def test_text_in_a_grammar_is_not_taken_for_rules(compiler: GrammarCompiler) -> None:
    colons = json.dumps("a: b & " * 2000)

    compiler.compile(lark(f'start: "x" | {colons} | /{"a:&" * 400}/ // {"a: b" * 2000}'))
    check_grammar(lark(f'start: %json {{"description": {colons}, "type": "null"}}'))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 2},
        # As Zod writes a record.
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 1,
        },
        {"type": "object", "properties": {"uniqueItems": {"const": False}}, "required": ["uniqueItems"]}
        | {"additionalProperties": False, "unevaluatedProperties": True, "dependentRequired": {}, "not": False},
        {"oneOf": [{"const": 1, "title": "One"}, {"const": True}, {"enum": [2, "1", None]}]},
    ],
)
def test_what_means_the_same_in_other_words_is_taken(
    schema: Schema, compiler: GrammarCompiler, model_text: ModelText
) -> None:
    outputs = [draw(compiler.compile(schema_grammar(schema)), model_text, seed) for seed in range(3)]

    for output, is_complete in outputs:
        if is_complete:
            jsonschema.validate(json.loads(output), schema)
    assert any(is_complete for _, is_complete in outputs)


def test_branches_with_a_value_in_common_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="oneOf"):
        compiler.compile(schema_grammar({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}))


def test_a_choice_may_have_any_character(compiler: GrammarCompiler, model_text: ModelText) -> None:
    literal = '\x00\x1f\x7f\u2028\\/"\n\t<|im_end|>'

    output, is_complete = draw(compiler.compile(Grammar(GrammarForm.CHOICE, (literal,))), model_text, 1)

    assert is_complete
    assert output == literal


def test_an_expression_does_not_escape_its_own_end() -> None:
    with pytest.raises(InvalidRequest, match="backslash"):
        check_grammar(Grammar(GrammarForm.REGEX, ("a\\",)))
    check_grammar(Grammar(GrammarForm.REGEX, ("a\\\\",)))
