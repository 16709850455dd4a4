"""Issue 4, direct I/O: chosen by probing, falls back loudly, and the bytes and promises are the same.

In a temporary directory on a disk, since a tmpfs takes O_DIRECT for a joke.
"""

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from storekit import PAGE, dump, ids_of, load, open_store, payloads

from posix_store import PosixStore, Reason, StoreError, compiled, io_mode
from posix_store.buffers import scratch
from posix_store.syscalls import Syscalls

LENGTH = 2 * PAGE
COUNT = 24
ENGINES = (
    pytest.param("native", marks=pytest.mark.skipif(compiled.native is None, reason=compiled.why_not)),
    "python",
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    try:
        fd = os.open(tmp_path, os.O_RDONLY | os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT in {tmp_path}: {error}")
    os.close(fd)
    yield path


class Aligned:
    """Page-aligned memory for blocks, `shift` bytes off."""

    def __init__(self, shift: int = 0, count: int = COUNT, length: int = LENGTH) -> None:
        self.rows = scratch(count * length + PAGE)[shift : shift + count * length].reshape(count, length)
        self.addresses = self.rows.ctypes.data + np.arange(count, dtype=np.int64).reshape(-1, 1) * length

    def dump(self, store: PosixStore, ids: np.ndarray) -> np.ndarray:
        self.rows[:] = payloads(ids, self.rows.shape[1])
        return store.dump_data(ids, None, self.addresses, self.rows.shape[1], background=False).status()

    def load(self, store: PosixStore, ids: np.ndarray) -> np.ndarray:
        self.rows[:] = 0xA5
        status = store.load_data(ids, None, self.addresses, self.rows.shape[1], background=False).status()
        good = status == Reason.OK
        assert (self.rows[good] == payloads(ids[good], self.rows.shape[1])).all(), "wrong bytes"
        return status


class Watched(Syscalls):
    """Notes whether data went around the page cache."""

    def __init__(self) -> None:
        self.direct = {"preadv": 0, "pwritev": 0}
        self.buffered = {"preadv": 0, "pwritev": 0}

    def _note(self, kind: str, fd: int) -> None:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            flags = int(next(line.split()[1] for line in info if line.startswith("flags")), 8)
        (self.direct if flags & os.O_DIRECT else self.buffered)[kind] += 1

    def preadv(self, fd: int, iov: int, count: int, offset: int) -> int:
        self._note("preadv", fd)
        return super().preadv(fd, iov, count, offset)

    def pwritev(self, fd: int, iov: int, count: int, offset: int) -> int:
        self._note("pwritev", fd)
        return super().pwritev(fd, iov, count, offset)


@pytest.mark.parametrize("engine", ENGINES)
def test_aligned_batches_go_around_the_page_cache(root: Path, engine: str) -> None:
    calls, ids = Watched(), ids_of(1, COUNT)
    with open_store(root, io_mode="direct", engine=engine, syscalls=calls) as store:
        memory = Aligned()
        assert not memory.dump(store, ids).any()
        order = np.random.default_rng(0).permutation(COUNT)
        assert not memory.load(store, ids[order]).any()
        assert store.io_mode.fallbacks == 0
    assert calls.direct["preadv"] and calls.direct["pwritev"] and not any(calls.buffered.values())
    with open_store(root, engine=engine) as store:  # and through it the same bytes are there
        assert not load(store, ids, LENGTH).any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("shift", "length"), [(512, LENGTH), (0, LENGTH + 512)], ids=["address", "size"])
def test_unaligned_batches_fall_back_loudly(
    root: Path, engine: str, shift: int, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bytes, through the page cache; said once, counted each time."""
    calls, ids = Watched(), ids_of(2, COUNT)
    with (
        caplog.at_level(logging.WARNING),
        open_store(root, io_mode="direct", engine=engine, syscalls=calls) as store,
    ):
        memory = Aligned(shift, length=length)
        assert not memory.dump(store, ids).any()
        assert not memory.load(store, ids).any()
        assert store.io_mode.fallbacks == 2
    assert not any(calls.direct.values())
    said = [record.message for record in caplog.records if "not aligned" in record.message]
    assert len(said) == 1 and "page-aligned" in said[0].lower()


def test_what_was_stored_unaligned_is_loaded(root: Path) -> None:
    """Blocks of odd size are at odd offsets in their extent: they are read through the page cache."""
    ids, odd = ids_of(3, COUNT), ids_of(4, 3)
    with open_store(root, io_mode="direct") as store:
        dump(store, odd, 1000)
        Aligned().dump(store, ids)
        assert not load(store, odd, 1000).any()
        assert not Aligned().load(store, ids).any()


def test_a_file_system_without_it(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`direct` refuses at start, with the key, the value and the fix; `auto` goes on and says why."""
    open_store(root).close()

    class Refusing(Syscalls):
        def open(self, path: str, flags: int, mode: int = 0o666) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().open(path, flags, mode)

    with pytest.raises(StoreError, match=r"io_mode = 'direct'.*O_DIRECT.*buffered"):
        open_store(root, io_mode="direct", syscalls=Refusing())
    with open_store(root, io_mode="auto", syscalls=Refusing()) as store:
        assert not store.io_mode.direct and "O_DIRECT" in str(store.io_mode)


@pytest.mark.parametrize(("nvme", "name"), [(True, "direct"), (False, "buffered")])
def test_auto_is_direct_on_nvme(root: Path, monkeypatch: pytest.MonkeyPatch, nvme: bool, name: str) -> None:
    monkeypatch.setattr(io_mode, "on_nvme", lambda *_: nvme)
    with open_store(root, io_mode="auto") as store:
        assert store.io_mode.name == name
        assert not Aligned().dump(store, ids_of(5, COUNT)).any()


def test_nvme_is_seen_through_partitions_and_volumes(tmp_path: Path) -> None:
    """LVM and RAID list what they are made of; all of it must be NVMe."""
    for device in ("pci/nvme/nvme0n1/nvme0n1p1", "ata/sda/sda1"):
        (tmp_path / device).mkdir(parents=True)
    for volume, parts in {"dm-0": ["pci/nvme/nvme0n1/nvme0n1p1"], "md0": ["dm-0", "ata/sda/sda1"]}.items():
        (tmp_path / volume / "slaves").mkdir(parents=True)
        for part in parts:
            (tmp_path / volume / "slaves" / Path(part).name).symlink_to(tmp_path / part)
    found = {
        name: io_mode._is_nvme(str(tmp_path / name), Syscalls()) for name in ("dm-0", "md0", "ata/sda/sda1")
    }
    assert found == {"dm-0": True, "md0": False, "ata/sda/sda1": False}


@pytest.mark.parametrize("engine", ENGINES)
def test_o_direct_is_refused_later(root: Path, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """The store goes on through the page cache; no block is lost by it."""
    calls = FaultySyscalls(Fault(kinds=["set_direct"], times=float("inf"), error=errno.EINVAL))
    ids = ids_of(6, COUNT)
    with open_store(root, io_mode="direct", engine=engine, syscalls=calls) as store:
        assert not Aligned().dump(store, ids).any()
        assert not Aligned().load(store, ids).any()
    assert calls.counts["set_direct"] and "O_DIRECT is refused" in caplog.text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["preadv", "pwritev", "pwrite", "fallocate", "open", "fstat"])
def test_every_call_fails_in_turn(root: Path, engine: str, kind: str) -> None:
    """I1, I2: what is said to be loaded has the right bytes, what is said to be stored is found again."""
    ids = ids_of(7, COUNT)
    for nth in range(1, 40):
        where = root.with_name(f"{kind}{nth}")
        fault = Fault(kinds=[kind], error=errno.EIO)
        calls = FaultySyscalls()
        with open_store(where, io_mode="direct", engine=engine, syscalls=calls) as store:
            fault.nth = nth
            calls.faults.append(fault)
            stored = Aligned().dump(store, ids) == Reason.OK
            Aligned().load(store, ids)
            calls.faults.clear()
            there = Aligned(count=int(stored.sum())).load(store, ids[stored])
            assert np.isin(there, (Reason.OK, Reason.ABSENT)).all()
        with open_store(where) as again:
            assert not load(again, ids[stored], LENGTH).any()
        if not fault.fired:
            break
    assert nth > 1


def test_a_killed_direct_writer_leaves_no_space_behind(root: Path) -> None:
    """I2, I4: its segment is as long as what was reserved for it; the next writer cuts it back."""
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from storekit import ids_of, open_store
from test_io_mode import Aligned, COUNT
store = open_store({str(root)!r}, io_mode="direct")
assert not Aligned().dump(store, ids_of(8, COUNT)).any()
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    (segment,) = root.glob("*/*.seg")
    left = segment.stat()
    assert left.st_size > COUNT * LENGTH + PAGE
    with open_store(root, io_mode="direct") as store:
        assert not Aligned().load(store, ids_of(8, COUNT)).any()
        assert not Aligned().dump(store, ids_of(9, COUNT)).any()
        assert segment.stat().st_blocks * 512 <= COUNT * LENGTH + 2 * PAGE
        assert not Aligned().load(store, ids_of(8, COUNT)).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_page_cache_drop(root: Path, engine: str) -> None:
    """What was read is let go of, what was written begins to be written back; the bytes are the same."""
    calls, ids = FaultySyscalls(), ids_of(10, COUNT)
    with open_store(root, page_cache="drop", engine=engine, syscalls=calls) as store:
        assert not Aligned().dump(store, ids).any()
        assert calls.counts["fadvise"] == 1
        assert not Aligned().load(store, ids).any()
        assert calls.counts["fadvise"] == 2
        calls.faults.append(Fault(kinds=["fadvise"], times=float("inf"), error=errno.EIO))
        assert not Aligned().load(store, ids).any(), "advice that is not taken changes nothing"
    with open_store(root, page_cache="keep", syscalls=calls) as store:
        before = calls.counts["fadvise"]
        assert not Aligned().load(store, ids).any()
        assert calls.counts["fadvise"] == before


def test_prefetch_reads_ahead_what_was_asked_for(root: Path) -> None:
    """Issue 4: a range for each run of blocks, not all that lies between them; nothing with direct I/O."""
    ranges: list[tuple[int, int]] = []

    class Noting(Syscalls):
        def fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
            assert advice == os.POSIX_FADV_WILLNEED
            ranges.append((offset, length))

    ids = ids_of(11, COUNT)
    with open_store(root, syscalls=Noting()) as store:
        assert not Aligned().dump(store, ids).any()
        wanted = [7, 0, 1, 20]
        store.prefetch(ids[wanted])
    assert sorted(ranges) == [
        (PAGE, 2 * LENGTH), (PAGE + 7 * LENGTH, LENGTH), (PAGE + 20 * LENGTH, LENGTH),
    ]  # fmt: skip
    ranges.clear()
    with open_store(root, io_mode="direct", syscalls=Noting()) as store:
        store.prefetch(ids)
    assert not ranges


@pytest.mark.parametrize(("key", "value"), [("io_mode", "fast"), ("page_cache", "yes"), ("engine", "rust")])
def test_unknown_names(root: Path, key: str, value: str) -> None:
    with pytest.raises(StoreError, match=rf"{key} = '{value}'.*unknown"):
        open_store(root, **{key: value})
