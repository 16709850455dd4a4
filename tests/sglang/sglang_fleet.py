"""True SGLang servers for tests: one at a time, shared by all tests that ask for the same settings.

A start costs half a minute, so tests ask `Fleet.get` for the settings they need and get the running server
when it has them. What a server logs is kept with level and logger, and `Fleet.new_log` hands out what was
logged since it was last asked, so that every test can be held to a clean log.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cpu_engine.server import CpuServer, Generation, ServerError
from cpu_engine.settings import ServerSettings
from cpu_engine.tiny_model import make_lora, make_model

REPOSITORY = Path(__file__).resolve().parents[2]
LORAS = ("one", "two")

in_full_matrix = pytest.mark.skipif(
    os.environ.get("UCM_FULL_MATRIX") != "1", reason="part of the full matrix: set UCM_FULL_MATRIX=1"
)

# SGLang's default format says neither the level nor which logger a line came from.
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "[%(asctime)s] %(levelname)s %(name)s %(process)d: %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"level": "INFO", "handlers": ["out"]},
}
_RECORD = re.compile(r"^(?=\[\d{4}-\d\d-\d\d )", re.MULTILINE)
_WRONG = re.compile(r"\] (?:ERROR|CRITICAL) |^Traceback", re.MULTILINE)
_OUR_WARNING = re.compile(r"\] WARNING (?:posix_store|ucm_sglang)")
# SGLang asks itself for this before its port is open, now and then.
_HARMLESS = "post-warmup freeze_gc failed"


def extra_config(root: Path, **more: Any) -> dict[str, Any]:
    """The backend's configuration. No floor of free space, so that tests do not depend on the disk."""
    return {
        "backend_name": "ucm",
        "module_path": "ucm_sglang.hicache",
        "class_name": "UcmHiCacheStorage",
        "interface_v1": 1,
        "path": str(root),
        "capacity": "1GiB",
        "min_free": 0,
        **more,
    }


def all_from_storage(prompt: list[int], page_size: int) -> int:
    """Tokens that come from storage when all pages are there: SGLang computes the last token itself."""
    return (len(prompt) - 1) // page_size * page_size


def assert_same(got: Generation, wanted: Generation) -> None:
    """Must hold 1: the same ids, and log probabilities within 5e-5."""
    assert got.output_ids == wanted.output_ids
    if got.logprobs is not None and wanted.logprobs is not None:
        worst = max(abs(a - b) for a, b in zip(got.logprobs, wanted.logprobs, strict=True))
        assert worst < 5e-5


class Fleet:
    """Servers for one test session.

    Args:
        base: directory for models, stores and logs.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = base / "store"
        """The root that `settings` names: shared by servers of all settings, as in production."""
        self.server: CpuServer | None = None
        self._settings: ServerSettings | None = None
        self._seeds: dict[str, int] = {}
        self._adapters: dict[str, int] = {}
        self._failed: list[tuple[ServerSettings, ServerError]] = []
        self._starts = 0
        self._log: Path | None = None
        self._read = 0
        self._unread = ""
        self._logging = base / "logging.json"
        self._logging.write_text(json.dumps(_LOGGING))

    def model(self, kind: str = "qwen3") -> Path:
        """The model directory of a kind: "qwen3" or "mla"."""
        return make_model(self.base / "models" / kind, kind, self._seeds.get(kind, 0))  # type: ignore[arg-type]

    def lora(self, name: str) -> Path:
        """An adapter's directory."""
        path, seed = self.base / "loras" / name, self._seeds.get(name, LORAS.index(name) + 1)
        if self._adapters.get(name) != seed:
            make_lora(path, seed)
            self._adapters[name] = seed
        return path

    def unrelated_model(self) -> Path:
        """Another model of the kind "qwen3", with a path of its own."""
        return make_model(self.base / "models" / "unrelated", "qwen3", seed=7)

    @contextmanager
    def other_weights(self, name: str, seed: int = 99) -> Iterator[None]:
        """Other weights under the same path while this lasts, of a kind of model or of an adapter.

        Servers run with either, so they are stopped before and after.
        """
        self.stop()
        self._seeds[name] = seed
        try:
            yield
        finally:
            self.stop()
            del self._seeds[name]

    def settings(self, kind: str = "qwen3", **changes: Any) -> ServerSettings:
        """Settings of a server with our backend on `store`; changes are fields of `ServerSettings`."""
        env = {"SGLANG_LOGGING_CONFIG_PATH": str(self._logging), **changes.pop("env", {})}
        return ServerSettings(
            model=self.model(kind),
            storage_backend="dynamic",
            storage_extra_config=extra_config(self.store),
            python_path=[REPOSITORY],
            env=env,
            **changes,
        )

    def main_settings(self, **changes: Any) -> ServerSettings:
        """The settings that most tests share: recommended layout and page size, two LoRA adapters."""
        return self.settings(lora_paths={name: self.lora(name) for name in LORAS}, **changes)

    def get(self, settings: ServerSettings) -> CpuServer:
        """The server with these settings: the running one, or a new one in its place.

        What it replaces is killed: a store has to bear that (I9), and an orderly end takes seconds. Settings
        that failed to start once are not tried again.
        """
        if self.server is not None and self._settings != settings:
            self.kill()
        if self.server is None:
            for failed, error in self._failed:
                if failed == settings:
                    raise error
            self._unread = self.new_log()
            try:
                self.server = self.another(settings)
            except ServerError as error:
                self._failed.append((settings, error))
                raise
            self._log, self._read, self._settings = self.server.log, 0, settings
        return self.server

    def main(self) -> CpuServer:
        return self.get(self.main_settings())

    def another(self, settings: ServerSettings) -> CpuServer:
        """Start a server beside the current one; the caller ends it."""
        self._starts += 1
        log = self.base / f"server-{self._starts:02d}.log"
        return CpuServer(settings, log=log).start()

    def stop(self) -> None:
        """SIGTERM, as an orderly end."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self.server is not None:
            self.server.kill()
            self.server = None

    def new_log(self) -> str:
        """What this test's servers have logged since the last call."""
        text, self._unread = self._unread, ""
        if self._log is not None:
            with self._log.open(errors="replace") as file:
                file.seek(self._read)
                text += file.read()
                self._read = file.tell()
        return text

    def whole_log(self) -> str:
        """All that the running server has logged."""
        return "" if self.server is None else self.server.log.read_text(errors="replace")


def errors_in(log: str) -> list[str]:
    """Log records that are errors or hold a traceback, whoever logged them."""
    records = _RECORD.split(log)
    return [record for record in records if _WRONG.search(record) and _HARMLESS not in record]


def our_warnings_in(log: str) -> list[str]:
    return [record for record in _RECORD.split(log) if _OUR_WARNING.search(record)]


def namespaces(log: str) -> dict[str, str]:
    """Namespaces that the log announces: digest -> its fields as text."""
    return dict(re.findall(r"blocks in namespace ([0-9a-f]{32}) (engine=.*?); engine ", log))
