"""Two true servers, the same prompts for both, and everything that is noted about it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpu_engine.server import CpuServer, Generation, ServerError, random_prompt
from cpu_engine.settings import ServerSettings
from cpu_engine.tiny_model import make_model

from server_soak.answers import Difference, compare
from server_soak.server_log import LOGGING_CONFIG, LogReader
from server_soak.watch import Sample, StoreWatch, measure
from server_soak.workload import NEW_TOKENS, PAGE_SIZE, Kind, Shape, Turn, Workload

REPOSITORY = Path(__file__).resolve().parents[2]
PREFETCH_THRESHOLD = 2 * PAGE_SIZE
"""Tokens. SGLang's default, 256, is as long as some whole prompts here."""
TOGETHER = 4
"""Requests at a time in a concurrent round."""
MANY_FAULTS = 10
"""So many wrong answers or log records are enough to see what is wrong: the soak ends early."""
PROGRESS_SECONDS = 10.0
SAMPLE_SECONDS = 2.0
MOST_OVERTIME = 600.0
"""Seconds beyond the planned ones after which the working set is given up (on a machine that is too busy)."""

Phase = Callable[[], None]


@dataclass(frozen=True)
class Settings:
    """A soak. minutes: of load; what it takes to start servers comes on top, and the load goes on until the
    working set was complete for a while. concurrent: rounds of `TOGETHER` requests at once, spread evenly.

    directory: for model, store and logs; the caller removes it.
    """

    minutes: float
    seed: int
    shape: Shape
    directory: Path
    concurrent: int


@dataclass(frozen=True)
class Request:
    """A request that was answered.

    at: seconds of load. away: requests since the conversation's last one. Tokens of the prompt by where they
    came from. seconds: on the tested server. drift: of a log probability from the reference's.
    """

    at: float
    kind: Kind
    alone: bool
    away: int
    prompt_tokens: int
    device: int
    host: int
    storage: int
    seconds: float
    drift: float
    distinct: int
    """Different ids in the answer."""
    digest: int
    """Of the answer: to see that answers differ."""


@dataclass
class Restart:
    """What the kill did. found: storage tokens of each of the prompts that were asked first afterwards."""

    at: float = 0.0
    killed_while_busy: bool = False
    seconds: float = 0.0
    blocks_before: int = 0
    found: list[int] = field(default_factory=list)


@dataclass
class Records:
    """Everything that the verdict is about."""

    requests: list[Request] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    ties: list[dict[str, Any]] = field(default_factory=list)
    reference_cached: int = 0
    samples: list[Sample] = field(default_factory=list)
    restart: Restart | None = None
    load_seconds: float = 0.0
    working_set_seconds: float | None = None
    """Seconds of load after which the working set was complete."""
    died: str = ""


class LoadClock:
    """Seconds of load: runs from when it is made, and stands still while servers start."""

    def __init__(self) -> None:
        self._skipped_until = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._skipped_until

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._skipped_until += time.monotonic() - began


class Soak:
    """One soak. `run` fills `records`; `watch` and `log` look from outside. Use it once.

    Args:
        settings: what to do.
        say: called with a line of text every few seconds.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings, self._say = settings, say
        self.records = Records()
        self.workload = Workload(settings.shape, settings.seed)
        base = settings.directory
        self.store = base / "store"
        model = make_model(base / "model")
        self.tested = CpuServer(self._tested_settings(model), base / "tested.log", progress=say)
        self.reference = CpuServer(self._reference_settings(model), base / "reference.log")
        capacity = settings.shape.capacity_bytes
        self.watch = StoreWatch(self.store, limit=capacity + capacity // 100)
        self.log = LogReader(self.tested.log)
        self._clock = LoadClock()
        self._life = 0
        self._pool = ThreadPoolExecutor(TOGETHER + 1, thread_name_prefix="request")
        self._sampled_at = self._said_at = float("-inf")
        self._said_requests = 0

    # ---- servers ------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        logging_config = self.settings.directory / "logging.json"
        logging_config.write_text(json.dumps(LOGGING_CONFIG))
        # One core for each server: they compute at the same time.
        return {"SGLANG_LOGGING_CONFIG_PATH": str(logging_config), "OMP_NUM_THREADS": "1"}

    def _tested_settings(self, model: Path) -> ServerSettings:
        shape = self.settings.shape
        return ServerSettings(
            model=model,
            page_size=PAGE_SIZE,
            max_total_tokens=shape.device,
            context_length=shape.device,
            hicache_ratio=shape.host_ratio,
            storage_backend="dynamic",
            storage_extra_config={
                "backend_name": "ucm",
                "module_path": "ucm_sglang.hicache",
                "class_name": "UcmHiCacheStorage",
                "interface_v1": 1,
                "hicache_storage_pass_prefix_keys": True,
                "prefetch_threshold": PREFETCH_THRESHOLD,
                "path": str(self.store),
                "capacity": shape.capacity_bytes,
                "min_free": 0,
            },
            python_path=[REPOSITORY],
            env=self._environment(),
        )

    def _reference_settings(self, model: Path) -> ServerSettings:
        """No HiCache, and no cache of its own either: every answer is computed from nothing."""
        return ServerSettings(
            model=model,
            page_size=PAGE_SIZE,
            hicache=False,
            max_total_tokens=2 * self.settings.shape.device,
            context_length=self.settings.shape.device,
            env=self._environment(),
            extra_args=["--disable-radix-cache"],
        )

    def _start(self) -> None:
        self._say("starting a server with the store, and one without HiCache to compare")
        starting = [self._pool.submit(server.start) for server in (self.reference, self.tested)]
        for each in starting:
            each.result()
        # Fewer tokens than are fetched; it may compile SGLang's prefix hash.
        self.tested.generate(random_prompt(PREFETCH_THRESHOLD - 1, seed=0), 1)

    # ---- course -------------------------------------------------------------------------------------

    def run(self) -> Records:
        """The whole soak. Never raises for what a server does: `records.died` says what happened."""
        self.watch.start()
        try:
            with self._clock.standing():
                self._start()
            self._load()
            self.records.load_seconds = self._clock()
            self.tested.wait_idle()
        except ServerError as error:
            self.records.died = str(error)
        finally:
            self._pool.shutdown()
            self.tested.stop()
            self.reference.kill()
            self.watch.stop()
            self.log.read(last=True)
        return self.records

    def _load(self) -> None:
        planned = self.settings.minutes * 60
        rounds = self.settings.concurrent
        # In the middle between two concurrent rounds, so that the restart is followed by both kinds of load.
        due: list[tuple[float, Phase]] = [
            ((i + 0.75) / max(1, rounds), self._concurrent_round) for i in range(rounds)
        ]
        due = sorted([*due, (0.5, self._kill_and_restart)], key=lambda entry: entry[0])
        while not self._finished(planned):
            if due and self._progress(planned) >= due[0][0]:
                due.pop(0)[1]()
            else:
                self._single()
            self._housekeeping()
        if not self._too_many_faults():
            for _, phase in due:
                phase()

    def _progress(self, planned: float) -> float:
        """Share of the soak that is over, 0 to 1. Half of it is for after the working set is complete."""
        share = self._clock() / planned
        ready = self.records.working_set_seconds
        return min(share, 0.49) if ready is None else min(share, 0.49 + (self._clock() - ready) / planned)

    def _finished(self, planned: float) -> bool:
        if self._too_many_faults() or self._clock() > planned + MOST_OVERTIME:
            return True
        return self._progress(planned) >= 1

    def _too_many_faults(self) -> bool:
        return len(self.records.wrong) + len(self.log.faults) + len(self.watch.exceeded) >= MANY_FAULTS

    def _housekeeping(self) -> None:
        now = self._clock()
        if self.records.working_set_seconds is None and self.workload.complete:
            self.records.working_set_seconds = now
        if now - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = now
            self.records.samples += [
                measure("tested", self._life, now, self.tested.pid),
                measure("reference", 0, now, self.reference.pid),
            ]
            for fault in self.log.read():
                self._say(f"LOG: {fault[:500]}")
        if now - self._said_at >= PROGRESS_SECONDS:
            self._report(now)

    def _report(self, now: float) -> None:
        new = self.records.requests[self._said_requests :]
        prompt = max(1, sum(r.prompt_tokens for r in new))
        shares = " ".join(
            f"{tier} {100 * sum(getattr(r, tier) for r in new) // prompt}%"
            for tier in ("device", "host", "storage")
        )
        last = self.records.samples[-2:]
        processes = ", ".join(f"{s.server} {s.rss >> 20} MiB {s.fds} fds" for s in last)
        self._say(
            f"load {now:.0f} s: {len(self.records.requests)} requests ({len(new)} new: {shares}), "
            f"{len(self.records.wrong)} wrong; store {self.watch.now / 2**20:.1f} MiB, peak "
            f"{self.watch.peak / 2**20:.2f} of {self.settings.shape.capacity_bytes / 2**20:.0f}, "
            f"{self.watch.evicted} pages evicted; {processes}; {len(self.log.faults)} log faults"
        )
        self._said_at, self._said_requests = now, len(self.records.requests)

    # ---- requests -----------------------------------------------------------------------------------

    def _ask(self, server: CpuServer, prompt: list[int]) -> Future[Generation]:
        return self._pool.submit(server.generate, prompt, NEW_TOKENS, return_logprob=True)

    def _single(self) -> None:
        """One request, alone on each of the servers."""
        turn = self.workload.next()
        asked = [self._ask(server, turn.prompt) for server in (self.tested, self.reference)]
        got, wanted = (future.result() for future in asked)
        self._note(turn, got, wanted, alone=True)

    def _concurrent_round(self) -> None:
        """Several requests at once on the tested server; the reference still computes one at a time."""
        turns = self.workload.several(TOGETHER)
        together = [self._ask(self.tested, turn.prompt) for turn in turns]
        wanted = [self._ask(self.reference, turn.prompt).result() for turn in turns]
        for turn, future, reference in zip(turns, together, wanted, strict=True):
            self._note(turn, future.result(), reference, alone=False)

    def _note(self, turn: Turn, got: Generation, wanted: Generation, alone: bool) -> None:
        """Compare, keep what came of it, and let the conversation go on from the reference's answer."""
        difference = compare(got, wanted)
        if not difference.right:
            self._note_difference(turn, got, wanted, difference, alone)
        self.records.reference_cached += wanted.cached_tokens
        self.records.requests.append(
            Request(
                at=self._clock(), kind=turn.kind, alone=alone, away=turn.away,
                prompt_tokens=got.prompt_tokens, device=got.device, host=got.host, storage=got.storage,
                seconds=got.seconds, drift=difference.drift, distinct=len(set(wanted.output_ids)),
                digest=hash(wanted.output_ids),
            )
        )  # fmt: skip
        self.workload.answered(turn, wanted.output_ids)

    def _note_difference(
        self, turn: Turn, got: Generation, wanted: Generation, difference: Difference, alone: bool
    ) -> None:
        """Ask again: at once, while the pages in question are still cached; and computed from nothing."""
        again = self._ask(self.tested, turn.prompt).result()
        salted = self.tested.generate(
            turn.prompt, NEW_TOKENS, return_logprob=True, cache_salt=f"computed anew {self._clock()}"
        )
        what = {
            "at": self._clock(),
            "request": len(self.records.requests),
            "kind": turn.kind,
            "alone": alone,
            "token": difference.token,
            "drift": difference.drift,
            "got": asdict(got),
            "wanted": asdict(wanted),
            "asked again": asdict(again),
            "computed by the tested server": asdict(salted),
            "computing agrees": compare(salted, wanted).right,
            "prompt": turn.prompt,
        }
        tie = not alone and difference.may_be_a_tie and compare(again, wanted).right
        (self.records.ties if tie else self.records.wrong).append(what)
        kind = "a tie" if tie else "WRONG ANSWER"
        self._say(
            f"{kind}: request {what['request']} ({turn.kind}): token {difference.token} differs, drift "
            f"{difference.drift:.3g}; device {got.device}, host {got.host}, storage {got.storage} tokens; "
            f"asked again: {'right' if compare(again, wanted).right else 'wrong'}; computed anew: "
            f"{'right' if what['computing agrees'] else 'wrong'}"
        )

    # ---- restart ------------------------------------------------------------------------------------

    def _kill_and_restart(self) -> None:
        """SIGKILL in the middle of requests; then the conversations of just before must be found again."""
        restart = self.records.restart = Restart(at=self._clock(), blocks_before=self.watch.present)
        busy = [self._ask(self.tested, turn.prompt) for turn in self.workload.several(TOGETHER)]
        time.sleep(0.1)
        restart.killed_while_busy = not all(future.done() for future in busy)
        self.tested.kill()
        for future in busy:
            with contextlib.suppress(ServerError):
                future.result()
        self._say("killed the server with the store in the middle of requests; starting it again")
        began = time.monotonic()
        self._life += 1
        with self._clock.standing():
            self.tested.start()
        restart.seconds = time.monotonic() - began
        for conversation in self.workload.latest(self.workload.recent):
            turn = Turn(conversation, "retry", conversation.prompt, 0)
            asked = [self._ask(server, turn.prompt) for server in (self.tested, self.reference)]
            got, wanted = (future.result() for future in asked)
            restart.found.append(got.storage)
            self._note(turn, got, wanted, alone=True)
