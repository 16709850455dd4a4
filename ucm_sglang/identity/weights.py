"""A fingerprint of a model's weights that never reads all of them.

A model in a hub cache is named by its commit. Any other directory is named by a digest of its configuration
and model code (whole), and of its weight files: name, size, safetensors header and sampled pages. The cost
is a few hundred 4 KiB reads a file, whatever its size: from the page cache, 100 files of 4 GiB with 250
tensors each took 0.19 s, and 163 files with 560 tensors each 0.7 s (2-core AMD EPYC).

What sampling cannot see: a change confined to pages that are not sampled, in a file of unchanged size. Every
tensor of a safetensors file is sampled in its middle (up to `MAX_TENSOR_SAMPLES` a file), so a tensor that
was trained again is seen; a hand-made change of a few numbers may not be. For that, and for models that are
not local files, the operator names the weights with the configuration key ``weights_fingerprint``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ucm_sglang.identity.hub_cache import SnapshotPath, cached_snapshot, hub_cache_dir, snapshot_of

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_SUFFIXES = (".json", ".py")
NOT_THE_MODEL = frozenset(
    {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "chat_template.json",
        "trainer_state.json",
    }
)
"""JSON files that change which tokens go in or come out, but never the keys and values of given tokens. Any
other JSON file counts: an unneeded miss costs time, a file wrongly left out costs a wrong answer."""

SAMPLE_BYTES = 4096
WHOLE_FILE_BYTES = 8 << 20
STRATA = 64
MAX_TENSOR_SAMPLES = 1024
MAX_HEADER_BYTES = 100_000_000

_SCHEME = "ucm-sglang-weights-1"
_THREADS = 8
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FIX = (
    "Set the configuration key weights_fingerprint to a text of your own that you change whenever the "
    "weights change, or give the path of a local model."
)


class FingerprintError(ValueError):
    """The weights cannot be identified. The message names the model, the cause and the fix."""


def weights_fingerprint(model_path: str, revision: str | None = None, *, cache_dir: str | None = None) -> str:
    """Text that changes when the weights behind `model_path` change, and only then.

    `model_path`: a directory, a weight file, or the id of a model in the local hub cache (in `cache_dir`, or
    where huggingface_hub would look); `revision` picks the commit of the latter. Returns one of

    * ``hub:<commit>``, followed by ``/<path>`` inside the snapshot if `model_path` goes deeper;
    * the same, followed by ``+<32 hex>``, if files of the snapshot are not links into the hub's
      content-addressed blobs, so that the commit alone does not prove what they hold;
    * ``digest:<32 hex>`` for anything else. Depends on names relative to `model_path` and on contents only.

    `FingerprintError` (a `ValueError`) if there is no such model, it holds no weights, it cannot be read, or
    it is remote. Blocking: call it at start.
    """
    if _URL.match(model_path):
        raise _error(model_path, "it is not a local model")
    try:
        return _fingerprint(model_path, revision, cache_dir)
    except OSError as error:
        raise _error(model_path, f"{error.strerror}: {error.filename or model_path}") from error


def _error(model_path: str, cause: str) -> FingerprintError:
    return FingerprintError(f"cannot fingerprint the weights of {model_path!r}: {cause}. {_FIX}")


def _fingerprint(model_path: str, revision: str | None, cache_dir: str | None) -> str:
    path = Path(os.path.abspath(os.path.expanduser(model_path)))
    if path.exists():
        snapshot = snapshot_of(path)
    else:
        snapshot = cached_snapshot(model_path, revision, cache_dir)
        if snapshot is None:
            wanted = f"{model_path!r} at revision {revision!r}" if revision else repr(model_path)
            hub = hub_cache_dir(cache_dir)
            raise _error(model_path, f"no such path, and no model {wanted} in the hub cache {hub}")
        path = snapshot.path
    files = _model_files(path)
    if not any(_is_weights(file) for file in files.values()):
        kinds = ", ".join(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)
        raise _error(model_path, f"no weight files ({kinds}) in {path}")
    return _hub_fingerprint(snapshot, files) if snapshot else f"digest:{_digest(files)}"


def _hub_fingerprint(snapshot: SnapshotPath, files: dict[str, Path]) -> str:
    name = f"hub:{snapshot.commit}" + (f"/{snapshot.inside}" if snapshot.inside else "")
    if all(snapshot.vouches_for(file) for file in files.values()):
        return name
    return f"{name}+{_digest(files)}"


def _model_files(path: Path) -> dict[str, Path]:
    """Files that make up the model, by name relative to `path` (a file is its own model), in name order."""
    if not path.is_dir():
        return {path.name: path}
    found = {file.relative_to(path).as_posix(): file for file in _walk(path)}
    return {name: found[name] for name in sorted(found)}


def _walk(top: Path) -> Iterator[Path]:
    """Model files below `top`, hidden ones left out; links to folders are followed, each folder once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(top, followlinks=True, onerror=_raise):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        # In order, so that of two links to one folder the same one is followed everywhere.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and (_is_weights(file) or _is_config(file)):
                yield file


def _raise(error: OSError) -> None:
    raise error


def _is_weights(file: Path) -> bool:
    return file.suffix.lower() in WEIGHT_SUFFIXES


def _is_config(file: Path) -> bool:
    return file.suffix.lower() in CONFIG_SUFFIXES and file.name not in NOT_THE_MODEL


def _digest(files: dict[str, Path]) -> str:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-fingerprint") as threads:
        entries = list(threads.map(_file_entry, files.keys(), files.values()))
    text = json.dumps([_SCHEME, entries], separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _file_entry(name: str, file: Path) -> tuple[str, int, str]:
    """``(name, size in bytes, SHA-256 of the content or of its samples)``."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        whole = size <= WHOLE_FILE_BYTES or not _is_weights(file)
        return name, size, _hash_whole(fd) if whole else _hash_samples(fd, size, file)
    finally:
        os.close(fd)


def _hash_whole(fd: int) -> str:
    with open(fd, "rb", buffering=0, closefd=False) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_samples(fd: int, size: int, file: Path) -> str:
    # Without this a cold read of 4 KiB pulls in a read-ahead window of 128 KiB or more.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    header = _safetensors_header(fd, size) if file.suffix.lower() == ".safetensors" else b""
    pages = sample_pages(size, _tensor_middles(header))
    digest = hashlib.sha256(header)
    digest.update(b"".join([os.pread(fd, SAMPLE_BYTES, page * SAMPLE_BYTES) for page in pages]))
    return digest.hexdigest()


def sample_pages(size: int, tensor_middles: list[int]) -> list[int]:
    """Numbers of the 4 KiB pages read from a file of `size` bytes, ascending: the first, the last, the middle
    of each of `STRATA` equal parts, and those that hold the given byte offsets (at most
    `MAX_TENSOR_SAMPLES` of them, evenly chosen)."""
    count = -(-size // SAMPLE_BYTES)
    stride = max(1, -(-len(tensor_middles) // MAX_TENSOR_SAMPLES))
    pages = {0, count - 1}
    pages.update((2 * part + 1) * count // (2 * STRATA) for part in range(STRATA))
    pages.update(m // SAMPLE_BYTES for m in tensor_middles[::stride] if 0 <= m < size)
    return sorted(pages)


def _safetensors_header(fd: int, size: int) -> bytes:
    """Length field and JSON of a safetensors file; empty if the file is something else."""
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        return b""
    return start + os.pread(fd, length, 8)


def _tensor_middles(header: bytes) -> list[int]:
    """File offsets of the middle byte of each tensor, ascending; none if the header is no such JSON."""
    try:
        tensors = json.loads(header[8:] or b"{}")
        spans = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
        return sorted(len(header) + (int(begin) + int(end)) // 2 for begin, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return []
