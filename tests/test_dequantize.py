"""Every tensor type against the `gguf` package's own dequantization, bit for bit, and its integers against `decode`."""

from __future__ import annotations

import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from quantized_blocks import SCALES, random_rows

from tinyllm.errors import UnsupportedModelError
from tinyllm.kernels.block_format import BLOCK_FORMATS, BlockFormat
from tinyllm.kernels.codebooks import codebook
from tinyllm.kernels.dequantize import DECODERS, PLAIN_TYPES, codes, decode

FORMATS = list(BLOCK_FORMATS.values())
# Types that the gguf package knows by size at most; their formulas are written out in ORACLES below.
UNKNOWN_TO_GGUF = {"Q8_1", "Q8_K", "Q1_0", "Q2_0"}

each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal float32 arrays, the sign of zero included; NaNs match any NaN."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    assert same.all(), f"{np.count_nonzero(~same)} of {same.size} values differ"


each_scale = pytest.mark.parametrize("scales", SCALES)


def oracle_q8_1(block: bytes) -> list[float]:
    d, _, *q = struct.unpack("<ee32b", block)
    return [np.float32(d) * np.float32(x) for x in q]


def oracle_q8_k(block: bytes) -> list[float]:
    d, *q = struct.unpack("<f256b", block[: 4 + 256])
    return [np.float32(d) * np.float32(x) for x in q]


def oracle_q1_0(block: bytes) -> list[float]:
    (d,) = struct.unpack("<e", block[:2])
    return [np.float32(d if block[2 + i // 8] >> i % 8 & 1 else -d) for i in range(128)]


def oracle_q2_0(block: bytes) -> list[float]:
    (d,) = struct.unpack("<e", block[:2])
    return [np.float32(d) * np.float32((block[2 + i // 4] >> 2 * (i % 4) & 3) - 1) for i in range(64)]


ORACLES = {"Q8_1": oracle_q8_1, "Q8_K": oracle_q8_k, "Q1_0": oracle_q1_0, "Q2_0": oracle_q2_0}


def expected_values(form: BlockFormat, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if form.name not in ORACLES:
            return gguf.dequantize(data, gguf_type(form.name))
        blocks = data.reshape(-1, form.n_bytes)
        values = [value for block in blocks for value in ORACLES[form.name](block.tobytes())]
        return np.array(values, dtype=np.float32).reshape(len(data), -1)


def test_every_type_that_gguf_dequantizes_is_read():
    readable = set()
    for kind, (block_values, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        readable.add(kind.name)
        assert decode(kind.name, np.zeros(block_bytes, dtype=np.uint8), block_values).shape == (block_values,)
    assert readable == set(DECODERS) - UNKNOWN_TO_GGUF - {"F64", "I64", "I32", "I16", "I8"}


@each_format
def test_block_sizes(form: BlockFormat):
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    sizes["Q8_1"] = (32, 2 + 2 + 32)  # ggml made d and s f16 in 2024; the package still counts two f32
    sizes["Q2_0"] = (64, 2 + 16)  # newer than the package
    assert (form.n_values, form.n_bytes) == sizes[form.name]


@each_scale
@each_format
def test_decode_equals_oracle(form: BlockFormat, scales: str):
    n_rows, n_blocks = 6, 10
    data = random_rows(form, n_rows, n_blocks, scales)
    assert_same_bits(decode(form.name, data, n_blocks * form.n_values), expected_values(form, data))


def test_decode_plain_types():
    rng = np.random.default_rng(1)
    any_bytes = rng.integers(0, 256, (4, 64), dtype=np.uint8)
    for name in ("F32", "F16", "BF16"):
        n = 64 // PLAIN_TYPES[name].itemsize
        assert_same_bits(decode(name, any_bytes, n), gguf.dequantize(any_bytes, gguf_type(name)).reshape(4, n))
    for name, code in {"F64": "d", "I64": "q", "I32": "i", "I16": "h", "I8": "b"}.items():
        n = 64 // PLAIN_TYPES[name].itemsize
        with np.errstate(all="ignore"):
            expected = [np.array(struct.unpack(f"<{n}{code}", row.tobytes())).astype(np.float32) for row in any_bytes]
        assert_same_bits(decode(name, any_bytes, n), np.stack(expected))


@pytest.mark.parametrize("name", DECODERS)
def test_decode_shapes(name: str):
    """Leading axes are kept, rows may be strided or read-only, and the result is always an array of its own."""
    form = BLOCK_FORMATS.get(name)
    block_values, block_bytes = (form.n_values, form.n_bytes) if form else (1, PLAIN_TYPES[name].itemsize)
    n = 3 * block_values
    data = np.random.default_rng(2).integers(0, 256, (4, 5, 3 * block_bytes), dtype=np.uint8)
    data.setflags(write=False)
    values = decode(name, data, n)
    assert values.shape == (4, 5, n)
    assert values.flags.writeable and values.flags.c_contiguous and not np.shares_memory(values, data)
    assert_same_bits(decode(name, data[2, 3], n), values[2, 3])
    assert_same_bits(decode(name, data[::2, 1], n), values[::2, 1])
    assert decode(name, data[:0], n).shape == (0, 5, n)
    shifted = np.concatenate([[np.uint8(0)], data[0, 0]])[1:]  # an odd address
    assert_same_bits(decode(name, shifted, n), values[0, 0])


@each_scale
@each_format
def test_codes_give_decode_to_the_last_bit(form: BlockFormat, scales: str):
    n_rows, n = 6, 8 * form.n_values
    data = random_rows(form, n_rows, 8, scales, seed=3)
    parts = codes(form.name, data, n)
    assert parts.codes.dtype == np.uint8 and parts.codes.shape == (n_rows, n)
    assert parts.sub_block in (16, 32)
    assert parts.scale.shape == (n_rows, n // parts.sub_block)
    with np.errstate(all="ignore"):
        q = parts.codes.astype(np.int32) - parts.zero
        values = parts.scale.repeat(parts.sub_block, axis=-1) * q.astype(np.float32)
        if parts.offset is not None:
            values -= parts.offset.repeat(parts.sub_block, axis=-1)
        assert_same_bits(values, decode(form.name, data, n))


@each_scale
@each_format
def test_codes_factors(form: BlockFormat, scales: str):
    """scale and offset are the products of their factors, computed in double precision: nothing was rounded."""
    n = 8 * form.n_values
    parts = codes(form.name, random_rows(form, 6, 8, scales, seed=4), n)
    for product, factor, integers in (
        (parts.scale, parts.d, parts.scales),
        (parts.offset, parts.dmin, parts.mins),
    ):
        if product is None:
            assert factor is None and integers is None and not form.has_offset
            continue
        with np.errstate(all="ignore"):
            exact = factor.astype(np.float64).repeat(product.shape[-1] // factor.shape[-1], axis=-1)
            exact *= 1 if integers is None else integers
        np.testing.assert_array_equal(product, exact)


@each_format
def test_table_facts(form: BlockFormat):
    """What a row of the table promises to packers holds on random blocks, and no bit more is promised than needed."""
    n_rows, n_blocks = 64, 2048 // form.n_values
    n = n_blocks * form.n_values
    parts = codes(form.name, random_rows(form, n_rows, n_blocks, seed=5), n)

    q = np.unique(parts.codes.astype(np.int32) - parts.zero)
    assert (q[0], q[-1]) == (form.lowest, form.highest)
    assert parts.codes.max() < 2**form.code_bits
    assert parts.zero == form.zero and parts.sub_block == form.sub_block
    if form.levels:
        assert set(q) == set(form.levels)
        assert len(form.levels) <= 2**form.level_bits <= 16
        levels = form.level_of[parts.codes]
        np.testing.assert_array_equal(np.array(form.levels)[levels], parts.codes.astype(np.int32) - parts.zero)

    assert parts.d.shape == (n_rows, n // form.scale_span)
    assert (parts.offset is not None) == form.has_offset
    for integers, promised in ((parts.scales, form.scales), (parts.mins, form.mins)):
        assert (integers is None) == (promised is None)
        if integers is not None:
            assert integers.dtype == np.int8 and integers.shape == (n_rows, n // form.sub_block)
            assert (integers.min(), integers.max()) == promised

    stored = parts.d / np.float32(form.gain)
    if form.scale_type == "f16":
        np.testing.assert_array_equal(stored.astype(np.float16).astype(np.float32), stored)
    elif form.scale_type == "e8m0":
        assert (np.frexp(stored)[0] == 0.5).all()
    elif form.scale_type == "ue4m3":
        np.testing.assert_array_equal(np.ldexp(np.round(np.ldexp(stored, 10)), -10), stored)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1"])
def test_codebook(name: str):
    oracle = getattr(gguf.quants, "IQ1_S" if name == "IQ1" else name)
    oracle.init_grid()
    np.testing.assert_array_equal(codebook(name), oracle.grid.reshape(oracle.grid_shape))
    assert not codebook(name).flags.writeable


def test_errors():
    row = np.zeros(18, dtype=np.uint8)
    with pytest.raises(UnsupportedModelError, match="Q4_0_4_4"):
        decode("Q4_0_4_4", row, 32)
    with pytest.raises(UnsupportedModelError, match="F16"):
        codes("F16", row, 9)
    with pytest.raises(ValueError, match="36 bytes, not 18"):
        decode("Q4_0", row, 64)
    with pytest.raises(ValueError, match="blocks of 32"):
        decode("Q4_0", row, 40)
    with pytest.raises(ValueError, match="20 bytes, not 18"):
        decode("F16", row, 10)


def test_reading_needs_numpy_only():
    check = "import sys, tinyllm.kernels.dequantize; print({'gguf', 'numba', 'llvmlite'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
