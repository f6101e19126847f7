"""The kernels that read embedding rows, against the formats' specification."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tinyllm.gguf.ggml_types import BLOCK_SIZES, GGMLType
from tinyllm.kernels import abi
from tinyllm.kernels.dequantize import decode
from tinyllm.kernels.formats import EMBEDDED_BY_KERNEL
from tinyllm.kernels.jit import kernel_addresses


@pytest.mark.parametrize("name", EMBEDDED_BY_KERNEL)
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_rows_equal_the_specification(name, scale):
    rng = np.random.default_rng(3)
    values, block_bytes = BLOCK_SIZES[GGMLType[name]]
    n, step = 512, max(16, values)
    table = rng.integers(0, 256, (20, n // values * block_bytes), dtype=np.uint8)
    if name in ("F32", "F16", "BF16"):
        floats = rng.normal(size=(20, n)).astype(np.float32)
        raw = {
            "F32": floats,
            "F16": floats.astype(np.float16),
            "BF16": (floats.view(np.uint32) >> 16).astype(np.uint16),
        }
        table = raw[name].view(np.uint8).reshape(20, -1).copy()
    else:
        # Any bits are codes, but the scales must be finite.
        scales = {"Q4_K": [0, 2], "Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(name, [0])
        blocks = table.reshape(20, -1, block_bytes)
        for at in scales:
            blocks[:, :, at : at + 2] = rng.normal(size=(*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    tokens = [19, 0, 7, 7]
    rows = np.zeros((4, abi.ROW_BYTES // 8), np.int64)
    rows[:, abi.ROW_TOKEN // 8] = tokens
    x, n_rows = np.full((4, n + 3), 9, np.float32), np.array([4])
    words = np.array(
        abi.EMBED.pack(
            n_rows=n_rows.ctypes.data,
            row_table=rows.ctypes.data,
            table=table.ctypes.data,
            row_bytes=table.shape[1],
            n_blocks=n // step,
            x=x.ctypes.data,
            x_stride=x.strides[0],
            scale=scale,
        )
    )
    kernel = f"embed.embed:{name}"
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel_addresses([kernel])[kernel])(words.ctypes.data, 0, 1)
    want = decode(name, table[tokens], n) * np.float32(scale)
    np.testing.assert_allclose(x[:, :n], want, rtol=2e-6, atol=1e-6 * np.abs(want).max())
    assert (x[:, n:] == 9).all()
