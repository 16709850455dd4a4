"""Makes room: chooses blocks over all namespaces of a root, records that they are gone, frees their space."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from posix_store.capacity import LOCK_TIMEOUT, NoSpace, SpaceKeeper
from posix_store.catalog import LOOK_SECONDS, Catalog
from posix_store.compaction import compact, worth_a_look
from posix_store.eviction_stamp import EvictionStamp
from posix_store.freeing import Freer
from posix_store.index import Entries
from posix_store.mount_type import COPY_ON_WRITE
from posix_store.pins import Pins
from posix_store.policies import Policy
from posix_store.root import EVICTION_LOCK_FILE, NAMESPACE_FILE, SERVED_FILE, STORE_FILE, StoreRoot
from posix_store.segment import EXTENT_ALIGNMENT, MAX_BATCH_RECORDS, evict_records
from posix_store.syscalls import close_quietly
from posix_store.victims import Candidates, Plan, candidates, plan
from posix_store.writer import SegmentWriter

logger = logging.getLogger(__name__)

ABANDONED_SECONDS = 600.0
"""A namespace that no process has open, and of which no block was used for so long, goes before others."""
_PLAN_SHARE = 8
"""A plan is made for this share of what is stored, or for what is needed if that is more."""
_JOURNAL_ONLY_BYTES = 1 << 20
_PLAN_SECONDS = 30.0
"""After so long a plan is made anew: other processes may have changed what it is about."""


@dataclass
class EvictionReport:
    """What went: `bytes` of disk space, about; `segments` are whole files."""

    blocks: int = 0
    bytes: int = 0
    segments: int = 0


@dataclass
class _Namespace:
    catalog: Catalog
    writer: SegmentWriter
    freer: Freer


class Evictor:
    """Eviction over all namespaces of one root, one process at a time. Thread-safe.

    Args:
        own: the namespace that this process has open, with its catalog and writer.
    """

    def __init__(
        self,
        root: StoreRoot,
        space: SpaceKeeper,
        policy: Policy,
        own: tuple[str, Catalog, SegmentWriter] | None = None,
    ) -> None:
        self.total = EvictionReport()
        """What this object has evicted since it was made."""
        self._root = root
        self._space = space
        self._policy = policy
        self.stamp = EvictionStamp(root, space)
        self._own = own[0] if own else None
        self._lock = threading.Lock()
        self._known: dict[str, _Namespace] = {}
        if own:
            self._known[own[0]] = _Namespace(own[1], own[2], Freer(root, space, own[1], own[2], self.stamp))
        self._plan = Plan()
        self._planned_at = float("-inf")
        self._asked_to_punch = False
        self._compacted: dict[str, int] = {}
        self._pins: dict[str, Pins] = {}

    def make_room(self, missing: int, deadline: float) -> bool:
        """Free `missing` bytes or more, for a dump that waits; False when there is nothing to free.

        True also when another process was evicting in the meantime: it is worth another try.
        """
        with self._exclusive(deadline) as mine:
            if not mine:
                return True
            ahead = min(self._space.chunk, self.held_bytes // _PLAN_SHARE)
            try:
                report = self._evict(max(missing + ahead, self._portion), deadline)
            except (OSError, NoSpace) as error:
                logger.warning("posix_store %s: cannot make room: %s", self._root.path, error)
                return False
            return report.bytes > 0 or time.monotonic() > deadline

    def evict(
        self,
        target: int,
        deadline: float,
        *,
        namespaces: Collection[str] | None = None,
        older_than: float | None = None,
    ) -> EvictionReport:
        """Free about `target` bytes, coldest blocks first, until `deadline` (`time.monotonic()`).

        Args:
            namespaces: only of these; None: of all.
            older_than: only blocks stored before this (Unix seconds), and those that stand behind them.

        Never raises for what a file system does. Nothing is evicted when another process is at
        it, unless namespaces or an age are given: then it is waited for.
        """
        with self._exclusive(deadline, insist=namespaces is not None or older_than is not None) as mine:
            if not mine:
                return EvictionReport()
            try:
                if namespaces is None and older_than is None:
                    return self._evict(target, deadline)
                self._look_up_namespaces(max(0.0, deadline - time.monotonic()))
                report = EvictionReport()
                self._carry_out(self._make_plan(target, namespaces, older_than), target, deadline, report)
            except (OSError, NoSpace) as error:
                logger.warning("posix_store %s: cannot evict: %s", self._root.path, error)
                return EvictionReport()
            return self._counted(report)

    def remove(self, namespace: str, entries: Entries, deadline: float) -> EvictionReport:
        """Evict given blocks of a namespace, whatever they are worth: those found damaged, for example."""
        report = EvictionReport()
        with self._exclusive(deadline, insist=True) as mine:
            self._look_up_namespaces()
            if mine and namespace in self._known and len(entries):
                self._record_and_free(self._known[namespace], entries, report)
        return self._counted(report)

    def tidy(self, deadline: float) -> int:
        """Free what holds no block any more: garbage in segments, empty segments, dead journal records.

        Bytes freed, about. Nothing is done when another process evicts.
        """
        with self._exclusive(time.monotonic()) as mine:
            if not mine:
                return 0
            self._look_up_namespaces()
            return sum(self._tidy(name, known, deadline) for name, known in list(self._known.items()))

    def let_go_of_deleted(self) -> None:
        """Close journals of this process that others have deleted."""
        for known in list(self._known.values()):
            known.writer.let_go_of_deleted()

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks in all namespaces that this object knows of."""
        return sum(known.catalog.index.bytes for known in list(self._known.values()))

    @property
    def _portion(self) -> int:
        return self.held_bytes // 64

    def close(self) -> None:
        """Close the journals that were opened for evictions in namespaces of others. Idempotent."""
        if self._lock.acquire(timeout=LOCK_TIMEOUT):  # an eviction may hang on a sick disk
            try:
                for name, known in self._known.items():
                    if name != self._own:
                        known.writer.close()
            finally:
                self._lock.release()

    # ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self, deadline: float, insist: bool = False) -> Iterator[bool]:
        """The eviction lock. False when another thread or process has or had it; waits for it to finish.

        With `insist` it is taken after that, and False means that it could not be had before the deadline.
        """
        if not self._lock.acquire(blocking=False):
            others_did = self._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
            if others_did and not insist:
                self._lock.release()
            if not (others_did and insist):
                yield False
                return
        try:
            with contextlib.ExitStack() as stack:
                try:
                    first = max(0.0, deadline - time.monotonic()) if insist else 0.0
                    mine = stack.enter_context(self._root.locked_file(first, EVICTION_LOCK_FILE))
                    patience = min(deadline - time.monotonic(), LOCK_TIMEOUT)
                    if mine is not None:
                        stack.enter_context(self.stamp.held(mine))
                    elif patience > 0:
                        stack.enter_context(self._root.lock(patience, EVICTION_LOCK_FILE))
                except OSError as error:
                    logger.debug("posix_store %s: no eviction lock: %s", self._root.path, error)
                    mine = None
                yield mine is not None
        finally:
            self._lock.release()

    # -- callers have the lock ----------------------------------------------------------------------

    def _evict(self, target: int, deadline: float) -> EvictionReport:
        report = EvictionReport()
        stale = time.monotonic() - self._planned_at > _PLAN_SECONDS
        for attempt in range(2):
            if attempt or stale or self._plan.exhausted:
                # The last plan's blocks may be many rounds old by now, and others may have come.
                self._look_up_namespaces()
                for name, known in list(self._known.items()):
                    report.bytes += self._tidy(name, known, deadline)
                amount = max(target - report.bytes, self.held_bytes // _PLAN_SHARE)
                self._plan = self._make_plan(amount, None, None)
                self._planned_at = time.monotonic()
            if not self._carry_out(self._plan, target, deadline, report):
                break  # a sick disk: this is not the time to delete anything
            if report.bytes >= target or time.monotonic() > deadline:
                break
        else:
            if not report.bytes:
                self._drop_a_segment(report)
        return self._counted(report)

    def _counted(self, report: EvictionReport) -> EvictionReport:
        self.total.blocks += report.blocks
        self.total.bytes += report.bytes
        self.total.segments += report.segments
        return report

    def _carry_out(self, chosen: Plan, target: int, deadline: float, report: EvictionReport) -> bool:
        """False when evictions could not be recorded."""
        while report.bytes < target and not chosen.exhausted:
            for each, ids in chosen.take(target - report.bytes):
                if not self._leave(each, ids, report):
                    return False
            if time.monotonic() > deadline:
                break
        return True

    def _leave(self, each: Candidates, ids: np.ndarray, report: EvictionReport) -> bool:
        """Evict blocks of one namespace; False when their eviction cannot be recorded."""
        known = self._known[each.namespace]
        self._remove_displaced(known)
        entries = known.catalog.index.entries_of(ids)
        try:
            self._record_and_free(known, entries, report)
        except NoSpace as full:
            logger.debug("no room to record evictions: %s", full)
            return self._drop_a_segment(report)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # others have filled the disk to the last block
                return self._drop_a_segment(report)
            logger.warning("cannot record evictions: %s", error)
            return False
        return True

    def _record_and_free(self, known: _Namespace, entries: Entries, report: EvictionReport) -> None:
        """Raises `NoSpace` and `OSError` when the evictions cannot be recorded: then nothing is freed."""
        if not len(entries):
            return
        numbers, which = np.unique(entries.at.segment, return_inverse=True)
        uids = np.array([np.void(known.catalog.segment(number).uid) for number in numbers.tolist()], "V16")
        records = evict_records(entries.ids, uids[which], entries.at.offset, known.catalog.clock.now())
        for start in range(0, len(records), MAX_BATCH_RECORDS):
            known.writer.record(records[start : start + MAX_BATCH_RECORDS])
        report.blocks += known.catalog.forget_blocks(entries)
        before = len(known.catalog.segments)
        report.bytes += known.freer.free(entries.at.segment, entries.at.offset, entries.at.length)
        report.segments += before - len(known.catalog.segments)

    def _drop_a_segment(self, report: EvictionReport) -> bool:
        """Delete the coldest segment that can go: the way out when there is no room to record evictions."""
        found: list[tuple[float, str, int]] = []
        candidates_of = {each.namespace: each for each in self._candidates(self._known, None)}
        for name, known in self._known.items():
            if not known.catalog.complete:
                continue
            if name not in candidates_of:
                found += [(-np.inf, name, each.number) for each in known.catalog.segments]
                continue
            each = candidates_of[name]
            held = set(each.segment[~each.can_leave].tolist())
            numbers, which = np.unique(each.segment, return_inverse=True)
            mean = np.bincount(which, weights=np.nan_to_num(each.effective, neginf=0.0)) / np.bincount(which)
            found += [
                (value, name, number)
                for value, number in zip(mean.tolist(), numbers.tolist(), strict=True)
                if number not in held
            ]
            empty = np.setdiff1d([each.number for each in known.catalog.segments], numbers)
            found += [
                (np.inf if known.catalog.waiting_ranges(number) else -np.inf, name, number)
                for number in empty.tolist()
            ]
        for _, name, number in sorted(found):
            known = self._known[name]
            segment = known.catalog.segment(number)
            if segment.name == known.writer.current:
                known.writer.retire()
            blocks = len(known.catalog.index)
            if freed := known.freer.delete(segment, with_blocks=True):
                report.blocks += blocks - len(known.catalog.index)
                report.bytes += freed
                report.segments += 1
                return True
        return False

    def _make_plan(self, target: int, namespaces: Collection[str] | None, older_than: float | None) -> Plan:
        chosen = {
            name: known for name, known in self._known.items() if namespaces is None or name in namespaces
        }
        among = self._candidates(chosen, older_than)
        return plan(among, target, whole_segments=not self._can_punch())

    def _candidates(self, among: Mapping[str, _Namespace], older_than: float | None) -> list[Candidates]:
        """The blocks of namespaces whose journals are known to their ends."""
        chosen = {
            name: known
            for name, known in among.items()
            if known.catalog.complete and len(known.catalog.index)
        }
        last_use = {name: known.catalog.index.last_use for name, known in chosen.items()}
        recently = time.time() - ABANDONED_SECONDS
        abandoned = [n for n in chosen if last_use[n] < recently and not self._root.is_served(n)]
        abandoned.sort(key=last_use.__getitem__)
        found = []
        for name, known in chosen.items():
            rank = abandoned.index(name) if name in abandoned else len(abandoned)
            pins = self._pins.setdefault(name, Pins(self._root, name)).ids()
            found.append(candidates(name, known.catalog, rank, self._policy, pins, older_than))
        return found

    def _can_punch(self) -> bool:
        """Ask the file system once, on a file of its own: it costs blocks to find out by evicting them."""
        if self._asked_to_punch or not self._space.punches:
            return self._space.punches
        self._asked_to_punch = True
        if self._root.file_system in COPY_ON_WRITE:
            self._space.punches = False
            return False
        path = os.path.join(self._root.path, f".{STORE_FILE}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            fd = self._root.syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._root.syscalls.unlink(path)
                self._space.punch(fd, 0, EXTENT_ALIGNMENT)  # without a stamp: no block was ever there
            finally:
                close_quietly(self._root.syscalls, fd)
        return self._space.punches

    def _look_up_namespaces(self, budget: float = LOOK_SECONDS) -> None:
        """Follow the journals of all namespaces; those whose directory is gone are forgotten."""
        try:
            names = self._root.namespaces()
        except OSError as error:
            logger.debug("posix_store %s: cannot be listed: %s", self._root.path, error)
            return
        for name in set(self._known) - {*names, self._own}:
            self._known.pop(name).writer.close()
        for name in names:
            if name not in self._known:
                catalog = Catalog(self._root, name)
                writer = SegmentWriter(self._root, name, None, self._space, catalog, _JOURNAL_ONLY_BYTES)
                self._known[name] = _Namespace(
                    catalog, writer, Freer(self._root, self._space, catalog, writer, self.stamp)
                )
            self._known[name].catalog.refresh(max_age=0, budget=budget)

    def _tidy(self, name: str, known: _Namespace, deadline: float) -> int:
        catalog = known.catalog
        if not catalog.complete:
            return 0
        self._remove_displaced(known)
        known.freer.forget_shards_of_the_dead()
        segments = catalog.segments
        if not segments:
            self._remove_if_abandoned(name)
            return 0
        if name != self._own and not len(catalog.index):
            known.writer.retire()  # it holds nothing but evictions, which mean nothing any more
            segments = catalog.segments
        live, held = catalog.index.count_by_segment(1 + max(segment.number for segment in segments))
        freed = 0
        for segment in segments:
            if time.monotonic() > deadline:
                break
            if not live[segment.number] and not catalog.waiting_ranges(segment.number):
                freed += known.freer.delete(segment)
            elif segment.sealed:
                freed += known.freer.sweep(segment, int(live[segment.number]), int(held[segment.number]))
                with contextlib.suppress(OSError, NoSpace):
                    path = os.path.join(catalog.directory, segment.name.journal)
                    size = self._root.syscalls.stat(path).st_size
                    if self._compacted.get(path) != size and worth_a_look(size, int(live[segment.number])):
                        compact(self._root, catalog, segment, self._space)
                        self._compacted[path] = self._root.syscalls.stat(path).st_size
        return freed

    def _remove_displaced(self, known: _Namespace) -> None:
        """Evict copies of blocks in the place of which another copy is found.

        Before anything else is freed: they may share pages with what is, and would be found again when the
        other copy has gone.
        """
        for entries in known.catalog.take_displaced():
            there = [not known.catalog.segment(number).dropped for number in entries.at.segment.tolist()]
            try:
                self._record_and_free(known, entries.take(np.flatnonzero(there)), EvictionReport())
            except (NoSpace, OSError) as error:
                # They are found again by those who start later, and swept with their segment.
                logger.debug("copies cannot be evicted: %s", error)

    def _remove_if_abandoned(self, name: str) -> None:
        """Remove the directory of a namespace that is empty and that nobody has used for a while."""
        directory = self._root.namespace_path(name)
        calls = self._root.syscalls
        with contextlib.suppress(OSError):
            if name == self._own or time.time() - calls.stat(directory).st_mtime < ABANDONED_SECONDS:
                return
            # Under the store lock no writer is in the middle of making it.
            with self._root.lock(0) as held:
                if (
                    held
                    and set(calls.listdir(directory)) <= {NAMESPACE_FILE, SERVED_FILE}
                    and not self._root.is_served(name)
                ):
                    for entry in calls.listdir(directory):
                        calls.unlink(os.path.join(directory, entry))
                    calls.rmdir(directory)
