"""Tests with a real SGLang: make it run on a CPU in this process before anything imports it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pass  # the tests are skipped; tests/conftest.py says why
else:
    import cpu_engine

    cpu_engine.install()

if TYPE_CHECKING:
    from sglang_fleet import Fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The session's true servers: one at a time, shared by tests that ask for the same settings."""
    from sglang_fleet import Fleet

    base = tmp_path_factory.mktemp("servers")
    servers = Fleet(base)
    yield servers
    servers.stop()
    shutil.rmtree(base / "store", ignore_errors=True)


@pytest.fixture
def fresh_store(fleet: Fleet) -> Iterator[Callable[..., Path]]:
    """A call attaches the main server to a new, empty store and returns its root; arguments are config keys.

    Afterwards the server is back on the store it started with. No restart is needed for either.
    """
    from sglang_fleet import extra_config

    server = fleet.main()
    server.flush_cache()
    roots: list[Path] = []

    def attach(**config: object) -> Path:
        roots.append(Path(tempfile.mkdtemp(prefix="store-", dir=fleet.base)))
        server.detach_storage()
        server.attach_storage("dynamic", extra_config(roots[-1], **config))
        return roots[-1]

    yield attach
    if fleet.server is server:
        server.flush_cache()
        server.detach_storage()
        server.attach_storage("dynamic", extra_config(fleet.store))
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def clean_log(fleet: Fleet) -> Iterator[None]:
    """No server of this test logs a traceback or an error: what is stored and found costs nobody one."""
    from sglang_fleet import errors_in

    fleet.new_log()
    yield
    assert errors_in(fleet.new_log()) == []
