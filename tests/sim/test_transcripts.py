"""What the scheduler does in each scenario is what its golden transcript says."""

from __future__ import annotations

import difflib

import pytest

from tests.sim.record import TRANSCRIPTS
from tests.sim.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_goes_as_its_transcript_says(name: str) -> None:
    golden = (TRANSCRIPTS / f"{name}.txt").read_text(encoding="utf-8")

    actual = SCENARIOS[name]().text

    difference = "\n".join(
        difflib.unified_diff(golden.splitlines(), actual.splitlines(), f"{name}.txt", "now", lineterm="", n=2)
    )
    assert not difference, f"\n{difference}\n\nIf this is better: python -m tests.sim.record {name}"


def test_every_transcript_has_a_scenario() -> None:
    assert {path.stem for path in TRANSCRIPTS.glob("*.txt")} == set(SCENARIOS)
