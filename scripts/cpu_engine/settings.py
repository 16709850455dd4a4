"""What to start an SGLang server with: checked choices, turned into a command line and an environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_engine import SHIM_DIR

# SGLang refuses or silently rewrites every other pair; see README.md.
IO_LAYOUTS_MHA: tuple[tuple[str, str], ...] = (
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("kernel", "page_head"),
)
IO_LAYOUTS_MLA: tuple[tuple[str, str], ...] = tuple(p for p in IO_LAYOUTS_MHA if p[1] != "page_head")


@dataclass(frozen=True)
class ServerSettings:
    """Choices for one server. Every field but `model` has a default that works on two cores.

    model: directory written by `tiny_model.make_model`.
    page_size: tokens in a page.
    hicache: keep a host cache (L2). Without it the storage fields are ignored.
    io_backend, mem_layout: how pages are copied and laid out in host memory; a pair of `IO_LAYOUTS_MHA`.
    storage_backend: "file", "dynamic", another of SGLang's names, or None for no storage (L3).
    storage_extra_config: the backend's configuration: a mapping, JSON text, or "@path" as SGLang takes it.
    write_policy, prefetch_policy: SGLang's names. "wait_complete" makes hits independent of timing.
    max_total_tokens: size of the device pool, in tokens.
    hicache_ratio: size of the host pool as a multiple of the device pool.
    hicache_size_gb: size of the host pool in GB (1e9 bytes); overrides `hicache_ratio` when set.
    dtype: type of weights and activations. float32, because the tiny model's best two tokens are often
        closer than bfloat16's rounding, and then a hit and a cold run may differ though the cache is right.
    kv_cache_dtype: type of the KV cache; "auto" follows `dtype`.
    tp_size: tensor-parallel ranks, one core each.
    lora_paths: adapter name -> directory, loaded at start.
    python: interpreter of the environment that has SGLang.
    python_path: directories put on PYTHONPATH behind the shim, e.g. where a dynamic backend's module is.
    env: more environment variables; they win over everything set here.
    extra_args: more command-line arguments, last.
    """

    model: Path
    page_size: int = 64
    hicache: bool = True
    io_backend: str = "direct"
    mem_layout: str = "page_first_direct"
    storage_backend: str | None = None
    storage_extra_config: Mapping[str, Any] | str | None = None
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    max_total_tokens: int = 8192
    context_length: int = 8192
    hicache_ratio: float = 2.0
    hicache_size_gb: int | None = None
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    lora_paths: Mapping[str, Path] = field(default_factory=dict)
    python: str = sys.executable
    python_path: Sequence[Path | str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    extra_args: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.hicache and (self.io_backend, self.mem_layout) not in IO_LAYOUTS_MHA:
            raise ValueError(
                f"io_backend={self.io_backend!r} with mem_layout={self.mem_layout!r}: SGLang does not run "
                f"this pair as given; use one of {IO_LAYOUTS_MHA}"
            )
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(f"model={str(self.model)!r} is no model directory; make one with tiny_model.py")

    @property
    def has_storage(self) -> bool:
        return self.hicache and self.storage_backend is not None

    def extra_config_text(self) -> str | None:
        """The storage configuration as SGLang takes it on the command line and over HTTP."""
        config = self.storage_extra_config
        return config if config is None or isinstance(config, str) else json.dumps(dict(config))

    def command(self, port: int, admin_key: str) -> list[str]:
        """argv of the server process."""
        args = {
            "--model-path": self.model,
            "--host": "127.0.0.1",
            "--port": port,
            "--admin-api-key": admin_key,
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--dtype": self.dtype,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--page-size": self.page_size,
            "--max-total-tokens": self.max_total_tokens,
            "--context-length": self.context_length,
            "--mem-fraction-static": 0.5,
            "--tp-size": self.tp_size,
        }
        switches = [
            "--disable-cuda-graph",
            "--disable-overlap-schedule",
            "--skip-server-warmup",
            "--enable-cache-report",
            "--enable-metrics",
        ]
        argv = [self.python, "-m", "sglang.launch_server", *_pairs(args), *switches]
        argv += [*self._hicache_args(), *self._lora_args(), *self.extra_args]
        return argv

    def _hicache_args(self) -> list[str]:
        if not self.hicache:
            return []
        args: dict[str, Any] = {
            "--hicache-io-backend": self.io_backend,
            "--hicache-mem-layout": self.mem_layout,
            "--hicache-write-policy": self.write_policy,
        }
        if self.hicache_size_gb is None:
            args["--hicache-ratio"] = self.hicache_ratio
        else:
            args["--hicache-size"] = self.hicache_size_gb
        if self.storage_backend is not None:
            args["--hicache-storage-backend"] = self.storage_backend
            args["--hicache-storage-prefetch-policy"] = self.prefetch_policy
            if (text := self.extra_config_text()) is not None:
                args["--hicache-storage-backend-extra-config"] = text
        return ["--enable-hierarchical-cache", *_pairs(args)]

    def _lora_args(self) -> list[str]:
        if not self.lora_paths:
            return []
        adapters = [f"{name}={path}" for name, path in self.lora_paths.items()]
        return ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *adapters]

    def environment(self) -> dict[str, str]:
        """The server process's whole environment: this process's own, plus what the CPU engine needs."""
        env = dict(os.environ)
        path = [str(SHIM_DIR), *map(str, self.python_path), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.tp_size > 1:
            # SGLang wants a NUMA node per rank unless told which cores each rank gets.
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(self.tp_size))
        return env | dict(self.env)


def _pairs(args: Mapping[str, Any]) -> list[str]:
    return [str(part) for pair in args.items() for part in pair]
