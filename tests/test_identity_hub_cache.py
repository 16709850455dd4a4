"""Models in the hub cache are named by their commit, without reading weights."""

import os
import sys
from pathlib import Path

import pytest

from ucm_sglang.identity import FingerprintError, weights_fingerprint
from ucm_sglang.identity.hub_cache import hub_cache_dir

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def add_snapshot(
    cache: Path, model_id: str, commit: str, files: dict[str, str], ref: str | None = None
) -> Path:
    """What huggingface_hub lays out: blobs, links to them, and refs."""
    repo = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = repo / "blobs" / f"{name.replace('/', '_')}-{content}"
        blob.write_text(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    if ref:
        (repo / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return snapshot


FILES = {"config.json": "{}", "model.safetensors": "w", "fp8/model.safetensors": "w8", "model-Q4.gguf": "g"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    add_snapshot(folder, "org/name", COMMIT, FILES, ref="main")
    add_snapshot(folder, "org/name", OTHER, FILES, ref="refs/pr/1")
    add_snapshot(folder, "gpt2", OTHER, FILES, ref="main")
    return folder


def snapshot(cache: Path, commit: str = COMMIT) -> Path:
    return cache / "models--org--name" / "snapshots" / commit


def test_a_snapshot_path_is_named_by_its_commit(cache: Path, tmp_path: Path) -> None:
    """Each revision is another model; a link to the folder is the folder."""
    assert weights_fingerprint(str(snapshot(cache))) == f"hub:{COMMIT}"
    assert weights_fingerprint(str(snapshot(cache, OTHER))) == f"hub:{OTHER}"
    (tmp_path / "current").symlink_to(snapshot(cache))
    assert weights_fingerprint(str(tmp_path / "current")) == f"hub:{COMMIT}"


def test_parts_of_a_snapshot_are_apart(cache: Path) -> None:
    """One commit can hold several models: a folder or a file of it is named with the commit."""
    assert weights_fingerprint(str(snapshot(cache) / "fp8")) == f"hub:{COMMIT}/fp8"
    assert weights_fingerprint(str(snapshot(cache) / "model-Q4.gguf")) == f"hub:{COMMIT}/model-Q4.gguf"


def test_weights_of_a_snapshot_are_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is enough: no weight file is opened."""
    monkeypatch.setattr(os, "open", lambda *a, **k: pytest.fail(f"opened {a}"))
    assert weights_fingerprint(str(snapshot(cache))) == f"hub:{COMMIT}"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "fp8/model.safetensors", "extra.bin"])
def test_a_file_put_into_a_snapshot_is_seen(cache: Path, name: str) -> None:
    """Issue 2 number 2: the path still shows the commit, the content is no longer the commit's."""
    file = snapshot(cache) / name
    file.unlink(missing_ok=True)
    prints = []
    for content in ("mine", "mine, trained"):
        file.write_text(content)
        prints.append(weights_fingerprint(str(snapshot(cache))))
    assert prints[0] != prints[1]
    assert all(p.startswith(f"hub:{COMMIT}+") for p in prints)


@pytest.mark.parametrize(
    ("model_id", "revision", "commit"),
    [
        ("org/name", None, COMMIT),
        ("org/name", "main", COMMIT),
        ("org/name", COMMIT, COMMIT),
        ("org/name", OTHER, OTHER),
        ("org/name", "refs/pr/1", OTHER),
        ("gpt2", None, OTHER),
    ],
)
def test_a_model_id_is_looked_up_in_the_cache(
    cache: Path, model_id: str, revision: str | None, commit: str
) -> None:
    """A server started by id and one started by snapshot path share their pages."""
    assert weights_fingerprint(model_id, revision, cache_dir=str(cache)) == f"hub:{commit}"


@pytest.mark.parametrize(
    ("model_id", "revision"),
    [
        ("org/absent", None),
        ("org/name", "v9"),
        ("org/name", "0" * 40),
        ("org/name", "../refs"),
        ("org/name/deeper", None),
        ("../org/name", None),
        ("", None),
    ],
)
def test_a_model_that_is_not_cached_is_refused_with_the_fix(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_id: str, revision: str | None
) -> None:
    """I5: never a guess, never a download; the message names the cache that was searched."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(FingerprintError, match="weights_fingerprint") as caught:
        weights_fingerprint(model_id, revision, cache_dir=str(cache))
    assert repr(model_id) in str(caught.value)


def test_a_local_folder_wins_over_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines load ``org/name`` from the working directory if it is there."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "model.bin").write_text("local")
    monkeypatch.chdir(tmp_path)
    assert weights_fingerprint("org/name", cache_dir=str(cache)).startswith("digest:")


def test_a_folder_that_only_looks_like_a_snapshot_is_digested(tmp_path: Path) -> None:
    """A branch name is no commit."""
    folder = tmp_path / "models--org--name" / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_text("w")
    assert weights_fingerprint(str(folder)).startswith("digest:")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/d", "HF_HOME": "/h"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "/d", "HF_HOME": "/h"}, "/d"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "$HOME/h"}, "/root-of-me/h/hub"),
        ({}, "/root-of-me/.cache/huggingface/hub"),
    ],
)
def test_cache_folder_without_huggingface_hub(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    """The scheduler's environment decides, as in huggingface_hub, where that is not installed."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/root-of-me")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    assert hub_cache_dir() == Path(expected)
    assert hub_cache_dir("/given") == Path("/given")
