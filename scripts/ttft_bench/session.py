"""A whole run: model, server, measurement, report."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu_engine.server import CpuServer
from cpu_engine.settings import ServerSettings
from server_soak.server_log import LOGGING_CONFIG, LogReader

from posix_store.mount_type import mount_type
from posix_store.syscalls import Syscalls
from ttft_bench.measure import Say, measure
from ttft_bench.model import bytes_per_token, make_bench_model
from ttft_bench.plan import PAGE_SIZE, Plan
from ttft_bench.report import write
from ttft_bench.samples import problems

ROOT = Path(__file__).resolve().parents[2]
HOST_RATIO = 2.0


class NoSpaceError(Exception):
    """The folder for the stores is on a file system without enough space."""


def run_session(plan: Plan, out: Path, where: Path, command: str, say: Say) -> list[str]:
    """Measure and write the report.

    Args:
        out: folder for ttft.json, ttft.md and server.log; made where it is not there.
        where: existing folder; what is stored lies in a temporary folder there.
        command: as the report says it.

    Returns what is wrong with the figures; empty when they are valid. Raises `ServerError`, `NoSpaceError`.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "server.log"
    for stale in (log, out / "ttft.json", out / "ttft.md"):
        stale.unlink(missing_ok=True)
    about: dict[str, Any] = {"command": command, "date": time.strftime("%Y-%m-%d %H:%M"), "commit": _commit()}
    about |= {"machine": f"{_machine()}, load average {os.getloadavg()[0]:.1f} before"}
    with tempfile.TemporaryDirectory(prefix="bench-ttft-", dir=where) as name:
        folder = Path(name)
        say("making the model")
        model = make_bench_model(folder / "model")
        _require_space(folder, 2 * plan.tokens_of_round() * bytes_per_token(model))
        settings = _settings(plan, model, out)
        about["settings"] = _stated(plan, settings, folder)
        server = CpuServer(settings, log, progress=say)
        try:
            server.start()
            samples = measure(server, plan, folder, say)
            server.stop()
        finally:
            server.kill()
    reader = LogReader(log)
    reader.read(last=True)
    wrong = problems(samples) + [f"in the server's log: {record[:500]}" for record in reader.faults]
    about["seconds"] = time.monotonic() - started
    say(write(out, about, samples, wrong))
    return wrong


def _settings(plan: Plan, model: Path, out: Path) -> ServerSettings:
    logging_config = out / "logging.json"
    logging_config.write_text(json.dumps(LOGGING_CONFIG))
    return ServerSettings(
        model=model,
        page_size=PAGE_SIZE,
        max_total_tokens=plan.device_tokens(),
        context_length=max(plan.lengths) + 4 * PAGE_SIZE,
        hicache_ratio=HOST_RATIO,
        python_path=[ROOT],
        env={"SGLANG_LOGGING_CONFIG_PATH": str(logging_config)},
    )


def _stated(plan: Plan, settings: ServerSettings, folder: Path) -> dict[str, str]:
    token = bytes_per_token(settings.model)
    config = json.loads((settings.model / "config.json").read_text())
    return {
        "model": f"Qwen3 with random weights, {config['num_hidden_layers']} layers, "
        f"{config['num_key_value_heads']} KV heads of {config['head_dim']}, {settings.dtype}",
        "page": f"{PAGE_SIZE} tokens, {token * PAGE_SIZE / (1 << 20):g} MiB",
        "server": f"write policy {settings.write_policy}, prefetch policy {settings.prefetch_policy}, layout "
        f"{settings.mem_layout}, I/O backend {settings.io_backend}, device pool {settings.max_total_tokens} "
        f"tokens, host pool {HOST_RATIO:g} times as large",
        "stored in": f"{folder.parent} ({mount_type(str(folder), Syscalls())})",
        "plan": f"{plan.rounds} rounds, {plan.prompts} prompts of each length, seed {plan.seed}",
    }


def _require_space(folder: Path, needed: int) -> None:
    needed += 1 << 30  # our store allocates ahead of what is written
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpaceError(
            f"{folder.parent}: a round needs {needed >> 20} MiB, and {free >> 20} are free; name another "
            "--dir, or fewer --prompts or shorter --lengths"
        )


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"
