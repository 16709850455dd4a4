"""The CPU engine harness itself: what tests and the demo rest on must be exact, and loud where it fails.

Where a test names no other reason it defends issue 2's "failing loudly when SGLang's version differs" and
its "Must hold" 1: pages in shuffled order, every byte equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import cpu_engine  # noqa: E402
from cpu_engine.process import GroupProcess  # noqa: E402
from cpu_engine.server import CpuServer, ServerError  # noqa: E402
from cpu_engine.settings import IO_LAYOUTS_MHA, IO_LAYOUTS_MLA, ServerSettings  # noqa: E402
from cpu_engine.tiny_model import DegenerateOutputError, make_model, require_varied_output  # noqa: E402

cpu_engine.install()

pytestmark = pytest.mark.sglang


# ---- the shim ------------------------------------------------------------------------------------------


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def fake_sglang(site: Path, version: str | None) -> Path:
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    info = site / f"sglang-{version}.dist-info"
    if version is not None:
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return site


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0.dev1"])
def test_other_sglang_version_stops_the_first_import(tmp_path: Path, version: str) -> None:
    """Also where the caller tolerates a missing SGLang; the message names both versions."""
    site = fake_sglang(tmp_path, version)
    code = "try:\n    import sglang\nexcept ImportError:\n    pass\n"
    done = run_python(code, cpu_engine.SHIM_DIR, site)
    assert done.returncode != 0
    assert "UnsupportedSglangError" in done.stderr
    assert version in done.stderr and "0.5.23" in done.stderr


def test_supported_version_passes_and_chooses_the_cpu(tmp_path: Path) -> None:
    site = fake_sglang(tmp_path, "0.5.23")
    done = run_python(
        "import sglang, os; print(os.environ['SGLANG_USE_CPU_ENGINE'])", cpu_engine.SHIM_DIR, site
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_process_without_sglang_is_left_alone() -> None:
    code = "import sys, os, json; print('torch' in sys.modules, 'SGLANG_USE_CPU_ENGINE' in os.environ)"
    done = run_python(code, cpu_engine.SHIM_DIR)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False False", "")


def test_install_after_sglang_is_refused(tmp_path: Path) -> None:
    """Patching half of SGLang would fail later and elsewhere."""
    site = fake_sglang(tmp_path, "0.5.23")
    done = run_python("import sglang, cpu_engine; cpu_engine.install()", ROOT / "scripts", site)
    assert done.returncode != 0
    assert "before SGLang is imported" in done.stderr


def test_unavailable_kernel_can_be_imported_but_not_called() -> None:
    done = run_python("from sgl_kernel import fused_experts; fused_experts(1)", cpu_engine.SHIM_DIR)
    assert done.returncode != 0
    assert "sgl_kernel.fused_experts is not available" in done.stderr


# ---- the stand-in copies, against loops over single rows ----------------------------------------------

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 8, 4, 6
TOKENS = PAGES * PAGE
ROW_BYTES = HEADS * DIM * 2  # bfloat16
HOST_SHAPES = {
    "layer_first": (LAYERS, TOKENS, HEADS, DIM),
    "page_first": (TOKENS, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (PAGES, HEADS, PAGE, LAYERS, DIM),
}


Copy = Callable[[list[Any], list[list[Any]], Any, Any], None]  # host tensors, device layers, their indices


def host_row(host: Any, layout: str, layer: int, token: int) -> Any:
    page, offset = divmod(token, PAGE)
    match layout:
        case "layer_first":
            return host[layer, token]
        case "page_first":
            return host[token, layer]
        case "page_first_direct":
            return host[page, layer, offset]
    return host[page, :, offset, layer]


def addresses(layers: list[Any]) -> Any:
    import torch

    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def kernel_layout(name: str) -> str:
    return "page_head" if "ph" in name else "page_first" if "pf" in name else "layer_first"


def kernel_up(op: Callable[..., None], layout: str, extra: dict[str, int]) -> Copy:
    """Host to device, one call a layer."""

    def call(host: list[Any], device: list[Any], host_idx: Any, device_idx: Any) -> None:
        for layer in range(LAYERS):
            src = [h[layer] for h in host] if layout == "layer_first" else host
            dst = [d[layer] for d in device]
            where = {} if layout == "layer_first" else {"layer_id": layer}
            kw = {"src_indices": host_idx, "dst_indices": device_idx, **where, **extra}
            if len(host) == 1:
                op(src=src[0], dst=dst[0], **kw)
            else:
                op(src_k=src[0], dst_k=dst[0], src_v=src[1], dst_v=dst[1], **kw)

    return call


def kernel_down(op: Callable[..., None], layout: str, extra: dict[str, int]) -> Copy:
    """Device to host, one call for all layers; layer-first host pools are given by address, too."""

    def call(host: list[Any], device: list[Any], host_idx: Any, device_idx: Any) -> None:
        src = [addresses(d) for d in device]
        dst, to = (host, "") if layout != "layer_first" else ([addresses(list(h)) for h in host], "_layers")
        kw = {"src_indices": device_idx, "dst_indices": host_idx, "num_layers": LAYERS, **extra}
        if len(host) == 1:
            op(src_layers=src[0], **{f"dst{to}": dst[0]}, **kw)
        else:
            kw |= {f"dst_k{to}": dst[0], f"dst_v{to}": dst[1]}
            op(src_k_layers=src[0], src_v_layers=src[1], **kw)

    return call


def kernel_call(ops: Any, name: str) -> tuple[str, Copy]:
    layout, up = kernel_layout(name), "per_layer" in name
    extra = {"item_size": ROW_BYTES}
    if layout != "layer_first":
        extra["src_layout_dim" if up else "dst_layout_dim"] = ROW_BYTES * LAYERS
    if layout == "page_head":
        extra |= {"page_size": PAGE, "head_num": HEADS}
    return layout, (kernel_up if up else kernel_down)(getattr(ops, name), layout, extra)


def direct_call(ops: Any, name: str, up: bool) -> tuple[str, Copy]:
    def rows_up(host: list[Any], device: list[Any], host_idx: Any, device_idx: Any) -> None:
        for layer in range(LAYERS):
            src, dst = [h[layer] for h in host], [d[layer] for d in device]
            ops.transfer_kv_direct(src, dst, host_idx, device_idx, PAGE)

    def rows_down(host: list[Any], device: list[Any], host_idx: Any, device_idx: Any) -> None:
        src, dst = [t for d in device for t in d], [t for h in host for t in h]
        ops.transfer_kv_direct(src, dst, device_idx, host_idx, PAGE)

    def pages_up(host: list[Any], device: list[Any], host_idx: Any, device_idx: Any) -> None:
        for layer in range(LAYERS):
            dst = [d[layer] for d in device]
            ops.transfer_kv_per_layer_direct_pf_lf(host, dst, host_idx, device_idx, layer, PAGE)

    def pages_down(host: list[Any], device: list[Any], host_idx: Any, device_idx: Any) -> None:
        src = [t for d in device for t in d]
        ops.transfer_kv_all_layer_direct_lf_pf(src, host, device_idx, host_idx, PAGE)

    if name == "transfer_kv_direct":
        return "layer_first", rows_up if up else rows_down
    return "page_first_direct", pages_up if up else pages_down


def stand_in(case: str) -> tuple[str, Copy]:
    """Host layout and a call of the operator that `case` names, with the arguments SGLang gives it."""
    from cpu_engine_shim import transfer_ops

    name, direction = case.split()
    return (
        direct_call(transfer_ops, name, direction == "up")
        if "direct" in name
        else kernel_call(transfer_ops, name)
    )


COPIES = [
    "transfer_kv_all_layer down",
    "transfer_kv_all_layer_direct_lf_pf down",
    "transfer_kv_all_layer_lf_pf down",
    "transfer_kv_all_layer_lf_ph down",
    "transfer_kv_all_layer_mla down",
    "transfer_kv_all_layer_mla_lf_pf down",
    "transfer_kv_direct down",
    "transfer_kv_direct up",
    "transfer_kv_per_layer up",
    "transfer_kv_per_layer_direct_pf_lf up",
    "transfer_kv_per_layer_mla up",
    "transfer_kv_per_layer_mla_pf_lf up",
    "transfer_kv_per_layer_pf_lf up",
    "transfer_kv_per_layer_ph_lf up",
]


def test_every_stand_in_is_checked() -> None:
    from cpu_engine_shim import transfer_ops

    assert {name.split()[0] for name in COPIES} == set(transfer_ops.OPS)


def component_counts(name: str) -> list[int]:
    """How many tensors an operator moves: MLA's one, K and V, or either."""
    return [1, 2] if "direct" in name else [1] if "mla" in name else [2]


@pytest.mark.parametrize(("name", "components"), [(n, c) for n in COPIES for c in component_counts(n)])
@pytest.mark.parametrize("seed", range(3))
def test_stand_in_copies_what_a_loop_copies(name: str, components: int, seed: int) -> None:
    """Pages in shuffled order on both sides; rows that are not named stay as they were."""
    import torch

    layout, call = stand_in(name)
    torch.manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float32).to(torch.bfloat16)

    host = [random(*HOST_SHAPES[layout]) for _ in range(components)]
    device = [[random(TOKENS, HEADS, DIM) for _ in range(LAYERS)] for _ in range(components)]
    host_idx, device_idx = (
        (torch.randperm(PAGES)[:4, None] * PAGE + torch.arange(PAGE)).reshape(-1) for _ in range(2)
    )
    want_host, want_device = [h.clone() for h in host], [[t.clone() for t in d] for d in device]
    for component in range(components):
        for layer in range(LAYERS):
            for on_host, on_device in zip(host_idx.tolist(), device_idx.tolist(), strict=True):
                if name.endswith("up"):
                    row = host_row(host[component], layout, layer, on_host)
                    want_device[component][layer][on_device] = row
                else:
                    row = host_row(want_host[component], layout, layer, on_host)
                    row.copy_(device[component][layer][on_device])
    call(host, device, host_idx, device_idx)
    for got, want in zip(host, want_host, strict=True):
        assert torch.equal(got, want)
    for got_layers, want_layers in zip(device, want_device, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got_layers, want_layers, strict=True))


# ---- the controller rig --------------------------------------------------------------------------------

PAIRS = [("mha", *p) for p in IO_LAYOUTS_MHA] + [("mla", *p) for p in IO_LAYOUTS_MLA]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("kind", "io_backend", "layout"), PAIRS)
def test_rig_round_trip_with_sglangs_own_file_backend(
    tmp_path: Path, kind: Any, io_backend: str, layout: str, page_size: int
) -> None:
    """The rig works before our backend is involved, so a failure with ours is ours."""
    from cpu_engine.controller import ControllerRig, RoundTrip

    with ControllerRig(
        kind, page_size=page_size, layout=layout, io_backend=io_backend, file_dir=tmp_path
    ) as rig:
        assert rig.round_trip(pages=20) == RoundTrip(20, 20, 20, identical=True)
        rig.reset()
        assert rig.round_trip(pages=20, tokens_seed=1) == RoundTrip(20, 20, 20, identical=True)


@pytest.mark.parametrize("controller", ["hybrid", "base"])
def test_rig_notices_a_single_wrong_byte(tmp_path: Path, controller: Any) -> None:
    """SGLang's file backend hands a flipped bit back as a success (the rig must be able to fail)."""
    from cpu_engine.controller import ControllerRig

    with ControllerRig(file_dir=tmp_path, controller=controller) as rig:
        tokens, source = rig.tokens(4), rig.fill(4)
        wanted = rig.read_device(source)
        host = rig.to_host(source)
        assert rig.backup(host, tokens) == 4
        victim = next(tmp_path.glob(f"{rig.hashes(tokens)[2]}*"))
        data = bytearray(victim.read_bytes())
        data[100] ^= 1
        victim.write_bytes(data)
        rig.scramble()
        got = rig.prefetch(tokens)
        assert (got.hit_pages, got.completed_pages) == (4, 4)
        loaded = rig.read_device(rig.load(got.host_indices))
        different = [(a != b).sum().item() for a, b in zip(wanted, loaded, strict=True)]
        assert sum(different) == 1


def test_rig_gives_the_backend_its_place_among_the_ranks(tmp_path: Path) -> None:
    """The controller derives the place, so a backend's keys can be tested for every parallel axis (I5)."""
    from cpu_engine.controller import ControllerRig, Ranks

    def place(ranks: Ranks) -> tuple[int, ...]:
        with ControllerRig(file_dir=tmp_path, ranks=ranks) as rig:
            c = rig.controller.storage_config
            return c.tp_rank, c.tp_size, c.pp_rank, c.pp_size, c.attn_cp_rank, c.attn_cp_size, c.dp_rank

    assert place(Ranks()) == (0, 1, 0, 1, 0, 1, 0)
    assert place(Ranks(tp_rank=3, tp_size=4, pp_rank=1, pp_size=2)) == (3, 4, 1, 2, 0, 1, 0)
    assert place(Ranks(tp_rank=2, tp_size=4, cp_size=2)) == (2, 4, 0, 1, 1, 2, 0)
    # With DP attention the backend is told its rank within the attention group.
    assert place(Ranks(tp_rank=5, tp_size=8, cp_size=2, dp_size=2)) == (1, 2, 0, 1, 0, 2, 1)


# ---- the tiny model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [[[7] * 16], [[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 1, 2, 1, 2]]])
def test_degenerate_reference_output_is_refused(outputs: list[list[int]]) -> None:
    """Output that is the same whatever the cache holds would make every comparison pass."""
    with pytest.raises(DegenerateOutputError):
        require_varied_output(outputs)


@pytest.mark.parametrize("kind", ["qwen3", "mla"])
def test_tiny_model_is_reproducible_and_seeds_differ(tmp_path: Path, kind: Any) -> None:
    """A second call changes nothing; another seed gives other weights at the same path ("Must hold" 2)."""
    path = tmp_path / "model"

    def weights(seed: int) -> bytes:
        return (make_model(path, kind, seed) / "model.safetensors").read_bytes()

    first, stamp = weights(0), path.stat().st_mtime_ns
    assert weights(0) == first and path.stat().st_mtime_ns == stamp
    assert weights(1) != first
    assert weights(0) == first


def test_foreign_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not a tiny model"):
        make_model(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


# ---- the server process --------------------------------------------------------------------------------


def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_pair_that_sglang_would_rewrite_is_refused(tmp_path: Path) -> None:
    """SGLang silently turns direct + page_first into another pair; a test would then test something else."""
    with pytest.raises(ValueError, match=r"io_backend='direct' with mem_layout='page_first'"):
        ServerSettings(model=model_dir(tmp_path), io_backend="direct", mem_layout="page_first")


def test_settings_reach_the_command_line_and_environment(tmp_path: Path) -> None:
    settings = ServerSettings(
        model=model_dir(tmp_path),
        storage_backend="dynamic",
        storage_extra_config={"backend_name": "x", "interface_v1": 1},
        python_path=["/somewhere"],
        env={"EXTRA": "yes"},
    )
    argv = settings.command(31000, "key")
    text = argv[argv.index("--hicache-storage-backend-extra-config") + 1]
    assert json.loads(text) == {"backend_name": "x", "interface_v1": 1}
    assert argv[argv.index("--hicache-storage-backend") + 1] == "dynamic"
    env = settings.environment()
    assert env["PYTHONPATH"].split(os.pathsep)[:2] == [str(cpu_engine.SHIM_DIR), "/somewhere"]
    assert env["EXTRA"] == "yes"
    plain = ServerSettings(model=tmp_path, hicache=False).command(31000, "key")
    assert not [arg for arg in plain if "hicache" in arg or "hierarchical" in arg]


def test_server_that_dies_while_starting_shows_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho the reason; exit 3\n")
    python.chmod(0o755)
    server = CpuServer(ServerSettings(model=model_dir(tmp_path), python=str(python)), tmp_path / "log")
    with pytest.raises(ServerError, match=r"died while starting(.|\n)*the reason"):
        server.start()


def test_killing_the_group_ends_its_children_and_nothing_else(tmp_path: Path) -> None:
    script = "sleep 300 & echo $!; sleep 300"
    ours, other = (
        GroupProcess(["/bin/sh", "-c", script], os.environ, tmp_path / name) for name in ("ours", "other")
    )
    try:
        deadline = time.monotonic() + 10
        while not ours.log_tail() or not other.log_tail():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ours.kill_group()
        child, bystander = int(ours.log_tail()), int(other.log_tail())
        assert ours.exited() and not running(child)
        assert not other.exited() and running(bystander)
    finally:
        ours.kill_group()
        other.kill_group()


def running(pid: int) -> bool:
    """False also for a process that has ended but that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
