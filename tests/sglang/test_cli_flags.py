"""What `ucm-sglang init` prints and writes is what this SGLang takes."""

import argparse
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from ucm_sglang import cli
from ucm_sglang.config import SGLangKeys, StoreConfig, load_config_file

pytestmark = pytest.mark.sglang

POPPED = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")


def printed_argv(text: str) -> list[str]:
    """The words of the printed command, as a shell would pass them on."""
    command = text[text.index("sglang serve") :]
    return shlex.split(command.replace("\\\n", " "))[2:]


@pytest.mark.parametrize("ending", ["json", "yaml", "toml"])
def test_sglang_takes_the_printed_flags_and_the_written_file(tmp_path: Path, capsys, ending: str) -> None:
    from sglang.srt.arg_groups.hicache_hook import resolve_layout_io_compatibility
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.server_args import ServerArgs

    file = tmp_path / f"ucm.{ending}"
    assert cli.main(["init", str(tmp_path / "kv"), "--capacity", "1GiB", "--config", str(file)]) == 0
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(printed_argv(capsys.readouterr().out))

    assert (args.page_size, args.enable_hierarchical_cache) == (64, True)
    assert (args.hicache_storage_backend, args.hicache_write_policy) == ("dynamic", "write_through")
    assert args.hicache_storage_prefetch_policy == "timeout"
    before = SimpleNamespace(**vars(args))
    pair = (args.hicache_io_backend, args.hicache_mem_layout)
    resolve_layout_io_compatibility(before)
    assert (before.hicache_io_backend, before.hicache_mem_layout) == pair == ("direct", "page_first_direct")

    extra, *_, pass_prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
        args.hicache_storage_backend_extra_config
    )
    assert pass_prefix_keys is True
    whole = load_config_file(str(file))
    assert extra == {key: value for key, value in whole.items() if key != "hicache_storage_pass_prefix_keys"}
    assert StoreConfig.from_extra(extra, "sglang") == StoreConfig.from_extra(whole, "file")


def test_the_keys_that_sglang_takes_out_are_ours_to_recognise() -> None:
    """A key that a new SGLang reads and we do not know would be refused as unknown: this says so first."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
    from sglang.srt.mem_cache.storage import backend_factory

    read = set()
    for module in (cache_controller, hybrid_cache_controller, backend_factory):
        source = Path(str(module.__file__)).read_text()
        read |= set(re.findall(r'extra_config\.(?:pop|get)\(\s*"(\w+)"', source))
        read |= set(re.findall(r'backend_config\["(\w+)"\]', source))
    assert read >= {*POPPED, "tp_lcm_size", "interface_v1", "module_path"}
    assert read <= set(SGLangKeys.model_fields)


def test_the_defaults_we_document_for_sglang_s_keys_are_sglang_s() -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    _, *values = HybridCacheController.parse_storage_backend_extra_config("{}")
    names = (*POPPED, "hicache_storage_pass_prefix_keys")
    assert values == [SGLangKeys.model_fields[name].default for name in names]
