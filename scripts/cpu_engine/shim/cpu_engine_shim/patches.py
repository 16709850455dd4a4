"""The patches, one function per patched module. Each is called once, after its module's code has run.

A patch that no longer fits fails with an AttributeError that names what is missing. Importing this module
imports neither torch nor SGLang.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from cpu_engine_shim.import_hooks import After

_LIBRARIES: list[Any] = []  # an operator lives as long as the library object that declared it
_POOL_HOST = "sglang.srt.mem_cache.pool_host."


def _torch() -> Any:
    """torch, untyped: these patches add to it what its stubs do not know."""
    return importlib.import_module("torch")


def bind_transfer_ops(module: ModuleType) -> None:
    """Give a host pool module the ``transfer_kv_*`` names that SGLang binds only on CUDA, ROCm and XPU."""
    from cpu_engine_shim import transfer_ops

    for name, op in transfer_ops.OPS.items():
        if not hasattr(module, name):
            setattr(module, name, op)


def allow_plain_host_memory(module: ModuleType) -> None:
    """Host pools ask for pinned memory by default, which torch refuses without an accelerator.

    SGLang also leaves 10 GiB of host memory unused, more than a small machine has; 1 GiB is enough here.
    """
    if not isinstance(module.HICACHE_HOST_MEMORY_RESERVE_BYTES, int):
        raise AttributeError("HICACHE_HOST_MEMORY_RESERVE_BYTES is no longer a number")
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # type: ignore[attr-defined]
    original = module.HostKVCache.__init__

    @functools.wraps(original)
    def __init__(self: Any, **kwargs: Any) -> None:  # keyword-only in SGLang, too
        original(self, **{**kwargs, "pin_memory": False})

    module.HostKVCache.__init__ = __init__


class _UnpinnedTorch:
    """The torch module, but its factory functions ignore a request for pinned memory."""

    def __getattr__(self, name: str) -> Any:
        torch = _torch()
        attribute = getattr(torch, name)
        if name not in ("empty", "tensor", "zeros"):
            return attribute

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return attribute(*args, **kwargs)

        return unpinned


def leave_lora_memory_unpinned(module: ModuleType) -> None:
    """The LoRA modules pin memory without asking whether that is possible."""
    torch = _torch()
    module.torch = _UnpinnedTorch()  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, device=None: self


def add_stream_synchronize(module: ModuleType) -> None:
    """SGLang waits for its copy stream when a copy raises; torch.cpu.Stream cannot be waited for.

    CPU copies are synchronous, so there is nothing to wait for. Without this the wait would hide the
    error that caused it.
    """
    torch = _torch()
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None


def run_mla_absorbed(module: ModuleType) -> None:
    """torch_native attention has no entry in SGLang's table of MLA methods and would get triton's.

    That one runs prefill as multi-head attention, which torch_native cannot do from an MLA pool. The
    absorbed method does prefill and decode on the latent cache alone.
    """
    absorbed = module.AttnForwardMethod.MLA
    module.AttentionBackendRegistry.register("torch_native", lambda attn, forward_batch: absorbed)


def declare_torchvision_ops(module: ModuleType) -> None:
    """A torchvision built for another torch cannot load its C++ part; its Python part still needs two names.

    SGLang imports torchvision for image models. The names exist only so that the import succeeds.
    """
    torch = _torch()
    if module._has_ops() or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


AFTER_IMPORT: dict[str, After] = {
    _POOL_HOST + "base": allow_plain_host_memory,
    _POOL_HOST + "mha": bind_transfer_ops,
    _POOL_HOST + "mla": bind_transfer_ops,
    _POOL_HOST + "dsa": bind_transfer_ops,
    "sglang.srt.lora.layers": leave_lora_memory_unpinned,
    "sglang.srt.lora.backend.torch_backend": leave_lora_memory_unpinned,
    "sglang.srt.mem_cache.l2_transfer": add_stream_synchronize,
    "sglang.srt.models.deepseek_common.attention_backend_handler": run_mla_absorbed,
    "torchvision.extension": declare_torchvision_ops,
}
