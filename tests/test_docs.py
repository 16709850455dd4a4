"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posix_store import segment
from posix_store.errors import Reason
from ucm_sglang.config import SGLangKeys, StoreConfig, config_table

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("model", [StoreConfig, SGLangKeys])
def test_the_readme_lists_every_key_as_the_code_has_it(model: type) -> None:
    """LMCache#1635: users found the accepted configuration by run-time errors."""
    assert config_table(model) in (REPOSITORY / "README.md").read_text(), (
        "README.md differs from config_table(): paste its output there"
    )


def test_operations_names_every_reason() -> None:
    """Every reason that a counter can show is explained to the operator."""
    text = (REPOSITORY / "docs" / "OPERATIONS.md").read_text()
    reasons = {reason.name.lower() for reason in Reason} - {"ok"}
    assert not [reason for reason in sorted(reasons) if reason not in text]


def test_format_states_the_numbers_of_the_code() -> None:
    """Must hold 10: a reader can be written from FORMAT.md alone, so its numbers must be the true ones."""
    text = (REPOSITORY / "docs" / "FORMAT.md").read_text()
    for number in (segment.RECORD_BYTES, segment.SEGMENT_HEADER_BYTES, segment.EXTENT_ALIGNMENT):
        assert re.search(rf"\b{number}\b", text)
    assert f"version {segment.FORMAT_VERSION}" in text
    assert segment.SEGMENT_MAGIC.decode() in text and segment.JOURNAL_MAGIC.decode() in text


def test_links_between_documents_lead_somewhere() -> None:
    for document in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
