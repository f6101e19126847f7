"""Views of memory that kernels work on, by the addresses in their arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def memory_at(address: int, dtype: Any, n: int) -> np.ndarray:
    """`n` values at an address, live."""
    return np.frombuffer((ctypes.c_char * (n * np.dtype(dtype).itemsize)).from_address(address), dtype)


def matrix_at(address: int, stride: int, n_rows: int, width: int) -> np.ndarray:
    """A live float32 matrix [n_rows, width] with `stride` bytes from row to row."""
    flat = memory_at(address, np.float32, (n_rows - 1) * (stride // 4) + width)
    return np.lib.stride_tricks.as_strided(flat, (n_rows, width), (stride, 4), writeable=False)
