"""Our reading of the hub cache agrees with huggingface_hub, which the engines use."""

from importlib import import_module
from pathlib import Path

import pytest

from ucm_sglang.identity import weights_fingerprint
from ucm_sglang.identity.hub_cache import hub_cache_dir

pytestmark = pytest.mark.sglang

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_cache_folder_is_the_library_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where huggingface_hub is installed, its own constant decides."""
    constants = import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub_cache_dir() == tmp_path


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_lookup_by_id_finds_what_the_library_finds(tmp_path: Path, revision: str | None) -> None:
    """The fingerprint names the commit of the snapshot that the engine would load."""
    hub = import_module("huggingface_hub")
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "model.safetensors"):
        (repo / "blobs" / name).write_text("{}")
        (snapshot / name).symlink_to(Path("../../blobs") / name)

    found = hub.try_to_load_from_cache("org/name", "config.json", cache_dir=tmp_path, revision=revision)
    assert isinstance(found, str)
    assert Path(found).parent == snapshot
    assert (
        weights_fingerprint("org/name", revision, cache_dir=str(tmp_path)) == f"hub:{Path(found).parent.name}"
    )
