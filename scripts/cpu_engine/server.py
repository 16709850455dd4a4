"""A true SGLang server on this machine's CPU, as a context manager.

    with CpuServer(ServerSettings(model=make_model("/tmp/tiny")), log=Path("server.log")) as server:
        cold = server.generate(random_prompt(1500, seed=1))
        server.flush_cache()
        hit = server.generate(random_prompt(1500, seed=1))

Starting takes 20 to 80 s on two cores, nearly all of it imports. One thread at a time may use a CpuServer,
except that `generate` may be called from several.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cpu_engine.process import GroupProcess
from cpu_engine.settings import ServerSettings

Progress = Callable[[str], None]


class ServerError(RuntimeError):
    """The server died, did not start in time, or refused a request. The message holds the log's tail."""


@dataclass(frozen=True)
class Generation:
    """One finished request.

    output_ids: generated token ids. logprobs: natural log of each one's probability, if asked for.
    prompt_tokens: length of the prompt. cached_tokens: how many of those were not computed, of which
    `device`, `host` and `storage` tokens came from each tier. seconds: wall-clock time of the request.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    prompt_tokens: int
    cached_tokens: int
    device: int
    host: int
    storage: int
    seconds: float

    @classmethod
    def from_response(cls, response: Mapping[str, Any], seconds: float) -> Generation:
        meta = response["meta_info"]
        tiers = meta.get("cached_tokens_details") or {}
        logprobs = meta.get("output_token_logprobs")
        return cls(
            output_ids=tuple(response["output_ids"]),
            logprobs=None if logprobs is None else tuple(entry[0] for entry in logprobs),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            device=tiers.get("device", 0),
            host=tiers.get("host", 0),
            storage=tiers.get("storage", 0),
            seconds=seconds,
        )


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids of a prompt in which no page looks like another, so that a page mix-up changes the output."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(tokens)]


def print_progress(message: str) -> None:
    """Progress callback that writes to standard error."""
    print(message, file=sys.stderr, flush=True)


class CpuServer:
    """Start a server, talk to it, end it.

    Args:
        settings: what to start.
        log: file that the server's output is appended to.
        progress: called with one line of text every few seconds while the server starts.
        start_timeout: seconds to wait for the server to be healthy.
    """

    def __init__(
        self,
        settings: ServerSettings,
        log: Path,
        progress: Progress | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        self.settings = settings
        self.log = Path(log)
        self.port = 0
        self._progress = progress or (lambda message: None)
        self._start_timeout = start_timeout
        self._admin_key = secrets.token_hex(8)
        self._process: GroupProcess | None = None
        self._storage_backend: str | None = None

    # ---- life ---------------------------------------------------------------------------------------

    def __enter__(self) -> CpuServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> CpuServer:
        """Start the process and wait until it answers. May be called again after `stop` or `kill`.

        Raises ServerError if the process dies or is not healthy in time; it is then gone.
        """
        if self._process is not None:
            raise ServerError("the server is running already")
        self.port = _free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = GroupProcess(
            self.settings.command(self.port, self._admin_key), self.settings.environment(), self.log
        )
        try:
            self._wait_healthy()
        except BaseException:
            self.kill()
            raise
        self._storage_backend = self.settings.storage_backend if self.settings.has_storage else None
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Ask the server to end, which lets the storage backend close; kill what is left after `timeout`."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait_exit(timeout)
            self.kill()

    def kill(self) -> None:
        """SIGKILL the server and all its processes at once, as a crash of the machine would."""
        if self._process is not None:
            self._process.kill_group()
            self._process = None

    @property
    def pid(self) -> int:
        """Process id, and process group id, of the running server."""
        return self._running().pid

    def log_tail(self, lines: int = 40) -> str:
        return self._running().log_tail(lines)

    def _running(self) -> GroupProcess:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process

    def _wait_healthy(self) -> None:
        started = time.monotonic()
        next_report = 5.0
        while True:
            self._require_alive("while starting")
            try:
                if self._request("GET", "/health", timeout=5.0)[0] == 200:
                    break
            except OSError:
                pass  # not listening yet
            waited = time.monotonic() - started
            if waited > self._start_timeout:
                raise self._failure(f"not healthy after {waited:.0f} s")
            if waited > next_report:
                self._progress(f"server starting, {waited:.0f} s (20 to 80 s is usual)")
                next_report += 5.0
            time.sleep(0.5)
        self._progress(f"server ready after {time.monotonic() - started:.0f} s on port {self.port}")

    def _require_alive(self, when: str) -> None:
        if self._running().exited():
            raise self._failure(f"died {when}")

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"SGLang server: {what}. End of {self.log}:\n{self._running().log_tail()}")

    # ---- requests -----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 16,
        *,
        return_logprob: bool = False,
        lora: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        timeout: float = 180.0,
    ) -> Generation:
        """Greedy completion of a text or of token ids; always exactly `max_new_tokens` tokens.

        Args:
            lora: name of an adapter from the settings.
            extra_key, cache_salt: requests with different values share no cached page.
            extra_body: more fields of SGLang's /generate request; they win.
            timeout: seconds. The first request of a machine may compile SGLang's hash extension (30 s).

        Raises ServerError if the server answers with an error or dies.
        """
        body: dict[str, Any] = {
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "return_logprob": return_logprob,
            **({"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}),
        }
        optional = {"lora_path": lora, "extra_key": extra_key, "cache_salt": cache_salt}
        body |= {key: value for key, value in optional.items() if value is not None}
        started = time.monotonic()
        text = self._call("POST", "/generate", body | dict(extra_body or {}), timeout)
        return Generation.from_response(json.loads(text), time.monotonic() - started)

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empty the device and host caches, once all writes under way have reached the storage."""
        self._call("POST", f"/flush_cache?timeout={timeout:.0f}", timeout=timeout + 30.0)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until nothing is running and every page has been handed to the storage and acknowledged.

        Whether that is so only the scheduler knows, and it tells in one way that changes nothing: it
        accepts the attached storage backend being attached once more only while it is idle. Without a
        storage backend nothing is pending after a response, so this returns at once.
        """
        if self._storage_backend is None:
            return
        deadline = time.monotonic() + timeout
        while True:
            status, text = self._attach_request(self._storage_backend)
            if status == 200:
                return
            if "not idle" not in text or time.monotonic() > deadline:
                raise self._failure(f"not idle after {timeout:.0f} s: {text.strip()}")
            time.sleep(0.05)

    def update_weights(self, model: Path) -> None:
        """Replace the running server's weights by those of another model directory of the same kind."""
        self._call("POST", "/update_weights_from_disk", {"model_path": str(model)})

    # ---- storage ------------------------------------------------------------------------------------

    def clear_storage(self) -> None:
        """Ask the storage backend to drop what it holds."""
        self._call("POST", "/hicache/storage-backend/clear")

    def detach_storage(self) -> None:
        """Detach the storage backend of the running server. Refused unless idle; see `wait_idle`."""
        self._call("DELETE", "/hicache/storage-backend")
        self._storage_backend = None

    def attach_storage(
        self,
        backend: str,
        extra_config: Mapping[str, Any] | str | None = None,
        prefetch_policy: str | None = None,
        write_policy: str | None = None,
    ) -> None:
        """Attach a storage backend to the running server. Refused unless idle and none is attached."""
        if extra_config is not None and not isinstance(extra_config, str):
            extra_config = json.dumps(dict(extra_config))
        status, text = self._attach_request(backend, extra_config, prefetch_policy, write_policy)
        if status != 200:
            raise self._failure(f"attaching storage backend {backend!r} answered {status}: {text.strip()}")
        self._storage_backend = backend

    def _attach_request(
        self,
        backend: str,
        extra_config: str | None = None,
        prefetch_policy: str | None = None,
        write_policy: str | None = None,
    ) -> tuple[int, str]:
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": extra_config,
            "hicache_storage_prefetch_policy": prefetch_policy,
            "hicache_write_policy": write_policy,
        }
        return self._request_or_fail("PUT", "/hicache/storage-backend", body)

    # ---- metrics ------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The server's Prometheus values, summed over labels, e.g. ``sglang:backuped_tokens_total``."""
        totals: dict[str, float] = {}
        for line in self._call("GET", "/metrics").splitlines():
            if match := re.match(r"([^\s{#]+)(?:\{.*\})?\s+(\S+)$", line):
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        return totals

    # ---- HTTP ---------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> str:
        status, text = self._request_or_fail(method, path, body, timeout)
        if status != 200:
            raise self._failure(f"{method} {path} answered {status}: {text.strip()[:500]}")
        return text

    def _request_or_fail(
        self, method: str, path: str, body: Any = None, timeout: float = 60.0
    ) -> tuple[int, str]:
        try:
            return self._request(method, path, body, timeout)
        except (OSError, http.client.HTTPException) as e:
            self._running().wait_exit(2.0)
            state = "the server has died" if self._running().exited() else "the server still runs"
            raise self._failure(f"{method} {path} failed with {e!r}; {state}") from e

    def _request(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self._admin_key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
