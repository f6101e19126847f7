"""Every GGUF type through packing, GEMV and GEMM, against `decode` in float64, in each lowering of the dot product."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from quantized_blocks import random_rows, set_scales

from tinyllm.kernels import abi
from tinyllm.kernels.block_format import BLOCK_FORMATS
from tinyllm.kernels.dequantize import PLAIN_TYPES, codes, decode
from tinyllm.kernels.formats import BLOCK, PANEL_ROWS, TILE_OF, tile_of
from tinyllm.kernels.jit import kernel_addresses
from tinyllm.kernels.matmul import CHUNK_BLOCKS, CHUNK_TOKENS, unpacked_bytes
from tinyllm.kernels.pack import kernel_of, table_of
from tinyllm.kernels.target import current_target

QUANTIZED = [name for name in TILE_OF if name in BLOCK_FORMATS]
FLOATS = [name for name in TILE_OF if name in PLAIN_TYPES]
GRAIN = 2  # panels that a thread takes at a time
ALLOWED_ERROR = 5e-6  # of Σ |w||x|, for 80 additions that are all rounded the same way; one wrong code would be 1e-4
SMALLEST = 1e-39  # what subnormal scales lose

# The lowerings that this machine can run besides its own, as values of NUMBA_CPU_NAME.
OTHER_LOWERINGS = {"avx512_vnni": ["haswell", "x86-64"], "avx512_madd": ["haswell", "x86-64"]}
OTHER_LOWERINGS |= {"avx_vnni": ["haswell", "x86-64"], "avx2_madd": ["x86-64"]}
# Types that between them use nearly every unpack step: signed bytes, minima, tables of each width, scales of each type.
REPRESENTATIVE = ["Q8_0", "Q5_K", "IQ4_NL", "IQ2_S", "MXFP4", "NVFP4"]


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels(request: pytest.FixtureRequest) -> None:
    """Ask for the kernels of all selected tests at once, so that they are compiled side by side."""
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    types = sorted({case["name"] for case in cases if case.get("name") in TILE_OF})
    products = {f"matmul.{kind}:{tile_of(name).name}" for name in types for kind in ("gemv", "gemm")}
    kernel_addresses(["elementwise.quantize", *map(kernel_of, types), *sorted(products)])


def run(kernel: str, arguments: abi.Arguments, **values: int | float) -> None:
    """Call a kernel as a team of one thread; numpy arrays are passed by their addresses."""
    values = {name: v.ctypes.data if isinstance(v, np.ndarray) else v for name, v in values.items()}
    words = np.array(arguments.pack(**values), dtype=np.int64)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel_addresses([kernel])[kernel])
    function(words.ctypes.data, 0, 1)


def pack(name: str, data: np.ndarray, n: int) -> np.ndarray:
    """Panels of a matrix uint8 [rows, bytes_per_row] with n inputs."""
    tile, n_panels = tile_of(name), -(-len(data) // PANEL_ROWS)
    weights = np.zeros(n_panels * tile.panel_bytes(n), dtype=np.uint8)
    table = table_of(name)
    run(
        kernel_of(name),
        abi.PACK,
        n_rows=np.array([1]),
        rows=len(data),
        n_inputs=n,
        row_bytes=data.shape[1],
        source=data,
        panels=n_panels,
        panel_bytes=tile.panel_bytes(n),
        gap=0,
        tiles=tile.panel_bytes(n) // tile.bytes,
        weights=weights,
        table=0 if table is None else table,
    )
    return weights


def quantize(x: np.ndarray) -> np.ndarray:
    """Records of float32 [rows, n]: uint8 [rows, n / 32, 64]."""
    records = np.zeros((len(x), x.shape[1] // BLOCK, abi.RECORD), dtype=np.uint8)
    run(
        "elementwise.quantize",
        abi.QUANTIZE,
        n_rows=np.array([len(x)]),
        n=x.shape[1],
        x=x,
        x_stride=x.strides[0],
        records=records,
        records_stride=records.strides[0],
    )
    return records


def dequantized(records: np.ndarray) -> np.ndarray:
    """The inputs that records stand for, float64 [rows, n]."""
    scales = records[..., abi.RECORD_SCALE :][..., :4].view(np.float32)
    return (records[..., :BLOCK].view(np.int8) * scales.astype(np.float64)).reshape(len(records), -1)


def multiply(
    kind: str, name: str, weights: np.ndarray, n_outputs: int, n: int, x: np.ndarray, **options: object
) -> np.ndarray:
    """y = W x by the kernel matmul.`kind`, float32 [rows, panels · 16], for records or float32 rows x."""
    tile = tile_of(name)
    n_panels = -(-n_outputs // PANEL_ROWS)
    y = np.array(options.pop("y", np.full((len(x), n_panels * PANEL_ROWS), np.nan)), dtype=np.float32)
    scratch_bytes = 0 if tile.is_float else CHUNK_BLOCKS * unpacked_bytes(tile.name) + GRAIN * 64 * CHUNK_TOKENS
    values = {
        "scale": 1.0,
        "n_rows": np.array([len(x)]),
        "grain": GRAIN,
        "stream": n_panels // abi.STREAMS,
        "turn": 1,
        "panels": n_panels,
        "tiles": tile.panel_bytes(n) // tile.bytes,
        "panel_bytes": tile.panel_bytes(n),
        "weights": weights,
        "x": x,
        "x_stride": x.strides[0],
        "y": y,
        "y_stride": y.strides[0],
        "scratch": np.zeros(scratch_bytes, dtype=np.uint8),
    }
    run(f"matmul.{kind}:{tile.name}", abi.LINEAR, **dict.fromkeys(abi.LINEAR.names, 0) | values | options)
    return y


def activations(n: int, size: float = 1.0) -> np.ndarray:
    """float32 [13, n]: random rows and the ones that make the largest sums of codes."""
    x = np.random.default_rng(7).standard_normal((13, n)).astype(np.float32)
    x[3], x[4], x[5] = 1, -1, 0
    x[6] = np.where(np.arange(n) % 2, 1, -1)
    return x * np.float32(size)


# Sizes of the inputs with which products and sums stay within float32, for each kind of weights' scales.
INPUT_SIZES = {"ordinary": 1.0, "negative": 1.0, "zero": 1.0, "subnormal": 1e3, "largest": 1e-3}


# Inputs of a row by the size of the format's blocks: more than the GEMM unpacks at a time, odd numbers of blocks.
INPUTS = {32: 800, 64: 832, 128: 896, 256: 1280}


@pytest.mark.parametrize("scales", INPUT_SIZES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_products(name: str, scales: str):
    """GEMV and GEMM equal decode(W) @ x̂ within the rounding of float32, and each other to the last bit."""
    form = BLOCK_FORMATS[name]
    n_outputs, n = 85, INPUTS[form.n_values]  # one panel for each stream, two more, the last of them not full
    data = random_rows(form, n_outputs, n // form.n_values, scales, seed=5)
    data[:5], data[5:10] = 0x00, 0xFF  # extreme codes
    set_scales(form, data[:10], scales, np.random.default_rng(6))
    if form.scale_type == "e8m0":
        e = data.view(form.layout)["e"]
        e[:] = np.minimum(e, 252)  # the largest finite scale
    weights = pack(name, data, n)
    records = quantize(activations(n, INPUT_SIZES[scales]))
    x = dequantized(records)

    parts = codes(name, data, n)
    magnitudes = np.abs(parts.scale).repeat(parts.sub_block, axis=1) * np.abs(parts.codes.astype(float) - parts.zero)
    if parts.offset is not None:
        magnitudes += np.abs(parts.offset).repeat(parts.sub_block, axis=1)
    expected = x @ decode(name, data, n).astype(np.float64).T
    limit = ALLOWED_ERROR * (np.abs(x) @ magnitudes.T) + SMALLEST

    single = np.concatenate([multiply("gemv", name, weights, n_outputs, n, row) for row in np.split(records, 13)])
    error = np.abs(single[:, :n_outputs] - expected)
    assert (error <= limit).all(), f"{np.nanmax(error / limit)} times the allowed error"
    assert (single[:, n_outputs:] == 0).all()
    for n_rows in (1, 2, 5, 13):
        many = multiply("gemm", name, weights, n_outputs, n, records[:n_rows])
        np.testing.assert_array_equal(many, single[:n_rows])


def test_more_rows_than_a_pass_takes(name: str = "Q4_K"):
    """Tokens beyond CHUNK_TOKENS, panels beyond GRAIN."""
    n_outputs, n = 100, 1024
    weights = pack(name, random_rows(BLOCK_FORMATS[name], n_outputs, n // 256), n)
    records = quantize(np.random.default_rng(1).standard_normal((CHUNK_TOKENS + 9, n)).astype(np.float32))
    many = multiply("gemm", name, weights, n_outputs, n, records)
    for row in (0, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 8):
        single = multiply("gemv", name, weights, n_outputs, n, records[row : row + 1])
        np.testing.assert_array_equal(single, many[row : row + 1])


@pytest.mark.parametrize("n", [1, 31, 32, 100])
@pytest.mark.parametrize("name", FLOATS)
def test_float_products(name: str, n: int):
    """Rows of any length; behind them the inputs are padded with zeros to whole tiles."""
    n_outputs, n_padded = 85, -(-n // BLOCK) * BLOCK
    rng = np.random.default_rng(n)
    w = rng.standard_normal((n_outputs, n)).astype(np.float32)
    data = {"F32": w, "F16": w.astype(np.float16), "BF16": (w.view(np.uint32) >> 16).astype(np.uint16)}[name]
    data = data.view(np.uint8).reshape(n_outputs, -1)
    x = np.zeros((13, n_padded), dtype=np.float32)
    x[:, :n] = rng.standard_normal((13, n))
    weights = pack(name, data, n)
    decoded = decode(name, data, n).astype(np.float64)
    expected, limit = x[:, :n] @ decoded.T, ALLOWED_ERROR * (np.abs(x[:, :n]) @ np.abs(decoded).T)
    many = multiply("gemm", name, weights, n_outputs, n, x)
    assert (np.abs(many[:, :n_outputs] - expected) <= limit).all()
    assert (many[:, n_outputs:] == 0).all()
    for row in range(13):
        single = multiply("gemv", name, weights, n_outputs, n, x[row : row + 1])
        np.testing.assert_array_equal(single, many[row : row + 1])


@pytest.mark.parametrize("kind", ["gemv", "gemm"])
@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_bias_scale_and_accumulation(name: str, kind: str):
    """y (+)= scale · (W x + bias)"""
    n_outputs, n = 16, 64
    rng = np.random.default_rng(3)
    data = rng.integers(0, 64, (n_outputs, n // 32 * 18 if name == "Q4_0" else 2 * n), dtype=np.uint8)
    weights = pack(name, data, n)
    x = rng.standard_normal((1, n)).astype(np.float32)
    x = quantize(x) if name == "Q4_0" else x
    bias, before = rng.standard_normal((2, n_outputs)).astype(np.float32)
    plain = multiply(kind, name, weights, n_outputs, n, x)
    options = {"bias": bias, "scale": 0.5}
    scaled = multiply(kind, name, weights, n_outputs, n, x, **options)
    np.testing.assert_allclose(scaled[0], 0.5 * (plain[0] + bias), rtol=1e-6)
    added = multiply(kind, name, weights, n_outputs, n, x, **options, accumulate=1, y=before[None])
    np.testing.assert_allclose(added[0], before + 0.5 * (plain[0] + bias), rtol=1e-5, atol=1e-6)


def test_records():
    """A record is scale = max |x| / 127, codes to the nearest even, and sums of codes as the products want them."""
    x = np.concatenate([activations(96), activations(96, 1e-42), activations(96, 1e30)])
    records = quantize(x)
    blocks = x.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(axis=-1) * np.float32(1 / 127)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exact = blocks.astype(np.float64) / scale[..., None]
    q = records[..., :BLOCK].view(np.int8).astype(int)
    floats = records[..., abi.RECORD_SCALE : abi.RECORD_NEGATIVE].view(np.float32)
    np.testing.assert_array_equal(floats[..., 0], scale)
    normal = scale > 1e-38
    assert np.abs(q - exact)[normal].max() <= 0.5 + 1e-4
    assert (q[scale == 0] == 0).all() and np.abs(q).max() == 127
    halves = q.reshape(*q.shape[:2], 2, 16)
    sums = halves.sum(axis=-1)
    np.testing.assert_allclose(floats[..., 1:3], scale[..., None] * sums, rtol=1e-6)
    np.testing.assert_allclose(floats[..., 3], scale * sums.sum(axis=-1), rtol=1e-6)
    words = records[..., abi.RECORD_NEGATIVE :][..., :12]
    if current_target().dot.endswith("madd"):  # int16 of inputs 0, 1, 4, 5 … and of 2, 3, 6, 7 …
        pairs = -halves.reshape(*q.shape[:2], 2, 4, 2, 2).sum(axis=(-3, -1))
        expected = np.concatenate([pairs, pairs.sum(axis=-2, keepdims=True)], axis=-2)
        np.testing.assert_array_equal(words.view(np.int16).reshape(expected.shape), expected)
    else:
        np.testing.assert_array_equal(words.view(np.int32), -np.concatenate([sums, sums.sum(-1, keepdims=True)], -1))


@pytest.mark.parametrize("cpu", OTHER_LOWERINGS.get(current_target().dot, []))
def test_lowering_of_another_cpu(cpu: str):
    """The same tests hold where this machine poses as a lesser one."""
    cases = [f"{__file__}::test_quantized_products[{name}-ordinary]" for name in REPRESENTATIVE]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_records", *cases],
        env=os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
    )
    assert f"{1 + len(cases)} passed" in result.stdout, result.stdout + result.stderr


# For each lowering, instructions of the GEMV over IQ4_NL and how many there are in a block of 32 inputs by 16 rows.
INSTRUCTIONS = {
    "avx512_vnni": {r"vpdpbusd\s.*%zmm": 8, r"vpshufb\s.*%zmm": 8},
    "avx512_madd": {r"vpmaddubsw\s.*%zmm": 8, r"vpshufb\s.*%zmm": 8},
    "avx_vnni": {r"vpdpbusd\s.*%ymm": 16, r"vpshufb\s.*%ymm": 16},
    "avx2_madd": {r"vpmaddubsw\s.*%ymm": 16, r"vpshufb\s.*%ymm": 16, r"vpsignb\s.*%ymm": 16},
    "neon_dotprod": {r"sdot\s+v": 32, r"tbl\s+v": 32},
    "generic_arm": {r"tbl\s+v": 32},
}


@pytest.mark.parametrize("lowering", INSTRUCTIONS)
def test_instructions(lowering: str):
    """The vocabulary becomes the instructions that it is meant for, on CPUs that this machine need not be."""
    script = Path(__file__).with_name("assembly.py")
    command = [sys.executable, script, lowering, "matmul.gemv:IQ4_NL"]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for pattern, per_block in INSTRUCTIONS[lowering].items():
        count = len(re.findall(pattern, assembly))
        assert count and count % per_block == 0, f"{pattern}: {count}"
    assert not re.search(r"\b(call|callq|bl)\s+\S*(pow|exp|__gnu|__extend|__trunc)", assembly)
