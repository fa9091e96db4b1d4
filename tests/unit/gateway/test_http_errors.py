"""Errors in OpenAI's shape."""

from __future__ import annotations

import orjson

from libs.errors import (
    ERROR_TABLE,
    ContextLengthExceeded,
    InternalError,
    OctavoError,
    Overloaded,
    Unauthenticated,
    UnavailableError,
    UnsupportedField,
)
from services.gateway.http_errors import error_body, http_error, known_error
from services.gateway.sse import error_event


def test_every_error_has_openais_shape_and_its_own_status() -> None:
    for spec in ERROR_TABLE:
        answer = http_error(spec.error_class("Why."))
        error = orjson.loads(answer.body)["error"]

        assert answer.status == spec.http_status >= 400
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] == "Why."


def test_the_field_at_fault_is_named() -> None:
    error = orjson.loads(error_body(UnsupportedField("No.", param="tools")))["error"]

    assert (error["param"], error["code"]) == ("tools", "unsupported_field")


def test_both_numbers_of_a_context_error_are_told() -> None:
    error = ContextLengthExceeded.of(num_prompt_tokens=9000, max_output_tokens=1, max_model_len=8192)
    body = orjson.loads(error_body(error))["error"]

    assert body["code"] == "context_length_exceeded"
    assert "9000" in body["message"]
    assert "8192" in body["message"]


def test_a_time_to_come_back_is_a_whole_number_of_seconds_and_at_least_one() -> None:
    assert http_error(Overloaded("x", retry_after_seconds=0.01)).headers["Retry-After"] == "1"
    assert http_error(Overloaded("x", retry_after_seconds=1.2)).headers["Retry-After"] == "2"
    assert "Retry-After" not in http_error(InternalError("x")).headers


def test_a_missing_key_says_how_to_send_one() -> None:
    assert http_error(Unauthenticated("x")).headers["WWW-Authenticate"].startswith("Bearer")


def test_a_message_that_is_no_unicode_is_still_json() -> None:
    assert orjson.loads(error_body(InternalError("path \udcff")))["error"]["message"] == "path ?"


def test_an_error_of_a_group_becomes_internal() -> None:
    assert isinstance(known_error(UnavailableError("x")), InternalError)
    assert isinstance(known_error(OctavoError("x")), InternalError)
    assert orjson.loads(error_event(OctavoError("x"))[6:])["error"]["code"] == "internal_error"
