"""Every trouble that users of disk tiers reported is a test, or stands in OPERATIONS.md (issue 3)."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
REPORTS = REPOSITORY.parent / "shared" / "facts" / "pain.md"
"""The list of reports, which is no part of the package."""
TESTS = [*REPOSITORY.glob("tests/test_pain_*.py"), REPOSITORY / "tests" / "sglang" / "test_pain.py"]
PARTS = ("A", "B", "D")


def reported() -> dict[str, str]:
    """Rows of parts A, B and D of the list, and their second column: where it was reported."""
    if not REPORTS.exists():
        pytest.skip(f"the list of reports is not here: {REPORTS}")
    rows = re.findall(r"^\| ([A-Z]\d+) \| ([^|]*) \|", REPORTS.read_text(), re.MULTILINE)
    return {row: where for row, where in rows if row[0] in PARTS}


def named_tests() -> dict[str, list[str]]:
    names = [
        name for path in TESTS for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    found: dict[str, list[str]] = {}
    for name in names:
        if match := re.match(r"test_([abd]\d+)_", name):
            found.setdefault(match[1].upper(), []).append(name)
    return found


def rows_of_the_guide() -> Iterator[tuple[str, list[str]]]:
    """The rows of the last table of OPERATIONS.md, and their other cells."""
    text = (REPOSITORY / "docs" / "OPERATIONS.md").read_text().split("\n## Known troubles of disk tiers")[1]
    for line in text.split("\n## ")[0].splitlines():
        if re.match(r"\| [A-Z]\d+ \|", line):
            row, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            yield row, cells


def test_every_report_is_a_test_or_outside_our_reach() -> None:
    rows = reported()
    assert len(rows) >= 58, "the list was not read whole"
    covered = named_tests().keys() | dict(rows_of_the_guide()).keys()
    assert not sorted(rows.keys() - covered)
    assert not sorted(covered - rows.keys()), "no such report"


def test_each_test_is_named_after_its_report() -> None:
    """By the row and the number of at least one issue, so that both lead to each other."""
    rows = reported()
    for row, names in named_tests().items():
        numbers = re.findall(r"#(\d+)", rows[row])
        for name in names:
            assert not numbers or any(number in name.split("_") for number in numbers), (name, rows[row])


def test_what_is_outside_our_reach_says_why_and_what_to_do() -> None:
    """Four cells: the report, the reason, and the operator's way out."""
    rows = list(rows_of_the_guide())
    assert len(rows) == len(dict(rows))
    for row, cells in rows:
        assert len(cells) == 3 and all(cells), row
