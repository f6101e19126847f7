"""The unpack step of each weight format: from a tile to codes, scales and minima in the SIMD vocabulary.

value = scale · (code − zero) + minimum. The tiles are described in `formats.py`, the files' own layouts in `blocks.py`
and `blocks_iq.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import llvmlite.ir as ir
import numpy as np

from .dot import SIGNED_BYTES, SUMS_PAIRS, fits_16_bits
from .formats import FIELDS, PANEL_ROWS, SCALE_BYTES, TILES, Tile
from .simd import (
    address,
    constant_ir,
    fma,
    i8x64,
    load_bf16x16,
    load_e8m0x16,
    load_f16x16,
    load_f32x16,
    load_high4x16,
    load_i8x16,
    load_ir,
    load_low4x16,
    load_u8x16,
    load_ue4m3x16,
    mul,
    operation,
    splat_f32,
    table16_ir,
)
from .specialize import inline


@dataclass(frozen=True)
class Unpack:
    """The functions of a format. A block's codes begin at tile + block_index · tile.code_bytes.

    codes[group](codes_address) -> i8x64: inputs 4·group … 4·group + 3 of the block for all 16 rows, at most `highest`;
    scale(tile, block_index, half) -> f32x16; minimum likewise or None.
    `bits`: width of the codes in the dot product, 8 meaning bytes of the kind that SIGNED_BYTES says.
    """

    tile: Tile
    codes: tuple[Callable, ...]
    bits: int
    highest: int
    zero: int
    scale: Callable
    minimum: Callable | None


def _table(tile: Tile) -> tuple[list[int], int]:
    """The codes that levels become, and their zero: a power of two that makes them unsigned, if that is wanted."""
    zero = next(z for z in (8, 16, 32, 64, 128) if z >= -min(tile.levels))
    if zero == 128 and SIGNED_BYTES:
        zero = 0
    return [level + zero for level in tile.levels], zero


def _codes_of(tile: Tile, group: int, table: list[int] | None) -> Callable:
    @operation(i8x64, address)
    def codes(builder, block):
        parts = []
        for vector, shift, mask in FIELDS[tile.bits][group]:
            where = builder.add(block, ir.Constant(ir.IntType(64), 64 * vector))
            shifted = builder.lshr(load_ir(builder, where, i8x64.ir), constant_ir(i8x64, shift))
            parts.append(builder.and_(shifted, constant_ir(i8x64, mask)))
        value = reduce(builder.or_, parts)
        if table is not None:
            return table16_ir(builder, value, table)
        if tile.bits == 8 and not SIGNED_BYTES:
            return builder.xor(value, constant_ir(i8x64, 0x80))
        return value

    return codes


_LOAD_FLOAT = {"f32": load_f32x16, "f16": load_f16x16, "e8m0": load_e8m0x16, "ue4m3": load_ue4m3x16}
_LOAD_INTEGER = {"i8": load_i8x16, "u8": load_u8x16, "u4": load_low4x16}
_LOAD_INTEGER_MINIMUM = {"u8": load_u8x16, "u4": load_high4x16}


def _factor_of(tile: Tile, floats_at: int, integers_at: int, load_integer: Callable | None, gain: float) -> Callable:
    """factor(tile, block, half): the floats there, times the integers there, times the gain."""
    load_float = _LOAD_FLOAT[tile.scale]
    float_bytes, halves, gain = PANEL_ROWS * SCALE_BYTES[tile.scale], tile.halves, np.float32(gain)

    @inline
    def floats(at, block, half):
        return load_float(at + floats_at + float_bytes * half)

    @inline
    def floats_times_integers(at, block, half):
        integers = load_integer(at + integers_at + 16 * (halves * block + half))
        return mul(load_float(at + floats_at), integers)

    @inline
    def all_times_gain(at, block, half):
        integers = load_integer(at + integers_at + 16 * (halves * block + half))
        return mul(mul(load_float(at + floats_at), splat_f32(gain)), integers)

    if load_integer is None:
        return floats
    return floats_times_integers if gain == 1 else all_times_gain


def _centred(scale: Callable, minimum: Callable, zero: int) -> Callable:
    """The minimum that makes up for a zero: scale · code + minimum = scale · (code − zero) + this."""

    @inline
    def centred(at, block, half):
        return fma(scale(at, block, half), splat_f32(np.float32(zero)), minimum(at, block, half))

    return centred


def _unpack_of(tile: Tile) -> Unpack:
    table, zero = _table(tile) if tile.levels else (None, tile.zero)
    highest = max(table) if table else 2**tile.bits - 1
    if tile.bits == 8 and not SIGNED_BYTES:
        zero = 128
    bits = 8 if tile.levels and zero in (0, 128) else highest.bit_length()
    scale = _factor_of(tile, tile.scales_at, tile.integers_at, _LOAD_INTEGER.get(tile.integers), tile.gain)
    minimum = None
    if tile.minimum:
        load_integer = _LOAD_INTEGER_MINIMUM.get(tile.integers)
        minimum = _factor_of(tile, tile.minima_at, tile.integer_minima_at, load_integer, 1.0)
        if SUMS_PAIRS and not fits_16_bits(highest, zero, 8 // tile.halves):
            zero = 2 ** (tile.bits - 1)
            minimum = _centred(scale, minimum, zero)
    return Unpack(
        tile=tile,
        codes=tuple(_codes_of(tile, group, table) for group in range(8)),
        bits=bits,
        highest=highest,
        zero=zero,
        scale=scale,
        minimum=minimum,
    )


UNPACK = {name: _unpack_of(tile) for name, tile in TILES.items() if not tile.is_float}


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
