"""From directories to a store: what is refused, and that nothing has been made then (invariant I3)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from storekit import NAMESPACE, dump, held_open, ids_of, memory_directory
from stripedkit import ALWAYS, homes, opened

from posix_store import PosixStore, Reason, StoreError
from posix_store.opening import make_roots, open_store

LENGTH = 3000


@pytest.fixture
def top() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def roots(top: Path) -> list[str]:
    return [str(top / name) for name in "abc"]


def test_one_root_is_a_plain_store(roots: list[str]) -> None:
    """Nothing is between an engine and its store where there is one root."""
    for one in (roots[:1], roots[0]):
        with open_store(one, NAMESPACE, capacities=[1 << 25], min_free=0) as store:
            assert type(store) is PosixStore and store.stats().capacity == 1 << 25


def test_the_same_directory_twice_is_refused(top: Path) -> None:
    """Also by another way, and when it is not there yet; nothing has been made then."""
    (top / "link").symlink_to(top / "real")
    (top / "up").symlink_to(top)
    for paths in (["real", "real"], ["real", "x/../real/"], ["x", "real", "link"], ["up/real", "real"]):
        given = [str(top / path) for path in paths]
        with pytest.raises(StoreError, match=r"^path = \[.*\]: .* same directory; name each directory once"):
            open_store(given, NAMESPACE)
        with pytest.raises(StoreError, match="same directory"):
            make_roots(given)
    assert sorted(path.name for path in top.iterdir()) == ["link", "up"]


def test_a_directory_inside_another_is_refused(top: Path) -> None:
    (top / "up").symlink_to(top)
    for outer, inner in [("a", "a/b"), ("up/a", "a/b/c"), (".", "b")]:
        for paths in ([outer, inner], [inner, "other", outer]):
            with pytest.raises(StoreError, match=r"^path = \[.*\]: .* lies in .*; name directories side by"):
                open_store([os.path.join(top, path) for path in paths], NAMESPACE)
    assert sorted(path.name for path in top.iterdir()) == ["up"]
    open_store([str(top / "a"), str(top / "ab")], NAMESPACE, capacities=[1 << 25] * 2).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a bind mount")
def test_a_directory_under_two_mounts_is_refused(top: Path) -> None:
    """Two paths without a link between them may lead to one directory."""
    for name in ("a", "b"):
        (top / name).mkdir()
    if os.system(f"mount --bind {top}/a {top}/b 2>/dev/null"):
        pytest.skip("bind mounts are not allowed here")
    try:
        for paths, what in ((["a/kv", "b/kv"], "same directory"), (["a", "b/kv"], "lies in")):
            with pytest.raises(StoreError, match=what):
                open_store([str(top / path) for path in paths], NAMESPACE)
    finally:
        os.system(f"umount {top}/b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacities": [1 << 30]}, r"capacity = \[1073741824\]: 1 sizes for 3 paths; give one for each"),
        ({"capacities": [1, 2, 3, 4]}, "4 sizes for 3 paths"),
        ({"min_free": [0, 0]}, r"min_free = \[0, 0\]: 2 sizes for 3 paths; give one for each"),
    ],
)
def test_as_many_sizes_as_roots(roots: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(roots, NAMESPACE, **options)
    assert not any(os.path.exists(root) for root in roots)


def test_no_roots_are_refused() -> None:
    with pytest.raises(StoreError, match=r"path = \[\]: names no directory; give at least one"):
        open_store([], NAMESPACE)


def test_the_write_queue_is_shared_by_the_roots(roots: list[str]) -> None:
    """Its size is what all pages that wait may take up together, however many devices there are."""
    with opened(roots, write_queue_bytes=30 << 20) as store:
        assert [each.health.queue.limit_bytes for each in store.stores] == [10 << 20] * 3


def test_a_floor_for_each_root(roots: list[str]) -> None:
    """A root whose floor cannot be met stores nothing; the others do."""
    ids = ids_of(30, 60)
    with opened(roots, min_free=[0, 1 << 60, 0]) as store:
        stored = dump(store, ids, LENGTH)
        assert (stored == np.where(homes(roots, ids) == 1, Reason.FULL, Reason.OK)).all()


def test_a_root_that_is_broken_at_the_start_is_named(roots: list[str]) -> None:
    """The error of that root says so, and the others are let go of."""
    calls = FaultySyscalls(Fault(kinds=["listdir"], suffix="/b", times=ALWAYS, error=errno.EIO))
    with opened(roots) as store:
        dump(store, ids_of(31, 60), LENGTH)
    with pytest.raises(StoreError, match=rf"^path = {roots[1]}: Input/output error .*; .*"):
        open_store(roots, NAMESPACE, syscalls=calls)
    with pytest.raises(StoreError, match=rf"^path = {roots[1]}: no store here"):
        shutil.rmtree(roots[1])
        open_store(roots, NAMESPACE, writable=False)
    assert held_open(Path(roots[0]).parent) == []
