"""`nixl-posix`: NIXL's POSIX plugin, a file for each block, as SGLang's nixl backend uses it."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from store_bench.stores.base import CannotRun, Spec, StoreUnderTest

_NAME = "bench"


class NixlPosix(StoreUnderTest):
    """Opens and registers the files of a batch, posts one transfer, polls it without sleeping, closes them.

    The memory is registered once. Files are written under their final name, as SGLang's backend does.
    """

    def __init__(self, spec: Spec) -> None:
        try:
            nixl: Any = importlib.import_module("nixl_cu12")
        except Exception as error:
            raise CannotRun(f"import of nixl_cu12 failed: {error}") from error
        super().__init__(spec)
        try:
            self._agent = nixl.nixl_agent(_NAME, nixl.nixl_agent_config(backends=[]))
            self._agent.create_backend("POSIX", {})
            memory = self.blocks.components[0]
            self._memory = self._agent.register_memory(
                [(memory.ctypes.data, memory.nbytes, 0, "memory")], "DRAM", backends=["POSIX"]
            )
        except Exception as error:
            raise CannotRun(f"NIXL's POSIX plugin does not start: {error}") from error
        self._flags = os.O_DIRECT if spec.io_mode == "direct" else 0
        self._addresses = self.blocks.addresses[:, 0].tolist()

    def facts(self) -> dict[str, Any]:
        return dict(self._agent.get_backend_params("POSIX"))

    def begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def prepare_dump(self, ids: list[bytes], first: int = 0) -> Any:
        size = self.spec.block_bytes
        memory = [(address, size, 0) for address in self._addresses[first : first + len(ids)]]
        return [f"{self.directory}/{block.hex()}" for block in ids], memory

    def prepare_load(self, ids: list[bytes]) -> Any:
        return self.prepare_dump(ids)

    def dump(self, prepared: Any) -> None:
        self._move("WRITE", prepared, os.O_RDWR | os.O_CREAT | self._flags)

    def load(self, prepared: Any) -> None:
        self._move("READ", prepared, os.O_RDWR | self._flags)

    def _move(self, direction: str, prepared: Any, flags: int) -> None:
        paths, memory = prepared
        size, agent = self.spec.block_bytes, self._agent
        files = [os.open(path, flags, 0o644) for path in paths]
        try:
            registered = agent.register_memory(
                [(0, size, fd, "") for fd in files], "FILE", backends=["POSIX"]
            )
            local = agent.get_xfer_descs(memory, "DRAM")
            handle = agent.initialize_xfer(direction, local, registered.trim(), _NAME)
            state = agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            agent.deregister_memory(registered, backends=["POSIX"])
            if state == "ERR":
                raise RuntimeError(f"{direction} failed")
        finally:
            for fd in files:
                os.close(fd)

    def prepare_lookup(self, ids: list[bytes]) -> Any:
        return [(0, 0, 0, f"{self.directory}/{block.hex()}") for block in ids]

    def lookup(self, prepared: Any) -> int:
        return sum(
            found is not None for found in self._agent.query_memory(prepared, "POSIX", mem_type="FILE")
        )

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._agent = None
        super().close()
