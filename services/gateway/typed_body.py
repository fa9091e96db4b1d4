"""From a JSON object to a typed body, with errors that name the field.

Owns the conversion and its messages. The types are msgspec's, whose schema is published.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from libs.errors import InvalidRequest
from services.gateway.openai_fields import check_against

Body = TypeVar("Body", bound=msgspec.Struct)

_MISSING: Final = re.compile(r"Object missing required field `(.+?)`")
# msgspec does not say which of a list's values is wrong.
_SOME_INDEX: Final = "[...]"


def convert_body(
    body: Mapping[str, Any], body_type: type[Body], neutral_values: Mapping[str, Callable[[Any], bool]]
) -> Body:
    """Return the body as its type. ``neutral_values`` are fields known and not served, each with a test.

    Raises:
        InvalidRequest: a field that nobody knows, or a value of another type or size; names the field.
        UnsupportedField: a field known and not served, with a value that would change the answer.
    """
    served = frozenset(field.encode_name for field in msgspec.structs.fields(body_type))
    check_against(body, served, neutral_values)
    served_body = {name: value for name, value in body.items() if name not in neutral_values}
    try:
        return msgspec.convert(served_body, body_type, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(served_body, body_type, str(error)) from error


def _invalid(body: Mapping[str, Any], body_type: type[msgspec.Struct], message: str) -> InvalidRequest:
    reason, _, place = message.partition(" - at `$")
    path = _with_index(body, body_type, place.removesuffix("`").removeprefix("."))
    missing = _MISSING.match(reason)
    if missing is not None:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"'{param}' must be given.", param=param)
    return InvalidRequest(f"'{path}' cannot be served: {reason[0].lower()}{reason[1:]}.", param=path or None)


def _with_index(body: Mapping[str, Any], body_type: type[msgspec.Struct], path: str) -> str:
    """Put the index of the first wrong value into a path such as ``messages[...].role``."""
    name, mark, rest = path.partition(_SOME_INDEX)
    values = body.get(name)
    if not mark or not isinstance(values, list):
        return path

    def is_wrong(num_values: int) -> bool:
        try:
            msgspec.convert({**body, name: values[:num_values]}, body_type, strict=True)
        except msgspec.ValidationError as error:
            return _SOME_INDEX in str(error)
        return False

    # The shortest beginning that is wrong, found in as many looks as its length has binary digits.
    num_values = bisect_left(range(1, len(values) + 1), True, key=is_wrong) + 1
    return f"{name}[{num_values - 1}]{rest}"
