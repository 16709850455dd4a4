"""A store shared by users and by forked processes: docs/OPERATIONS.md on sharing, I3, I4, I9, I11."""

import contextlib
import logging
import os
import signal
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from storekit import dump, ids_of, load, memory_directory, open_store, payloads
from workers import Worker

from posix_store import Reason, StoreError

LENGTH = 5000
BLOCKS, OTHERS, LATER = ids_of(1, 6), ids_of(2, 3), ids_of(3, 4)
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        path.chmod(0o755)
        yield path / "store"


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """The umask of this process for the body of the `with`."""
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def fill(root: Path, mask: int) -> None:
    """A store that holds `BLOCKS`, made with a umask."""
    with umask(mask), open_store(root) as store:
        assert (dump(store, BLOCKS, LENGTH) == Reason.OK).all()


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_the_umask_decides_who_may_share(root: Path, mask: int) -> None:
    """docs/OPERATIONS.md: every file and directory has exactly the rights that the umask leaves."""
    fill(root, mask)
    paths = [root, *root.rglob("*")]
    assert {path.suffix for path in paths} == {"", ".json", ".lock", ".seg", ".idx"}
    for path in paths:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path.name


def another_user(connection: Connection, root: str) -> None:
    """Give up all rights, open the store, load `BLOCKS`, dump `OTHERS`; answer with what came of it."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("posix_store").addHandler(handler)
    try:
        with open_store(root, capacity=None) as store:
            hits = int(store.lookup(BLOCKS).sum())
            loads, dumps = load(store, BLOCKS, LENGTH), dump(store, OTHERS, LENGTH)
            reasons = {Reason(int(reason)).name for reason in dumps}
            connection.send((store.root.read_only_because, hits, int((loads == 0).sum()), reasons, lines))
    except StoreError as error:
        connection.send(str(error))


@as_root
def test_a_user_without_write_access(root: Path) -> None:
    """I3, I4: the store says at its start that it is read-only and why, serves, and stores nothing."""
    fill(root, 0o022)
    with Worker(another_user, str(root)) as worker:
        why, hits, loaded, reasons, lines = worker.receive()
    assert why and (hits, loaded) == (len(BLOCKS), len(BLOCKS))
    assert reasons == {"READ_ONLY"}
    assert len(lines) == 1 and "STORE.lock is not writable" in lines[0] and "access" in lines[0]


@as_root
def test_a_user_without_write_access_to_a_new_store(root: Path) -> None:
    """I3, I4: the same for a store that `ucm-sglang init` has made and nobody has stored anything in."""
    with umask(0o022):
        open_store(root).close()
    with Worker(another_user, str(root)) as worker:
        why, hits, _, reasons, _ = worker.receive()
    assert why and hits == 0 and reasons == {"READ_ONLY"}


@as_root
def test_users_that_share_a_store(root: Path) -> None:
    """docs/OPERATIONS.md: with a umask that allows it, another user reads and stores, and is read."""
    fill(root, 0o000)
    with Worker(another_user, str(root)) as worker:
        why, hits, loaded, reasons, lines = worker.receive()
    assert why is None and (hits, loaded) == (len(BLOCKS), len(BLOCKS))
    assert reasons == {"OK"} and lines == []
    with open_store(root) as store:
        assert (load(store, OTHERS, LENGTH) == Reason.OK).all()


def forks_with_threads(connection: Connection, root: str) -> None:
    """Use the store's threads, fork, have the child dump and load in the background; then go on.

    Reports how the child ended (a wait status), and which of its own later blocks the parent stored.
    """
    store = open_store(root)
    large = payloads(BLOCKS, 1 << 20)  # enough for helper threads
    assert store.dump(BLOCKS, None, list(large)).results().all()
    child = os.fork()
    if not child:
        signal.alarm(10)  # a hang ends here
        rows = payloads(OTHERS, LENGTH)
        large[:] = 0
        good = store.load(BLOCKS, None, list(large), background=True).results(5).all()
        good &= (large == payloads(BLOCKS, 1 << 20)).all()
        good &= store.dump(OTHERS, None, list(rows), background=True).results(5).all()
        store.close()
        os._exit(0 if good else 1)
    connection.send(os.waitpid(child, 0)[1])
    connection.send(dump(store, LATER, LENGTH))
    connection.recv()


def test_a_forked_child(root: Path) -> None:
    """I11, I2: a child that inherited a store with threads does not hang, and its parent loses nothing."""
    with Worker(forks_with_threads, str(root)) as worker, open_store(root, writable=True) as reader:
        ended = worker.receive()
        assert ended == 0, f"child ended with signal {os.WTERMSIG(ended)}, code {os.WEXITSTATUS(ended)}"
        assert (worker.receive() == Reason.OK).all()
        assert (load(reader, BLOCKS, 1 << 20) == Reason.OK).all()
        for ids in (OTHERS, LATER):
            assert (load(reader, ids, LENGTH) == Reason.OK).all()
        worker.kill()
    with open_store(root) as fresh:
        dump(fresh, ids_of(9, 1), LENGTH)  # gives back what the dead left, and no more
        assert (load(fresh, BLOCKS, 1 << 20) == Reason.OK).all()
        for ids in (OTHERS, LATER):
            assert (load(fresh, ids, LENGTH) == Reason.OK).all()
