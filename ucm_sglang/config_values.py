"""Values of the configuration as people write them, to what the code uses.

Validators of single keys. They raise `PydanticCustomError`, whose text goes on behind "key = value: ". Some
look at a key that stands before theirs in the model, and do without it when that one is wrong.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from pydantic import AfterValidator, ByteSize, TypeAdapter, ValidationInfo
from pydantic_core import PydanticCustomError

MAX_BYTES = 2**63 - 1

_SIZE = re.compile(r"(\d{1,19})(\.\d{1,9})?\s*([kmgtpe]i?b|b)?", re.ASCII | re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,2}(?:\.\d{1,9})?)\s*%", re.ASCII)
_BYTES: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)

T = TypeVar("T")


def parse_size(value: Any) -> Any:
    """Bytes, from a whole number or from text such as "500GiB", "1.5 TB" or "4096".

    pydantic's `ByteSize` knows the units but is not strict: it takes true for 1, "10kbit" for 1250 and
    "5 %" for 5. So the form is checked here, and `ByteSize` does the rest. "G" and the like are refused
    because half the tools mean 10^9 by it and half 2^30.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    whole, fraction, unit = match.groups() if match else ("", None, None)
    if not match or (fraction and (unit or "b") in "bB"):
        raise PydanticCustomError("size", "is not a size (units are B, kB, KiB, MB, MiB and so on)")
    return int(_BYTES.validate_python(match.group())) if unit else int(whole)


def parse_capacity(value: Any, info: ValidationInfo) -> int | tuple[int, ...] | None:
    """Bytes for one `path`, or as many sizes as there are paths."""
    if value is None:
        return None
    sizes = _each(_parse_positive, value) if isinstance(value, list | tuple) else [_parse_positive(value)]
    path = info.data.get("path", value)
    paths = len(path) if isinstance(path, list | tuple) else 1
    if len(sizes) != paths or not sizes:
        counts = {"sizes": counted(len(sizes), "size"), "paths": counted(paths, "path")}
        raise PydanticCustomError("count", "is {sizes} for {paths}", counts)
    return tuple(sizes) if paths > 1 else sizes[0]


def _parse_positive(value: Any) -> int:
    size = parse_size(value)
    if not 0 < size <= MAX_BYTES:
        raise PydanticCustomError("size", "must be more than 0 and less than 8 EiB")
    return int(size)


def parse_floor(value: Any) -> int | str:
    """Bytes, or a share such as "5%"."""
    if isinstance(value, str) and "%" in value:
        if not (match := _SHARE.fullmatch(value.strip())):
            raise PydanticCustomError("share", "is not a share from 0% to less than 100%")
        return f"{match.group(1)}%"
    size = parse_size(value)
    if not 0 <= size <= MAX_BYTES:
        raise PydanticCustomError("size", "must be 0 or more")
    if 0 < size < 1 << 20:
        raise PydanticCustomError("size", "is less than 1 MiB (a share of the file system needs a % sign)")
    return int(size)


def parse_paths(value: Any) -> str | tuple[str, ...]:
    """One normal absolute path, or several."""
    if not isinstance(value, list | tuple):
        return _parse_path(value)
    paths = _each(_parse_path, value)
    if not paths:
        raise PydanticCustomError("path", "names no directory")
    return tuple(paths) if len(paths) > 1 else paths[0]


def _parse_path(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise PydanticCustomError("path", "must be the path of a directory")
    if not os.path.isabs(value):
        raise PydanticCustomError(
            "path",
            "must be absolute, or it depends on where a server is started; here it would be {full}",
            {"full": os.path.abspath(os.path.expanduser(value))},
        )
    return os.path.normpath(value)


def parse_switch(value: Any) -> bool:
    """0 and 1, or a boolean."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise PydanticCustomError("switch", "must be 1, 0, true or false (SGLang takes any text for true)")


def one_of(names: Collection[str]) -> AfterValidator:
    """Validates a text that must be one of these names."""

    def check(value: str) -> str:
        if value not in names:
            raise PydanticCustomError("name", "is unknown")
        return value

    return AfterValidator(check)


def less_than_timeout(value: float | None, info: ValidationInfo) -> float | None:
    """What lasts as long as `timeout` never happens."""
    timeout = info.data.get("timeout")
    if value is not None and timeout is not None and value >= timeout:
        raise PydanticCustomError("slow", "must be less than timeout = {timeout}", {"timeout": timeout})
    return value


def _each(parse: Callable[[Any], T], values: Sequence[Any]) -> list[T]:
    """Parse the elements of a list; an error says which."""
    parsed = []
    for value in values:
        try:
            parsed.append(parse(value))
        except PydanticCustomError as error:
            context = {"value": shown(value), "what": error.message()}
            raise PydanticCustomError("element", "{value} {what}", context) from error
    return parsed


def shown(value: Any) -> str:
    """A value for a message, not too long."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = 80
    return shortened.repr(value)


def counted(count: int, what: str) -> str:
    """ "1 size", "2 sizes"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
