"""Sick disks, hung disks, deaths and leaks: what users of other disk tiers reported, and what happens here.

Issue 3. Each test is named after a public report and shows its scenario in small; most of it is tested in
depth elsewhere.
"""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clikit import dump_chain, report
from faults import KINDS, Fault, FaultySyscalls
from layout_pools import MHATokenToKVPoolHost, tokens
from patient import KNOWN, patient
from storekit import (
    NAMESPACE,
    assert_counters_add_up,
    assert_no_lock_is_held,
    dump,
    held_open,
    ids_of,
    load,
    memory_directory,
    open_store,
    payloads,
)
from workers import Worker, obedient

from posix_store import Reason, StoreError
from posix_store.pins import write_pins
from posix_store.segment import SegmentName
from ucm_sglang.layout import PoolLayout

LENGTH = 4096
MIB = 1 << 20
SMALL: dict[str, Any] = {"capacity": MIB, "segment_bytes": MIB // 8}
"""A store of some 250 blocks."""
FOREVER = float("inf")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


# -- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE])
def test_b11_sglang_38428_no_exception_reaches_the_engine(root: Path, error: int) -> None:
    """An exception ended the backup thread: nothing was stored any more, and host memory was never released.

    Here every system call fails from one moment on, and all verbs answer with a reason for each block. (I3)
    """
    with open_store(root) as store:
        dump(store, KNOWN, LENGTH)
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls, breaker_failures=99) as store:
        calls.faults = [Fault(kinds=set(KINDS) - {"close"}, times=FOREVER, error=error)]
        assert (load(store, KNOWN, LENGTH) != Reason.OK).all()
        assert (dump(store, ids_of(2, 4), LENGTH) != Reason.OK).all()
        assert not store.lookup(ids_of(3, 4)).any() and store.lookup_on_prefix(ids_of(3, 4)) == -1
        store.prefetch(KNOWN)
        task = store.dump(ids_of(4, 4), 0, list(payloads(ids_of(4, 4), LENGTH)))
        assert not store.wait(task, 10).any()
        assert_counters_add_up(store)
        calls.faults = []
        assert (dump(store, ids_of(5, 4), LENGTH) == Reason.OK).all()


def test_b12_sglang_36882_38483_threads_survive_and_end(root: Path) -> None:
    """I/O threads leaked, or were killed by an exception.

    Here their number is bounded, failures do not end them, and `close` leaves none.
    """
    before = set(threading.enumerate())
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls, breaker_failures=999, maintenance=True) as store:
        rows = list(payloads(KNOWN, LENGTH))
        calls.faults = [Fault(kinds=["pwritev", "preadv"], times=FOREVER, error=errno.EIO)]
        tasks = [store.dump(KNOWN, 0, rows) for _ in range(10)] + [
            store.load(KNOWN, 0, rows) for _ in range(10)
        ]
        assert not any(store.wait(task, 10).any() for task in tasks)
        calls.faults = []
        assert store.wait(store.dump(KNOWN, 0, rows), 10).all()
        assert store.wait(store.load(KNOWN, 0, rows), 10).all()
        assert len(set(threading.enumerate()) - before) <= 2 + 2 + 2 + 1
    assert not set(threading.enumerate()) - before


def test_b13_sglang_30760_33029_38270_26921_15805_ranks_get_the_same_answer_at_once(root: Path) -> None:
    """Ranks that disagreed on the length of a hit, or waited in it, hung in a collective operation.

    That they agree is SGLang's job (it takes the least of all). Here readers of one state give one answer,
    and a look-up waits for no write, however long that takes. (I11)
    """
    with patient() as it:
        ids = np.concatenate([KNOWN, ids_of(9, 4)])
        it.calls.faults = [Fault(kinds=["pwritev"], before=it.hang)]
        it.start(lambda: dump(it.store, ids_of(8, 4), LENGTH))
        it.hang.begun()
        answers = [it.prompt(lambda: it.store.lookup_on_prefix(ids)) for _ in range(3)]
        for _ in range(3):
            with open_store(it.path, writable=False) as rank:
                answers.append(rank.lookup_on_prefix(ids))
        assert answers == [len(KNOWN) - 1] * 6


@pytest.mark.parametrize("length", [512, 4095, 4096 + 8, 70_001])
def test_b14_sglang_34386_any_size_and_any_address(root: Path, length: int) -> None:
    """A stride that did not fit O_DIRECT gave EINVAL, and pages were dropped in silence.

    Here sizes and addresses may be anything, and a disk that says EINVAL is counted and logged.
    """
    ids = ids_of(1, 5)
    memory = np.zeros(5 * length + 3, np.uint8)
    rows = [memory[3 + at * length : 3 + (at + 1) * length] for at in range(5)]
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls) as store:
        for row, right in zip(rows, payloads(ids, length), strict=True):
            row[:] = right
        assert store.dump(ids, 0, rows, background=False).results().all()
        memory[:] = 0
        assert store.load(ids, 0, rows, background=False).results().all()
        assert (np.stack(rows) == payloads(ids, length)).all()
        calls.faults = [Fault(kinds=["pwritev"], times=FOREVER, error=errno.EINVAL)]
        assert (dump(store, ids_of(2, 3), length) == Reason.IO_ERROR).all()
        assert store.counters.snapshot()["unstored"] == {"io_error": 3}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_b17_sglang_9431_34969_a_pool_without_bytes(layout: str) -> None:
    """A pool without memory of its own (a logical anchor, a stage without attention layers) divided by zero.

    Here its pages have no components and no bytes.
    """
    found = PoolLayout.of(MHATokenToKVPoolHost(layout, 8, 4, 0, 2, 8))
    assert found.page_bytes == 0
    assert found.addresses(tokens([3, 1], 4)).shape[0] == 2


def test_b18_lmcache_2942_nothing_can_be_evicted(root: Path) -> None:
    """An allocation that could not succeed was tried for ever, with a lock held: deadlock.

    Here everything is pinned: the dump gives up in time, and others go on meanwhile. (I11)
    """
    with open_store(root, **SMALL) as store:
        pinned = np.concatenate([ids_of(seed, 32) for seed in range(20)])
        dump(store, pinned[:128], LENGTH)
        write_pins(store.root, NAMESPACE, pinned)
        for start in range(128, 640, 32):
            status = dump(store, pinned[start : start + 32], LENGTH)
        assert (status == Reason.FULL).any()
        begun = time.monotonic()
        thread = threading.Thread(target=dump, args=(store, ids_of(50, 32), LENGTH))
        thread.start()
        assert (load(store, pinned[:128], LENGTH) == Reason.OK).all()
        thread.join(10)
        assert time.monotonic() - begun < 2
        assert not store.lookup(ids_of(50, 32)).all()
    assert_no_lock_is_held(root)


@pytest.mark.parametrize("kind", ["fallocate", "ftruncate", "open for writing", "pwritev", "pwrite", "flock"])
def test_b19_lmcache_no_lock_is_kept_after_a_failure(root: Path, kind: str) -> None:
    """An early return after a failed allocation kept a lock: everybody waited for ever.

    Here whatever call fails in a dump, another process can store at once.
    """
    with open_store(root) as store:
        dump(store, KNOWN, LENGTH)
    calls = FaultySyscalls(Fault(kinds=[kind], nth=2, times=3, error=errno.EIO))
    with open_store(root, syscalls=calls) as store, open_store(root) as other:
        for seed in range(2, 5):
            dump(store, ids_of(seed, 4), LENGTH)
        assert calls.faults[0].fired
        begun = time.monotonic()
        assert (dump(other, ids_of(9, 4), LENGTH) == Reason.OK).all()
        assert time.monotonic() - begun < 1
    assert_no_lock_is_held(root)


# -- time ---------------------------------------------------------------------------------------------------


def test_b21_vllm_54363_a_hung_disk_does_not_hold_up_the_engine() -> None:
    """Asked for: checksums, and an engine that goes on when I/O hangs.

    Here one read hangs. Soon all other calls are misses at once, and when it ends, all is served. (I11)
    """
    with patient(breaker_failures=2, slow_seconds=0.1, breaker_seconds=0.2) as it:
        it.calls.faults = [Fault(kinds=["preadv"], before=it.hang)]
        hung = it.start(lambda: load(it.store, KNOWN, LENGTH))
        it.hang.begun()
        time.sleep(0.25)
        for _ in range(3):
            assert (it.prompt(lambda: load(it.store, KNOWN, LENGTH)) == Reason.BREAKER).all()
            assert it.prompt(lambda: it.store.lookup_on_prefix(KNOWN)) == -1
        it.hang.let_go()
        assert len(hung.result(10)) == len(KNOWN)
        it.recovers(lambda: bool((load(it.store, KNOWN, LENGTH) == Reason.OK).all()))


def test_b22_vllm_50031_51240_53485_191_waiting_writes_are_bounded() -> None:
    """Writes that waited without bound held the GPU's blocks until the engine starved.

    Here so many bytes may wait, the newest pages go unstored as `queue`, and loads go on.
    """
    with patient(write_queue_bytes=8 * LENGTH) as it:
        it.calls.faults = [Fault(kinds=["pwritev"], before=it.hang)]
        first = it.store.dump(ids_of(60, 8), 0, list(payloads(ids_of(60, 8), LENGTH)))
        it.hang.begun()
        assert (it.prompt(lambda: dump(it.store, ids_of(61, 4), LENGTH)) == Reason.QUEUE).all()
        assert (it.prompt(lambda: load(it.store, KNOWN, LENGTH)) == Reason.OK).all()
        it.hang.let_go()
        assert it.store.wait(first, 10).all()
        assert (dump(it.store, ids_of(61, 4), LENGTH) == Reason.OK).all()


# -- processes ----------------------------------------------------------------------------------------------


def test_b23_vllm_57303_44888_nothing_is_left_outside_the_store(tmp_path: Path) -> None:
    """Shared memory was never unlinked, and /dev/shm ran full.

    Here a process maps and opens no file outside the directory of the store, so its death leaves nothing.
    """

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if re.search(r"/(dev/shm|tmp|memfd)", line)}

    before = mapped()
    opened = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    with open_store(tmp_path / "store", maintenance=True) as store:
        dump(store, KNOWN, LENGTH)
        load(store, KNOWN, LENGTH)
        assert mapped() == before
        now = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
        added = {name for name in now - opened if name.startswith("/") and not name.startswith("/proc/")}
        assert added and all(name.startswith(str(tmp_path)) for name in added)
    assert held_open(tmp_path) == []


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_b24_sglang_29955_nothing_depends_on_a_graceful_end(root: Path, sign: signal.Signals) -> None:
    """SIGTERM did not reach the backend's clean-up, and others followed stale metadata.

    Here there is nothing to clean up: what was reported stored is found, and nothing else. (I9)
    """
    with Worker(obedient, str(root), {"maintenance": True}, LENGTH) as server:
        server.receive()
        server.send(("dump", KNOWN))
        assert (server.receive() == Reason.OK).all()
        os.kill(server.pid, sign)
        server.process.join(10)
        assert server.process.exitcode == -sign
        with open_store(root) as store:
            assert (load(store, KNOWN, LENGTH) == Reason.OK).all()
            assert store.stats().live_writers == 0
            assert (dump(store, ids_of(2, 4), LENGTH) == Reason.OK).all()


def test_b25_hf3fs_signals_are_not_touched(root: Path) -> None:
    """A constructor replaced the handlers of SIGINT, SIGTERM and SIGQUIT.

    Here all handlers are the same before, during and after. (I9)
    """
    numbers = sorted(signal.valid_signals())
    before = [signal.getsignal(number) for number in numbers]
    store = open_store(root, maintenance=True)
    dump(store, KNOWN, LENGTH)
    assert [signal.getsignal(number) for number in numbers] == before
    store.close()
    assert [signal.getsignal(number) for number in numbers] == before


def test_b26_sglang_37172_a_chain_without_its_head_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With write_back the head of a chain was never stored, so the pages behind it could not be reached.

    Here `inspect` says so of a block, and `init` prints the flags with which it does not happen.
    """
    path = str(tmp_path / "store")
    head = b"\x07" * 16
    dump_chain(path, ["second", "third"], before=head)
    (block,) = report(capsys, "inspect", path, "--key", "third", status=1)["blocks"]
    assert not block["chain_whole"] and block["chain_cut_at"] == head.hex()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.ENOENT])
def test_b27_ccache_68_llvm_220936_r_lib_fs_458_network_file_systems(root: Path, error: int) -> None:
    """On NFS: stale handles, attributes from a cache, and SIGBUS in mapped memory.

    Here each error of a file is a miss, the block can be stored again, and no file is mapped into memory.
    """
    with open_store(root) as store:
        dump(store, KNOWN, LENGTH)
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls) as store:
        calls.faults = [Fault(kinds=["preadv"], times=FOREVER, error=error)]
        assert set(load(store, KNOWN, LENGTH).tolist()) <= {Reason.IO_ERROR, Reason.EVICTED}
        calls.faults = []
        assert (dump(store, KNOWN, LENGTH) == Reason.OK).all()
        assert (load(store, KNOWN, LENGTH) == Reason.OK).all()
        assert str(root) not in Path("/proc/self/maps").read_text()


# -- words --------------------------------------------------------------------------------------------------


def test_b29_ucm_928_900_141_errors_in_words(root: Path) -> None:
    """An error was the number "2", or "-50005".

    Here it is what the system calls it, with the path and what to do.
    """
    open_store(root).close()
    for error in (errno.EIO, errno.ENOSPC, errno.EACCES):
        calls = FaultySyscalls(Fault(kinds=["listdir"], times=FOREVER, error=error))
        with pytest.raises(
            StoreError, match=f"path = {root}: {os.strerror(error)} .*; .*name another directory"
        ):
            open_store(root, syscalls=calls)


@pytest.mark.parametrize("kind", ["pwritev", "preadv"])
def test_b29_ucm_928_900_141_errors_of_transfers_in_words(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same for what fails later: the log has the path, what the system said, and what to do."""
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls) as store:
        dump(store, KNOWN, LENGTH)
        calls.faults = [Fault(kinds=[kind], times=FOREVER, error=errno.EIO)]
        dump(store, ids_of(2, 4), LENGTH)
        load(store, KNOWN, LENGTH)
    line = next(line for line in caplog.messages if "unstored" in line or "cannot be used" in line)
    assert not [word for word in (os.strerror(errno.EIO), str(root), "doctor") if word not in line]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM])
def test_b31_permissions_said_at_the_start(root: Path, error: int) -> None:
    """Nobody could tell why a store was not written.

    Here it is said at construction: which user this is, whose the directory is, its mode, and what to do.
    """
    root.mkdir(mode=0o750)
    root.chmod(0o750)
    calls = FaultySyscalls(Fault(kinds=["open for writing"], times=FOREVER, error=error))
    with pytest.raises(StoreError) as caught:
        open_store(root, syscalls=calls)
    words = (str(root), os.strerror(error), f"{os.geteuid()}:{os.getegid()}", "mode 750", "access")
    assert not [word for word in words if word not in str(caught.value)]
    assert not [path for path in root.rglob("*") if SegmentName.parse(path.name)]
