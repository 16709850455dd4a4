"""Journals that are mostly dead, rewritten without what does not matter any more."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import numpy as np

from posix_store.capacity import SpaceKeeper
from posix_store.catalog import Catalog
from posix_store.freeing import read_journal
from posix_store.known import SegmentInfo
from posix_store.root import StoreRoot
from posix_store.segment import (
    EVICT,
    JOURNAL_MAGIC,
    MAX_BATCH_RECORDS,
    PUT,
    RECORD_BYTES,
    TOUCH,
    FormatError,
    align,
    as_halves,
    encode_header,
    seal_record,
    seal_records,
)

logger = logging.getLogger(__name__)

LEAST_BYTES = 256 << 10
"""Smaller journals are not worth it."""
MOST_ALIVE = 0.5
"""A journal is rewritten when that makes it smaller than this share of what it was."""


def compact(
    root: StoreRoot,
    catalog: Catalog,
    segment: SegmentInfo,
    space: SpaceKeeper | None = None,
    *,
    force: bool = False,
) -> bool:
    """Rewrite a sealed journal if it becomes much smaller, or by `force`; False when it stays as it is.

    The caller holds the eviction lock. The new journal takes the place of the old one by a rename, with a
    generation that is one higher; who has followed the old one reads it once more.

    Raises `NoSpace` when there is no room for both for a moment: then it can be tried again.
    """
    path = os.path.join(catalog.directory, segment.name.journal)
    try:
        records, generation = read_journal(root, catalog, segment)
        kept = _alive(catalog, segment, records)
        if len(kept) > len(records) * MOST_ALIVE and not force:
            return False
        created = time.time_ns()
        namespace = bytes.fromhex(os.path.basename(catalog.directory))
        parts = [encode_header(JOURNAL_MAGIC, segment.uid, namespace, created, generation + 1)]
        for start in range(0, len(kept), MAX_BATCH_RECORDS):
            parts.append(seal_records(kept[start : start + MAX_BATCH_RECORDS]))
        parts.append(seal_records(seal_record()))
        data = b"".join(parts)
        with contextlib.ExitStack() as stack:
            if space is not None:  # for a moment both are there
                stack.enter_context(space.locked())
                space.require(align(len(data)), divisible=False, urgent=True)
            root.write_file(path, data)
            root.changed(path)
    except (OSError, FormatError) as error:
        logger.debug("%s is not compacted: %s", path, error)
        return False
    logger.info("%s: %d of %d records kept", path, len(kept), len(records))
    return True


def worth_a_look(size: int, live: int) -> bool:
    """Could `compact` bring something? `size`: bytes of the journal; `live`: blocks in the segment."""
    return size >= LEAST_BYTES and live < size // RECORD_BYTES * MOST_ALIVE


def _alive(catalog: Catalog, segment: SegmentInfo, records: np.ndarray) -> np.ndarray:
    """Records that still matter: of blocks that are there, and of evictions in segments that are there."""
    _, offsets, _ = catalog.index.ranges_in(np.array([segment.number]))
    waiting = [offset for offset, _ in catalog.waiting_ranges(segment.number)]
    there = np.isin(
        records["offset"], np.concatenate([offsets, np.array(waiting, np.int64)]).astype(np.uint64)
    )
    touched = records["kind"] == TOUCH
    used = np.zeros(len(records), bool)
    used[touched] = catalog.index.contains(as_halves(records["id"][touched]))
    keep = (records["kind"] == PUT) & there
    keep |= (records["kind"] == EVICT) & catalog.matters(records)
    keep |= used
    return records[keep].copy()
