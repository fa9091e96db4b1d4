"""The fields that hold an answer to a form: what is read, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from libs.errors import InvalidRequest, OctavoError, UnsupportedField
from libs.grammar import Grammar, GrammarForm
from services.gateway.openai_fields import check_chat_fields
from services.gateway.output_constraints import parse_output_constraint

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA} | fields}


@pytest.mark.parametrize(
    ("fields", "form", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarForm.JSON_SCHEMA, '{"type":"object"}'),
        ({"response_format": named(strict=True, description="d")}, GrammarForm.JSON_SCHEMA, SCHEMA),
        ({"response_format": named(strict=None)}, GrammarForm.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarForm.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarForm.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, GrammarForm.JSON_SCHEMA, {"type": "object"}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, GrammarForm.REGEX, "a+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarForm.LARK, 'start: "a"'),
    ],
)
def test_a_form_is_read(fields: dict[str, Any], form: GrammarForm, text: Any) -> None:
    constraint = parse_output_constraint(fields)

    assert constraint is not None
    assert constraint.grammar.form is form
    read: Any = constraint.grammar.text
    # The order of properties is that of the answer, so it must survive.
    assert read == text or json.dumps(json.loads(read)) == json.dumps(text)


def test_a_choice_has_each_string_once() -> None:
    constraint = parse_output_constraint({"structured_outputs": {"choice": ["a", "b", "a"]}})

    assert constraint is not None
    assert constraint.grammar == Grammar(GrammarForm.CHOICE, ("a", "b"))


def test_gbnf_is_read_as_lark() -> None:
    constraint = parse_output_constraint({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}})

    assert constraint is not None
    assert "start:" in constraint.grammar.text


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}]
)
def test_without_a_form_any_text_will_do(fields: dict[str, Any]) -> None:
    assert parse_output_constraint(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": named(name="no spaces")}, "response_format.json_schema.name"),
        ({"response_format": named(schema=None)}, "response_format.json_schema.schema"),
        ({"response_format": named(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": named(extra=1)}, "response_format.json_schema"),
        ({"response_format": named(schema={"items": {"x-guidance": {}}})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 4097}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"choice": ["a"] * 2 + [str(i) for i in range(1024)]}},
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"grammar": "root ::= ((("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"nothing": 1}}, "structured_outputs.nothing"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_a_wrong_form_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_output_constraint(fields)

    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_what_would_break_a_form_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as refused:
        parse_output_constraint(fields)

    assert refused.value.param == param


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_an_old_name_is_refused_with_the_new_one(name: str) -> None:
    with pytest.raises(OctavoError, match=rf"structured_outputs\.{name}"):
        check_chat_fields({f"guided_{name}": "a"})
    check_chat_fields({f"guided_{name}": None})
