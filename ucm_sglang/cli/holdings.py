"""What a namespace holds, taken from its journals at one moment. Reads only, also while servers run."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from crc32c import crc32c

from posix_store.catalog import Catalog
from posix_store.chains import ROOT, in_chains, parent_rows
from posix_store.engine import reason_of
from posix_store.errors import Reason
from posix_store.files import SegmentFiles
from posix_store.ids import as_ids
from posix_store.index import Entries
from posix_store.pins import Pin, read_pin_list
from posix_store.root import StoreRoot
from posix_store.segment import SegmentName, as_void
from posix_store.syscalls import close_quietly, read_at

_LOOK_SECONDS = 10.0
"""Time after which no further look is taken at journals that could not be read whole."""
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Chain:
    """The blocks from one block back to the head of its chain, as far as they are stored."""

    rows: np.ndarray
    """int64 (n,): rows of `Holdings.blocks`, the block itself first."""
    missing: bytes | None
    """Id of the block where the chain is cut: it is recorded as a parent and not stored. None: whole."""


class Holdings:
    """Blocks, pins and segments of one namespace. Not thread-safe.

    Attributes:
        blocks: the complete blocks, in columns.
    """

    def __init__(self, root: StoreRoot, namespace: str) -> None:
        self.root = root
        self.namespace = namespace
        self.catalog = Catalog(root, namespace)
        self._look()
        self.blocks, self.segment_of = self.catalog.index.residents()

    def _look(self) -> None:
        """Follow all journals: a huge one is read in parts, and a size may be seen late."""
        deadline = time.monotonic() + _LOOK_SECONDS
        while True:
            self.catalog.refresh(max_age=0, budget=float("inf"))
            if self.catalog.complete or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_SECONDS)

    @cached_property
    def pins(self) -> list[Pin]:
        return read_pin_list(self.root, self.namespace)

    @cached_property
    def parent_rows(self) -> np.ndarray:
        """int64 (n,): the row of each block's parent, or `chains.ROOT` or `chains.ORPHAN`."""
        return parent_rows(self.blocks.ids, self.blocks.parents)

    def rows_of(self, ids: bytes) -> np.ndarray:
        """int64 (n,): rows of blocks by packed ids, -1 for those that are not stored."""
        order, ordered = self._by_id
        wanted = as_void(as_ids(ids))
        if not len(ordered):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        return np.where(ordered[at] == wanted, order[at], -1)

    @cached_property
    def _by_id(self) -> tuple[np.ndarray, np.ndarray]:
        ids = as_void(self.blocks.ids)
        order = np.argsort(ids)
        return order, ids[order]

    def protected_by(self, pins: list[Pin]) -> np.ndarray:
        """bool (n,): which blocks pins keep: those that they name, and all before them in their chains.

        Not blocks whose chain is cut: eviction takes those, for nobody can use them.
        """
        named = self.rows_of(b"".join(each for pin in pins for each in (pin.id, *pin.others)))
        kept = np.zeros(len(self.blocks))
        kept[named[named >= 0]] = 1.0
        return in_chains(kept, self.parent_rows)[0] > 0

    def chain(self, row: int) -> Chain:
        """The chain of one block."""
        rows, seen = [row], {row}
        while (above := int(self.parent_rows[rows[-1]])) >= 0 and above not in seen:
            rows.append(above)
            seen.add(above)
        # A damaged parent can close a circle: that is cut there too.
        cut = above != ROOT
        return Chain(np.array(rows), self.blocks.parents[rows[-1]].tobytes() if cut else None)

    def entries_of(self, row: int) -> Entries:
        """Where the shards of one block lie, in their order."""
        entries = self.catalog.index.entries_of(self.blocks.ids[row : row + 1])
        return entries.take(np.argsort(entries.shard))

    def read(self, entries: Entries) -> Reason:
        """Read shards and compare their checksums: `OK`, or what is wrong with the first bad one."""
        outcome = self._read(entries)
        if outcome is not Reason.OK:
            there = self.catalog.still_there(entries.ids, entries.shard, entries.at)
            if there is not None and not there.all():  # a server evicted it while it was read
                return Reason.EVICTED
        return outcome

    def _read(self, entries: Entries) -> Reason:
        at = entries.at
        places = zip(
            at.segment.tolist(), at.offset.tolist(), at.length.tolist(), at.crc.tolist(), strict=True
        )
        files = SegmentFiles(self.catalog, self.namespace, self.root.syscalls)
        try:
            with files.opened(np.unique(at.segment).tolist()) as (fds, failed):
                if failed:
                    return next(iter(failed.values()))
                for number, offset, length, crc in places:
                    data = read_at(self.root.syscalls, fds[number], length, offset)
                    if len(data) < length:
                        return Reason.LENGTH
                    if crc32c(data) != crc:
                        return Reason.CHECKSUM
        except OSError as error:
            return reason_of(error)
        finally:
            files.close()
        return Reason.OK

    def live_segments(self) -> set[int]:
        """Numbers of segments that a living process appends to (of this machine, where locks are local)."""
        return {
            segment.number
            for segment in self.catalog.segments
            if not segment.sealed and is_locked(self.root, self.catalog.path(segment))
        }


def is_locked(root: StoreRoot, path: str) -> bool:
    """Does a process hold the exclusive lock on a file? False when it cannot be opened."""
    try:
        fd = root.syscalls.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        root.syscalls.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        close_quietly(root.syscalls, fd)


def segment_names(root: StoreRoot, namespace: str) -> set[SegmentName]:
    """Segments of which a file is in a namespace's directory. Raises `OSError`."""
    try:
        names = root.syscalls.listdir(root.namespace_path(namespace))
    except FileNotFoundError:
        return set()
    return {parsed[0] for parsed in map(SegmentName.parse, names) if parsed}


def segment_files(root: StoreRoot, namespace: str, name: SegmentName) -> tuple[tuple[int, int], ...]:
    """Size and allocated bytes of a segment's data file and of its journal; zeros for a file that is gone."""
    return tuple(
        _size_and_allocated(root, os.path.join(root.namespace_path(namespace), file))
        for file in (name.data, name.journal)
    )


def _size_and_allocated(root: StoreRoot, path: str) -> tuple[int, int]:
    try:
        status = root.syscalls.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_blocks * 512
