"""What a server's log says that it should not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LOGGING_CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "[%(asctime)s] %(levelname)s %(name)s %(process)d: %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"level": "INFO", "handlers": ["out"]},
}
"""For SGLANG_LOGGING_CONFIG_PATH: SGLang's own format says neither the level nor the logger."""

_RECORD = re.compile(r"^(?=\[\d{4}-\d\d-\d\d )", re.MULTILINE)
_WRONG = re.compile(
    r"\] (?:ERROR|CRITICAL) |^Traceback|\b[A-Z]\w*(?:Error|Exception)\b|(?i:\berror\b|\bexception\b)",
    re.MULTILINE,
)
_OUR_WARNING = re.compile(r"\] WARNING (?:posix_store|ucm_sglang)")


@dataclass(frozen=True)
class Harmless:
    """What SGLang on a CPU logs though nothing is wrong. What the pattern matches is taken out of the log."""

    name: str
    pattern: re.Pattern[str]
    reason: str


HARMLESS = (
    Harmless(
        "freeze_gc",
        re.compile(
            r"^\[[^\n]*http_server \d+: post-warmup freeze_gc failed\nTraceback .*"
            r"^requests\.exceptions\.ConnectionError: [^\n]* url: /freeze_gc [^\n]*$",
            re.MULTILINE | re.DOTALL,
        ),
        "SGLang asks itself for this before its port is open, now and then; it has nothing to do with caches",
    ),
    Harmless(
        "model import",
        re.compile(
            r"^\[[^\n]*WARNING sglang\.srt\.models\.registry \d+: Ignore import error when [^\n]*$",
            re.MULTILINE,
        ),
        "models whose packages or GPU kernels are not installed; none of them is served here",
    ),
)


def without_harmless(record: str) -> tuple[str, list[str]]:
    """What is left of a record without harmless parts, and the names of those."""
    found = []
    for known in HARMLESS:
        record, number = known.pattern.subn("", record)
        found += [known.name] * number
    return record, found


def is_fault(record: str) -> bool:
    """Is this an error, does it hold a traceback or name an exception, or is it a warning of ours?"""
    rest, _ = without_harmless(record)
    return bool(_WRONG.search(rest) or _OUR_WARNING.search(rest))


class LogReader:
    """Reads a log as it grows, so that a fault is known soon after it was logged. One thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""
        self.faults: list[str] = []
        self.records = 0
        self.harmless: Counter[str] = Counter()

    def read(self, last: bool = False) -> list[str]:
        """New faults. The last record may not be complete yet: it waits, unless this is the last look."""
        if not self._path.exists():
            return []
        with self._path.open(errors="replace") as file:
            file.seek(self._offset)
            self._rest += file.read()
            self._offset = file.tell()
        records = _RECORD.split(self._rest)
        self._rest = "" if last else records.pop()
        new = [record.strip() for record in records if is_fault(record)]
        self.faults += new
        self.records += sum(bool(record) for record in records)
        self.harmless.update(name for record in records for name in without_harmless(record)[1])
        return new
