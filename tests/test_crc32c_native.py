"""The CRC-32C of posix_store/_crc32c.h, by each of its ways, against the crc32c package and the definition.

Defends issue 4: the native data path must compute the very checksums that FORMAT.md names, on whatever CPU,
and must never read outside the buffer it is given.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

HEADER = Path(__file__).parents[1] / "posix_store" / "_crc32c.h"
CC = shutil.which("cc")
KINDS = ["avx512", "pclmul", "sse42", "arm64", "portable"]
POLYNOMIAL = 0x1_1EDC_6F41
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler (cc) on the path")

WRAPPER = """
#include "_crc32c.h"
uint32_t update(uint32_t crc, const void *data, size_t length) { return crc32c_update(crc, data, length); }
uint32_t combine(uint32_t a, uint32_t b, uint64_t length) { return crc32c_combine(a, b, length); }
const char *kind(void) { return crc32c_kind(); }
int choose(const char *kind) { return crc32c_select(kind); }
"""

# Every length in a buffer of just that size, so that the sanitizer sees the first byte read outside it.
DRIVER = """
#include "_crc32c.h"
#include <stdio.h>
#include <stdlib.h>

static uint32_t by_definition(uint32_t crc, const uint8_t *data, size_t length)
{
    crc = ~crc;
    for (size_t i = 0; i < length; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    }
    return ~crc;
}

static int wrong(size_t length)
{
    uint8_t *data = malloc(length ? length : 1);
    if (length == 0) {
        free(data);
        return crc32c_update(7, NULL, 0) != 7;
    }
    for (size_t i = 0; i < length; i++)
        data[i] = (uint8_t)((i + length) * 2654435761u >> 11);
    size_t split = length / 3;
    uint32_t expected = by_definition(0, data, length), head = crc32c_update(0, data, split);
    uint32_t tail = crc32c_update(0, data + split, length - split);
    int bad = crc32c_update(0, data, length) != expected ||
              crc32c_update(head, data + split, length - split) != expected ||
              crc32c_combine(head, tail, length - split) != expected;
    free(data);
    return bad;
}

int main(int count, char **kinds)
{
    for (int k = 1; k < count; k++) {
        if (!crc32c_select(kinds[k]))
            return 2;
        for (size_t length = 0; length < 40000; length += length < 1200 ? 1 : 1499)
            if (wrong(length)) {
                printf("%s: length %zu\\n", crc32c_kind(), length);
                return 1;
            }
    }
    puts("all right");
    return 0;
}
"""


class Native:
    """The wrapper library, by ctypes; addresses are plain integers."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.update: Callable[[int, int | bytes, int], int] = library.update
        self.combine: Callable[[int, int, int], int] = library.combine
        self.choose: Callable[[bytes], int] = library.choose
        library.update.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
        library.update.restype = ctypes.c_uint32
        library.combine.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
        library.combine.restype = ctypes.c_uint32
        library.kind.restype = ctypes.c_char_p
        self._kind = library.kind

    def kind(self) -> str:
        name: bytes = self._kind()
        return name.decode()

    def of(self, data: bytes, crc: int = 0) -> int:
        return self.update(crc, data, len(data))


def compile_c(directory: Path, source: str, *flags: str) -> Path:
    """Compiles `source` with the header on its include path; a warning is an error."""
    assert CC is not None
    code, output = directory / "source.c", directory / "output.so"
    code.write_text(source)
    command = [CC, "-Wall", "-Wextra", "-Werror", *flags, f"-I{HEADER.parent}", "-o", str(output), str(code)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """As it loads: nothing in this module selects another kind in this copy."""
    return Native(compile_c(tmp_path_factory.mktemp("plain"), WRAPPER, "-O3", "-shared", "-fPIC"))


@pytest.fixture(scope="module")
def selectable(tmp_path_factory: pytest.TempPathFactory) -> Native:
    return Native(compile_c(tmp_path_factory.mktemp("selectable"), WRAPPER, "-O2", "-shared", "-fPIC"))


@pytest.fixture(params=KINDS)
def native(request: pytest.FixtureRequest, selectable: Native) -> Native:
    if not selectable.choose(request.param.encode()):
        pytest.skip(f"this CPU cannot do {request.param}")
    assert selectable.kind() == request.param
    return selectable


def power_of_x(exponent: int) -> int:
    """x^exponent modulo the polynomial, bit i for x^i, by squaring."""
    result, square = 1, 2
    while exponent:
        if exponent & 1:
            result = times(result, square)
        square = times(square, square)
        exponent >>= 1
    return result


def times(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        result = result << 1 ^ (a if b >> bit & 1 else 0)
        if result >> 32:
            result ^= POLYNOMIAL
    return result


def mirrored(value: int) -> int:
    return int(f"{value:032b}"[::-1], 2)


def test_constants_are_the_powers_they_are_named_after() -> None:
    found = re.findall(r"^#define CRC32C_X(\d+) 0x([0-9a-f]{8})u$", HEADER.read_text(), re.MULTILINE)
    assert len(found) == HEADER.read_text().count("#define CRC32C_X") >= 12
    for exponent, value in found:
        assert int(value, 16) == mirrored(power_of_x(int(exponent))), f"x^{exponent}"


def test_best_kind_is_taken_and_an_unknown_one_refused(plain: Native, selectable: Native) -> None:
    assert plain.kind() == next(kind for kind in KINDS if selectable.choose(kind.encode()))
    before = selectable.kind()
    assert not selectable.choose(b"no such kind")
    assert selectable.kind() == before
    assert plain.of(b"123456789") == 0xE3069283


def test_known_values(native: Native) -> None:
    """RFC 3720, B.4, and the check value of the CRC catalogues."""
    read_command = bytes.fromhex(
        "01c00000 00000000 00000000 00000000 14000000 00000400"
        "00000014 00000018 28000000 00000000 02000000 00000000"
    )
    assert native.of(b"123456789") == 0xE3069283
    assert native.of(bytes(32)) == 0x8A9136AA
    assert native.of(b"\xff" * 32) == 0x62A8AB43
    assert native.of(bytes(range(32))) == 0x46DD794E
    assert native.of(bytes(range(31, -1, -1))) == 0x113FDB5C
    assert native.of(read_command) == 0xD9963A56
    assert native.of(b"") == 0
    assert native.update(0x12345678, 0, 0) == 0x12345678  # a null pointer of no bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    start=st.integers(0, 130),
    lengths=st.lists(st.integers(0, 30000), max_size=4),
    small=st.lists(st.integers(0, 600), max_size=4),
    crc=st.integers(0, 2**32 - 1),
)
def check_against_the_package(
    native: Native, seed: int, start: int, lengths: list[int], small: list[int], crc: int
) -> None:
    parts = lengths + small
    random.Random(seed).shuffle(parts)
    data = random.Random(seed).randbytes(start + sum(parts))
    address, at, chained, combined = _address_of(data), start, crc, crc
    for part in parts:
        chained = native.update(chained, address + at, part)
        combined = native.combine(combined, native.update(0, address + at, part), part)
        at += part
    expected = crc32c(memoryview(data)[start:], crc)
    assert native.update(crc, address + start, sum(parts)) == expected
    assert chained == expected
    assert combined == expected


def _address_of(data: bytes) -> int:
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return address


def test_any_data_length_alignment_and_split(native: Native) -> None:
    check_against_the_package(native)


def test_every_length_up_to_where_each_loop_has_run_twice(native: Native) -> None:
    data = random.Random(4).randbytes(40000)
    edges = [k * step + off for step in (512, 3072, 12288) for k in (1, 2, 3) for off in (-1, 0, 1, 63)]
    for length in [*range(1200), *edges]:
        offset = length % 67
        assert native.update(9, _address_of(data) + offset, length) == crc32c(
            memoryview(data)[offset : offset + length], 9
        ), length


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    a=st.integers(0, 2**32 - 1),
    b=st.integers(0, 2**32 - 1),
    length=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([2**31 - 1, 2**31, 2**61, 2**64 - 1])),
)
def check_combine(native: Native, a: int, b: int, length: int) -> None:
    assert native.combine(a, b, length) == mirrored(times(mirrored(a), power_of_x(8 * length))) ^ b


def test_combine_for_lengths_no_buffer_has(plain: Native) -> None:
    check_combine(plain)


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[int, int]]:
    """Address and size of some pages, with a page that cannot be read on either side."""
    size = 6 * PAGE
    area = mmap.mmap(-1, size + 2 * PAGE)
    view = ctypes.c_char.from_buffer(area)
    start = ctypes.addressof(view)
    area[:] = random.Random(5).randbytes(len(area))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in (start, start + PAGE + size):
        assert protect(page, PAGE, 0) == 0  # PROT_NONE
    yield start + PAGE, size
    for page in (start, start + PAGE + size):
        assert protect(page, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    del view
    area.close()


def test_nothing_outside_the_buffer_is_read(native: Native, guarded: tuple[int, int]) -> None:
    """A read past either end would end the process with a segmentation fault."""
    start, size = guarded
    content = ctypes.string_at(start, size)
    for length in [*range(1100), 3071, 3072, 3073, 4096, 12287, 12289, size - 1, size]:
        assert native.update(0, start + size - length, length) == crc32c(content[size - length :]), length
        assert native.update(0, start, length) == crc32c(content[:length]), length


def test_sanitizers_find_nothing(tmp_path: Path, selectable: Native) -> None:
    """Buffers of the exact size on the heap, under the address and undefined-behaviour sanitizers."""
    sanitize = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe"
    probe.mkdir()
    try:
        compile_c(probe, "int main(void) { return 0; }", *sanitize)
    except AssertionError as error:
        pytest.skip(f"this compiler has no sanitizers: {str(error)[:200]}")
    driver = compile_c(tmp_path, DRIVER, *sanitize)
    kinds = [kind for kind in KINDS if selectable.choose(kind.encode())]
    command = [str(driver), *kinds]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={"LC_ALL": "C"})
    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stdout + done.stderr
