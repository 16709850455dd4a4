"""What a soak must show: checks of its records, and of the store that is left. No server is needed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posix_store import PosixStore
from posix_store.root import StoreRoot
from server_soak.run import Records, Request, Settings, Soak
from server_soak.server_log import HARMLESS, LogReader
from server_soak.watch import Sample, StoreWatch
from server_soak.workload import PAGE_BYTES, WORKING_SET_FACTOR

MIB = 1 << 20
SLICES = 10
"""The load is looked at in so many parts, one after the other."""
MOST_GROWTH = 32 * MIB
"""Of the memory of a server's processes in the last third of a life over the middle third, beyond what the
server without HiCache grows by. In half an hour a leak of a tenth of what goes through the store would be
more; without a leak it is 1 MiB."""
MOST_NEW_FDS = 16
"""Descriptors, likewise. The store keeps segments open; a new one is opened before an old one is closed."""
MOST_TIES = 0.02
"""Of the requests that ran together: ties are rare, or they are not ties."""
LEAST_VARIED = 0.9
"""Of the answers, the share that has 4 different tokens or more, and the share that no other prompt has."""


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str


@dataclass
class Verdict:
    """The outcome. numbers: what was measured, for people and for the JSON file."""

    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def add(self, name: str, ok: bool, detail: str) -> None:
        self.checks.append(Check(name, bool(ok), detail))

    def failed(self) -> list[str]:
        return [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]

    def lines(self) -> Iterator[str]:
        for check in self.checks:
            yield f"  {'ok    ' if check.ok else 'FAILED'}  {check.name}: {check.detail}"


def judge(soak: Soak) -> Verdict:
    """All checks of a soak that has ended."""
    verdict = Verdict()
    records, settings = soak.records, soak.settings
    verdict.add("servers", not records.died, records.died.strip() or "answered every request")
    if not records.requests:
        verdict.add("requests", False, "none was answered")
        return verdict
    judge_answers(records, verdict)
    judge_log(soak.log, verdict)
    judge_disk(soak.watch, settings, soak.workload.least_bytes, verdict)
    judge_hits(records, verdict)
    judge_restart(records, verdict)
    judge_growth(records.samples, verdict)
    judge_store(str(soak.store), verdict)
    verdict.numbers |= numbers(soak)
    return verdict


def judge_answers(records: Records, verdict: Verdict) -> None:
    requests = records.requests
    together = sum(not request.alone for request in requests)
    worst = max(request.drift for request in requests)
    alone = max(request.drift for request in requests if request.alone)
    verdict.add(
        "correct output", not records.wrong,
        f"{len(requests)} answers, {len(records.wrong)} differ from the server without HiCache; "
        f"largest drift of a log probability: {alone:.3g} alone, {worst:.3g} at all",
    )  # fmt: skip
    verdict.add(
        "ties", len(records.ties) <= 1 + MOST_TIES * together,
        f"{len(records.ties)} of {together} requests that ran together were decided by rounding",
    )  # fmt: skip
    verdict.add(
        "reference", records.reference_cached == 0,
        f"{records.reference_cached} prompt tokens of the server without HiCache were cached",
    )  # fmt: skip
    first_asked = [request for request in requests if request.kind != "retry"]
    varied = sum(request.distinct >= 4 for request in first_asked) / max(1, len(first_asked))
    different = len({request.digest for request in first_asked}) / max(1, len(first_asked))
    verdict.add(
        "answers tell pages apart", min(varied, different) >= LEAST_VARIED,
        f"{varied:.1%} have 4 different tokens or more, {different:.1%} are different from all others",
    )  # fmt: skip


def judge_log(log: LogReader, verdict: Verdict) -> None:
    known = ", ".join(f"{number} of {name}" for name, number in log.harmless.items()) or "none"
    detail = f"{log.records} records, {len(log.faults)} of them faults (known as harmless: {known})"
    verdict.add("clean log", not log.faults and log.records > 0, "; ".join([detail, *log.faults[:3]]))


def judge_disk(watch: StoreWatch, settings: Settings, working_set: int, verdict: Verdict) -> None:
    capacity = settings.shape.capacity_bytes
    verdict.add(
        "disk use bounded", not watch.exceeded and watch.error is None and watch.samples > 100,
        f"peak {watch.peak:,} of {capacity:,} bytes in {watch.samples} looks ({watch.unsettled} unsettled); "
        + (f"exceeded: {watch.exceeded[:5]}" if watch.exceeded else f"{watch.error or 'never exceeded'}"),
    )  # fmt: skip
    verdict.add(
        "working set", working_set >= WORKING_SET_FACTOR * capacity,
        f"{working_set:,} bytes of pages or more at a time, {working_set / capacity:.1f} times the capacity",
    )  # fmt: skip
    pages = capacity // PAGE_BYTES
    verdict.add(
        "evictions", watch.evicted >= pages and watch.peak >= 0.8 * capacity,
        f"{watch.evicted} pages were seen to go, of {watch.stored} different ones; {pages} fill the store",
    )  # fmt: skip


def slices(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests in `SLICES` parts of about the same number."""
    bounds = [len(requests) * i // SLICES for i in range(SLICES + 1)]
    return [list(requests[bounds[i] : bounds[i + 1]]) for i in range(SLICES)]


def judge_hits(records: Records, verdict: Verdict) -> None:
    """From the second tenth on, since at first there is nothing to find."""
    found = [sum(request.storage for request in part) for part in slices(records.requests)]
    verdict.add("hits until the end", min(found[1:]) > 0, f"tokens from storage, by tenths: {found}")


def judge_restart(records: Records, verdict: Verdict) -> None:
    restart = records.restart
    if restart is None:
        verdict.add("restart", False, "the server was not killed")
        return
    after = [request.storage for request in records.requests if request.at > restart.at]
    verdict.add(
        "restart", restart.killed_while_busy and sum(restart.found) > 0 and sum(after) > sum(restart.found),
        f"killed after {restart.at:.0f} s {'in' if restart.killed_while_busy else 'NOT in'} requests; the "
        f"latest conversations had {restart.found} tokens from storage, all later requests {sum(after):,}",
    )  # fmt: skip


def growth(samples: Sequence[Sample], server: str, start: float, end: float) -> tuple[int, int]:
    """How much memory (bytes) and descriptors a server gained from the middle to the last third of a time."""
    third = (end - start) / 3
    mine = [sample for sample in samples if sample.server == server and start <= sample.at <= end]
    middle = [sample for sample in mine if third <= sample.at - start < 2 * third]
    last = [sample for sample in mine if sample.at - start >= 2 * third]
    if not middle or not last:
        return 0, 0
    memory = statistics.median(s.rss for s in last) - statistics.median(s.rss for s in middle)
    return int(memory), max(s.fds for s in last) - max(s.fds for s in middle)


def judge_growth(samples: Sequence[Sample], verdict: Verdict) -> None:
    lives: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.server == "tested":
            lives[sample.life].append(sample.at)
    for life, times in lives.items():
        memory, fds = growth(samples, "tested", times[0], times[-1])
        usual, _ = growth(samples, "reference", times[0], times[-1])
        verdict.add(
            "growth before the restart" if life == 0 else "growth after the restart",
            memory <= MOST_GROWTH + max(0, usual) and fds <= MOST_NEW_FDS,
            f"{memory / MIB:+.1f} MiB (the server without HiCache: {usual / MIB:+.1f}), {fds:+d} descriptors",
        )  # fmt: skip


def judge_store(path: str, verdict: Verdict) -> None:
    """Read every page that is left."""
    root = StoreRoot(path, create=False)
    (namespace,) = root.namespaces()
    identity = root.read_identity(namespace) or {}
    with PosixStore(path, namespace, writable=False, maintenance=False) as store:
        report = store.verify()
    verdict.add(
        "store is whole", report.ok and report.blocks > 0 and identity.get("page_bytes") == PAGE_BYTES,
        f"{report.blocks} pages of {identity.get('page_bytes')} bytes read, bad: {report.bad or 'none'}, "
        f"damaged records: {report.damaged_records}",
    )  # fmt: skip


def numbers(soak: Soak) -> dict[str, Any]:
    """Figures of the whole run and of each of its tenths."""
    requests = soak.records.requests
    shape = soak.settings.shape
    return {
        "minutes of load": round(soak.records.load_seconds / 60, 2),
        "seed": soak.settings.seed,
        "capacity bytes": shape.capacity_bytes,
        "device pool tokens": shape.device,
        "host pool tokens": shape.host,
        "capacity tokens": shape.capacity_bytes // PAGE_BYTES * 16,
        "longest conversation tokens": shape.longest,
        "conversations at a time": soak.workload.population,
        "smallest working set bytes": soak.workload.least_bytes,
        "largest working set bytes": soak.workload.peak_bytes,
        "working set complete after seconds": soak.records.working_set_seconds,
        "requests": len(requests),
        "requests that ran together": sum(not request.alone for request in requests),
        "wrong answers": len(soak.records.wrong),
        "ties": len(soak.records.ties),
        "largest drift": max(request.drift for request in requests),
        "largest drift alone": max(request.drift for request in requests if request.alone),
        **tiers(requests),
        "tenths": [tiers(part) for part in slices(requests)],
        "by kind": {kind: tiers([r for r in requests if r.kind == kind]) for kind in
                    sorted({r.kind for r in requests})},
        "peak allocated bytes": soak.watch.peak,
        "looks at the disk": soak.watch.samples,
        "unsettled looks": soak.watch.unsettled,
        "pages seen": soak.watch.stored,
        "pages evicted": soak.watch.evicted,
        "restart": asdict(soak.records.restart) if soak.records.restart else None,
        "log records": soak.log.records,
        "log faults": soak.log.faults,
        "harmless log records": {
            known.name: {"number": soak.log.harmless[known.name], "reason": known.reason}
            for known in HARMLESS
        },
        "wrong": soak.records.wrong,
        "tied": soak.records.ties,
        "samples": [asdict(sample) for sample in soak.records.samples],
    }  # fmt: skip


def tiers(requests: Sequence[Request]) -> dict[str, Any]:
    """Where the prompt tokens of some requests came from, and how long they took."""
    prompt = sum(request.prompt_tokens for request in requests)
    cached = {tier: sum(getattr(r, tier) for r in requests) for tier in ("device", "host", "storage")}
    return {
        "requests": len(requests),
        "prompt tokens": prompt,
        **{f"{tier} tokens": count for tier, count in cached.items()},
        "computed tokens": prompt - sum(cached.values()),
        "requests with storage hits": sum(request.storage > 0 for request in requests),
        "median seconds": round(statistics.median(r.seconds for r in requests), 3) if requests else None,
    }
