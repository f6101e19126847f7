"""Tensor bytes of any GGUF type in, float32 values out (`decode`), or the integers behind them (`codes`).

This is the slow reading of every format: the oracle of the kernels' tests, the source of packers for formats without
one of their own, and the way a prompt's embedding rows are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..errors import UnsupportedModelError
from . import blocks, blocks_iq  # noqa: F401  (they fill the table)
from .block_format import BLOCK_FORMATS, BlockFormat

PLAIN_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
}


@dataclass(frozen=True)
class Codes:
    """A tensor as integers: value = scale·(code − zero) − offset, the two steps rounded to float32 in this order.

    scale = d·scales and offset = dmin·mins, both exact in float32 and repeated for every sub-block. The factors are
    there for tiles that keep them apart; the format's row in BLOCK_FORMATS tells their types and ranges.
    """

    codes: np.ndarray  # uint8 [..., n]
    zero: int
    sub_block: int  # 16 or 32 values
    scale: np.ndarray  # float32 [..., n / sub_block]
    offset: np.ndarray | None  # float32 [..., n / sub_block]
    d: np.ndarray  # float32 [..., n / scale_span]
    scales: np.ndarray | None  # int8 [..., n / sub_block]
    dmin: np.ndarray | None  # float32 [..., n / scale_span]
    mins: np.ndarray | None  # int8 [..., n / sub_block]


def decode(type_name: str, data: np.ndarray, n: int) -> np.ndarray:
    """Values of rows stored as the GGUF type `type_name`: uint8 [..., bytes_per_row] → new float32 [..., n].

    Raises UnsupportedModelError for an unknown type and ValueError when a row of n values has another size.
    """
    _check_known(type_name)
    with np.errstate(over="ignore", invalid="ignore"):
        return DECODERS[type_name](data, n)


def codes(type_name: str, data: np.ndarray, n: int) -> Codes:
    """The integers behind rows of a block format: uint8 [..., bytes_per_row] → `Codes` of n values a row.

    Raises UnsupportedModelError for types that are not made of integers and scales (F32, F16, BF16, plain integers),
    ValueError when a row of n values has another size.
    """
    if type_name not in BLOCK_FORMATS:
        raise UnsupportedModelError(f"tensors of type {type_name} are not made of integers and scales")
    form = BLOCK_FORMATS[type_name]
    with np.errstate(over="ignore", invalid="ignore"):
        parts = form.split(_as_blocks(form, data, n))
        scale, offset = parts.scale, parts.offset

    def row(array: np.ndarray | None, per_block: int | None = None) -> np.ndarray | None:
        """[..., n_blocks, k] → [..., n_blocks·k], or `per_block` numbers for each block."""
        if array is None:
            return None
        if per_block is not None:
            array = array.repeat(per_block // array.shape[-1], axis=-1)
        return array.reshape(*data.shape[:-1], array.shape[-2] * array.shape[-1])

    sub_blocks = form.n_values // form.sub_block
    return Codes(
        codes=row(parts.q.view(np.uint8) + np.uint8(form.zero)),
        zero=form.zero,
        sub_block=form.sub_block,
        scale=row(scale, sub_blocks),
        offset=row(offset, sub_blocks),
        d=row(parts.d),
        scales=row(parts.scales),
        dmin=row(parts.dmin),
        mins=row(parts.mins),
    )


def _check_known(type_name: str) -> None:
    if type_name not in DECODERS:
        raise UnsupportedModelError(f"tensors of type {type_name} cannot be read; use a file of another quantization")


def _decode_plain(type_name: str, data: np.ndarray, n: int) -> np.ndarray:
    dtype = PLAIN_TYPES[type_name]
    _check_row(type_name, data, n, n * dtype.itemsize)
    return _plain_to_float32(type_name, np.ascontiguousarray(data).view(dtype))


def _plain_to_float32(type_name: str, values: np.ndarray) -> np.ndarray:
    if type_name == "BF16":  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _decode_blocks(form: BlockFormat, data: np.ndarray, n: int) -> np.ndarray:
    parts = form.split(_as_blocks(form, data, n))
    scale, offset = parts.scale, parts.offset
    *lead, k = scale.shape
    values = parts.q.astype(np.float32).reshape(*lead, k, form.n_values // k)
    values *= scale[..., None]
    if offset is not None:
        values -= offset[..., None]
    return values.reshape(*data.shape[:-1], n)


def _as_blocks(form: BlockFormat, data: np.ndarray, n: int) -> np.ndarray:
    """uint8 [..., bytes_per_row] → the format's layout [..., n_blocks], without copying contiguous data."""
    if n % form.n_values:
        raise ValueError(f"a row of {n} values is not a whole number of {form.name} blocks of {form.n_values}")
    _check_row(form.name, data, n, n // form.n_values * form.n_bytes)
    return np.ascontiguousarray(data).view(form.layout)


def _check_row(type_name: str, data: np.ndarray, n: int, n_bytes: int) -> None:
    if data.shape[-1] != n_bytes:
        raise ValueError(f"a {type_name} row of {n} values takes {n_bytes} bytes, not {data.shape[-1]}")


DECODERS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    **{name: partial(_decode_plain, name) for name in PLAIN_TYPES},
    **{name: partial(_decode_blocks, form) for name, form in BLOCK_FORMATS.items()},
}
