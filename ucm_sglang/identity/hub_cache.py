"""Where a model lies in the local Hugging Face hub cache, and under which commit. Never downloads."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class SnapshotPath:
    """A place in ``<cache>/models--<id>/snapshots/<commit>``."""

    path: Path
    """The place itself: a folder or a file, in or equal to the snapshot's folder."""
    commit: str
    """40 hex digits."""
    inside: str
    """The place relative to the snapshot's folder, ``""`` for the folder itself."""
    blobs: Path
    """Folder of the files that the snapshot's links point to, each named by a hash of its content."""

    def vouches_for(self, file: Path) -> bool:
        """Whether the commit proves the content of `file`: a link into the blobs, not a file put here."""
        return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(self.blobs))


def snapshot_of(path: Path) -> SnapshotPath | None:
    """The snapshot that an absolute path lies in, as written or with links resolved; None if in none."""
    for candidate in (path, Path(os.path.realpath(path))):
        parts = candidate.parts
        for i in range(len(parts) - 2):
            repo, snapshots, commit = parts[i : i + 3]
            if repo.startswith("models--") and snapshots == "snapshots" and _COMMIT.fullmatch(commit):
                inside = Path(*parts[i + 3 :]).as_posix() if len(parts) > i + 3 else ""
                return SnapshotPath(candidate, commit, inside, Path(*parts[: i + 1], "blobs"))
    return None


def cached_snapshot(
    model_id: str, revision: str | None = None, cache_dir: str | None = None
) -> SnapshotPath | None:
    """The snapshot of `model_id` at `revision` (branch, tag or commit; default "main"), if it is cached."""
    if not _MODEL_ID.fullmatch(model_id):
        return None
    repo = hub_cache_dir(cache_dir) / f"models--{model_id.replace('/', '--')}"
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repo / "refs" / commit).read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
    folder = repo / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    return SnapshotPath(folder, commit, "", repo / "blobs")


def hub_cache_dir(cache_dir: str | None = None) -> Path:
    """`cache_dir`, or the folder huggingface_hub uses (its own rules, where it is not installed)."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    try:
        return Path(str(import_module("huggingface_hub.constants").HF_HUB_CACHE))
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
        chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
        return Path(os.path.expandvars(chosen or os.path.join(home, "hub"))).expanduser()
