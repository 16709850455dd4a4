"""The configuration: what is accepted, what is refused, and what the refusal says (invariant I3)."""

import json
import os
from pathlib import Path

import clikit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from posix_store.opening import open_store
from ucm_sglang.config import (
    ConfigError,
    SGLangKeys,
    StoreConfig,
    config_table,
    encode_config,
    load_config_file,
    parse_size,
)

UNITS = {
    "": 1, "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip


def config(**keys: object) -> StoreConfig:
    return StoreConfig.from_extra({"path": "/kv", **keys}, source="test")


def refusal(**keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    return str(caught.value)


@given(
    number=st.integers(1, 9000),
    unit=st.sampled_from(sorted(UNITS)),
    space=st.sampled_from(["", " "]),
    case=st.sampled_from([str, str.lower, str.upper]),
)
def test_a_size_is_its_number_times_its_unit_in_any_case(number, unit, space, case):
    """Decimal and binary units differ by 10 % at TB: mixing them up breaks invariant I4."""
    assert parse_size(case(f"{number}{space}{unit}")) == number * UNITS[unit]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096),
        ("9007199254740993", 9007199254740993),
        ("500GiB", 500 << 30),
        ("1.5TB", 1_500_000_000_000),
        (" 0.5 GiB ", 1 << 29),
        (None, None),
    ],
)
def test_capacity_is_bytes_whatever_form_it_was_given_in(value, expected):
    assert config(capacity=value).capacity == expected


WRONG = [
    *[("capacity", v, "500GiB") for v in (True, False, 1.5, float("nan"), -1, 0, "0", "0GiB", "-5GB")],
    *[("capacity", v, "500GiB") for v in ("abc", "", "10 parsecs", "10kbit", "500G", "5%", "1_000", "1e3")],
    *[("capacity", v, "500GiB") for v in ("٣GB", "1.5", "1.5B", 2**63, "9" * 30, "10EiB", {})],
    *[("capacity", v, "one size for each path") for v in ([], [1, 2], [[1]], [None], ["1GiB", "x"])],
    *[("min_free", v, "5%") for v in (True, -1, "-1%", "100%", "nan%", "5%%", "%", "abc", None, 0.05)],
    *[("segment_size", v, "1 MiB") for v in (True, 0, (1 << 20) - 1, "1kB", "big", None)],
    *[("io_threads", v, "1 to 64") for v in (True, 0, -1, 65, 2.0, "2", None)],
    *[("verify", v, "true or false") for v in (1, 0, "true", None)],
    *[("timeout", v, "10 s") for v in (True, 0, -1, 9, 9.0, 60, float("nan"), float("inf"), "5", 10**400)],
    *[("weights_fingerprint", v, '"auto"') for v in ("", 7, None)],
    *[("tag", v, "200") for v in ("x" * 201, 7, None)],
    *[("path", v, "absolute") for v in ("", " ", "kv", "~/kv", "./kv", "$HOME/kv", "/k\0v", 7, None)],
    *[("path", v, "absolute") for v in ([], ["/a", "b"], ["/a", 7], [["/a"]], ["/a", ""], {"/a": 1})],
    *[("policy", v, "lru, fifo") for v in ("LRU", "lfu", "", 1, None)],
    *[("admission", v, "always, second_touch") for v in ("never", "", True, None)],
    *[("ttl", v, "more than 0") for v in (True, 0, -1, float("nan"), float("inf"), "1h")],
    *[("slow_seconds", v, "less than `timeout`") for v in (True, 0, -1, 5, 5.0, float("nan"), "1")],
    *[("breaker_failures", v, "1 or more") for v in (True, 0, -1, 1.5, "5", None)],
    *[("breaker_seconds", v, "more than 0") for v in (True, 0, -1, float("inf"), "5", None)],
    *[("write_queue", v, "1 MiB") for v in (True, 0, 1 << 19, "1kB", "big", None)],
]


@pytest.mark.parametrize(("key", "value", "fix"), WRONG)
def test_a_malformed_value_is_refused_with_its_key_and_the_fix(key, value, fix):
    """Invariant I3: a configuration error fails at start with the key, the value and the fix."""
    message = refusal(**{key: value})
    assert message.startswith(f"test: {key} = ")
    assert fix in message
    assert "\n" not in message
    if len(repr(value)) < 40:
        assert f"{key} = {value!r}: " in message


def test_the_refusal_of_a_long_timeout_says_whose_limit_it_is():
    """Invariant I11: SGLang's flush fails after 10 s of waiting for a storage thread."""
    assert "SGLang stops waiting for a storage thread after 10 s" in refusal(timeout=10)


def test_a_relative_path_is_refused_with_the_absolute_one():
    """Two servers started in different directories would otherwise use two stores."""
    assert os.path.abspath("kv") in refusal(path="kv")


@pytest.mark.parametrize(
    ("path", "capacity", "what"),
    [
        (["/a", "/b"], "1GiB", "'1GiB': is 1 size for 2 paths"),
        (["/a", "/b"], ["1GiB"], "['1GiB']: is 1 size for 2 paths"),
        ("/a", ["1GiB", "2GiB"], "['1GiB', '2GiB']: is 2 sizes for 1 path"),
        (["/a", "/b"], ["1GiB", "1parsec"], "['1GiB', '1parsec']: '1parsec' is not a size"),
        (["/a", "/b"], ["1GiB", 0], "['1GiB', 0]: 0 must be more than 0"),
    ],
)
def test_as_many_sizes_as_paths(path, capacity, what):
    """One size for two devices could mean each or both together: nobody should have to find out which."""
    message = refusal(path=path, capacity=capacity)
    assert message.startswith(f"test: capacity = {what}")
    assert message.endswith("with several paths a list, one size for each path")


def test_a_relative_path_in_a_list_is_named():
    message = refusal(path=["/a", "kv"])
    assert message.startswith("test: path = ['/a', 'kv']: 'kv' must be absolute, ")
    assert f"here it would be {os.path.abspath('kv')}; " in message


def test_a_slow_transfer_must_end_before_the_batch_does():
    """What takes `timeout` is given up: a `slow_seconds` of more than that would never be reached."""
    assert "slow_seconds = 1.5: must be less than timeout = 1.5; give seconds" in refusal(
        timeout=1.5, slow_seconds=1.5
    )
    assert config(timeout=1.5, slow_seconds=1.4).store_arguments()["slow_seconds"] == 1.4
    assert config().store_arguments()["slow_seconds"] == 2.0
    assert config(timeout=1.5).store_arguments()["slow_seconds"] == 0.75


def test_every_problem_is_in_one_message():
    """Invariant I3, and no operator should need one restart for each wrong key."""
    message = refusal(capcity="5GB", timeout=60, interface_v1="yes", verify="no")
    assert message.startswith("test: 4 wrong keys\n")
    for part in (
        "capcity = '5GB': unknown key",
        "timeout = 60: ",
        "interface_v1 = 'yes': ",
        "verify = 'no': ",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("capcity", "capacity"),
        ("Capacity", "capacity"),
        ("min-free", "min_free"),
        ("io_thread", "io_threads"),
        ("segment_bytes", "segment_size"),
        ("interface_v2", "interface_v1"),
        ("prefetch_treshold", "prefetch_threshold"),
        ("weights_finger_print", "weights_fingerprint"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(key, nearest):
    assert f"{key} = 1: unknown key; did you mean {nearest}?" in refusal(**{key: 1})


def test_a_key_that_resembles_nothing_gets_the_list():
    message = refusal(zzzzzz=1)
    assert all(name in message for name in StoreConfig.model_fields)


def test_a_key_that_is_no_text_is_refused():
    """YAML makes numbers and booleans of bare keys."""
    with pytest.raises(ConfigError, match="unknown key"):
        StoreConfig.from_extra({"path": "/kv", 1: 2}, source="test")


def test_a_missing_path_says_what_to_give():
    with pytest.raises(ConfigError, match="path: is missing; give the absolute path"):
        StoreConfig.from_extra({}, source="test")


@pytest.mark.parametrize("extra", [None, [], "path", 3])
def test_an_extra_config_that_is_no_mapping_is_refused(extra):
    with pytest.raises(ConfigError, match="must be a mapping"):
        StoreConfig.from_extra(extra, source="test")


SGLANG_KEYS = {
    "backend_name": "ucm",
    "module_path": "ucm_sglang.hicache",
    "class_name": "UcmHiCacheStorage",
    "interface_v1": 1,
    "allocator": "shm",
    "prefetch_threshold": 256,
    "prefetch_timeout_base": 1,
    "prefetch_timeout_per_ki_token": 0.25,
    "hicache_storage_pass_prefix_keys": True,
    "tp_lcm_size": None,
    "file_storage_path": None,
}


def test_sglang_s_own_keys_are_recognised_and_change_nothing_of_ours():
    assert set(SGLANG_KEYS) == set(SGLangKeys.model_fields)
    assert config(**SGLANG_KEYS) == config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("interface_v1", v) for v in ("0", "true", 2, 1.0, None)],
        *[("hicache_storage_pass_prefix_keys", v) for v in (1, "true")],
        *[("prefetch_threshold", v) for v in (True, 1.5, "256", -1)],
        *[("prefetch_timeout_base", v) for v in (True, "1", -1, float("nan"))],
        *[("prefetch_timeout_per_ki_token", v) for v in (True, "1", float("inf"))],
        *[("tp_lcm_size", v) for v in (True, 0, "4")],
        *[("allocator", v) for v in ("mmap", 1)],
        *[("module_path", v) for v in (None, 1)],
    ],
)
def test_sglang_s_own_keys_are_typed(key, value):
    """SGLang takes `"interface_v1": "0"` for true: a text there is refused before it misleads anybody."""
    assert f"{key} = {value!r}: " in refusal(**{key: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*StoreConfig.model_fields, *SGLangKeys.model_fields]) | st.text(max_size=8)


@given(extra=st.dictionaries(NAMES, JSON, max_size=6))
def test_whatever_the_mapping_holds_the_answer_is_a_config_or_a_config_error(extra):
    """Invariant I3; and the mapping, which SGLang goes on using, stays as it was."""
    before = repr(extra)
    try:
        StoreConfig.from_extra(extra, source="test")
    except ConfigError as error:
        assert str(error).startswith("test: ")
    assert repr(extra) == before


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        config().tag = "other"


@pytest.mark.parametrize(("value", "expected"), [(0, 0), ("10GiB", 10 << 30), ("0%", 0), ("5%", None)])
def test_min_free_in_bytes(value, expected):
    assert config(min_free=value).min_free_bytes() == expected


def test_min_free_as_a_share_is_of_the_file_system_that_the_store_will_be_on(tmp_path: Path):
    """The store does not exist yet when a server starts for the first time."""
    made_later = config(path=str(tmp_path / "not" / "yet"), min_free=" 2.5 % ")
    disk = os.statvfs(tmp_path)
    assert made_later.min_free_bytes() == pytest.approx(disk.f_blocks * disk.f_frsize * 0.025, abs=1)


def test_a_share_is_of_each_file_system(tmp_path: Path):
    """With several paths, 10 % of a small device is another floor than 10 % of a big one."""
    paths = [str(tmp_path / "kv"), "/proc/kv"]
    floors = config(path=paths, min_free="10%").store_arguments()["min_free"]
    disk = os.statvfs(tmp_path)
    assert floors == [pytest.approx(disk.f_blocks * disk.f_frsize * 0.1, abs=1), 0]


@pytest.mark.parametrize(
    ("keys", "paths", "capacities"),
    [
        ({"path": "/a"}, ("/a",), (None,)),
        ({"path": ["/a/"]}, ("/a",), (None,)),
        ({"path": ["/a"], "capacity": ["1GiB"]}, ("/a",), (1 << 30,)),
        ({"path": "/a", "capacity": "1GiB"}, ("/a",), (1 << 30,)),
        ({"path": ["/b", "/a/../c"]}, ("/b", "/c"), (None, None)),
        ({"path": ("/b", "/c"), "capacity": ("1GiB", 7)}, ("/b", "/c"), (1 << 30, 7)),
    ],
)
def test_one_path_or_several(keys, paths, capacities):
    found = config(**keys)
    assert (found.paths, found.capacities) == (paths, capacities)
    arguments = found.store_arguments()
    assert (arguments["roots"], arguments["capacities"]) == (list(paths), list(capacities))


KEYS = {
    "capacity": "64MiB", "min_free": 0, "segment_size": "2MiB", "io_threads": 1, "timeout": 2,
    "verify": False, "policy": "fifo", "admission": "second_touch", "ttl": 3600, "slow_seconds": 0.5,
    "breaker_failures": 3, "breaker_seconds": 4, "write_queue": "8MiB", "engine": "python",
    "io_mode": "direct", "page_cache": "drop",
}  # fmt: skip


def test_the_store_opens_with_the_arguments_of_the_config(tmp_path: Path):
    """Every key reaches the store: a keyword that the store does not know would be a TypeError here."""
    arguments = config(path=str(tmp_path / "kv"), **KEYS).store_arguments()
    assert arguments == {
        "roots": [str(tmp_path / "kv")],
        "capacities": [64 << 20],
        "min_free": [0],
        "policy": "fifo",
        "admission": "second_touch",
        "ttl": 3600.0,
        "segment_bytes": 2 << 20,
        "io_threads": 1,
        "verify": False,
        "timeout": 2.0,
        "slow_seconds": 0.5,
        "breaker_failures": 3,
        "breaker_seconds": 4.0,
        "engine": "python",
        "io_mode": "direct",
        "page_cache": "drop",
        "write_queue_bytes": 8 << 20,
    }
    with open_store(namespace="0" * 32, **arguments) as store:
        assert store.stats().capacity == 64 << 20


def test_a_store_on_several_paths_opens_with_the_arguments_of_the_config(tmp_path: Path):
    paths = [str(tmp_path / name) for name in "ab"]
    arguments = config(**KEYS | {"path": paths, "capacity": ["64MiB", "32MiB"]}).store_arguments()
    with open_store(namespace="0" * 32, **arguments) as store:
        assert store.stats().capacity == 96 << 20


def test_init_leaves_a_config_with_several_paths_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It makes one store for one path, and says what the file is for."""
    file, paths = tmp_path / "c.json", [str(tmp_path / name) for name in "ab"]
    file.write_text(json.dumps({"path": paths}))
    status, _, message = clikit.run(capsys, "init", paths[0], "--config", str(file))
    assert status == 2
    assert f"{file}: belongs to the store {', '.join(paths)}, not {paths[0]}; name another file" in message
    assert not os.path.exists(paths[0])


# -- files ----------------------------------------------------------------------------------------------

VALUES = {"path": "/kv/modèle", "capacity": "500GiB", "interface_v1": 1, "timeout": 2.5, "verify": True}


@pytest.mark.parametrize("ending", ["json", "yaml", "yml", "toml", "JSON"])
def test_a_config_file_reads_back_as_it_was_written(tmp_path: Path, ending: str):
    file = tmp_path / f"c.{ending}"
    kind = {"yml": "yaml"}.get(ending, ending.lower())
    file.write_text(encode_config(kind, VALUES), encoding="utf-8")
    assert load_config_file(str(file)) == VALUES
    assert list(load_config_file(str(file))) == list(VALUES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.ini", b"path=/kv", "must end in .json, .toml, .yaml, .yml"),
        ("c", b"{}", "must end in"),
        ("c.json", b'{"path": "/kv",}', "not valid JSON: .*line 1 column"),
        ("c.json", b"", "not valid JSON"),
        ("c.json", b"[1]", "must hold a mapping"),
        ("c.json", b'"\xff"', "not valid JSON: .*utf-8"),
        ("c.json", b"[" * 100_000, "not valid JSON"),
        ("c.toml", b"path = /kv", "not valid TOML: .*line 1"),
        ("c.yaml", b"path: [", "not valid YAML: .*line 1"),
        ("c.yaml", b"", "must hold a mapping"),
        ("c.yaml", b"!!python/object/apply:os.getpid []", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_read_says_why_in_one_line(tmp_path: Path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config_file(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "message"), [("no.json", "No such file"), ("dir.json", "Is a directory")])
def test_a_file_that_is_not_there_says_so(tmp_path: Path, name, message):
    (tmp_path / "dir.json").mkdir()
    with pytest.raises(ConfigError, match=message):
        load_config_file(str(tmp_path / name))


def test_nan_in_a_json_file_is_refused(tmp_path: Path):
    """Python's JSON reader lets NaN through, and no comparison with NaN is ever true."""
    file = tmp_path / "c.json"
    file.write_text('{"path": "/kv", "timeout": NaN}')
    with pytest.raises(ConfigError, match="timeout = nan: must be a finite number"):
        StoreConfig.from_extra(load_config_file(str(file)), source=str(file))


# -- documentation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [StoreConfig, SGLangKeys])
def test_the_table_has_every_key_with_a_type_a_default_and_a_meaning(model):
    rows = [line.strip("|").split("|") for line in config_table(model).splitlines()[2:]]
    assert [row[0].strip(" `") for row in rows] == list(model.model_fields)
    for name, kind, _unit, default, meaning in rows:
        assert kind.strip() and default.strip() and meaning.strip().endswith("."), name


def test_the_defaults_in_the_table_are_valid_values():
    """A default that is shown can be copied into a config file."""
    for line in config_table().splitlines()[2:]:
        name, _, _, default, _ = [cell.strip() for cell in line.strip("|").split("|")]
        if default.startswith("`"):
            assert config(**{name.strip("`"): json.loads(default.strip("`"))}) == config()
