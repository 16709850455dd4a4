"""Pins: blocks that eviction leaves alone, with all blocks before them in their chains.

They stand in `<root>/<namespace>/PINS.json`, so that every process that evicts knows them. What cannot be
read protects nothing: pins are advice to eviction and never decide what a block is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from posix_store.errors import StoreError
from posix_store.ids import Ids, as_ids
from posix_store.root import PINS_FILE, StoreRoot
from posix_store.segment import ID_BYTES
from posix_store.syscalls import close_quietly, read_at

logger = logging.getLogger(__name__)

PINS_FORMAT = 1
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Pin:
    """One decision of an operator: a chain that stays, named by its last block."""

    id: bytes
    """16 bytes. Pinning it again replaces this pin."""
    others: tuple[bytes, ...] = ()
    """Further blocks of the chain that the last one may not lead to, because a parent is not recorded."""
    note: str = ""
    """For people."""
    time: int = 0
    """When it was pinned, Unix seconds."""


@dataclass(frozen=True)
class PinChange:
    """What `update_pins` did."""

    added: int
    """Pins that are new."""
    removed: tuple[Pin, ...]
    """Pins that are gone, those that were replaced not among them."""
    left: int
    """Pins in the file now."""


def read_pin_list(root: StoreRoot, namespace: str) -> list[Pin]:
    """The pins of a namespace, oldest first; none when the file is damaged, which is logged.

    Raises `OSError` when it is there and cannot be read.
    """
    path = _path(root, namespace)
    try:
        fd = root.syscalls.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return []
    try:
        data = read_at(root.syscalls, fd, root.syscalls.fstat(fd).st_size, 0)
    finally:
        close_quietly(root.syscalls, fd)
    pins = decode_pins(data)
    if pins is None:
        logger.warning(
            "posix_store %s: the pins in %s are lost, because it is damaged, was edited by hand, or is of a "
            "newer version; pin again with `ucm-sglang pin`",
            root.path, path,
        )  # fmt: skip
    return pins or []


def read_pins(root: StoreRoot, namespace: str) -> np.ndarray:
    """Ids of the pinned blocks of a namespace, uint64 (n, 2), distinct. Like `read_pin_list` otherwise."""
    return _ids(read_pin_list(root, namespace))


def write_pins(root: StoreRoot, namespace: str, ids: Ids) -> None:
    """Replace all pins of a namespace by pins of these blocks. Raises `OSError`.

    For a caller that knows all pins; others use `update_pins`, or they lose what somebody else pinned.
    """
    now = int(time.time())
    _write(root, namespace, [Pin(id=row.tobytes(), time=now) for row in as_ids(ids)])


def update_pins(
    root: StoreRoot, namespace: str, add: Sequence[Pin] = (), remove: Iterable[bytes] | None = ()
) -> PinChange:
    """Add and remove pins under the store lock, so that no other process's change is lost.

    Args:
        add: new pins. One of the same `id` is replaced.
        remove: the `id` of pins to remove; None removes all of them.

    Raises:
        StoreError: others held the store lock for seconds.
        OSError: the file cannot be read or written.
    """
    with root.lock(_LOCK_SECONDS) as held:
        if not held:
            raise StoreError(
                f"path = {root.path}: another process has held the store lock for {_LOCK_SECONDS:g} s; no "
                "pin was changed. Try again; a stopped process or a very slow disk holds it that long"
            )
        known = {pin.id: pin for pin in read_pin_list(root, namespace)}
        gone = known.keys() if remove is None else set(remove) & known.keys()
        pins = {key: pin for key, pin in known.items() if key not in gone}
        added = [pin for pin in add if pin.id not in known]
        for pin in add:
            pins[pin.id] = pin
        if list(pins.values()) != list(known.values()):
            _write(root, namespace, list(pins.values()))
        removed = tuple(known[key] for key in known if key in gone and key not in pins)
        return PinChange(len({pin.id for pin in added}), removed, len(pins))


class Pins:
    """The pins of a namespace as a process that evicts sees them: read again when the file has changed.

    Thread-safe.
    """

    def __init__(self, root: StoreRoot, namespace: str) -> None:
        self._root = root
        self._namespace = namespace
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._ids = _ids([])

    def ids(self) -> np.ndarray:
        """uint64 (n, 2), not to be changed. What was known before, when the file cannot be read now."""
        with self._lock:
            try:
                seen = self._look()
                if seen != self._seen:
                    self._ids = read_pins(self._root, self._namespace)
                    self._seen = seen
            except OSError as error:
                logger.debug("posix_store %s: cannot read the pins again: %s", self._root.path, error)
            return self._ids

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._root.syscalls.stat(_path(self._root, self._namespace))
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def encode_pins(pins: Sequence[Pin]) -> bytes:
    """PINS.json: format version, pins, and the CRC-32C over both, by the rule of STORE.json."""
    fields = {
        "format": PINS_FORMAT,
        "pins": [
            {"id": pin.id.hex(), "others": [other.hex() for other in pin.others], "note": pin.note,
             "time": pin.time}
            for pin in pins
        ],
    }  # fmt: skip
    return json.dumps({**fields, "crc32c": crc32c(json.dumps(fields).encode())}, indent=1).encode() + b"\n"


def decode_pins(data: bytes) -> list[Pin] | None:
    """The pins in PINS.json; None when it is damaged or of a newer format."""
    try:
        fields = json.loads(data)
        checksum = fields.pop("crc32c")
        if crc32c(json.dumps(fields).encode()) != checksum or fields["format"] != PINS_FORMAT:
            return None
        return [_pin(entry) for entry in fields["pins"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _pin(entry: dict[str, Any]) -> Pin:
    ids = [bytes.fromhex(text) for text in (entry["id"], *entry["others"])]
    if any(len(each) != ID_BYTES for each in ids):
        raise ValueError("a block id is 16 bytes")
    return Pin(ids[0], tuple(ids[1:]), str(entry["note"]), int(entry["time"]))


def _write(root: StoreRoot, namespace: str, pins: Sequence[Pin]) -> None:
    path = _path(root, namespace)
    if pins:
        root.write_file(path, encode_pins(pins))
        return
    with contextlib.suppress(FileNotFoundError):  # an empty file would only keep the directory from going
        root.syscalls.unlink(path)


def _path(root: StoreRoot, namespace: str) -> str:
    return os.path.join(root.namespace_path(namespace), PINS_FILE)


def _ids(pins: Sequence[Pin]) -> np.ndarray:
    ids = {each for pin in pins for each in (pin.id, *pin.others)}
    return as_ids(sorted(ids))
