"""A batch: which memory goes to or comes from which place in which file, in numpy arrays.

An engine needs nothing but a `Transfer` to move it. Planning is vectorised and makes no system call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posix_store.segment import MAX_BLOCK_BYTES


@dataclass
class Transfer:
    """n blocks of k components each, in any order.

    The caller keeps the memory behind the addresses alive and unchanged until the engine returns.
    """

    addresses: np.ndarray
    """int64 (n, k): where each component of each block is in memory."""
    sizes: np.ndarray
    """int64 (k,): bytes of each component."""
    fds: np.ndarray
    """int32 (n,): file of each block."""
    offsets: np.ndarray
    """int64 (n,): where each block begins in its file."""
    crc: np.ndarray
    """uint32 (n,): CRC-32C of each block. Reading: what is expected. Writing: set by the engine."""
    status: np.ndarray
    """uint8 (n,): a `Reason` for each block, `OK` before, set by the engine."""
    direct: bool = False
    """Are the files open with O_DIRECT? Then every system call is to move much."""
    error: OSError | None = None
    """The first error that the file system returned, for people; set by the engine."""

    @classmethod
    def of(
        cls,
        addresses: np.ndarray,
        sizes: np.ndarray,
        fds: np.ndarray,
        offsets: np.ndarray,
        crc: np.ndarray | None = None,
        direct: bool = False,
    ) -> Transfer:
        """A transfer with its arrays contiguous, which native code needs."""
        count = len(addresses)
        return cls(
            np.ascontiguousarray(addresses, np.int64),
            np.ascontiguousarray(sizes, np.int64),
            np.ascontiguousarray(fds, np.int32),
            np.ascontiguousarray(offsets, np.int64),
            np.zeros(count, np.uint32) if crc is None else np.ascontiguousarray(crc, np.uint32),
            np.zeros(count, np.uint8),
            direct,
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return int(self.sizes.sum())


def component_sizes(sizes: int | np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Bytes of each component, int64 (k,), for addresses (n, k).

    Raises:
        ValueError: shapes do not agree, or a size is not positive.
    """
    array = np.asarray(sizes, np.int64).reshape(-1)
    if array.size == 1 and addresses.shape[1] != 1:
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


def runs(files: np.ndarray, begins: np.ndarray, lengths: np.ndarray | int) -> list[tuple[int, int, int]]:
    """(file, begin, end) of each run of neighbours among n blocks, given their files, offsets and lengths."""
    order = np.lexsort((begins, files))
    files, begins, ends = files[order], begins[order], (begins + lengths)[order]
    first = np.ones(len(order), bool)
    first[1:] = (files[1:] != files[:-1]) | (begins[1:] != ends[:-1])
    last = np.roll(first, -1)
    return list(zip(files[first].tolist(), begins[first].tolist(), ends[last].tolist(), strict=True))


@dataclass
class Requests:
    """A transfer's blocks in file order, cut into r requests of neighbouring blocks."""

    order: np.ndarray
    """int64 (n,): block i of the requests is row order[i] of the transfer."""
    iov: np.ndarray
    """uint64 (n * k, 2): address and bytes of every component, block after block."""
    fds: np.ndarray
    """int32 (r,): file of each request."""
    offsets: np.ndarray
    """int64 (r,): where in the file each request begins."""
    first: np.ndarray
    """int64 (r + 1,): blocks first[i] to first[i + 1] belong to request i."""

    def __len__(self) -> int:
        return len(self.fds)


def plan(transfer: Transfer, request_bytes: int) -> Requests:
    """Put blocks into file order and coalesce neighbours into requests.

    Args:
        request_bytes: about how many bytes a request may have; a block is never cut.
    """
    count, components = transfer.addresses.shape
    length = transfer.block_bytes
    order = np.lexsort((transfer.offsets, transfer.fds))
    fds, offsets = transfer.fds[order], transfer.offsets[order]
    iov = np.empty((count, components, 2), np.uint64)
    iov[:, :, 0] = transfer.addresses[order]
    iov[:, :, 1] = transfer.sizes
    begins = np.ones(count, bool)
    begins[1:] = (fds[1:] != fds[:-1]) | (offsets[1:] != offsets[:-1] + length)
    per_request = max(1, request_bytes // length)
    starts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    begins |= (np.arange(count) - starts[run]) % per_request == 0
    first = np.append(np.flatnonzero(begins), count)
    return Requests(order, iov.reshape(-1, 2), fds[first[:-1]], offsets[first[:-1]], first)
