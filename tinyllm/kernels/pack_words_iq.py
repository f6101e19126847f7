"""Reads blocks of the codebook formats, four weights at a time, for `pack_blocks.py`; `blocks_iq.py` has the layouts.

As in `pack_words.py`; `table` is the address of `pack.table_of` the type: points as numbers of the tile's levels.
"""

from __future__ import annotations

from .pack_words import FileBlock, spread_bits
from .simd import load_u8, load_u16, load_u32
from .specialize import inline


@inline
def half_point(table, number, group):
    """Half of a point with eight coordinates."""
    return load_u32(table + 8 * number + 4 * (group & 1))


@inline
def eight_signs(seven):
    """Seven sign bits and the eighth that makes the number of minus signs even."""
    seven &= 127
    return seven | (0x6996 >> (seven & 15 ^ seven >> 4) & 1) << 7


@inline
def with_signs(word, signs, group, complement):
    """Numbers of levels, complemented where one of eight sign bits is set: the levels of the other sign."""
    return word ^ spread_bits(signs >> 4 * (group & 1)) * complement


@inline
def odd_nibble(bytes_at, index):
    """2·nibble + 1 of a nibble in plain order."""
    return 2 * (load_u8(bytes_at + (index >> 1)) >> 4 * (index & 1) & 15) + 1


@inline
def word_iq3_s(block, index, group, table):
    number = load_u8(block + 2 + 8 * index + group) | (load_u8(block + 66 + index) >> group & 1) << 8
    signs = load_u8(block + 74 + 4 * index + (group >> 1))
    return with_signs(load_u32(table + 4 * number), signs, group, 15)


@inline
def scale_iq3_s(block, index):
    return odd_nibble(block + 106, index)


@inline
def word_iq3_xxs(block, index, group, table):
    number = load_u8(block + 2 + 8 * index + group)
    sevens = load_u32(block + 66 + 4 * index)
    return with_signs(load_u32(table + 4 * number), eight_signs(sevens >> 7 * (group >> 1)), group, 15)


@inline
def scale_iq3_xxs(block, index):
    return 2 * (load_u32(block + 66 + 4 * index) >> 28) + 1


@inline
def word_iq2_s(block, index, group, table):
    point = group >> 1
    number = load_u8(block + 2 + 4 * index + point) | (load_u8(block + 66 + index) >> 2 * point & 3) << 8
    signs = load_u8(block + 34 + 4 * index + point)
    return with_signs(half_point(table, number, group), signs, group, 7)


@inline
def scale_iq2_s(block, index):
    return odd_nibble(block + 74, index)


@inline
def word_iq2_xs(block, index, group, table):
    point = load_u16(block + 2 + 8 * index + 2 * (group >> 1))
    return with_signs(half_point(table, point & 511, group), eight_signs(point >> 9), group, 7)


@inline
def scale_iq2_xs(block, index):
    return odd_nibble(block + 66, index)


@inline
def word_iq2_xxs(block, index, group, table):
    number = load_u8(block + 2 + 8 * index + (group >> 1))
    sevens = load_u32(block + 6 + 8 * index)
    return with_signs(half_point(table, number, group), eight_signs(sevens >> 7 * (group >> 1)), group, 7)


@inline
def scale_iq2_xxs(block, index):
    return 2 * (load_u32(block + 6 + 8 * index) >> 28) + 1


@inline
def shifted_point(table, number, down, group):
    """Of IQ1, half of a point: shifted up, it is the next of the levels."""
    return half_point(table, number, group) + spread_bits(15 * (1 - down))


@inline
def word_iq1_s(block, index, group, table):
    point = group >> 1
    high = load_u16(block + 34 + 2 * index)
    number = load_u8(block + 2 + 4 * index + point) | (high >> 3 * point & 7) << 8
    return shifted_point(table, number, high >> 15, group)


@inline
def scale_iq1_s(block, index):
    return 2 * (load_u16(block + 34 + 2 * index) >> 12 & 7) + 1


@inline
def word_iq1_m(block, index, group, table):
    point = 4 * index + (group >> 1)
    nibble = load_u8(block + 32 + (point >> 1)) >> 4 * (point & 1) & 15
    return shifted_point(table, load_u8(block + point) | (nibble & 7) << 8, nibble >> 3, group)


@inline
def scale_iq1_m(block, index):
    return 2 * (load_u16(block + 48 + 2 * (index >> 2)) >> 3 * (index & 3) & 7) + 1


@inline
def float_iq1_m(block, index):
    """d is spread over the top nibbles of the four words of scales, lowest first."""
    bits = 0
    for word in range(4):
        bits |= load_u16(block + 48 + 2 * word) >> 12 << 4 * word
    return bits


IQ_BLOCKS = {
    "IQ3_S": FileBlock(word_iq3_s, scale_iq3_s),
    "IQ3_XXS": FileBlock(word_iq3_xxs, scale_iq3_xxs),
    "IQ2_S": FileBlock(word_iq2_s, scale_iq2_s),
    "IQ2_XS": FileBlock(word_iq2_xs, scale_iq2_xs),
    "IQ2_XXS": FileBlock(word_iq2_xxs, scale_iq2_xxs),
    "IQ1_S": FileBlock(word_iq1_s, scale_iq1_s),
    "IQ1_M": FileBlock(word_iq1_m, scale_iq1_m, float=float_iq1_m),
}
