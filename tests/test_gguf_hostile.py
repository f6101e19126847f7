"""No file makes the GGUF reader crash, hang or take much: the answer is one line that names file and field."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import gguf_builders as build
import numpy as np
import pytest
from gguf_builders import refusal, write

from tinyllm.errors import TinyLLMError, UnsupportedModelError
from tinyllm.gguf.header import MAX_KEYS, MAX_STRINGS, MAX_TENSORS
from tinyllm.gguf_file import GGMLType, open_gguf

EXPONENT_60 = 1 << 60


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build.write_sample(tmp_path / "model.gguf")


def key(kind: int, payload: bytes = b"") -> bytes:
    return build.forge([build.entry("k", kind, payload)])


def keys(*entries: bytes) -> bytes:
    return build.forge(entries)


def alignment(kind: int, payload: bytes) -> bytes:
    return keys(build.entry("general.alignment", kind, payload))


def one_tensor(dims=(8,), type_id=0, offset=0, data=bytes(64), name: str | bytes = "t", entries=()) -> bytes:
    return build.forge(entries, [build.tensor(name, dims, type_id, offset)], data)


def nested(depth: int) -> bytes:
    return key(build.ARRAY, build.array(build.ARRAY, 1) * depth + build.array(build.U8, 0))


BROKEN = {
    "empty": (b"", "is empty"),
    "three-bytes": (b"GGU", "header: is not a GGUF file"),
    "magic-only": (b"GGUF", "version: 4 bytes from byte 4 on, but the file ends at byte 4"),
    "magic-and-version": (b"GGUF" + build.u32(3), "header: 16 bytes"),
    "other-magic": (b"ABCD" + bytes(60), "header: is not a GGUF file: it begins with b'ABCD'"),
    "zeros": (bytes(64), "header: begins with zeros"),
    "safetensors": (struct.pack("<Q", 40) + b'{"a":{}}', "header: is a safetensors file"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\n", "header: is a Git LFS pointer"),
    "web-page": (b"<!DOCTYPE html>", "header: looks like a web page"),
    "old-ggml": (b"tjgg" + bytes(60), "header: is a GGML file from before GGUF"),
    "version-0": (build.forge(version=0), "version: GGUF version 0"),
    "version-1": (build.forge(version=1), "version: GGUF version 1; only versions 2 and 3"),
    "version-4": (build.forge(version=4), "version: GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: is a big-endian GGUF file"),
    "big-endian-magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "header: is a big-endian GGUF file"),
    "n-keys-2^60": (build.forge(n_keys=EXPONENT_60), "number of keys: 1152921504606846976 of at least"),
    "n-keys-one-too-many": (build.forge([build.entry("k", 0, b"\1")], n_keys=2, alignment=1), "number of keys: 2 of"),
    "n-tensors-2^62": (build.forge(n_tensors=1 << 62), "number of tensors: 4611686018427387904 of at least"),
    "n-tensors-2^64-1": (build.forge(n_tensors=(1 << 64) - 1), "number of tensors: "),
    "key-length-2^63": (build.forge([struct.pack("<Q", 1 << 63) + bytes(16)]), "key 0: 9223372036854775808 bytes"),
    "string-length-2^60": (key(build.STRING, struct.pack("<Q", EXPONENT_60)), "key 'k': 1152921504606846976 bytes"),
    "value-missing": (build.forge([build.text("k" * 9)], alignment=1), "key 'kkkkkkkkk': 4 bytes from byte 41 on, but"),
    "value-type-13": (key(13, bytes(8)), "key 'k': unknown value type 13"),
    "value-type-2^32-1": (key((1 << 32) - 1, bytes(8)), "key 'k': unknown value type 4294967295"),
    "bool-2": (key(build.BOOL, b"\2"), "key 'k': a boolean of value 2"),
    "bools-2": (key(build.ARRAY, build.array(build.BOOL, 3, b"\0\1\2")), "key 'k': an array of booleans"),
    "array-u8-2^61": (key(build.ARRAY, build.array(build.U8, 1 << 61)), "key 'k': 2305843009213693952 bytes"),
    "array-u64-2^61": (key(build.ARRAY, build.array(build.U64, 1 << 61)), "key 'k': 18446744073709551616 bytes"),
    "array-strings-2^61": (key(build.ARRAY, build.array(build.STRING, 1 << 61)), "key 'k': number of strings: 23"),
    "array-type-99": (key(build.ARRAY, build.array(99, EXPONENT_60)), "key 'k': an array of unknown value type 99"),
    "array-string-length-2^63": (
        key(build.ARRAY, build.array(build.STRING, 2, struct.pack("<QQ", 1 << 63, 0))),
        "key 'k': a string reaches to byte 92",
    ),
    "array-string-length-2^64-8": (
        key(build.ARRAY, build.array(build.STRING, 2, struct.pack("<QQ", (1 << 64) - 8, 0))),
        "key 'k': a string reaches to byte 18",
    ),
    "array-last-string-too-long": (
        key(build.ARRAY, build.array(build.STRING, 2, struct.pack("<QQ", 0, 99))),
        "key 'k': a string reaches to byte",
    ),
    "array-nested": (nested(1), "key 'k': an array of arrays"),
    "array-nested-10000-deep": (nested(10_000), "key 'k': an array of arrays"),
    "key-twice": (keys(*[build.entry("k", build.U8, b"\1")] * 2), "key 'k': appears twice"),
    "key-with-escapes": (keys(build.entry("\x1b[2J\n\u202e", 99, b"")), "key '\\x1b[2J\\n\\u202e': unknown value type"),
    "key-not-utf8": (keys(build.entry(b"\xff", 99, b"\0")), "key '\\udcff': unknown value type"),
    "key-very-long": (keys(build.entry("k" * 5000, 99, b"")), f"key '{'k' * 80}'...: unknown value type"),
    "alignment-u64": (alignment(build.U64, struct.pack("<Q", 32)), "key 'general.alignment': is of value type 10"),
    "alignment-string": (alignment(build.STRING, build.text("32")), "key 'general.alignment': is of value type 8"),
    "alignment-0": (alignment(build.U32, build.u32(0)), "key 'general.alignment': 0 is not a power of two"),
    "alignment-1": (alignment(build.U32, build.u32(1)), "key 'general.alignment': 1 is not a power of two"),
    "alignment-3": (alignment(build.U32, build.u32(3)), "key 'general.alignment': 3 is not a power of two"),
    "alignment-4": (
        alignment(build.U32, build.u32(4)),
        "key 'general.alignment': 4 is not a power of two of at least 8",
    ),
    "alignment-48": (alignment(build.U32, build.u32(48)), "key 'general.alignment': 48 is not a power of two"),
    "alignment-2^31": (
        one_tensor(entries=[build.entry("general.alignment", build.U32, build.u32(1 << 31))]),
        "tensor 't': its data lie at bytes 2147483648",
    ),
    "alignment-of-offset": (
        one_tensor(offset=32, data=bytes(256), entries=[build.entry("general.alignment", build.U32, build.u32(64))]),
        "tensor 't': its offset 32 is not a multiple of the alignment 64",
    ),
    "offset-unaligned": (one_tensor(offset=8), "tensor 't': its offset 8 is not a multiple of the alignment 32"),
    "offset-behind-the-end": (one_tensor(offset=1 << 40), "tensor 't': its data lie at bytes"),
    "offset-2^64-32": (one_tensor(offset=(1 << 64) - 32), "tensor 't': its data lie at bytes 18446744073709"),
    "data-cut-off": (
        one_tensor(data=bytes(31)),
        "tensor 't': its data lie at bytes 64 to 96, but the file ends at byte 95",
    ),
    "no-data": (one_tensor(data=b""), "tensor 't': its data lie at bytes"),
    "dims-5": (one_tensor(dims=(1,) * 5), "tensor 't': 5 dimensions"),
    "dims-2^32-1": (
        build.forge(tensors=[build.text("t") + build.u32((1 << 32) - 1) + bytes(64)]),
        "tensor 't': 4294967295 dimensions",
    ),
    "dim-zero": (one_tensor(dims=(8, 0)), "tensor 't': a dimension is zero: [8, 0]"),
    "dim-zero-inner": (one_tensor(dims=(0, 8)), "tensor 't': a dimension is zero: [0, 8]"),
    "dims-overflow": (one_tensor(dims=(1 << 32, 1 << 32)), "tensor 't': its data lie at bytes"),
    "dims-overflow-to-zero": (one_tensor(dims=(1 << 63, 2, 1 << 62, 4)), "tensor 't': its data lie at bytes"),
    "row-not-whole-blocks": (
        one_tensor(dims=(33,), type_id=2),
        "tensor 't': rows of 33 are not whole Q4_0 blocks of 32",
    ),
    "tensor-twice": (build.forge(tensors=[build.tensor("t")] * 2, data=bytes(64)), "tensor 't': appears twice"),
    "tensors-overlap": (
        build.forge(tensors=[build.tensor("a", (16,)), build.tensor("b", offset=32)], data=bytes(96)),
        "tensor 'b': its data overlap those of 'a'",
    ),
    "tensors-in-one-place": (
        build.forge(tensors=[build.tensor("a"), build.tensor("b")], data=bytes(96)),
        "tensor 'b': its data overlap those of 'a'",
    ),
    "tensor-name-length-2^60": (
        build.forge(tensors=[struct.pack("<Q", EXPONENT_60) + bytes(64)]),
        "tensor 0: 1152921504606846976 bytes",
    ),
    "tensor-entry-cut-off": (build.forge(tensors=[build.text("t") + build.u32(4) + bytes(16)]), "tensor 't': "),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_file_is_refused(tmp_path: Path, data: bytes, message: str):
    assert message in refusal(write(tmp_path / "m.gguf", data))


RETIRED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@pytest.mark.parametrize("type_id", [*RETIRED, 42, 43, 142, (1 << 32) - 1])
def test_unknown_tensor_type_is_named(tmp_path: Path, type_id: int):
    path = write(tmp_path / "m.gguf", one_tensor(name="blk.0.attn_q.weight", type_id=type_id))
    message = refusal(path, UnsupportedModelError)
    assert message.startswith("tensor 'blk.0.attn_q.weight': its type ")
    assert str(type_id) in message
    assert type_id not in RETIRED or f"({RETIRED[type_id]}, retired" in message
    assert all(kind.name in message for kind in GGMLType)


def test_every_truncation_is_refused(model: Path, tmp_path: Path):
    data = model.read_bytes()
    with open_gguf(model) as file:
        last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
        first = min(file.tensors.values(), key=lambda tensor: tensor.offset)
        used = last.offset + last.n_bytes
    for size in [*range(first.offset), *range(first.offset, used, 37), used - 1]:
        refusal(write(tmp_path / "cut.gguf", data[:size]))
    open_gguf(write(tmp_path / "cut.gguf", data[:used])).close()


@pytest.mark.model
@pytest.mark.parametrize("size", [4, 23, 24, 1_000, 1_000_000, 50_000_000, -1])
def test_truncated_real_model_is_refused(smollm2_path: Path, tmp_path: Path, size: int):
    data = np.memmap(smollm2_path, np.uint8, "r")
    assert "the file ends at byte" in refusal(write(tmp_path / "cut.gguf", data[:size]))


def test_fuzzed_headers_are_read_or_refused(model: Path, tmp_path: Path):
    """Whatever the header says, the outcome is a file whose every value and tensor can be read, or one line."""
    data = model.read_bytes()
    with open_gguf(model) as file:
        header_size = min(tensor.offset for tensor in file.tensors.values())
    rng = random.Random(20)
    path = tmp_path / "fuzzed.gguf"
    outcomes = {"read": 0, "refused": 0}
    for _ in range(1500):
        fuzzed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            fuzzed[rng.randrange(4, header_size)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(fuzzed)
        try:
            with open_gguf(path) as file:
                for name in file.metadata:
                    file.metadata[name]
                for tensor in file.tensors.values():
                    assert len(tensor.data) == tensor.n_bytes
                    assert tensor.rows([0]).shape == (1, tensor.row_bytes)
            outcomes["read"] += 1
        except TinyLLMError as error:
            assert str(error).isprintable()
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (build.forge([build.entry(f"{i:05}", build.U8, b"\1") for i in range(MAX_KEYS + 1)]), "number of keys: "),
        (build.forge(tensors=[build.tensor("t")] * (MAX_TENSORS + 1)), "number of tensors: "),
        (
            key(build.ARRAY, build.array(build.STRING, MAX_STRINGS + 1) + bytes(8 * MAX_STRINGS + 8)),
            "key 'k': number of",
        ),
    ],
    ids=["keys", "tensors", "strings"],
)
def test_more_than_any_model_has_is_refused(tmp_path: Path, data: bytes, message: str):
    refused = refusal(write(tmp_path / "m.gguf", data))
    assert refused.startswith(message)
    assert refused.endswith(" are not read")


# Files that claim as much as they can: sparse ones make any claim true for free


def sparse(header: bytes, size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(header)
        os.truncate(path, size)

    return make


def dense(data: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data()) and None


def strings_claim(count: int, key: str = "k") -> bytes:
    return build.entry(key, build.ARRAY, build.array(build.STRING, count))


COSTLY = {
    "empty-keys": sparse(build.forge(n_keys=1 << 33), 1 << 40),
    "long-keys": dense(
        lambda: build.forge([build.entry(f"{i:05}😀" + "k" * 60_000, build.U8, b"\1") for i in range(300)])
    ),
    "long-value": sparse(build.forge([build.entry("k", build.STRING, struct.pack("<Q", 1 << 37))]), 1 << 40),
    "many-strings": sparse(build.forge([strings_claim(1 << 33)]), 1 << 40),
    "strings-to-the-limit": sparse(build.forge([strings_claim(MAX_STRINGS)]), 1 << 40),
    "strings-in-long-steps": sparse(build.forge([strings_claim(MAX_STRINGS) + struct.pack("<Q", 1 << 26)]), 1 << 40),
    "strings-in-two-keys": sparse(
        build.forge([strings_claim(1 << 20, "a") + bytes(8 << 20), strings_claim(MAX_STRINGS, "b")]), 1 << 40
    ),
    "many-bools": sparse(build.forge([build.entry("k", build.ARRAY, build.array(build.BOOL, 120 << 20))]), 1 << 40),
    "many-numbers": sparse(build.forge([build.entry("k", build.ARRAY, build.array(build.F64, 1 << 36))]), 1 << 40),
    "many-tensors": sparse(build.forge(n_tensors=1 << 33), 1 << 40),
    "everything-to-the-limit": dense(
        lambda: build.forge(
            [
                *[build.entry(f"{i:05}", build.U8, b"\1") for i in range(MAX_KEYS - 1)],
                strings_claim(MAX_STRINGS) + bytes(8 * MAX_STRINGS),
            ],
            [build.tensor(f"blk.{i}.attn_norm.weight", offset=32 * i) for i in range(MAX_TENSORS)],
            data=bytes(32 * MAX_TENSORS),
        )
    ),
    "nested-arrays": dense(lambda: nested(4 << 20)),
}

MEASURE = r"""
    import re, sys, time
    from tinyllm.errors import TinyLLMError
    from tinyllm.gguf_file import open_gguf
    start = time.perf_counter()
    try:
        with open_gguf(sys.argv[1]) as file:
            for key in file.metadata:
                file.metadata[key]
        print("read")
    except TinyLLMError as error:
        print(error)
    seconds = time.perf_counter() - start
    peak_kb = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]
    print(seconds, int(peak_kb) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("make", COSTLY.values(), ids=COSTLY.keys())
def test_no_claim_costs_much(tmp_path: Path, make: Callable[[Path], None]):
    path = tmp_path / "m.gguf"
    make(path)
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(path)]
    outcome, figures = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    seconds, megabytes = map(float, figures.split())
    assert outcome == "read" or outcome.startswith(f"{path}: ")
    assert seconds < 2
    assert megabytes < 300
