"""Wrong bytes reused: what users of other disk tiers for KV cache reported, and what happens here (issue 3).

Each test is named after a public report and shows its scenario in small. Invariants I1, I2 and I5 are tested
in depth elsewhere.
"""

import errno
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Fault, FaultySyscalls
from storekit import NAMESPACE, dump, ids_of, load, memory_directory, open_store, payloads

from posix_store import PosixStore, Reason
from posix_store.segment import SEGMENT_HEADER_BYTES
from ucm_sglang.identity import (
    KV_POOL,
    BlockIds,
    Namespace,
    canonical_json,
    namespace_seed,
    token_chain,
    weights_fingerprint,
)

LENGTH = 4096
LOOK = 0.03
"""Seconds after which a store looks at the directory again when something is missing."""
IDENTITY: dict[str, Any] = {
    "engine": "sglang", "model": "org/model", "weights": "hub:1", "model_dtype": "bfloat16",
    "quantization": "", "model_overrides": "", "kv_dtype": "fp8_e4m3", "layout": "page_first",
    "object_layout": "buffers", "page_size": 64, "pool_class": "MHATokenToKVPoolHost", "attention": "mha",
    "page_bytes": LENGTH,
    "layer_start": 0, "layer_end": 2, "num_layers": 2, "head_num": 2, "head_dim": 8, "v_head_dim": 8,
    "kv_lora_rank": None, "rope_dim": None, "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 2,
    "cp_rank": 0, "cp_size": 2, "dcp_rank": 0, "dcp_size": 2,
}  # fmt: skip
KEYS = token_chain(range(8 * 64), 64)
"""SGLang's names of the eight pages of one prompt: the same on every server."""


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


def server(root: Path, **changes: Any) -> tuple[PosixStore, np.ndarray]:
    """The store of a server with that identity, and the ids of the prompt's pages there."""
    namespace = Namespace(**{**IDENTITY, **changes})
    ids = np.frombuffer(BlockIds(namespace.digest()).of(KV_POOL, KEYS), np.uint8).reshape(-1, 16)
    return open_store(root, namespace=namespace.hexdigest(), identity=namespace.to_dict()), ids


def finds(root: Path, **changes: Any) -> bool:
    """Does such a server find and load the prompt? All of it or nothing."""
    store, ids = server(root, **changes)
    with store:
        found = store.lookup(ids)
        loaded = load(store, ids, LENGTH) == Reason.OK
        assert (found == loaded).all() and found.all() == found.any()
        return bool(found.all())


def serve(root: Path, **changes: Any) -> None:
    """A server stores the prompt and ends."""
    store, ids = server(root, **changes)
    with store:
        assert (dump(store, ids, LENGTH) == Reason.OK).all()


def segment(root: Path) -> Path:
    (path,) = (root / NAMESPACE).glob("*.seg")
    return path


# -- what the bytes are -------------------------------------------------------------------------------------


def test_a1_sglang_33268_another_kv_dtype_is_another_namespace(root: Path) -> None:
    """After a restart with the other fp8 kind, pages of equal size were taken for its own: garbled output.

    Here the dtype is part of the namespace, so the same keys find nothing. (I5)
    """
    serve(root, kv_dtype="fp8_e4m3")
    assert not finds(root, kv_dtype="fp8_e5m2")
    assert finds(root, kv_dtype="fp8_e4m3")


def test_a2_sglang_24758_other_weights_under_the_same_name(root: Path, tmp_path: Path) -> None:
    """A model was trained on under the same served name, and answered from the old model's pages.

    Here what is in the files names the pages, not the path. (I5)
    """
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.bin"
    weights.write_bytes(bytes(10_000))
    before = weights_fingerprint(str(tmp_path))
    weights.write_bytes(bytes(5_000) + b"\1" + bytes(4_999))
    after = weights_fingerprint(str(tmp_path))
    serve(root, weights=before)
    assert not finds(root, weights=after)
    assert finds(root, weights=before)


def test_a3_tanguille_cluster_4213_nobody_versions_directories_by_hand(root: Path) -> None:
    """An operator put versions and revisions into the directory's name by hand, so as not to mix pages.

    Here one directory serves all models; each namespace says on disk, and in one line of the log, what it is.
    """
    serve(root)
    serve(root, model="org/other")
    for model in ("org/model", "org/other"):
        namespace = Namespace(**{**IDENTITY, "model": model})
        written = json.loads((root / namespace.hexdigest() / "NAMESPACE.json").read_text())
        assert written == namespace.to_dict()
        line = str(namespace)
        assert namespace.hexdigest() in line and f"model={model}" in line and "kv_dtype=fp8_e4m3" in line


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dcp"])
def test_a4_sglang_26670_every_parallel_axis_is_in_the_name(root: Path, axis: str) -> None:
    """Context-parallel ranks wrote one file over each other: garbled output.

    Here each rank has pages of its own, and an axis that this version does not know is refused. (I5)
    """
    serve(root)
    assert not finds(root, **{f"{axis}_rank": 1})
    assert not finds(root, **{f"{axis}_size": 4})
    with pytest.raises(ValueError, match="xp_rank"):
        Namespace.from_dict({**IDENTITY, "schema": 1, "tag": "", "xp_rank": 0})


def test_a5_sglang_38577_a_cache_salt_changes_every_key() -> None:
    """Pages of salted requests could be shared with requests of others.

    Here the engine's key is opaque: another key is another block, and the salt is in every key of the chain.
    """
    ids = BlockIds(bytes(16))
    plain, one, two = (
        ids.of(KV_POOL, token_chain(range(256), 64, namespace_seed(None, salt))) for salt in (None, "a", "b")
    )
    blocks = [chain[at : at + 16] for chain in (plain, one, two) for at in range(0, 64, 16)]
    assert len(set(blocks)) == 12


def test_a6_lmcache_2961_vllm_44250_a_lora_changes_every_key() -> None:
    """The adapter was not in the key: one adapter's pages answered for another.

    Here it is in the first hash of the chain, and the adapters' weights are in the server's fingerprint.
    """
    chains = [token_chain(range(256), 64, namespace_seed(lora, None)) for lora in (None, "one", "two")]
    assert len({key for chain in chains for key in chain}) == 12
    serving = {Namespace(**{**IDENTITY, "weights": f"hub:1{lora}"}).digest() for lora in ("", " lora=hub:2")}
    assert len(serving) == 2


# -- what is on disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [0, 100, LENGTH + 7])
def test_a7_lmcache_4991_a_store_that_failed_is_not_seen(root: Path, short: int) -> None:
    """A write failed half-way, and the file with 32 of 64 bytes stayed visible: gibberish.

    Here a block does not exist before all of its bytes do; afterwards it can be stored. (I2)
    """
    calls = FaultySyscalls(
        Fault(kinds=["pwritev"], short=short), Fault(2, ["pwritev"], error=errno.EIO, times=9)
    )
    ids = ids_of(1, 4)
    with open_store(root, syscalls=calls) as store, open_store(root, writable=False) as other:
        written = dump(store, ids, LENGTH) == Reason.OK
        assert written.tolist() == [at < short // LENGTH for at in range(4)]
        time.sleep(LOOK)
        assert (store.lookup(ids) == written).all() and (other.lookup(ids) == written).all()
        assert ((load(other, ids, LENGTH) == Reason.OK) == written).all()
        calls.faults = []
        assert (dump(store, ids, LENGTH) == Reason.OK).all()
    with open_store(root) as store:
        assert (load(store, ids, LENGTH) == Reason.OK).all()


def test_a9_sglang_29969_no_reader_sees_a_page_that_is_being_written(root: Path) -> None:
    """A file was read under its final name while another rank was still writing it.

    Here a reader that looks at any moment of a dump finds nothing of it, until all of it is there. (I2)
    """
    ids = ids_of(1, 4)
    seen = []
    with open_store(root) as first:
        dump(first, ids_of(2, 1), LENGTH)

    def look() -> None:
        with open_store(root, writable=False) as reader:
            seen.append(reader.lookup(ids).any())

    kinds = ["pwritev", "pwrite"]
    calls = FaultySyscalls(Fault(kinds=kinds, times=9, before=look))
    with open_store(root, syscalls=calls) as store:
        assert (dump(store, ids, LENGTH) == Reason.OK).all()
        calls.faults = []
    assert len(seen) >= 2 and not any(seen)
    with open_store(root) as reader:
        assert (load(reader, ids, LENGTH) == Reason.OK).all()


def test_a12_sglang_31926_35484_two_writers_share_a_directory(root: Path) -> None:
    """Ranks shared a directory and used the same bucket numbers: silent corruption.

    Here each writer has files of its own, with names that cannot meet; all blocks of all writers are right.
    """
    writers = [open_store(root) for _ in range(3)]
    batches = [ids_of(seed, 4) for seed in range(30)]
    for number, ids in enumerate(batches):
        assert (dump(writers[number % 3], ids, LENGTH) == Reason.OK).all()
    assert len(list(root.glob("*/*.seg"))) >= 3
    time.sleep(LOOK)
    for store in writers:
        assert (load(store, np.concatenate(batches), LENGTH) == Reason.OK).all()
        store.close()


SAME_BYTE_COUNT = {
    "revision": {"weights": "hub:2"},
    "auto dtype": {"model_dtype": "float16"},
    "layout": {"layout": "layer_first"},
    "runner layout": {"object_layout": "flat"},
    "page shape": {"page_size": 32, "num_layers": 4, "layer_end": 4},
    "head shape": {"head_num": 4, "head_dim": 4, "v_head_dim": 4},
    "numbers of the model": {"model_overrides": canonical_json({"rope_theta": 1e6})},
    "quantization": {"quantization": "fp8"},
}


@pytest.mark.parametrize("change", SAME_BYTE_COUNT)
def test_a16_vllm_49261_49438_49440_55904_equal_sizes_are_not_enough(root: Path, change: str) -> None:
    """Revision, dtype and layouts were missing in the digest: pages of the right size and the wrong content.

    Here all of them are fields of the namespace, taken from the live pool. (I5)
    """
    serve(root)
    assert not finds(root, **SAME_BYTE_COUNT[change])
    assert finds(root)


def test_a17_vllm_44701_fields_cannot_run_into_each_other() -> None:
    """A LoRA's name and a cache salt were hashed into one domain: two requests had one key.

    Here each field has its name or its length, and "empty" is not "absent".
    """
    seeds = [("a", "b"), ("ab", ""), ("", "ab"), ("ab", None), (None, "ab"), ("", None), (None, ""), ("", "")]
    assert len({namespace_seed(*parts) for parts in seeds}) == len(seeds)
    fields = [{"model": "ab", "tag": ""}, {"model": "a", "tag": "b"}, {"model": "a", "quantization": "b"}]
    assert len({Namespace(**{**IDENTITY, **some}).digest() for some in fields}) == len(fields)
    ids = BlockIds(bytes(16))
    assert len({ids.of("kv", ["ab"]), ids.of("kva", ["b"]), ids.of("k", ["vab"])}) == 3


@pytest.mark.parametrize("fault", [{"short": LENGTH // 2}, {"error": errno.EIO}], ids=["short", "error"])
def test_a18_vllm_49250_a_block_is_loaded_whole_or_not_at_all(root: Path, fault: dict[str, int]) -> None:
    """A block that had been loaded in part was taken as valid: wrong output after a failed load.

    Here a block that fails is a miss, also when one of its shards is, and never "loaded". (I1, I2)
    """
    ids, sharded = ids_of(1, 4), ids_of(2, 2)
    with open_store(root) as store:
        dump(store, ids, LENGTH)
        dump(store, sharded, LENGTH, shard=0, n_shards=2)
        assert not store.lookup(sharded).any()
        dump(store, sharded, LENGTH, shard=1, n_shards=2)
        assert store.lookup(sharded).all()
    calls = FaultySyscalls()
    with open_store(root, syscalls=calls, io_threads=1) as store:
        calls.faults = [Fault(kinds=["preadv"], **fault), Fault(2, ["preadv"], times=99, error=errno.EIO)]
        status = load(store, ids, LENGTH)  # compares what is said to be loaded
        assert (status == Reason.IO_ERROR).all()
    with open_store(root) as store:
        assert (load(store, ids, LENGTH) == Reason.OK).all()


def test_a20_vllm_8229_mooncake_644_what_about_collisions() -> None:
    """Users keep asking what happens when two prompts have one key.

    An id has 128 bits over the namespace and the whole key of 256 bits: among 10^12 blocks two share an id
    with a probability below 10^-14.
    """
    assert (10**12) ** 2 / 2 / 2**128 < 1e-14
    ids = BlockIds(bytes(16))
    keys = [f"{number:064x}" for number in range(50_000)]
    keys += [f"{number:032x}" + "0" * 32 for number in range(1, 50_000)]
    packed = ids.of(KV_POOL, keys)
    assert len({packed[at : at + 16] for at in range(0, len(packed), 16)}) == len(keys)


def test_a21_lmcache_207_226_ucm_867_906_reads_and_writes_at_once(root: Path) -> None:
    """Odd output when one process read what another was writing, or when a page was used at another position.

    Here whatever is loaded while others store the same blocks is right, and the same tokens at another
    position have another key. (I1)
    """
    ids = ids_of(1, 64)
    stop = threading.Event()

    def read(store: PosixStore) -> int:
        loaded = 0
        while not stop.is_set():
            loaded = int((load(store, ids, LENGTH) == Reason.OK).sum())
        return loaded

    with open_store(root) as one, open_store(root) as two, ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, store) for store in (one, two)]
        for start in range(0, 64, 8):
            dump(one, ids[start : start + 8], LENGTH)
            dump(two, ids[start : start + 8], LENGTH)
        stop.set()
        assert [reader.exception() for reader in readers] == [None, None]
        assert (load(two, ids, LENGTH) == Reason.OK).all()
    page = list(range(64))
    first, second = token_chain(page + page, 64)
    assert first != second


@pytest.mark.parametrize("verify", [True, False])
def test_a22_hf3fs_a_place_that_was_given_to_another_block(root: Path, verify: bool) -> None:
    """An eviction gave a slot to a writer while another process was reading it: another key's bytes.

    Here a place is never written twice, and a reader that still knows an evicted block gets a miss. (I1)
    """
    ids = ids_of(1, 32)
    small: dict[str, Any] = {"capacity": 1 << 20, "segment_bytes": 1 << 18}
    with open_store(root, **small) as writer, open_store(root, verify=verify, **small) as reader:
        dump(writer, ids, LENGTH)
        time.sleep(LOOK)
        assert reader.lookup(ids).all()
        for seed in range(2, 12):
            assert (dump(writer, ids_of(seed, 32), LENGTH) == Reason.OK).all()
        status = load(reader, ids, LENGTH)  # compares what is said to be loaded
        assert set(status.tolist()) <= {Reason.EVICTED, Reason.ABSENT}


def test_a23_hf3fs_the_index_is_only_a_cache(root: Path) -> None:
    """Metadata was written every 60 s and data at once: after a crash the old map named the wrong page.

    Here what finds a block is appended after its bytes, in one write. Without that the block does not exist,
    and with it but without the bytes (a power failure) it is a counted miss. (I1, I2)
    """
    ids = ids_of(1, 4)
    with open_store(root) as store:
        dump(store, ids, LENGTH)
    data = segment(root)
    journal = data.with_suffix(".idx")
    before = shutil.copy(journal, root.parent / "journal")
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size // 2)
    with open_store(root, writable=False) as store:
        assert not store.lookup(ids).any()
    shutil.copy(before, journal)
    with data.open("r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES)
        file.write(bytes(4 * LENGTH))
    with open_store(root, writable=False) as store:
        assert (load(store, ids, LENGTH) == Reason.CHECKSUM).all()
        assert store.counters.snapshot()["misses"] == {"checksum": 4}


def test_a24_ucm_posixstore_the_exact_length_or_a_miss(root: Path) -> None:
    """A short read counted as success, K and V apart in memory were read as one piece, and a smaller page
    read the beginning of a larger one as its own.

    Here each of these is a miss, or lands where it belongs. (I1)
    """
    ids = ids_of(1, 4)
    with open_store(root) as store:
        right = payloads(ids, LENGTH)
        apart = [[row[: LENGTH // 2].copy(), row[LENGTH // 2 :].copy()] for row in right]
        assert store.dump(ids, 0, apart, background=False).results().all()
        memory = np.zeros((2, 4, LENGTH), np.uint8)
        half = LENGTH // 2
        into = [[memory[0, i, :half], memory[1, i, half:]] for i in range(4)]
        assert store.load(ids, 0, into, background=False).results().all()
        assert (memory[0, :, :half] == right[:, :half]).all() and not memory[0, :, half:].any()
        assert (memory[1, :, half:] == right[:, half:]).all() and not memory[1, :, :half].any()
        for other in (half, 2 * LENGTH):
            rows = np.zeros((4, other), np.uint8)
            assert (store.load(ids, 0, list(rows), background=False).status() == Reason.LENGTH).all()
    with segment(root).open("r+b") as file:
        file.truncate(SEGMENT_HEADER_BYTES + LENGTH + half)
    with open_store(root) as store:
        assert (load(store, ids, LENGTH) == Reason.OK).tolist() == [True, False, False, False]
