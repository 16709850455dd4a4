"""The configuration: one validated object for both engines and the command line.

The keys stand in the engine's own extra config (SGLang: `--hicache-storage-backend-extra-config`), beside
keys that are the engine's. `StoreConfig` has ours, `SGLangKeys` has SGLang's; both are checked, and a key
that is in neither is an error. The fields are also the source of the documentation (`config_table`).
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypedDict, TypeVar

import tomli_w
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from posix_store.admission import ADMISSIONS
from posix_store.io_mode import IO_MODES, PAGE_CACHE
from posix_store.native import ENGINES
from posix_store.policies import POLICIES
from ucm_sglang.config_values import (
    MAX_BYTES,
    less_than_timeout,
    one_of,
    parse_capacity,
    parse_floor,
    parse_paths,
    parse_size,
    parse_switch,
    shown,
)

__all__ = [
    "ConfigError",
    "Key",
    "SGLangKeys",
    "StoreArguments",
    "StoreConfig",
    "config_format",
    "config_table",
    "encode_config",
    "load_config_file",
    "parse_size",
]

MAX_TIMEOUT = 9.0
"""SGLang gives up waiting for a storage thread after 10 s and then refuses to flush or detach."""

M = TypeVar("M", bound=BaseModel)


class ConfigError(ValueError):
    """The configuration cannot work. The message names each wrong key, its value and the fix."""


class StoreArguments(TypedDict):
    """Keyword arguments of `posix_store.opening.open_store` that come from the configuration."""

    roots: list[str]
    capacities: list[int | None]
    min_free: list[int | None]
    policy: str
    admission: str
    ttl: float | None
    segment_bytes: int
    io_threads: int
    verify: bool
    timeout: float
    slow_seconds: float
    breaker_failures: int
    breaker_seconds: float
    write_queue_bytes: int
    engine: str
    io_mode: str
    page_cache: str


@dataclass(frozen=True)
class Key:
    """What the documentation and the error messages say about a key."""

    kind: str
    unit: str
    description: str
    fix: str
    default: str = ""
    """The default in words, where the value (None) does not say it."""


_Size = Annotated[int, BeforeValidator(parse_size), Field(le=MAX_BYTES)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SIZE_FIX = 'give whole bytes or a size such as "500GiB" or "1.5TB"'
_SWITCH_FIX = "give true or false"
_NAMES_FIX = "give one of {}"


class SGLangKeys(BaseModel):
    """SGLang's own keys in the same mapping. It removes some of them before a backend sees the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    backend_name: Annotated[
        str, Key("text", "", "Name of the backend in SGLang's log and metrics.", 'give "ucm"')
    ] = "ucm"
    module_path: Annotated[
        str,
        Key("text", "", "Module that SGLang imports the backend from.", 'give "ucm_sglang.hicache"'),
    ] = "ucm_sglang.hicache"
    class_name: Annotated[
        str, Key("text", "", "Class of the backend in that module.", 'give "UcmHiCacheStorage"')
    ] = "UcmHiCacheStorage"
    interface_v1: Annotated[
        bool,
        BeforeValidator(parse_switch),
        Key("0 or 1", "", "Move pages without copies. SGLang's own default is 0; always set 1.", "give 1"),
    ] = False
    hicache_storage_pass_prefix_keys: Annotated[
        bool,
        Key("boolean", "", "Tell the store which pages stand before these in their chain.", _SWITCH_FIX),
    ] = False
    prefetch_threshold: Annotated[
        int,
        Field(ge=0),
        Key("integer", "tokens", "Shorter matches are not fetched from storage.", "give a whole number"),
    ] = 256
    prefetch_timeout_base: Annotated[
        _Seconds,
        Key("number", "seconds", "Prefetch policy `timeout`: the fixed part.", "give seconds, 0 or more"),
    ] = 1.0
    prefetch_timeout_per_ki_token: Annotated[
        _Seconds,
        Key(
            "number", "seconds", "Prefetch policy `timeout`: more for every 1024 tokens.",
            "give seconds, 0 or more",
        ),
    ] = 0.25  # fmt: skip
    tp_lcm_size: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Key("integer", "ranks", "Multiple of all tensor-parallel sizes that share pages.",
            "give a whole number that the tensor-parallel size divides, or leave it out", "unset"),
    ] = None  # fmt: skip
    allocator: Annotated[
        Literal["default", "shm"],
        Key("text", "", 'Host pool memory; "shm" has no effect in a config file in SGLang 0.5.23.',
            'give "default" or "shm"'),
    ] = "default"  # fmt: skip
    file_storage_path: Annotated[
        str | None,
        Key("text", "", "Put there by SGLang for `--file-storage-path`; not used.", "leave it out", "unset"),
    ] = None


class StoreConfig(BaseModel):
    """The validated configuration of a store. Immutable, thread-safe. Make one with `from_extra`.

    Sizes are in bytes and times in seconds, whatever form they were given in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: Annotated[
        str | tuple[str, ...],
        BeforeValidator(parse_paths),
        Key("text or list", "", "Absolute path of the store's directory, made when missing; or a list of "
            "several, best each on a device of its own: pages are spread over them by `capacity`.",
            'give the absolute path of a directory of its own, such as "/mnt/nvme/kv", or a list of such '
            "paths"),
    ]  # fmt: skip
    capacity: Annotated[
        int | tuple[int, ...] | None,
        BeforeValidator(parse_capacity),
        Key("size or list", "bytes", "Most that the whole store may take up on disk, all models and ranks "
            "together. With several paths a list: one size for each.",
            _SIZE_FIX + ", more than 0; with several paths a list, one size for each path",
            "what the store says; a new store: half of the free space"),
    ] = None  # fmt: skip
    min_free: Annotated[
        int | str,
        BeforeValidator(parse_floor),
        Key("size or share", "bytes or %", "What stays free on the file system, whatever `capacity` says.",
            'give whole bytes, a size such as "50GiB" or a share of the file system such as "5%"'),
    ] = "5%"  # fmt: skip
    policy: Annotated[
        str,
        one_of(POLICIES),
        Key("text", "", 'Which pages leave a full store first: "lru", those not used for the longest time; '
            '"fifo", those stored first.', _NAMES_FIX.format(", ".join(POLICIES))),
    ] = "lru"  # fmt: skip
    admission: Annotated[
        str,
        one_of(ADMISSIONS),
        Key("text", "", 'Which new pages are stored: "always", all; "second_touch", those that are computed '
            "for the second time.", _NAMES_FIX.format(", ".join(ADMISSIONS))),
    ] = "always"  # fmt: skip
    ttl: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        Key("number", "seconds", "Pages stored longer ago than this are not served.",
            "give seconds, more than 0, or leave it out", "unset"),
    ] = None  # fmt: skip
    segment_size: Annotated[
        _Size,
        Field(ge=1 << 20),
        Key("size", "bytes", "Size at which a writer begins a new data file.",
            'give whole bytes or a size, at least 1 MiB, such as "1GiB"', "1GiB"),
    ] = 1 << 30  # fmt: skip
    io_threads: Annotated[
        int,
        Field(ge=1, le=64),
        Key(
            "integer", "threads", "Threads that move one batch of pages.", "give a whole number from 1 to 64"
        ),
    ] = 2
    verify: Annotated[
        bool, Key("boolean", "", "Compare the checksum of every page that is loaded.", _SWITCH_FIX)
    ] = True
    timeout: Annotated[
        float,
        Field(gt=0, lt=MAX_TIMEOUT, allow_inf_nan=False),
        Key("number", "seconds", "Time for one batch; pages whose turn comes later are misses.",
            "give seconds, more than 0 and less than 9, because SGLang stops waiting for a storage thread "
            "after 10 s"),
    ] = 5.0  # fmt: skip
    slow_seconds: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        AfterValidator(less_than_timeout),
        Key("number", "seconds", "A transfer that takes longer, at less than 10 MB/s, counts as failed.",
            "give seconds, more than 0 and less than `timeout`", "2.0, or half of `timeout` if that is less"),
    ] = None  # fmt: skip
    breaker_failures: Annotated[
        int,
        Field(ge=1),
        Key("integer", "transfers", "After so many failures in a row a disk is left alone: its pages are "
            "misses.", "give a whole number, 1 or more"),
    ] = 5  # fmt: skip
    breaker_seconds: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False),
        Key("number", "seconds", "How long it is left alone before one transfer tries it again.",
            "give seconds, more than 0"),
    ] = 10.0  # fmt: skip
    write_queue: Annotated[
        _Size,
        Field(ge=1 << 20),
        Key("size", "bytes", "Most bytes of pages that may be waiting to be written; pages beyond that are "
            "not stored.", 'give whole bytes or a size, at least 1 MiB, such as "1GiB"', "1GiB"),
    ] = 1 << 30  # fmt: skip
    io_mode: Annotated[
        str,
        one_of(IO_MODES),
        Key("text", "", '"buffered", through the page cache; "direct", around it, where pages are aligned; '
            '"auto", direct on NVMe.', _NAMES_FIX.format(", ".join(IO_MODES))),
    ] = "auto"  # fmt: skip
    page_cache: Annotated[
        str,
        one_of(PAGE_CACHE),
        Key("text", "", 'Buffered I/O: "keep" what was moved in the page cache, or "drop" it, where its '
            "memory is wanted for other things.", _NAMES_FIX.format(", ".join(PAGE_CACHE))),
    ] = "keep"  # fmt: skip
    engine: Annotated[
        str,
        one_of(ENGINES),
        Key("text", "", 'What moves the bytes: "native", in C; "python"; "auto", native where it was built.',
            _NAMES_FIX.format(", ".join(ENGINES))),
    ] = "auto"  # fmt: skip
    weights_fingerprint: Annotated[
        str,
        Field(min_length=1),
        Key("text", "", 'Tells weights apart. "auto" looks at the model\'s files; other text is used as is.',
            'give "auto" or a text that changes whenever the weights do'),
    ] = "auto"  # fmt: skip
    tag: Annotated[
        str,
        Field(max_length=200),
        Key("text", "", "Keeps tenants or experiments apart: pages are shared only under an equal tag.",
            "give a text of at most 200 characters"),
    ] = ""  # fmt: skip

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], source: str) -> Self:
        """Validate an engine's extra config, which holds our keys and the engine's own.

        Args:
            extra: the mapping as the engine gives it; it is not changed.
            source: where it comes from, for messages: a flag or a file.

        Raises:
            ConfigError: every wrong key, with its value and the fix.
        """
        if not isinstance(extra, Mapping):
            raise ConfigError(f"{source}: must be a mapping of keys to values, got {shown(extra)}")
        engines = {name: value for name, value in extra.items() if name in SGLangKeys.model_fields}
        ours = {name: value for name, value in extra.items() if name not in engines}
        problems: list[str] = []
        config = _validate(cls, ours, problems)
        _validate(SGLangKeys, engines, problems)
        if config is None or problems:
            if len(problems) == 1:
                raise ConfigError(f"{source}: {problems[0]}")
            raise ConfigError("\n  ".join([f"{source}: {len(problems)} wrong keys", *problems]))
        return config

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of the store, one or several."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def capacities(self) -> tuple[int | None, ...]:
        """Bytes on disk for each of `paths`; None: what is said there, or the default."""
        if isinstance(self.capacity, tuple):
            return self.capacity
        return (self.capacity,) * len(self.paths)

    def min_free_bytes(self, path: str | None = None) -> int | None:
        """The free-space floor in bytes; None leaves it to the store, whose default is the same 5 %.

        Args:
            path: one of `paths`, since a share is one of its file system; None: the first.

        Raises:
            ConfigError: the floor is a share and the file system cannot be examined.
        """
        if isinstance(self.min_free, int):
            return self.min_free
        if self.min_free == StoreConfig.model_fields["min_free"].default:
            return None
        existing = path or self.paths[0]
        while not os.path.exists(existing) and existing != os.path.dirname(existing):
            existing = os.path.dirname(existing)
        try:
            disk = os.statvfs(existing)
        except OSError as error:
            raise ConfigError(
                f"min_free = {self.min_free!r}: cannot examine the file system of {existing} "
                f"({error.strerror}); give it in bytes"
            ) from error
        return int(disk.f_blocks * disk.f_frsize * float(self.min_free.rstrip("%")) / 100)

    def slow_seconds_or_default(self) -> float:
        """`slow_seconds`, or the default, which depends on `timeout`."""
        return min(2.0, self.timeout / 2) if self.slow_seconds is None else self.slow_seconds

    def store_arguments(self) -> StoreArguments:
        """Keyword arguments for `open_store`, which also wants a namespace and its identity."""
        return StoreArguments(
            roots=list(self.paths),
            capacities=list(self.capacities),
            min_free=[self.min_free_bytes(path) for path in self.paths],
            policy=self.policy,
            admission=self.admission,
            ttl=self.ttl,
            segment_bytes=self.segment_size,
            io_threads=self.io_threads,
            verify=self.verify,
            timeout=self.timeout,
            slow_seconds=self.slow_seconds_or_default(),
            breaker_failures=self.breaker_failures,
            breaker_seconds=self.breaker_seconds,
            write_queue_bytes=self.write_queue,
            engine=self.engine,
            io_mode=self.io_mode,
            page_cache=self.page_cache,
        )


def _validate(model: type[M], values: Mapping[str, Any], problems: list[str]) -> M | None:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems += [_problem(model, detail) for detail in error.errors()]
        return None


def _problem(model: type[BaseModel], detail: ErrorDetails) -> str:
    """One wrong key: `key = value: what is wrong; the fix`."""
    name = str(detail["loc"][0])
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return f"{name} = {shown(detail['input'])}: unknown key; {_nearest(name)}"
    fix = _key(model.model_fields[name]).fix
    if detail["type"] == "missing":
        return f"{name}: is missing; {fix}"
    what = detail["msg"].replace("Input should be", "must be").replace("String should have", "must have")
    return f"{name} = {shown(detail['input'])}: {what}; {fix}"


def _nearest(name: str) -> str:
    known = [*StoreConfig.model_fields, *SGLangKeys.model_fields]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    return (
        f"did you mean {close[0]}?"
        if close
        else f"the store's keys are {', '.join(StoreConfig.model_fields)}"
    )


def _key(info: FieldInfo) -> Key:
    return next(item for item in info.metadata if isinstance(item, Key))


# -- files ----------------------------------------------------------------------------------------------


def config_format(path: str) -> str:
    """ "json", "toml" or "yaml", by the ending of the name, as SGLang decides it. Raises `ConfigError`."""
    ending = os.path.splitext(path)[1].lower()
    formats = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
    if ending not in formats:
        raise ConfigError(f"{path}: the name must end in {', '.join(formats)}: SGLang reads no other format")
    return formats[ending]


def load_config_file(path: str) -> dict[str, Any]:
    """The mapping in a JSON, TOML or YAML file, not validated yet (`StoreConfig.from_extra` does that).

    Raises:
        ConfigError: no such file, another format, a syntax error, or something that is no mapping.
    """
    kind = config_format(path)
    try:
        with open(path, encoding="utf-8") as file:
            values = _parse(kind, file.read())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is not valid {kind.upper()}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a mapping of keys to values, got {shown(values)}")
    return values


def _parse(kind: str, text: str) -> Any:
    if kind == "toml":
        return tomllib.loads(text)
    return yaml.safe_load(text) if kind == "yaml" else json.loads(text)


def encode_config(kind: str, values: Mapping[str, Any]) -> str:
    """The text of a config file of that format, keys in the given order. `load_config_file` reads it back."""
    if kind == "toml":
        return tomli_w.dumps(values)
    if kind == "yaml":
        return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return json.dumps(dict(values), indent=2, ensure_ascii=False) + "\n"


# -- documentation --------------------------------------------------------------------------------------


def config_table(model: type[BaseModel] = StoreConfig) -> str:
    """A Markdown table of the keys of `StoreConfig` or `SGLangKeys`, for the README."""
    lines = ["| key | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for name, info in model.model_fields.items():
        key = _key(info)
        default = "required" if info.is_required() else key.default or f"`{json.dumps(info.default)}`"
        lines.append(f"| `{name}` | {key.kind} | {key.unit} | {default} | {key.description} |")
    return "\n".join(lines) + "\n"
