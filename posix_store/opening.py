"""From directories to a store: on one root, or striped over several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from posix_store.errors import StoreError
from posix_store.root import StoreRoot
from posix_store.store import PosixStore
from posix_store.striped import StripedStore
from posix_store.syscalls import Syscalls

Store = PosixStore | StripedStore


def open_store(
    roots: Sequence[str],
    namespace: str,
    *,
    capacities: Sequence[int | None] | None = None,
    min_free: int | Sequence[int | None] | None = None,
    write_queue_bytes: int | None = None,
    **options: Any,
) -> Store:
    """Open the store on one root, or one store over several.

    Args:
        roots: directories of their own, best each on another device: two on one device gain nothing.
        namespace: as for `PosixStore`.
        capacities: bytes on disk for each root; None: what each root says, or half of the free space.
        min_free: bytes to leave free on the file system of every root, or one such number for each.
        write_queue_bytes: for all roots together; each has an equal share.
        options: as for `PosixStore`; each root has all of them, so there are `io_threads` for each.

    Raises:
        StoreError: a root cannot be opened as configured, two are the same directory, one lies in another, or
            there are not as many capacities as roots. Says which, and what to do. Nothing stays open.
    """
    paths, sizes = _checked(roots, capacities, options.get("syscalls"))
    floors = list(min_free) if isinstance(min_free, Sequence) else [min_free] * len(paths)
    if len(floors) != len(paths):
        raise StoreError(
            f"min_free = {floors}: {len(floors)} sizes for {len(paths)} paths; give one for each"
        )
    if write_queue_bytes is not None:
        options["write_queue_bytes"] = max(1, write_queue_bytes // len(paths))
    stores: list[PosixStore] = []
    try:
        for path, size, floor in zip(paths, sizes, floors, strict=True):
            stores.append(PosixStore(path, namespace, capacity=size, min_free=floor, **options))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores[0] if len(stores) == 1 else StripedStore(stores)


def make_roots(roots: Sequence[str], capacities: Sequence[int | None] | None = None) -> list[StoreRoot]:
    """Make or adopt the roots without opening a namespace. Raises `StoreError` as `open_store` does."""
    return [StoreRoot(path, capacity=size) for path, size in zip(*_checked(roots, capacities), strict=True)]


def _checked(
    roots: Sequence[str], capacities: Sequence[int | None] | None, syscalls: Syscalls | None = None
) -> tuple[list[str], list[int | None]]:
    """Paths and capacities of roots that can be used side by side. Makes nothing."""
    paths = [roots] if isinstance(roots, str) else list(roots)
    if not paths:
        raise StoreError("path = []: names no directory; give at least one")
    sizes: list[int | None] = [None] * len(paths) if capacities is None else list(capacities)
    if len(sizes) != len(paths):
        raise StoreError(
            f"capacity = {sizes}: {len(sizes)} sizes for {len(paths)} paths; give one for each path"
        )
    _refuse_overlap(paths, syscalls or Syscalls())
    return paths, sizes


def _refuse_overlap(paths: Sequence[str], calls: Syscalls) -> None:
    """Blocks of a directory that is named twice would be evicted, cleared and counted twice."""
    lineages = [list(_lineage(path, calls)) for path in paths]
    for number, (path, lineage) in enumerate(zip(paths, lineages, strict=True)):
        for other, (its_path, its_lineage) in enumerate(zip(paths, lineages, strict=True)):
            if other == number or its_lineage[0] not in lineage:
                continue
            if its_lineage[0] == lineage[0]:
                raise StoreError(
                    f"path = {list(paths)}: {path} and {its_path} are the same directory; name each "
                    "directory once"
                )
            raise StoreError(
                f"path = {list(paths)}: {path} lies in {its_path}; name directories side by side"
            )


def _lineage(path: str, calls: Syscalls) -> Iterator[tuple[int, int, str]]:
    """What identifies a directory, and then each directory above it, by whatever way it was named.

    Device and inode of the nearest directory that is there, and the way on from it: links and bind mounts
    lead to the same.
    """
    here = os.path.realpath(path)
    while True:
        yield _identity(here, calls)
        if here == os.path.dirname(here):
            return
        here = os.path.dirname(here)


def _identity(path: str, calls: Syscalls) -> tuple[int, int, str]:
    existing = path
    while True:
        try:
            status = calls.stat(existing)
        except OSError:
            if existing == os.path.dirname(existing):
                return 0, 0, path
            existing = os.path.dirname(existing)
        else:
            return status.st_dev, status.st_ino, os.path.relpath(path, existing)
