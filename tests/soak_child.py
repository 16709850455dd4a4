"""One process of the soak: a writer, a reader, or an operator who clears or audits a namespace once.

    python tests/soak_child.py SPEC      (SPEC: a `ChildSpec` as JSON)

It may be killed or stopped at any instruction, so all it reports goes to the board and to logs at once. What
is known of a wrong block is written to `wrong.jsonl`. Any exception ends the process with a traceback and
status 70.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from soak_blocks import Difference, Space, difference, payloads, words
from soak_board import CALLS, Board, StoredLog, StoredTail

from posix_store import PosixStore, Reason
from posix_store.counters import Counters
from posix_store.task import Task

FAILED = 70
WAIT_SECONDS = 60.0
"""For a batch; the store's own deadline is 5 s, and stops by the killer come on top."""
DRIFT_SECONDS = 900.0
"""Until all popular chains are others."""
NEWS = 0.1
"""Seconds until another process must have heard of a block: misses look at the directory every 20 ms."""
SETTLED = 2.0
"""Seconds after a loss by the killer until every process must know of it."""


@dataclass(frozen=True)
class ChildSpec:
    """What a child is to be; JSON on its command line."""

    role: str
    """`writer`, `reader`, `clear` or `audit`."""
    directory: str
    root: str
    slot: int
    slots: int
    generation: int
    seed: int
    space: Space
    capacity: int
    min_free: int
    verify: bool = True
    threads: int = 1
    orderly: bool = True
    """Close the store at the end, instead of just ending."""
    writers: tuple[int, ...] = ()
    """Slots of the writers of this namespace."""
    pace: float = 0.0
    """Mean seconds of rest after a request."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ChildSpec:
        fields = json.loads(text)
        fields["space"] = Space(**fields["space"])
        fields["writers"] = tuple(fields["writers"])
        return cls(**fields)


class Tally:
    """This process's row of the board. Thread-safe."""

    def __init__(self, board: Board, slot: int) -> None:
        self._row = board.rows[slot : slot + 1]
        self._lock = threading.Lock()
        self._seen: dict[str, Any] = {}

    @property
    def leave(self) -> bool:
        return int(self._row["leave"][0]) == int(self._row["generation"][0])

    def add(self, field: str, amount: int, column: int | None = None) -> None:
        with self._lock:
            if column is None:
                self._row[field][0] += np.uint64(amount)
            else:
                self._row[field][0, column] += np.uint64(amount)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Run a call of the store; its duration counts, without the time this process was stopped."""
        began, stopped = time.monotonic(), float(self._row["stopped"][0])
        result = call()
        took = time.monotonic() - began - (float(self._row["stopped"][0]) - stopped)
        column = CALLS.index(name)
        with self._lock:
            self._row["slowest"][0, column] = max(took, self._row["slowest"][0, column])
        return result

    def beat(self) -> None:
        self._row["heartbeat"][0] = time.monotonic()

    def publish(self, counters: Counters) -> None:
        """Add what a store has counted since the last call."""
        simple = {
            "dumped_blocks": "dump_blocks",
            "written_blocks": "written_blocks",
            "written_bytes": "written_bytes",
            "already_stored": "already_stored_blocks",
            "loaded_blocks": "loaded_blocks",
            "loaded_bytes": "loaded_bytes",
            "lookups": "lookups",
            "hits": "lookup_hits",
            "evicted_bytes": "evicted_bytes",
        }
        with self._lock:
            seen, counts = self._seen, counters.snapshot()
            self._seen = counts
            for field, name in simple.items():
                self._row[field][0] += np.uint64(counts.get(name, 0) - seen.get(name, 0))
            for field in ("misses", "unstored"):
                before = seen.get(field, {})
                for reason, count in counts[field].items():
                    self._row[field][0, Reason[reason.upper()]] += np.uint64(count - before.get(reason, 0))


class Client:
    """One thread's requests. Every block that the store says it loaded is compared with the oracle."""

    def __init__(self, spec: ChildSpec, store: PosixStore, board: Board, tally: Tally, seed: int) -> None:
        self.spec, self.space, self.store, self.board, self.tally = spec, spec.space, store, board, tally
        self.rng = np.random.default_rng(seed)
        rows = words(self.space.block_bytes)
        self._right = np.empty((self.space.batch, rows), np.uint64)
        self._loaded = np.empty((self.space.batch, rows), np.uint64)
        self._log = StoredLog(board, spec.slot)
        self._tails = [StoredTail(board, slot) for slot in spec.writers]
        mean = self.space.block_bytes * (1 + self.space.longest) / 2
        self._window = max(16, int(3 * spec.capacity / mean))
        """Chains that are asked for again: together three times the capacity."""

    # -- what a request is ---------------------------------------------------------------------------

    def writer_turn(self) -> None:
        """Look a chain up, load what is there, compute and dump the rest; at times load that back."""
        chain = self._hot() if self.rng.random() < 0.5 else int(self.rng.integers(1 << 33, 1 << 62))
        length = self.space.length(chain)
        there = self._lookup(chain, length)
        loaded = self._load_prefix(chain, there)
        self._dump_rest(chain, loaded, length)

    def reader_turn(self) -> None:
        """Load a popular chain as far as it goes, or what a writer has just reported as stored."""
        if self.rng.random() < 0.5:
            self._check_recent()
            return
        chain = self._hot()
        there = self._lookup(chain, self.space.length(chain))
        if self.rng.random() < 0.1:
            self.store.prefetch(self.space.ids(chain, 0, there))
        self._load_prefix(chain, there)

    def _hot(self) -> int:
        """A chain of a popularity that falls steeply; which chains are popular drifts with time."""
        elapsed = time.monotonic() - float(self.board.head["started"][0])
        base = int(elapsed / DRIFT_SECONDS * self._window)
        return base + int(self._window * self.rng.random() ** 2.5)

    def _lookup(self, chain: int, length: int) -> int:
        ids = self.space.ids(chain, 0, length)
        if self.rng.random() < 0.2:
            found = self.tally.timed("lookup", lambda: self.store.lookup(ids))
            return length if found.all() else int(np.argmin(found))
        return 1 + int(self.tally.timed("lookup", lambda: self.store.lookup_on_prefix(ids)))

    def _load_prefix(self, chain: int, there: int) -> int:
        """Load up to `there` leading blocks; how many came before the first miss."""
        for first in range(0, there, self.space.batch):
            count = min(self.space.batch, there - first)
            loaded = self._load(chain, first, count)
            if not loaded.all():
                return first + int(np.argmin(loaded))
        return there

    def _dump_rest(self, chain: int, start: int, length: int) -> None:
        for first in range(start, length, self.space.batch):
            count = min(self.space.batch, length - first)
            began, written = time.monotonic(), self.board.written()
            stored = self._dump(chain, first, count)
            if not stored[0]:
                return  # what would follow has no chain to stand in
            self._log.append(began, written, chain, first, stored & np.logical_and.accumulate(stored))
            if self.rng.random() < 0.1:
                self._count_recent(began, written, stored, self._load(chain, first, count))
            if not stored.all():
                return

    def _check_recent(self) -> None:
        tail = self._tails[int(self.rng.integers(len(self._tails)))].last(64)
        if not len(tail):
            time.sleep(0.01)
            return
        record = tail[int(self.rng.integers(len(tail)))]
        if time.monotonic() - float(record["ended"]) < NEWS:
            return
        chain, first, count = int(record["chain"]), int(record["first"]), int(record["count"])
        stored = np.array([bool(int(record["mask"]) >> i & 1) for i in range(count)])
        found = self._load(chain, first, count)
        self._count_recent(float(record["began"]), int(record["written"]), stored, found)

    def _count_recent(self, began: float, written: int, stored: np.ndarray, found: np.ndarray) -> None:
        """Count how much of what was reported as stored could be loaded, if nothing was in its way since."""
        pressed = self.board.written() - written > self.spec.capacity // 4
        disturbed = self.board.disturbed_at(self.space.number) + SETTLED > began
        if pressed or disturbed:
            return
        weather = self.board.weather()
        self.tally.add("recent_asked", int(stored.sum()), weather)
        self.tally.add("recent_found", int((stored & found).sum()), weather)
        if (stored & ~found).any():
            lost = int((stored & ~found).sum())
            what = {"space": self.space.number, "began": began, "lost": lost, "of": len(stored)}
            self._note("lost.jsonl", {**what, "weather": weather})

    # -- calls of the store --------------------------------------------------------------------------

    def _addresses(self, rows: np.ndarray, count: int, length: int) -> tuple[np.ndarray, np.ndarray | int]:
        """The blocks' memory, at times as two components, such as keys and values."""
        starts = rows.ctypes.data + np.arange(count, dtype=np.int64).reshape(-1, 1) * rows.strides[0]
        if length < 2 or self.rng.random() < 0.7:
            return starts, length
        head = length // 2
        return np.hstack([starts, starts + head]), np.array([head, length - head], np.int64)

    def _waited(self, name: str, call: Callable[[], Task]) -> np.ndarray:
        return np.asarray(self.tally.timed(name, lambda: self.store.wait(call(), WAIT_SECONDS)))

    def _load(self, chain: int, first: int, count: int) -> np.ndarray:
        """bool (count,): which blocks were loaded, with all their shards; their bytes are checked."""
        ids = self.space.ids(chain, first, count)
        length = self.space.shard_bytes(chain)
        loaded = np.ones(count, bool)
        for shard in range(self.space.shards(chain)):
            self._loaded[:count].view(np.uint8).fill(0xA5)
            addresses, sizes = self._addresses(self._loaded, count, length)
            call = partial(
                self.store.load_data, ids, shard, addresses, sizes,
                background=bool(self.rng.random() < 0.3),
            )  # fmt: skip
            got = self._waited("load", call)
            self._compare(chain, first, shard, ids, got, length)
            loaded &= got
        return loaded

    def _dump(self, chain: int, first: int, count: int) -> np.ndarray:
        """bool (count,): which blocks are stored, with all their shards."""
        ids = self.space.ids(chain, first, count)
        parents = self.space.parents(chain, first, count)
        length, shards = self.space.shard_bytes(chain), self.space.shards(chain)
        stored = np.ones(count, bool)
        for shard in range(shards):
            payloads(ids, length, shard, self._right)
            addresses, sizes = self._addresses(self._right, count, length)
            call = partial(
                self.store.dump_data, ids, shard, addresses, sizes, n_shards=shards, parents=parents,
                background=bool(self.rng.random() < 0.3),
            )  # fmt: skip
            stored &= self._waited("dump", call)
        return stored

    def _compare(
        self, chain: int, first: int, shard: int, ids: np.ndarray, loaded: np.ndarray, length: int
    ) -> None:
        right = payloads(ids, length, shard, self._right)
        got = self._loaded[: len(ids)].view(np.uint8)[:, :length]
        self.tally.add("compared_bytes", int(loaded.sum()) * length)
        if loaded.all() and np.array_equal(right, got):
            return
        for row in np.flatnonzero(loaded).tolist():
            how = difference(right[row], got[row])
            if how is None:
                continue
            # Without verification, bytes that the killer has flipped are not the store's mistake.
            excused = how.flips and not self.spec.verify
            self.tally.add("flipped" if excused else "wrong", 1)
            if not excused:
                self._keep_journals()
                self._note("wrong.jsonl", self._about(chain, first + row, shard, ids[row], length, how))

    def _keep_journals(self) -> None:
        """Copy the namespace's journals as they are now, the first time, for whoever looks for the reason."""
        copies = self.board.directory / f"journals-{self.space.number}"
        with contextlib.suppress(OSError):
            copies.mkdir()
            for path in (Path(self.spec.root) / self.space.name).glob("*.idx"):
                (copies / path.name).write_bytes(path.read_bytes())

    def _about(
        self, chain: int, position: int, shard: int, block: np.ndarray, length: int, how: Difference
    ) -> dict[str, Any]:
        """Everything that helps to find out where a wrong block came from."""
        place = {}
        try:
            at = self.store._catalog.index.locate(
                block.reshape(1, 16).view(np.uint64), np.array([shard], np.uint16)
            )
            if at.present[0]:
                name = self.store._catalog.segment(int(at.segment[0])).name.data
                place = {"segment": name, "offset": int(at.offset[0])}
        except Exception as error:  # the store's inside, only looked at for the report
            place = {"unknown": repr(error)}
        return {
            "space": self.space.number, "chain": chain, "position": position, "shard": shard,
            "length": length, "id": block.tobytes().hex(), "verify": self.spec.verify, "now at": place,
            **asdict(how),
        }  # fmt: skip

    def _note(self, name: str, what: dict[str, Any]) -> None:
        who = {"slot": self.spec.slot, "generation": self.spec.generation, "at": time.monotonic()}
        with (self.board.directory / name).open("a") as file:
            file.write(json.dumps({**who, **what}) + "\n")


def open_store(spec: ChildSpec) -> PosixStore:
    """The store as a child of this kind opens it; only with settings that it knows."""
    options: dict[str, Any] = {
        "capacity": spec.capacity if spec.role == "writer" else None,
        "min_free": spec.min_free,
        "segment_bytes": spec.space.segment_bytes,
        "verify": spec.verify,
        "writable": spec.role in ("writer", "clear"),
        "policy": spec.space.policy,
    }
    known = inspect.signature(PosixStore.__init__).parameters
    options = {name: value for name, value in options.items() if name in known}
    return PosixStore(spec.root, spec.space.name, identity={"soak": spec.space.number}, **options)


def follow_the_boards_clock(board: Board) -> None:
    """Let wall-clock time in this process jump as the killer says."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + board.clock_offset()
    time.time_ns = lambda: real_ns() + int(board.clock_offset() * 1e9)


def serve(spec: ChildSpec, board: Board, tally: Tally) -> None:
    """Be a writer or reader until the soak stops, or this process is asked to leave."""
    store = tally.timed("open", lambda: open_store(spec))

    def loop(seed: int) -> None:
        client = Client(spec, store, board, tally, seed)
        turn = client.writer_turn if spec.role == "writer" else client.reader_turn
        while not board.stopping and not tally.leave:
            turn()
            tally.beat()
            tally.add("requests", 1)
            tally.publish(store.counters)
            time.sleep(float(client.rng.exponential(spec.pace)))

    others = [threading.Thread(target=loop, args=(spec.seed + n,)) for n in range(1, spec.threads)]
    for thread in others:
        thread.start()
    loop(spec.seed)
    for thread in others:
        thread.join()
    if spec.orderly:
        store.close()


def operate(spec: ChildSpec) -> None:
    """Clear or check the namespace once, as an operator's command does."""
    with open_store(spec) as store:
        if spec.role == "clear":
            print("cleared", store.clear(), flush=True)
        else:
            report = store.verify()
            print("audit", json.dumps(asdict(report)), json.dumps(store.stats().to_dict()), flush=True)


def _end_with_parent() -> None:
    """Be killed when the soak dies, whatever it dies of."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _fail(*_: Any) -> None:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(FAILED)


def _fail_in_thread(what: threading.ExceptHookArgs) -> None:
    traceback.print_exception(what.exc_type, what.exc_value, what.exc_traceback)
    sys.stderr.flush()
    os._exit(FAILED)


def main() -> None:
    spec = ChildSpec.decode(sys.argv[1])
    _end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.excepthook = _fail_in_thread
    logging.basicConfig(
        level=logging.INFO, format=f"%(relativeCreated)d {spec.role} {spec.slot} %(levelname)s %(message)s"
    )
    board = Board(Path(spec.directory), spec.slots)
    follow_the_boards_clock(board)
    try:
        if spec.role in ("writer", "reader"):
            serve(spec, board, Tally(board, spec.slot))
        else:
            operate(spec)
    except BaseException:
        _fail()
    if not spec.orderly:
        os._exit(0)


if __name__ == "__main__":
    main()
