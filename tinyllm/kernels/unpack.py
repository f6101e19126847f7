"""The unpack step of each weight format: from a tile to unsigned codes, scales and minima in the SIMD vocabulary.

`codes(block_address, group)` gives inputs 4·group … 4·group+3 of the block for all 16 rows, `scale` and `minimum` the
rows' factors, so that value = scale · (code − zero) + minimum. The formats' own layouts are in `dequantize.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import njit

from .dot import SIGNED_BYTES
from .formats import TILES, Tile
from .simd import constant_i8, high4, load_bf16x16, load_f16x16, load_f32x16, load_i8x64, low4, xor_i8

inline = njit(forceinline=True, error_model="numpy")

_flip_sign = constant_i8(-128)


@dataclass(frozen=True)
class Unpack:
    """The three functions of a format; `code_stride` is the distance of two blocks' codes within a tile.

    codes(block, group) -> i8x64; scale(tile, block_index, half) -> f32x16; minimum likewise or None.
    """

    tile: Tile
    codes: Callable
    scale: Callable
    minimum: Callable | None
    code_stride: int

    @property
    def zero(self) -> int:
        """Subtracted from each code: signed bytes become unsigned by adding 128 where the dot product wants that."""
        if self.tile.bits == 8 and not SIGNED_BYTES:
            return 128 + self.tile.zero
        return self.tile.zero


@inline
def codes_4bit(block, group):
    if group < 4:
        return low4(load_i8x64(block + 64 * group))
    return high4(load_i8x64(block + 64 * (group - 4)))


if SIGNED_BYTES:

    @inline
    def codes_8bit(block, group):
        return load_i8x64(block + 64 * group)

else:

    @inline
    def codes_8bit(block, group):
        return xor_i8(load_i8x64(block + 64 * group), _flip_sign())


@inline
def f16_after_256(tile, block, half):
    return load_f16x16(tile + 256)


@inline
def f16_after_288(tile, block, half):
    return load_f16x16(tile + 288)


@inline
def f16_after_512(tile, block, half):
    return load_f16x16(tile + 512)


UNPACK = {
    name: Unpack(TILES[name], *functions)
    for name, functions in {
        "Q8_0": (codes_8bit, f16_after_512, None, 512),
        "Q4_0": (codes_4bit, f16_after_256, None, 256),
        "Q4_1": (codes_4bit, f16_after_256, f16_after_288, 256),
    }.items()
}


@inline
def row_f32(tile, index):
    return load_f32x16(tile + 64 * index)


@inline
def row_f16(tile, index):
    return load_f16x16(tile + 32 * index)


@inline
def row_bf16(tile, index):
    return load_bf16x16(tile + 32 * index)


# Float formats: input `index` of 16 rows.
UNPACK_FLOAT = {"F32": row_f32, "F16": row_f16, "BF16": row_bf16}
