"""The error tree and its table are complete and agree with the proto."""

from __future__ import annotations

import re
from collections import Counter

import grpc
import pytest

import libs.errors
from libs.errors import (
    ERROR_TABLE,
    ContextLengthExceeded,
    ErrorReason,
    ErrorSpec,
    OctavoError,
    UnavailableError,
    spec_of,
)
from libs.protogen.errors.v1 import errors_pb2

_ROWS = pytest.mark.parametrize("spec", ERROR_TABLE, ids=lambda spec: spec.error_class.__name__)

_CLIENT_CODES = {
    "INVALID_ARGUMENT",
    "ALREADY_EXISTS",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
    "CANCELLED",
}


def _all_classes(root: type[OctavoError]) -> set[type[OctavoError]]:
    return {root}.union(*(_all_classes(child) for child in root.__subclasses__()))


def _leaves() -> set[type[OctavoError]]:
    tree = {error for error in _all_classes(OctavoError) if error.__module__ == "libs.errors.tree"}
    return {error for error in tree if not any(child in tree for child in error.__subclasses__())}


def test_every_leaf_of_the_tree_has_exactly_one_row() -> None:
    rows = Counter(spec.error_class for spec in ERROR_TABLE)

    assert set(rows) == _leaves()
    assert set(rows.values()) == {1}


def test_every_reason_has_exactly_one_row() -> None:
    rows = Counter(spec.reason for spec in ERROR_TABLE)

    assert set(rows) == set(ErrorReason)
    assert set(rows.values()) == {1}


def test_reasons_and_the_proto_enum_name_the_same() -> None:
    of_proto = {
        value.name.removeprefix("ERROR_REASON_")
        for value in errors_pb2.ErrorReason.DESCRIPTOR.values
        if value.name != "ERROR_REASON_UNSPECIFIED"
    }

    assert {reason.value for reason in ErrorReason} == of_proto
    assert all(reason.name == reason.value for reason in ErrorReason)


def test_the_package_exports_and_draws_every_class() -> None:
    classes = _all_classes(OctavoError)
    names = {error.__name__ for error in classes if error.__module__ == "libs.errors.tree"}
    drawing = libs.errors.__doc__ or ""

    assert names <= set(libs.errors.__all__)
    assert {name for name in names if not re.search(rf"\b{name}\b", drawing)} == set()


@_ROWS
def test_http_and_grpc_agree_on_whose_fault_it_is(spec: ErrorSpec) -> None:
    assert spec.grpc_code in grpc.StatusCode.__members__
    assert 400 <= spec.http_status < 600
    assert spec.http_code is None or re.fullmatch("[a-z_]+", spec.http_code)
    if spec.http_status == 429:
        # A right request, and no fault of the server: there was too much of it.
        assert spec.grpc_code == "RESOURCE_EXHAUSTED"
        assert spec.http_type == spec.http_code
        return
    is_clients = spec.http_status < 500
    assert is_clients == (spec.grpc_code in _CLIENT_CODES)
    assert spec.http_type == ("invalid_request_error" if is_clients else "server_error")


@_ROWS
def test_what_is_unavailable_can_be_tried_again_and_nothing_else(spec: ErrorSpec) -> None:
    assert spec.is_retryable == issubclass(spec.error_class, UnavailableError)
    assert spec.is_retryable == (spec.grpc_code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"))


def test_codes_of_openai_are_distinct() -> None:
    codes = Counter(spec.http_code for spec in ERROR_TABLE if spec.http_code is not None)

    assert set(codes.values()) == {1}


def test_a_class_that_groups_others_has_no_row() -> None:
    with pytest.raises(KeyError):
        spec_of(UnavailableError)


def test_the_context_error_names_its_numbers_and_its_field() -> None:
    error = ContextLengthExceeded.of(num_prompt_tokens=9_000, max_output_tokens=1, max_model_len=8_192)

    assert "8192" in error.message
    assert "9000" in error.message
    assert error.param == "messages"
    assert spec_of(error).http_code == "context_length_exceeded"
