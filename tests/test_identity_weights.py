"""The weights fingerprint: other weights under the same path are another namespace (I5, sglang#24758)."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_sglang.identity import FingerprintError, weights_fingerprint
from ucm_sglang.identity import weights as weights_module

PAGE = 4096
STRATA = 64


def write_safetensors(path: Path, tensors: dict[str, bytes | int], dtype: str = "U8") -> None:
    """A safetensors file; a tensor given as an int is a hole of that many bytes."""
    header: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        size = data if isinstance(data, int) else len(data)
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for data in tensors.values():
            if isinstance(data, int):
                f.seek(data, os.SEEK_CUR)
            else:
                f.write(data)
        f.truncate(8 + len(text) + at)


def poke(path: Path, offset: int, value: bytes = b"\xa5") -> None:
    """Overwrite bytes in place: size and name stay."""
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "vision").mkdir(parents=True)
    rng = random.Random(1)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "generation_config.json").write_text('{"temperature": 1}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    (folder / "modeling_own.py").write_text("SCALE = 1\n")
    (folder / "README.md").write_text("hello")
    for i in range(3):
        tensors: dict[str, bytes | int] = {f"layer.{i}.{t}": rng.randbytes(500) for t in range(4)}
        write_safetensors(folder / f"model-{i}-of-3.safetensors", tensors)
    for name in (
        "pytorch_model.bin",
        "extra.pt",
        "consolidated.00.pth",
        "model.gguf",
        "vision/model.safetensors",
    ):
        (folder / name).write_bytes(rng.randbytes(2000))
    return folder


COUNTED = [
    "config.json",
    "quantize_config.json",
    "modeling_own.py",
    "model-0-of-3.safetensors",
    "model-1-of-3.safetensors",
    "model-2-of-3.safetensors",
    "pytorch_model.bin",
    "extra.pt",
    "consolidated.00.pth",
    "model.gguf",
    "vision/model.safetensors",
]


def test_golden_fingerprint(tmp_path: Path) -> None:
    """Stores of older versions stay valid. A change here needs a new scheme name in weights.py."""
    write_safetensors(tmp_path / "model.safetensors", {"w": bytes(range(256))})
    (tmp_path / "config.json").write_text("{}")
    assert weights_fingerprint(str(tmp_path)) == "digest:a819da2a6c7676c7acab686519224e10"
    write_safetensors(tmp_path / "model.safetensors", {"w": bytes(range(256)), "x": 10 << 20})
    assert weights_fingerprint(str(tmp_path)) == "digest:c07002f69f53eab863fe73ed7badee23"


@pytest.mark.parametrize("name", COUNTED)
def test_a_changed_byte_of_any_model_file_is_seen(model: Path, name: str) -> None:
    """Issue 2 number 2: the same path, names and sizes, other content."""
    before = weights_fingerprint(str(model))
    file = model / name
    last = file.stat().st_size - 1
    byte = file.read_bytes()[last]
    poke(file, last, bytes([byte ^ 1]))
    assert weights_fingerprint(str(model)) != before
    poke(file, last, bytes([byte]))
    assert weights_fingerprint(str(model)) == before


@given(data=st.data())
@settings(max_examples=60)
def test_any_flipped_bit_of_small_files_is_seen(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files up to 8 MiB are read whole: header, metadata and every number count."""
    folder = tmp_path_factory.mktemp("m")
    write_safetensors(folder / "model.safetensors", {"a": bytes(300), "b": b"x" * 200})
    before = weights_fingerprint(str(folder))
    content = bytearray((folder / "model.safetensors").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "model.safetensors").write_bytes(content)
    assert weights_fingerprint(str(folder)) != before


@pytest.mark.parametrize("name", COUNTED)
def test_added_removed_or_renamed_files_are_seen(model: Path, name: str) -> None:
    """A shard moved to another name holds other layers; a missing one is another model."""
    before = weights_fingerprint(str(model))
    file = model / name
    twin = file.with_name(f"twin_{file.name}")
    shutil.copy(file, twin)
    added = weights_fingerprint(str(model))
    file.unlink()
    renamed = weights_fingerprint(str(model))
    twin.unlink()
    removed = weights_fingerprint(str(model))
    assert len({before, added, renamed, removed}) == 4


def test_swapped_shards_are_seen(model: Path) -> None:
    """The set of contents is the same, the assignment to names is not."""
    before = weights_fingerprint(str(model))
    first, second = model / "model-0-of-3.safetensors", model / "model-1-of-3.safetensors"
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert weights_fingerprint(str(model)) != before


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "tokenizer.json", "README.md", "training.log", ".cache/x.json", "._a.bin"],
)
def test_files_that_do_not_change_the_model_do_not_count(model: Path, name: str) -> None:
    """A warm cache survives an edited generation config, a new README, and download metadata."""
    before = weights_fingerprint(str(model))
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("other")
    assert weights_fingerprint(str(model)) == before


def test_the_same_content_elsewhere_is_the_same_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts share a store: neither path, order of creation, times nor links count."""
    before = weights_fingerprint(str(model))
    names = [p.relative_to(model) for p in model.rglob("*") if p.is_file()]

    copy = tmp_path / "far" / "copy"
    linked = tmp_path / "linked"
    for name in sorted(names, reverse=True):
        for folder in (copy, linked):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model / name, copy / name)
        (linked / name).symlink_to(model / name)
    (tmp_path / "link").symlink_to(copy)
    monkeypatch.chdir(tmp_path)
    for path in (copy, linked, tmp_path / "link", f"{model}/", f"{model}/../model", "model", "./far/copy"):
        assert weights_fingerprint(str(path)) == before


def test_order_of_the_directory_does_not_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems list a directory in their own order."""
    before = weights_fingerprint(str(model))
    walk = os.walk

    def shuffled(*args: Any, **kwargs: Any) -> Any:
        for folder, folders, names in walk(*args, **kwargs):
            random.Random(7).shuffle(names)
            folders.reverse()
            yield folder, folders, names

    monkeypatch.setattr(os, "walk", shuffled)
    assert weights_fingerprint(str(model)) == before


def test_links_in_a_circle_end(model: Path) -> None:
    """A start never hangs on a directory that links to itself."""
    before = weights_fingerprint(str(model))
    (model / "vision" / "up").symlink_to(model)
    assert weights_fingerprint(str(model)) == before


def test_a_single_file_is_a_model(model: Path) -> None:
    """GGUF servers are given a file: it counts, its neighbours do not."""
    before = weights_fingerprint(str(model / "model.gguf"))
    poke(model / "extra.pt", 0)
    assert weights_fingerprint(str(model / "model.gguf")) == before
    poke(model / "model.gguf", 1999, b"\0\0")
    assert weights_fingerprint(str(model / "model.gguf")) != before


def sampled_offsets(size: int) -> list[int]:
    """One byte in each place that must be sampled in any large file: head, tail, middle of every stratum."""
    pages = -(-size // PAGE)
    middles = [(2 * i + 1) * pages // (2 * STRATA) * PAGE for i in range(STRATA)]
    return [0, PAGE - 1, size - 1, *(m + 17 for m in middles)]


@pytest.mark.parametrize("suffix", [".bin", ".safetensors", ".gguf"])
def test_a_change_in_every_stratum_of_a_large_file_is_seen(tmp_path: Path, suffix: str) -> None:
    """Issue 2 number 2, for files too big to read: 64 strata, head and tail each count on their own."""
    size = (1 << 30) + 1234
    file = tmp_path / f"model{suffix}"
    with file.open("wb") as f:
        f.truncate(size)
    seen = {weights_fingerprint(str(tmp_path))}
    offsets = sampled_offsets(size)
    for offset in offsets:
        poke(file, offset)
        seen.add(weights_fingerprint(str(tmp_path)))
    assert len(seen) == 1 + len(offsets)


@pytest.mark.parametrize("count", [1, 300, 1024])
def test_a_retrained_tensor_is_seen_however_small_its_share(tmp_path: Path, count: int) -> None:
    """A tensor far smaller than a stratum is sampled in its middle."""
    file = tmp_path / "model.safetensors"
    size = (32 << 20) // count
    write_safetensors(file, {f"layers.{i}.w": size for i in range(count)})
    start = file.stat().st_size - size * count
    before = weights_fingerprint(str(tmp_path))
    for i in random.Random(count).sample(range(count), min(count, 40)):
        poke(file, start + i * size, b"\x5a" * size)
        changed = weights_fingerprint(str(tmp_path))
        assert changed != before, i
        before = changed


def test_header_and_size_of_a_large_file_count(tmp_path: Path) -> None:
    """Equal bytes read as another dtype, or one more byte, are other weights."""
    file = tmp_path / "model.safetensors"
    prints = []
    for tensors, dtype in (({"a": 64 << 20}, "I8"), ({"b": 64 << 20}, "I8"), ({"a": 64 << 20}, "U8")):
        write_safetensors(file, dict(tensors), dtype)
        prints.append(weights_fingerprint(str(tmp_path)))
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size + 1)
    prints.append(weights_fingerprint(str(tmp_path)))
    assert len(set(prints)) == 4


def test_a_long_header_counts_to_its_end(tmp_path: Path) -> None:
    """Two tensors of equal shape that swap names: every sampled page of data is the same."""
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {f"layers.{i:03}.w": 40_000 for i in range(300)})
    before = weights_fingerprint(str(tmp_path))
    content = file.read_bytes()
    first, second = content.index(b"layers.200.w"), content.index(b"layers.201.w")
    assert first > PAGE
    poke(file, first, b"layers.201.w")
    poke(file, second, b"layers.200.w")
    assert weights_fingerprint(str(tmp_path)) != before


def test_the_size_of_a_large_file_counts(tmp_path: Path) -> None:
    """Equal samples of files of different sizes are different weights."""
    prints = set()
    for size in (64 << 20, 128 << 20):
        with (tmp_path / "model.bin").open("wb") as f:
            f.truncate(size)
        prints.add(weights_fingerprint(str(tmp_path)))
    assert len(prints) == 2


def test_reads_are_bounded_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights of a big model are never hashed: 256 GiB cost a few MiB of reads."""
    for i in range(4):
        write_safetensors(tmp_path / f"{i}.safetensors", {f"t{t}": 32 << 20 for t in range(2048)})
    read = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(weights_module, "_hash_whole", lambda fd: pytest.fail("read a large file whole"))
    weights_fingerprint(str(tmp_path))
    headers = 4 * 2048 * 120
    assert sum(read) < headers + 4 * (STRATA + 2 + 1024) * PAGE


@given(st.binary(min_size=0, max_size=300))
@settings(max_examples=80)
def test_a_damaged_safetensors_header_is_still_fingerprinted(
    tmp_path_factory: pytest.TempPathFactory, header: bytes
) -> None:
    """Whether the file loads is the engine's business; ours is never to crash on it or to ignore it."""
    folder = tmp_path_factory.mktemp("m")
    file = folder / "model.safetensors"
    with file.open("wb") as f:
        f.write(header)
        f.truncate(9 << 20)
    before = weights_fingerprint(str(folder))
    poke(file, (9 << 20) - 1)
    assert before != weights_fingerprint(str(folder))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"data_offsets": [1]}}',
        b'{"a": {"data_offsets": ["x", null]}}',
        b'{"a": {"data_offsets": [-900000000, -900000000]}}',
        b'{"a": {"data_offsets": [0.5, 1e300]}}',
        b'{"a": {"data_offsets": [0, Infinity]}}',
    ],
)
def test_headers_that_are_no_safetensors_header(tmp_path: Path, header: bytes) -> None:
    """Offsets that lie are not followed."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(9 << 20)
    before = weights_fingerprint(str(tmp_path))
    poke(file, 8, b"?")
    assert before != weights_fingerprint(str(tmp_path))


@pytest.mark.parametrize(
    "url", ["s3://bucket/model", "gs://bucket/model", "https://host/m", "runai+s3://b/m"]
)
def test_a_remote_model_is_refused_with_the_fix(url: str) -> None:
    """I5: unknown weights are never guessed; the message names the key to set."""
    with pytest.raises(FingerprintError, match=r"not a local model.*weights_fingerprint") as caught:
        weights_fingerprint(url)
    assert url in str(caught.value)


def break_link(model: Path) -> Path:
    (model / "extra.pt").unlink()
    (model / "extra.pt").symlink_to(model / "gone")
    return model


def drop_weights(model: Path) -> Path:
    for file in model.rglob("*"):
        if file.suffix in weights_module.WEIGHT_SUFFIXES:
            file.unlink()
    return model


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: model / "missing", "no such path"),
        (break_link, "No such file or directory: .*extra.pt"),
        (drop_weights, r"no weight files \(\*.safetensors"),
    ],
)
def test_a_model_that_cannot_be_identified_is_refused_with_the_fix(
    model: Path, spoil: Callable[[Path], Path], message: str
) -> None:
    """I5: a missing path, a half-finished download, a folder of configs: an error at start, a ValueError."""
    with pytest.raises(ValueError, match=f"{message}.*configuration key weights_fingerprint"):
        weights_fingerprint(str(spoil(model)))


def test_unreadable_weights_are_refused_with_the_fix(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO or EACCES is an error at start that names the file, not a fingerprint of what could be read."""

    def failing(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("model.gguf"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    real = os.open
    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(FingerprintError, match=r"Permission denied: .*model\.gguf.*weights_fingerprint"):
        weights_fingerprint(str(model))
