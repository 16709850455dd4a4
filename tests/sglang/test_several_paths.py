"""The adapter with several paths (issue 3): one store on several devices under SGLang's real controller."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs the SGLang environment")

from cpu_engine.controller import ControllerRig

from posix_store import StoreError

pytestmark = pytest.mark.sglang

PAGES = 40

MakeRig = Callable[..., ControllerRig]


@pytest.fixture
def paths() -> Iterator[list[str]]:
    top = Path(f"/dev/shm/ucm-paths-{os.getpid()}")
    shutil.rmtree(top, ignore_errors=True)
    yield [str(top / name) for name in ("nvme0", "nvme1")]
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture
def rig(paths: list[str]) -> Iterator[MakeRig]:
    """Makes rigs on the two paths, one open at a time: a new one stands for a restarted server."""
    opened: list[ControllerRig] = []

    def make(**config: Any) -> ControllerRig:
        if opened:
            opened.pop().close()
        keys = {
            "backend_name": "ucm", "module_path": "ucm_sglang.hicache", "class_name": "UcmHiCacheStorage",
            "interface_v1": 1, "path": paths, "capacity": ["1GiB", "512MiB"], "min_free": 0,
            "weights_fingerprint": "weights-a", **config,
        }  # fmt: skip
        opened.append(ControllerRig(backend="dynamic", extra_config=keys))
        return opened[-1]

    yield make
    if opened:
        opened.pop().close()


def store_pages(rig: ControllerRig) -> list[Any]:
    """Store a chain; the bytes on the device that were stored."""
    device = rig.fill(PAGES)
    wanted = rig.read_device(device)
    assert rig.backup(rig.to_host(device), rig.tokens(PAGES)) == PAGES
    return wanted


def test_pages_are_spread_and_served_after_a_restart(
    rig: MakeRig, paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte comes back, also when the new server names the paths in another order; both hold pages."""
    with caplog.at_level(logging.INFO, logger="ucm_sglang.hicache"):
        wanted = store_pages(rig())
    assert f"store {paths[0]}, {paths[1]} (capacity {1536 << 20} bytes" in caplog.text
    assert all(list(Path(path).glob("*/*.seg")) for path in paths)
    restarted = rig(path=paths[::-1], capacity=["512MiB", "1GiB"])
    got = restarted.prefetch(restarted.tokens(PAGES))
    assert got.completed_pages == PAGES
    for before, after in zip(wanted, restarted.read_device(restarted.load(got.host_indices)), strict=True):
        assert (before == after).all()
    assert restarted.storage.errors == {}


def test_a_device_that_goes_away_costs_its_pages(rig: MakeRig, paths: list[str]) -> None:
    """I3: no exception on SGLang's threads; what is served of the chain ends before the first lost page."""
    made = rig()
    store_pages(made)
    shutil.move(paths[1], paths[1] + ".gone")
    made.prefetch(made.tokens(PAGES))
    assert made.storage.errors == {}
    restarted = rig()
    assert restarted.prefetch(restarted.tokens(PAGES)).hit_pages < PAGES
    store_pages(restarted)
    assert restarted.prefetch(restarted.tokens(PAGES)).completed_pages == PAGES
    assert restarted.storage.errors == {}


def test_the_same_device_twice_is_refused(rig: MakeRig, paths: list[str]) -> None:
    """At start, with the key, the value and the fix; nothing has been made."""
    with pytest.raises(StoreError, match="same directory; name each directory once"):
        rig(path=[paths[0], paths[0] + "/../nvme0"])
    assert not os.path.exists(paths[0])
