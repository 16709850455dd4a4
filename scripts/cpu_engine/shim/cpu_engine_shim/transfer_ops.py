"""Pure-torch stand-ins for the ``sgl_kernel.kvcacheio`` copies between a device pool and a host pool.

Names, parameters and results are those of the CUDA operators; both pools are CPU tensors here. The copies
are synchronous, and tuning parameters (``block_quota`` and the like) are accepted and ignored.

Words used below. Device pools are *layer first* (lf): one tensor per layer, ``[tokens, heads, dim]`` for K
and for V, or ``[tokens, 1, dim]`` for MLA. Host pools hold all layers in one tensor:

    page_first         pf          [tokens, layers, heads, dim]
    page_first_direct  pf, direct  [pages, layers, page_size, heads, dim]
    page_head          ph          [pages, heads, page_size, layers, dim]

Indices are one int64 per token. ``item_size`` is the size in bytes of one token of one layer. The
``*_layers`` parameters of the all-layer kernels are uint64 tensors of addresses, one per layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

# ---- building blocks ------------------------------------------------------------------------------------


def _rows_at(address: int, indices: Tensor, item_size: int) -> Tensor:
    """Packed rows at a raw address, as a uint8 ``[max(indices) + 1, item_size]`` view of that memory."""
    rows = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (rows * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, item_size)


def _read_rows(address: int, indices: Tensor, item_size: int) -> Tensor:
    return _rows_at(address, indices, item_size)[indices]


def _split(indices: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page number and offset within the page of each token."""
    return indices // page_size, indices % page_size


def _typed(rows: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """uint8 ``[n, item_size]`` rows as the elements of `like`, reshaped to ``[n, *shape]``."""
    return rows.contiguous().view(like.dtype).reshape(rows.shape[0], *shape)


# ---- io backend "direct" --------------------------------------------------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Token rows from each source tensor to the destination tensor at the same place in the list."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from page_first_direct host tensors (K, V; or MLA's one) to device tensors."""
    page, offset = _split(src_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[page, layer_id, offset].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """All layers of all device tensors (all K, then all V) to page_first_direct host tensors."""
    page, offset = _split(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        dst = dst_ptrs[i // layers]
        dst[page, i % layers, offset] = src[src_indices].reshape(-1, *dst.shape[3:])


# ---- io backend "kernel", one latent tensor per layer (MLA) ---------------------------------------------


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **tuning: int
) -> None:
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **tuning: int,
) -> None:
    """One layer from a page_first host tensor to a device tensor."""
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **tuning: int,
) -> None:
    """All layers, both sides given as addresses of packed rows."""
    if src_indices.numel() == 0:
        return
    for src, dst in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        _rows_at(dst, dst_indices, item_size)[dst_indices] = _read_rows(src, src_indices, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **tuning: int,
) -> None:
    """All layers, given as addresses, to a page_first host tensor."""
    if src_indices.numel() == 0:
        return
    for layer, address in enumerate(src_layers.tolist()):
        rows = _read_rows(address, src_indices, item_size)
        dst[dst_indices, layer] = _typed(rows, dst, dst.shape[2:])


# ---- io backend "kernel", K and V (MHA): each is what MLA does for its one tensor, twice ----------------


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    **tuning: int,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **tuning: int,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **tuning: int,
) -> None:
    """One layer from page_head host tensors to device tensors."""
    page, offset = _split(src_indices, page_size)
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[page, :, offset, layer_id]


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **tuning: int,
) -> None:
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **tuning: int,
) -> None:
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **tuning: int,
) -> None:
    """All layers, given as addresses, to page_head host tensors."""
    if src_indices.numel() == 0:
        return
    page, offset = _split(dst_indices, page_size)
    for addresses, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(addresses.tolist()):
            rows = _read_rows(address, src_indices, item_size)
            dst[page, :, offset, layer] = _typed(rows, dst, (head_num, -1))


OPS = {name: op for name, op in sorted(globals().items()) if name.startswith("transfer_kv_")}
