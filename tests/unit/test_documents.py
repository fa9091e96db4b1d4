"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)")
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    links = _LINK.findall(document.read_text())

    missing = [link for link in links if not (document.parent / link).exists()]

    assert missing == []


def test_the_architecture_links_the_file_of_each_step() -> None:
    steps = re.split(r"^\d+\. ", (REPOSITORY / "ARCHITECTURE.md").read_text(), flags=re.MULTILINE)[1:]

    assert len(steps) == 10
    assert all(_LINK.search(step) for step in steps)
