"""What can go wrong, as closed sets: one exception for configuration, one enum for data."""

from __future__ import annotations

from enum import IntEnum


class StoreError(ValueError):
    """The store cannot be opened as configured. The message names the setting, its value and the fix."""


class Reason(IntEnum):
    """Outcome of one block in a batch (uint8 in arrays).

    ``OK`` means loaded, stored, or already stored. Everything else is a counted miss (load) or an
    unstored block (dump).
    """

    OK = 0
    ABSENT = 1
    """No complete block of that id and shard is recorded."""
    NAMESPACE = 2
    """The segment's header belongs to another namespace, segment or format version."""
    LENGTH = 3
    """The recorded length differs from the one asked for, or the file ends before the block does."""
    CHECKSUM = 4
    """The bytes on disk are not the bytes that were dumped."""
    IO_ERROR = 5
    """The file system returned an error."""
    TIMEOUT = 6
    """The deadline of the batch passed before this block's turn came."""
    BREAKER = 7
    """The disk was slow or failed too often a moment ago; it is left alone for a while."""
    EVICTED = 8
    """The block was evicted, or its segment deleted, after the block had been found."""
    FULL = 9
    """Not stored: capacity or the free-space floor would be broken."""
    READ_ONLY = 10
    """Not stored: the store was opened read-only, or the file system turned read-only."""
    QUEUE = 11
    """Not stored: too many bytes are waiting to be written."""
    NOT_ADMITTED = 12
    """Not stored: the admission rule wants to see the block once more."""


def require_positive(kind: type, **settings: float | None) -> None:
    """Raises `StoreError` for a setting that is not None and no number above 0."""
    for name, value in settings.items():
        if value is not None and not (isinstance(value, int | kind) and 0 < value < float("inf")):
            raise StoreError(f"{name} = {value!r}: must be a {kind.__name__} of more than 0")
