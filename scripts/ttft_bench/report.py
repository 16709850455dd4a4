"""ttft.json and ttft.md, made from what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server_soak.answers import MOST_DRIFT
from store_bench.report import table
from store_bench.statistics import Summary

from ttft_bench.backends import STATED
from ttft_bench.figures import Figure, Verdict, figures, verdicts
from ttft_bench.plan import TAIL
from ttft_bench.samples import Samples

HEADINGS = {
    "ttft": "Time to first token, prefix only in storage",
    "wait": "Of that, waiting for the storage",
    "answered": "Write-through at 0 % hits, until answered",
    "stored": "Write-through at 0 % hits, until stored",
}
DEFINITIONS = f"""\
* **One server** serves all backends: they are attached to it and detached from it over HTTP. So everything
  but the storage is the same: process, model, pools, page size, host layout, flags.
* **Turn**: one length in one round. Every backend is asked the same prompts, one at a time; turns of one
  round follow each other, and the order of backends moves on by one each turn. After a backend was attached,
  one page is stored that is not timed.
* **TTFT**: from before the connection is made until the first event with a token has arrived, by the clock
  of the client (streamed `/generate`, greedy).
* **From storage**: the prompt is a stored prefix and {TAIL} tokens that are in no cache. Before each one the
  caches on device and host are flushed, so the prefix is in the storage only, and there in the page cache of
  the operating system. Hit tokens are those that SGLang reports as from storage. `none` computes all.
* **Waiting for the storage**: for which SGLang says that its scheduler held the request back until the prefix
  had been fetched into the host cache (`storage_prefetch_wait`). What is left of TTFT is the same for `file`
  and `ours`: the copy to the device, and the prefill of the end of the prompt, for which torch's attention
  takes as long as for all of it.
* **At 0 % hits**: all prompts of a turn, none seen before, one right after the other, one new token each.
  **Until answered**: from sending the first until the last was answered. **Until stored**: until SGLang
  has written every page (looked at every 50 ms). Both in seconds for each prompt.
* **Ratio**: to the seconds of the backend that is named, for the same prompt or turn; its median, least and
  most. Below 1 is faster. The overhead of write-through is the ratio to `none` less 1.
* **Verdicts** compare medians, however wide the spread is.
* Every answer is compared with the one computed without storage: token ids must be equal, log
  probabilities within {MOST_DRIFT:g}. Tokens from device, host and storage must be as expected. Else the
  run fails.
* The prefill of a CPU is slow beside that of a GPU, and torch makes the copies between device and host:
  ratios to `none` say little about a GPU server. What the storage itself takes is real.
"""


def write(folder: Path, about: dict[str, Any], samples: Samples, wrong: Sequence[str]) -> str:
    """Write ttft.json and ttft.md to a folder that exists. Returns the text of the latter.

    about: command, date, commit, machine, seconds, settings (name -> text). wrong: what was found wrong.
    """
    found = figures(samples)
    judged = verdicts(found)
    content = {
        "about": about,
        "definitions": DEFINITIONS,
        "problems": list(wrong),
        "drift": samples.drift(),
        "verdicts": [{**asdict(one), "verdict": one.word} for one in judged],
        "figures": [one.record() for one in found],
        "samples": asdict(samples),
    }
    (folder / "ttft.json").write_text(json.dumps(content, indent=1) + "\n")
    text = markdown(about, found, judged, wrong, samples)
    (folder / "ttft.md").write_text(text)
    return text


def markdown(
    about: dict[str, Any],
    found: Sequence[Figure],
    judged: Sequence[Verdict],
    wrong: Sequence[str],
    samples: Samples,
) -> str:
    """The whole document."""
    parts = [
        "# Time to first token: KV cache from storage\n",
        _about(about),
        _outcome(wrong, samples),
        "## Verdicts\n",
        table(
            ("", "ours", "bound", ""),
            [(one.what, f"{one.ours:.3f}", f"{one.bound:.3f}", one.word) for one in judged],
        ),
        *(
            f"## {heading}\n\n" + _table([one for one in found if one.what == what])
            for what, heading in HEADINGS.items()
        ),
        "## Definitions\n",
        DEFINITIONS,
    ]
    return "\n".join(parts)


def _about(about: dict[str, Any]) -> str:
    lines = [
        f"`{about['command']}`\n",
        f"* {about['date']}, commit {about['commit']}, {about['seconds']:.0f} s",
        f"* {about['machine']}",
        *(f"* {name}: {text}" for name, text in about["settings"].items()),
        *(f"* `{name}`: {text}" for name, text in STATED.items()),
    ]
    return "\n".join(lines) + "\n"


def _outcome(wrong: Sequence[str], samples: Samples) -> str:
    if wrong:
        return "\n".join(["**The figures below are not valid:**\n", *(f"* {what}" for what in wrong)]) + "\n"
    answers = len(samples.differences())
    return (
        f"All {answers} answers with a storage are the computed ones (log probabilities differ by "
        f"{samples.drift():.1g} at most), and all tokens came from where they should.\n"
    )


def _table(found: Sequence[Figure]) -> str:
    """Figures of one quantity; all have the same ratios."""
    head = ["tokens", "backend", "seconds", "spread"]
    head += [word for base in found[0].ratios for word in (f"to {base}", "spread")]
    rows = []
    for one in found:
        seconds = ["-", "-"] if one.length is None else _with_spread(one.seconds)
        row = ["all" if one.length is None else f"{one.length:,}", one.backend, *seconds]
        row += [text for ratio in one.ratios.values() for text in _with_spread(ratio)]
        row += [str(one.seconds.count), "-" if one.hit is None else f"{one.hit:,.0f}"]
        rows.append(row)
    return table([*head, "n", "hit tokens"], rows)


def _with_spread(summary: Summary) -> list[str]:
    return [f"{summary.median:.3f}", f"{summary.least:.3f}..{summary.most:.3f}"]
