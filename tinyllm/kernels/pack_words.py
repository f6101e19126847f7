"""Reads blocks of the plain formats, four weights at a time, for `pack_blocks.py`; see `blocks.py` for the layouts.

word_*(block, index, group, table): the unsigned codes of inputs 4·group … 4·group + 3 of the block's 32 inputs number
`index`, one in each byte. scale_*(block, index): the integer scale number `index`, as the tile stores it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .simd import load_u8, load_u16, load_u32
from .specialize import inline

_EVERY_BYTE = 0x01010101
_LOW_NIBBLES = 0x0F0F0F0F
_POWERS_OF_3 = sum(3**digit << 8 * digit for digit in range(5))


@dataclass(frozen=True)
class FileBlock:
    """How the tile of one row is read from a type's blocks.

    word(block, index, group, table) -> 4 codes of the 32 inputs number `index`; scale(block, index) and
    minimum(block, index) -> the integers, as the tile stores them. The bits of the float scales are those of the field
    `d`, or of float(block, index); of the float minimum those of `m`, or of `negative_m` with the other sign.
    """

    word: Callable
    scale: Callable | None = None
    minimum: Callable | None = None
    d: str = "d"
    float: Callable | None = None
    m: str = ""
    negative_m: str = ""


@inline
def spread_bits(bits):
    """The low four bits of an integer as bit 0 of four bytes."""
    return (bits & 15) * 0x00204081 & _EVERY_BYTE


@inline
def nibbles(qs, group):
    """Word of 16 bytes whose low nibbles are inputs 0–15, the high ones inputs 16–31."""
    return load_u32(qs + 4 * (group & 3)) >> 4 * (group >> 2) & _LOW_NIBBLES


@inline
def word_q8_0(block, index, group, table):
    return load_u32(block + 2 + 4 * group)


@inline
def word_q8_1(block, index, group, table):
    return load_u32(block + 4 + 4 * group)


@inline
def word_q8_k(block, index, group, table):
    return load_u32(block + 4 + 32 * index + 4 * group)


@inline
def word_q4_0(block, index, group, table):
    return nibbles(block + 2, group)


@inline
def word_q4_1(block, index, group, table):
    return nibbles(block + 4, group)


@inline
def word_q5_0(block, index, group, table):
    return nibbles(block + 6, group) | spread_bits(load_u32(block + 2) >> 4 * group) << 4


@inline
def word_q5_1(block, index, group, table):
    return nibbles(block + 8, group) | spread_bits(load_u32(block + 4) >> 4 * group) << 4


@inline
def word_q1_0(block, index, group, table):
    return spread_bits(load_u32(block + 2 + 4 * index) >> 4 * group) << 1


@inline
def word_q2_0(block, index, group, table):
    pairs = load_u8(block + 2 + 8 * index + group)
    return (pairs | pairs << 6 | pairs << 12 | pairs << 18) & 3 * _EVERY_BYTE


@inline
def word_mxfp4(block, index, group, table):
    return nibbles(block + 1, group)


@inline
def word_nvfp4(block, index, group, table):
    """8 bytes hold 16 inputs, the first 8 in their low nibbles."""
    at = block + 4 + 16 * index + 8 * (group >> 2) + 4 * (group & 1)
    return load_u32(at) >> 4 * (group >> 1 & 1) & _LOW_NIBBLES


@inline
def word_iq4_xs(block, index, group, table):
    return nibbles(block + 8 + 16 * index, group)


@inline
def bit_pairs(qs, index, group):
    """Word of 64 bytes: 32 bytes hold 128 inputs, their lowest pairs of bits inputs 0–31, and so on."""
    return load_u32(qs + 32 * (index >> 2) + 4 * group) >> 2 * (index & 3) & 3 * _EVERY_BYTE


@inline
def word_tq2_0(block, index, group, table):
    return bit_pairs(block, index, group)


@inline
def word_tq1_0(block, index, group, table):
    """Runs of 32, 16 and 4 bytes: of each run all first digits come first, then all second digits, and so on."""
    at, digit = block + 4 * group, index
    if index >= 5:
        number = 8 * (index - 5) + group
        at, digit = block + 32 + 4 * (number & 3), number >> 2
        if number >= 20:
            at, digit = block + 48, number - 20
    power = _POWERS_OF_3 >> 8 * digit & 0xFF
    word = load_u32(at)
    even = ((word & 0x00FF00FF) * power & 0x00FF00FF) * 3 >> 8 & 0x00FF00FF
    odd = ((word >> 8 & 0x00FF00FF) * power & 0x00FF00FF) * 3 & 0xFF00FF00
    return even | odd


@inline
def word_q2_k(block, index, group, table):
    return bit_pairs(block + 16, index, group)


@inline
def word_q3_k(block, index, group, table):
    high = load_u32(block + 4 * group) >> index & _EVERY_BYTE
    return bit_pairs(block + 32, index, group) | high << 2


@inline
def nibbles_q4_k(qs, index, group):
    """Word of 128 bytes: 32 bytes hold one block in their low nibbles and the next in their high ones."""
    return load_u32(qs + 32 * (index >> 1) + 4 * group) >> 4 * (index & 1) & _LOW_NIBBLES


@inline
def word_q4_k(block, index, group, table):
    return nibbles_q4_k(block + 16, index, group)


@inline
def word_q5_k(block, index, group, table):
    high = load_u32(block + 16 + 4 * group) >> index & _EVERY_BYTE
    return nibbles_q4_k(block + 48, index, group) | high << 4


@inline
def word_q6_k(block, index, group, table):
    at = block + 64 * (index >> 2) + 32 * (index & 1) + 4 * group
    low = load_u32(at) >> 4 * (index >> 1 & 1) & _LOW_NIBBLES
    return low | bit_pairs(block + 128, index, group) << 4


@inline
def scale_q2_k(block, index):
    return load_u8(block + index)


@inline
def scale_q3_k(block, index):
    low = load_u8(block + 96 + (index & 7)) >> 4 * (index >> 3) & 15
    high = load_u8(block + 104 + (index & 3)) >> 2 * (index >> 2) & 3
    return (low | high << 4) - 32


@inline
def scale_q4_k(block, index):
    if index < 4:
        return load_u8(block + 4 + index) & 63
    return load_u8(block + 8 + index) & 15 | load_u8(block + index) >> 6 << 4


@inline
def minimum_q4_k(block, index):
    if index < 4:
        return load_u8(block + 8 + index) & 63
    return load_u8(block + 8 + index) >> 4 | load_u8(block + 4 + index) >> 6 << 4


@inline
def scale_q6_k(block, index):
    return load_u8(block + 192 + index)


@inline
def scale_iq4_xs(block, index):
    low = load_u8(block + 4 + (index >> 1)) >> 4 * (index & 1) & 15
    high = load_u16(block + 2) >> 2 * index & 3
    return (low | high << 4) - 32


@inline
def float_nvfp4(block, index):
    """UE4M3 without its unused bit, and zero for its NaN, as ggml reads it."""
    bits = load_u8(block + index)
    return 0 if bits == 0x7F else bits & 0x7F


_K_MINIMA = {"negative_m": "dmin"}
PLAIN_BLOCKS = {
    "Q8_0": FileBlock(word_q8_0),
    "Q8_1": FileBlock(word_q8_1),
    "Q8_K": FileBlock(word_q8_k),
    "Q4_0": FileBlock(word_q4_0),
    "Q4_1": FileBlock(word_q4_1, m="m"),
    "Q5_0": FileBlock(word_q5_0),
    "Q5_1": FileBlock(word_q5_1, m="m"),
    "Q1_0": FileBlock(word_q1_0),
    "Q2_0": FileBlock(word_q2_0),
    "TQ1_0": FileBlock(word_tq1_0),
    "TQ2_0": FileBlock(word_tq2_0),
    "Q2_K": FileBlock(word_q2_k, scale_q2_k, **_K_MINIMA),
    "Q3_K": FileBlock(word_q3_k, scale_q3_k),
    "Q4_K": FileBlock(word_q4_k, scale_q4_k, minimum_q4_k, **_K_MINIMA),
    "Q5_K": FileBlock(word_q5_k, scale_q4_k, minimum_q4_k, **_K_MINIMA),
    "Q6_K": FileBlock(word_q6_k, scale_q6_k),
    "MXFP4": FileBlock(word_mxfp4, d="e"),
    "NVFP4": FileBlock(word_nvfp4, float=float_nvfp4),
    "IQ4_NL": FileBlock(word_q4_0),
    "IQ4_XS": FileBlock(word_iq4_xs, scale_iq4_xs),
}
