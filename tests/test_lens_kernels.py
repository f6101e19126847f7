"""The kernels that read rows of logits, against a stable sort and sums in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tinyllm.kernels import abi
from tinyllm.kernels.jit import kernel_addresses
from tinyllm.kernels.lens_words import BEST, N_TOP, RANKS, SUMS
from tinyllm.team import Team

# Below and above the width of a vector and of a block of the kernels, and none a multiple of it.
WIDTHS = [1, 3, 16, 50, 512, 999, 5003]
N_ROWS = 7


class Found(NamedTuple):
    values: np.ndarray
    columns: np.ndarray
    sums: np.ndarray
    ranks: np.ndarray


def logits(width: int, n_different: int) -> np.ndarray:
    """Rows with many equal values, or none; behind them zeros, as in a plan's buffers."""
    values = np.random.default_rng(width).integers(-n_different, n_different, (N_ROWS, width)) * np.float32(
        8 / n_different
    )
    return np.pad(values.astype(np.float32), ((0, 0), (0, -width % 32)))


def run(rows: np.ndarray, width: int, finals: np.ndarray, answers: np.ndarray, sign: float = 1.0) -> Found:
    found = Found(
        np.zeros((N_ROWS, N_TOP), np.float32),
        np.zeros((N_ROWS, N_TOP), np.int64),
        np.zeros((N_ROWS, 4), np.float32),
        np.zeros(N_ROWS, np.int64),
    )
    n_rows = np.array([N_ROWS])
    common = {"n_rows": n_rows.ctypes.data, "n": width, "x": rows.ctypes.data, "x_stride": rows.strides[0]}
    values = found.values.ctypes.data
    arguments = [
        BEST.pack(**common, sign=sign, values=values, columns=found.columns.ctypes.data),
        SUMS.pack(**common, values=values, finals=finals.ctypes.data, sums=found.sums.ctypes.data),
        RANKS.pack(**common, answers=answers.ctypes.data, ranks=found.ranks.ctypes.data),
    ]
    blocks = np.array(arguments)
    kernels = kernel_addresses(["lens.best", "lens.sums", "lens.ranks"])
    table = np.zeros((3, abi.OP_BYTES // 8), np.int64)
    for row, kernel, block in zip(table, kernels.values(), blocks, strict=True):
        row[:4] = kernel, kernel, block.ctypes.data, n_rows.ctypes.data
    team = Team(2)
    team.run(table)
    team.close()
    return found


@pytest.mark.parametrize("n_different", [3, 1 << 20], ids=["equal values", "different values"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_best_are_those_of_a_stable_sort(width, sign, n_different):
    rows = logits(width, n_different)
    found = run(rows, width, np.zeros(N_ROWS, np.int64), np.zeros(N_ROWS, np.int64), sign)
    want = np.argsort(-sign * rows[:, :width], axis=1, kind="stable")[:, :N_TOP]
    np.testing.assert_array_equal(found.columns[:, : want.shape[1]], want)
    np.testing.assert_array_equal(found.values[:, : want.shape[1]], sign * np.take_along_axis(rows, want, 1))
    assert (found.columns[:, width:] == -1).all()


@pytest.mark.parametrize("n_different", [3, 1 << 20], ids=["equal values", "different values"])
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_and_ranks_are_those_of_float64(width, n_different):
    rows = logits(width, n_different)
    dice = np.random.default_rng(1)
    finals, answers = dice.integers(0, N_ROWS, N_ROWS), dice.integers(0, width, N_ROWS)
    found = run(rows, width, finals, answers)
    x = rows[:, :width].astype(np.float64)
    shifted = x - x.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    cross = (weights[finals] * shifted).sum(axis=1)
    want = np.stack([weights.sum(axis=1), (weights * shifted).sum(axis=1), cross, x.sum(axis=1)], axis=1)
    np.testing.assert_allclose(found.sums, want, rtol=2e-6, atol=1e-6 * np.abs(x).sum(axis=1).max())
    own = x[np.arange(N_ROWS), answers][:, None]
    earlier = np.arange(width) < answers[:, None]
    np.testing.assert_array_equal(found.ranks, ((x > own) | ((x == own) & earlier)).sum(axis=1))
