"""Requests that schemathesis makes of ``/openapi.json``, to a whole ``octavo up`` whose worker is the stub.

Half of them keep to the document and half break it somewhere. Whatever comes, the answer is no fault of the server
and is one that the document tells of: its status, its content type and its body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.octavo import RunningOctavo, start_octavo

# Answers are short, and there is an end to them, so that a run is requests and not tokens.
OCTAVO = (
    *("--set", "worker.runner=stub"),
    *("--set", "gateway.default_max_tokens=4"),
    *("--set", "gateway.log_level=warning"),
    *("--set", "engine.log_level=warning"),
)
MAX_TOKENS = 4
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
# Longer than any answer may take: a request that hangs fails.
TIMEOUT_SECONDS = 20.0


@dataclass(slots=True)
class Tally:
    """What was sent and answered."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def num_requests(self) -> int:
        return self.statuses.total()

    def shown(self) -> str:
        return "\n".join(f"{path} {status}: {count}" for (path, status), count in sorted(self.statuses.items()))


def send_generated(base_url: str, num_requests: int, first_seed: int) -> Tally:
    """Send about so many requests, most of them to the routes that generate; the same ones for the same seed."""
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    # Any: an operation that cannot be read has no ok(), and the test ends there.
    found: list[Any] = list(schema.get_all_operations())
    operations = [one.ok() for one in found]
    with_body = [operation for operation in operations if operation.body]
    tally = Tally()
    with requests.Session() as session:
        for number, operation in enumerate(operations):
            num_examples = num_requests // (2 * len(with_body)) if operation.body else 1
            for mode in schemathesis.GenerationMode:
                if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                    continue
                send(operation, mode, num_examples, first_seed + number, session, tally)
    return tally


def send(
    operation: Any, mode: Any, num_examples: int, first_seed: int, session: requests.Session, tally: Tally
) -> None:
    @seed(first_seed)
    @settings(
        max_examples=num_examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        case.body = with_short_answer(
            case.body if mode is schemathesis.GenerationMode.NEGATIVE else reconciled(case.body)
        )
        response = case.call(session=session, timeout=TIMEOUT_SECONDS)
        tally.statuses[operation.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    one()


def with_short_answer(body: Any) -> Any:
    """Return a body whose answer is short: an output limit that is one is made small."""
    if not isinstance(body, Mapping):
        return body
    short = {name: MAX_TOKENS for name in LIMITS if isinstance(body.get(name), int) and body[name] > MAX_TOKENS}
    return {**body, **short}


def reconciled(body: Any) -> Any:
    """Return a body without fields that contradict each other, which a schema cannot tell and which are refused."""
    if not isinstance(body, Mapping):
        return body
    is_streaming = body.get("stream") is True
    contradicting = {
        "stream_options": not is_streaming,
        "prompt_logprobs": is_streaming,
        "top_logprobs": body.get("logprobs") is not True,
        # Made up, they are seldom of the vocabulary, or of a language.
        "logit_bias": True,
        "structured_outputs": bool(body.get("response_format") or body.get("tools")),
        "response_format": bool(body.get("tools")),
        "max_completion_tokens": True,
        "min_tokens": True,
        "ignore_eos": True,
        "continue_final_message": True,
        "safety_identifier": "user" in body,
        "tool_choice": not body.get("tools") or isinstance(body.get("tool_choice"), dict),
    }
    return {name: value for name, value in body.items() if not contradicting.get(name, False)}


@pytest.fixture(scope="module")
def octavo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOctavo]:
    with start_octavo(tmp_path_factory.mktemp("octavo") / "data", *OCTAVO) as running:
        yield running


def test_no_generated_request_makes_the_server_fail(octavo: RunningOctavo) -> None:
    tally = send_generated(octavo.base_url, 300, 1)

    assert tally.num_requests > 250, tally.shown()
    assert {path for path, status in tally.statuses if status == 200} >= {"/v1/models", "/tokenize"}


# 20,000 in all, in parts that each end in time.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_none_of_twenty_thousand_generated_requests_makes_the_server_fail(octavo: RunningOctavo, part: int) -> None:
    tally = send_generated(octavo.base_url, 2_520, 1_000 * (part + 1))

    print(tally.shown())
    assert tally.num_requests >= 2_500, tally.shown()
