"""A prepared batch: which memory goes to or comes from which place in which file, in numpy arrays.

Planning is vectorised and makes no system call. An engine needs nothing but a `Transfer` to run it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posix_store.errors import Reason
from posix_store.segment import MAX_BLOCK_BYTES


@dataclass
class Transfer:
    """n blocks in file order, cut into r requests of neighbouring blocks.

    The caller keeps the memory behind the addresses alive and unchanged until the engine returns.
    """

    iov: np.ndarray
    """uint64 (n * k, 2): address and bytes of every component, block after block."""
    components: int
    """k, the components of each block."""
    lengths: np.ndarray
    """int64 (n,): bytes of each block."""
    fds: np.ndarray
    """int32 (r,): file of each request."""
    offsets: np.ndarray
    """int64 (r,): where in the file each request begins."""
    first: np.ndarray
    """int64 (r + 1,): blocks first[i] to first[i + 1] belong to request i."""
    status: np.ndarray
    """uint8 (n,): a `Reason` for each block, set by the engine."""
    crc: np.ndarray
    """uint32 (n,): CRC-32C of each block. Reading: what is expected. Writing: set by the engine."""
    error: OSError | None = None
    """The first error that the file system returned, for people; set by the engine."""


def component_sizes(sizes: int | np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Bytes of each component, int64 (k,), for addresses (n, k).

    Raises:
        ValueError: shapes do not agree, or a size is not positive.
    """
    array = np.asarray(sizes, np.int64).reshape(-1)
    if array.size == 1:
        array = np.broadcast_to(array, (addresses.shape[1],))
    if array.shape != (addresses.shape[1],):
        raise ValueError(f"{array.size} component sizes for {addresses.shape[1]} addresses a block")
    if array.size == 0 or array.min() <= 0:
        raise ValueError("component sizes must be positive")
    if array.sum() > MAX_BLOCK_BYTES:
        raise ValueError(f"a block is at most {MAX_BLOCK_BYTES} bytes")
    return array


def address_matrix(
    addresses: np.ndarray, sizes: int | np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Addresses as int64 (count, k) and component sizes as int64 (k,). Raises `ValueError`."""
    matrix = np.asarray(addresses, np.int64)
    if matrix.ndim == 1:
        matrix = matrix.reshape(-1, 1)
    if matrix.ndim != 2 or len(matrix) != count:
        raise ValueError(
            f"addresses of shape {matrix.shape} for {count} blocks; (blocks, components) is expected"
        )
    if matrix.size and matrix.min() <= 0:
        raise ValueError("an address is not positive")
    return matrix, component_sizes(sizes, matrix)


def plan(
    addresses: np.ndarray,
    sizes: np.ndarray,
    fds: np.ndarray,
    offsets: np.ndarray,
    crc: np.ndarray,
    request_bytes: int,
) -> tuple[Transfer, np.ndarray]:
    """Put blocks into file order and coalesce neighbours into requests.

    Args:
        addresses: int64 (n, k).
        sizes: int64 (k,), bytes of each component.
        fds: int32 (n,), file of each block.
        offsets: int64 (n,), place of each block in its file.
        crc: uint32 (n,).
        request_bytes: about how many bytes a request may have; a block is never cut.

    Returns:
        The transfer, and `order`, int64 (n,): block i of the transfer is row order[i] of the arguments.
    """
    count, components = addresses.shape
    length = int(sizes.sum())
    order = np.lexsort((offsets, fds))
    fds, offsets = fds[order], offsets[order]
    iov = np.empty((count, components, 2), np.uint64)
    iov[:, :, 0] = addresses[order]
    iov[:, :, 1] = sizes
    begins = np.ones(count, bool)
    begins[1:] = (fds[1:] != fds[:-1]) | (offsets[1:] != offsets[:-1] + length)
    per_request = max(1, request_bytes // length)
    starts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    begins |= (np.arange(count) - starts[run]) % per_request == 0
    first = np.append(np.flatnonzero(begins), count)
    transfer = Transfer(
        iov=iov.reshape(-1, 2),
        components=components,
        lengths=np.full(count, length, np.int64),
        fds=fds[first[:-1]],
        offsets=offsets[first[:-1]],
        first=first,
        status=np.full(count, Reason.OK, np.uint8),
        crc=crc[order],
    )
    return transfer, order
