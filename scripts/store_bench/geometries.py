"""Block sizes of real models: what one page of KV cache holds on one rank."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

PAGE_SIZES = (1, 16, 64, 128)
POWERS = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
"""The sizes that the targets name."""

SMALLEST, LARGEST = 4 * KIB, 8 * MIB


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache, of 2-byte elements, on one of `tp` ranks.

    `kv_heads` of the whole model and `head_dim` for K and V; `latent`, elements per token and layer, for MLA,
    where every rank holds the whole latent.
    """

    model: str
    layers: int
    tp: int = 1
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} tp{self.tp}"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on one rank."""
        if self.latent:
            return self.layers * self.latent * 2
        return self.layers * 2 * max(1, self.kv_heads // self.tp) * self.head_dim * 2

    def block_bytes(self, page_size: int) -> int:
        return self.token_bytes * page_size


GEOMETRIES = tuple(
    geometry
    for tp in (1, 8)
    for geometry in (
        Geometry("Llama-3.1-8B", 32, tp, kv_heads=8, head_dim=128),
        Geometry("Qwen3-32B", 64, tp, kv_heads=8, head_dim=128),
        Geometry("DeepSeek-V3 MLA", 61, tp, latent=512 + 64),
    )
)


def block_sizes(page_sizes: tuple[int, ...] = PAGE_SIZES) -> dict[int, list[str]]:
    """Every block size from 4 KiB to 8 MiB that a geometry has, ascending, with what has it.

    The smallest is one layer of one token: a block of a pool in the layout `layer_first`, layer by layer.
    """
    sizes: dict[int, list[str]] = {}
    for geometry in GEOMETRIES:
        layer = geometry.token_bytes // geometry.layers
        if layer >= SMALLEST:
            sizes.setdefault(layer, []).append(f"one layer of {geometry.name} page 1")
        for page in page_sizes:
            size = geometry.block_bytes(page)
            if SMALLEST <= size <= LARGEST:
                sizes.setdefault(size, []).append(f"{geometry.name} page {page}")
    return dict(sorted(sizes.items()))


def is_mla(block_bytes: int) -> bool:
    """Has a geometry with one latent instead of K and V this size?"""
    return any("MLA" in name for name in block_sizes().get(block_bytes, []))


def size_text(size: int) -> str:
    """A number of bytes for a table: `64 KiB`, `68.6 KiB`, `1 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """`64k`, `1m`, `4MiB` or a plain number, in bytes. Raises `ValueError`."""
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    scale = {"k": KIB, "m": MIB, "g": GIB}.get(plain[-1:], 1)
    size = float(plain if scale == 1 else plain[:-1]) * scale
    if size < 16 or size != int(size):
        raise ValueError(f"{text!r} is not a number of bytes of 16 or more")
    return int(size)
