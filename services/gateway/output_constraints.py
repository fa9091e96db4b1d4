"""The form that an answer is held to: ``response_format`` and ``structured_outputs`` of a request.

Owns the meaning and the bounds of these fields. It must not know tokens; whether a schema can be enforced is found
out where the request's text is prepared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llguidance.gbnf_to_lark import gbnf_to_lark

from libs.errors import InvalidRequest, UnsupportedField
from libs.grammar import Grammar, GrammarForm, check_grammar
from services.gateway.openai_fields import check_structured_outputs
from services.gateway.openai_values import schema_text

# The converter is Python: it takes a few microseconds for each, while nobody else gets the event loop.
MAX_GBNF_CHARACTERS: Final = 16_384
# The time that the converter takes grows with their square: 0.1 s for so many.
MAX_GBNF_RULES: Final = 512
_ANY_OBJECT: Final = '{"type":"object"}'
_SCHEMA_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Fields of ``structured_outputs`` of which one says what the output is.
_FORMS: Final = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A grammar, and the field that asked for it."""

    grammar: Grammar
    param: str
    # A form that is part of the grammar, so that it is told which of the two cannot be enforced.
    form: OutputConstraint | None = None


def parse_output_constraint(body: Mapping[str, Any]) -> OutputConstraint | None:
    """Return what the answer is held to, or None for any text.

    Raises:
        InvalidRequest: the fields are wrong, contradict each other or are too large; names the field.
        UnsupportedField: they ask for what is not served.
    """
    response_format = _response_format(body)
    structured = _structured_outputs(body)
    if response_format is not None and structured is not None:
        raise InvalidRequest(
            "'response_format' and 'structured_outputs' both constrain the answer; give one of them.",
            param="structured_outputs",
        )
    constraint = response_format or structured
    if constraint is not None:
        _check_size(constraint)
        _check_beside(body, constraint.param)
    return constraint


def _check_size(constraint: OutputConstraint) -> None:
    try:
        check_grammar(constraint.grammar)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=constraint.param) from error


def check_beside_tools(body: Mapping[str, Any]) -> None:
    """Refuse what would keep an answer with calls from its end."""
    _check_beside(body, "tools")


def _check_beside(body: Mapping[str, Any], param: str) -> None:
    for name, neutral in (("ignore_eos", False), ("min_tokens", 0)):
        if body.get(name) not in (None, neutral):
            raise UnsupportedField(
                f"{name!r} cannot be used with {param!r}: the answer ends where its form is complete.", param=name
            )


def _response_format(body: Mapping[str, Any]) -> OutputConstraint | None:
    value = body.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            "'response_format' must be an object whose 'type' is 'text', 'json_object' or 'json_schema'.",
            param="response_format",
        )
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _refuse_others(value, known, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputConstraint(Grammar(GrammarForm.JSON_SCHEMA, (_ANY_OBJECT,)), "response_format")
    return _named_schema(value.get("json_schema"))


def _named_schema(value: Any) -> OutputConstraint:
    path = "response_format.json_schema"
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{path}' must be an object with 'name' and 'schema'.", param=path)
    _refuse_others(value, {"name", "description", "schema", "strict"}, path)
    name = value.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{path}.name' must be a string of 1 to 64 letters, digits, '_' and '-'.", param=f"{path}.name"
        )
    if not isinstance(value.get("description", ""), str | None):
        raise InvalidRequest(f"'{path}.description' must be a string.", param=f"{path}.description")
    if not isinstance(value.get("strict"), bool | None):
        raise InvalidRequest(f"'{path}.strict' must be true or false.", param=f"{path}.strict")
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"'{path}.schema' must be a JSON schema, an object.", param=f"{path}.schema")
    return OutputConstraint(_schema_grammar(schema, f"{path}.schema"), f"{path}.schema")


def _structured_outputs(body: Mapping[str, Any]) -> OutputConstraint | None:
    value = body.get("structured_outputs")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("'structured_outputs' must be an object.", param="structured_outputs")
    check_structured_outputs(value)
    given = [name for name in _FORMS if value.get(name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            f"'structured_outputs' must have exactly one of {', '.join(_FORMS)}; it has {len(given)}.",
            param="structured_outputs",
        )
    (name,) = given
    return OutputConstraint(_structured_grammar(name, value[name]), f"structured_outputs.{name}")


def _structured_grammar(name: str, value: Any) -> Grammar:
    path = f"structured_outputs.{name}"
    match name, value:
        case "json_object", True:
            return Grammar(GrammarForm.JSON_SCHEMA, (_ANY_OBJECT,))
        case "json", dict():
            return _schema_grammar(value, "structured_outputs.json")
        case "json", str():
            return Grammar(GrammarForm.JSON_SCHEMA, (value,))
        case "regex", str():
            return Grammar(GrammarForm.REGEX, (value,))
        case "grammar", str():
            return Grammar(GrammarForm.LARK, (_lark_of(value),))
        case "choice", [*literals] if all(isinstance(literal, str) for literal in literals):
            return Grammar(GrammarForm.CHOICE, tuple(dict.fromkeys(literals)))
        case _:
            raise InvalidRequest(f"'{path}' must be {_EXPECTED[name]}.", param=path)


_EXPECTED: Final = {
    "json": "a JSON schema, as an object or as a string",
    "json_object": "true or false",
    "regex": "a string",
    "choice": "a list of strings",
    "grammar": "a string",
}


def _lark_of(grammar: str) -> str:
    """Return a grammar in Lark's words; one in llama.cpp's (GBNF) is told by its ``::=``."""
    num_rules = grammar.count("::=")
    if not num_rules:
        return grammar
    if len(grammar) > MAX_GBNF_CHARACTERS:
        raise InvalidRequest(
            f"A grammar in GBNF has at most {MAX_GBNF_CHARACTERS} characters, not {len(grammar)}; "
            "write a longer one in Lark.",
            param="structured_outputs.grammar",
        )
    if num_rules > MAX_GBNF_RULES:
        raise InvalidRequest(
            f"A grammar in GBNF has at most {MAX_GBNF_RULES} rules; this one has {num_rules}.",
            param="structured_outputs.grammar",
        )
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # The converter raises whatever its parser stumbles over.
        raise InvalidRequest(
            f"The grammar cannot be read as GBNF: {error}", param="structured_outputs.grammar"
        ) from error


def _schema_grammar(schema: Mapping[str, Any], param: str) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, (schema_text(schema, param),))


def _refuse_others(value: Mapping[str, Any], known: set[str], path: str) -> None:
    for name in value.keys() - known:
        raise InvalidRequest(f"Unknown field '{path}.{name[:64]}'.", param=path)
