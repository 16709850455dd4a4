"""What the demo measured: as a table, and judged. Pure functions, no server and no engine needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpu_engine.server import Generation
from cpu_engine.tiny_model import DegenerateOutputError, require_varied_output
from rich import box
from rich.console import Console
from rich.table import Table

Expect = Literal["computed", "device", "storage"]
"""Where a prompt's KV cache has to come from: nowhere (all is computed), the device (the part it shares with
the prompt before), or the storage (all but the last page; a part may be on the device already)."""


@dataclass(frozen=True)
class Row:
    """One request. The first row of each prompt is the reference for its later ones."""

    step: str
    prompt: str
    expect: Expect
    result: Generation

    @property
    def computed(self) -> int:
        """Prompt tokens that were in no cache."""
        return self.result.prompt_tokens - self.result.cached_tokens


def references(rows: Sequence[Row]) -> dict[str, Row]:
    """The first row of each prompt."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.prompt, row)
    return first


def problems(rows: Sequence[Row], page_size: int) -> list[str]:
    """Why these rows do not show what the demo is to show; empty when they do.

    page_size: tokens. Caches hold whole pages, so up to one page of a known prompt is computed again.
    """
    first = references(rows)
    found = (
        [] if any(row.expect == "storage" for row in rows) else ["no request was made that needs the store"]
    )
    try:
        require_varied_output([row.result.output_ids for row in first.values()])
    except DegenerateOutputError as error:
        found.append(f"the reference output proves nothing: {error}")
    for row in rows:
        wrong = _wrong_tiers(row, page_size)
        if row.result.output_ids != first[row.prompt].result.output_ids:
            wrong.append(f"the output differs from {first[row.prompt].step!r}")
        found += [f"{row.step!r}, prompt {row.prompt}: {what}" for what in wrong]
    return found


def _wrong_tiers(row: Row, page_size: int) -> list[str]:
    result = row.result
    if result.device + result.host + result.storage != result.cached_tokens:
        return ["the tokens from device, host and storage do not add up to the cached ones"]
    if row.expect == "computed":
        return [f"{result.cached_tokens} tokens were cached, expected 0"] if result.cached_tokens else []
    if row.expect == "device":
        wrong = [] if result.device else ["no tokens from the device, expected the shared prefix"]
        return wrong + ([f"{result.storage} tokens from storage, expected 0"] if result.storage else [])
    if not result.storage:
        return ["no tokens from storage"]
    if row.computed > page_size:
        return [f"{row.computed} tokens were computed again, expected {page_size} or fewer"]
    return []


def drift(rows: Sequence[Row]) -> float:
    """Largest difference of a token's log probability from the reference's; nan where there are none."""
    first = references(rows)
    differences = [
        abs(ours - reference)
        for row in rows
        if row is not first[row.prompt]
        for ours, reference in zip(
            row.result.logprobs or (), first[row.prompt].result.logprobs or (), strict=False
        )
    ]
    return max(differences, default=float("nan"))


def summary(rows: Sequence[Row]) -> str:
    """What was shown, for the verdict of a demo without problems."""
    hits = [row for row in rows if row.expect == "storage"]
    tokens = sum(row.result.storage for row in hits)
    prompt = sum(row.result.prompt_tokens for row in hits)
    return (
        f"{tokens:,} of {prompt:,} prompt tokens came from storage after flush and restart; "
        f"output identical in all {len(rows)} requests"
    )


def table(rows: Sequence[Row], console: Console) -> Table:
    """The rows for people: with lines on a terminal, else as plain text that is a Markdown table as well."""
    plain = not console.is_terminal or console.is_dumb_terminal
    made = Table("step", "prompt", box=box.MARKDOWN if plain else box.ROUNDED)
    for heading in ("device", "host", "storage", "computed", "seconds"):
        made.add_column(heading, justify="right")
    made.add_column("identical output")
    first = references(rows)
    for row in rows:
        result, reference = row.result, first[row.prompt]
        same = "yes" if result.output_ids == reference.result.output_ids else "NO"
        counts = (result.device, result.host, result.storage, row.computed)
        made.add_row(
            row.step,
            row.prompt,
            *(f"{count:,}" for count in counts),
            f"{result.seconds:.2f}",
            "(reference)" if row is reference else same,
        )
    return made
