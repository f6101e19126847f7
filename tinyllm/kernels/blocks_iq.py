"""The IQ block formats of GGUF, whose integers come from tables: a block's bytes in, integers and scales out.

IQ4 looks up single values, the others points of a codebook with four or eight coordinates at a time, and signs beside.
"""

from __future__ import annotations

import numpy as np

from .block_format import Parts, bit_fields, block_format, float32, signed
from .codebooks import IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS, codebook

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_TABLE = np.array(IQ4_LEVELS, dtype=np.int8)

D = ("d", "<f2")


def _with_signs(levels: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted([-level for level in levels] + list(levels)))


# The eight factors ±1 that a byte of sign bits stands for, int8 [256, 8]. Where only seven bits are stored, the eighth
# makes the number of minus signs even.
_SIGNS = 1 - 2 * (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.int8)
_EVEN_SIGNS = _SIGNS[[bits | bits.bit_count() % 2 << 7 for bits in range(128)]]


def _gather(points: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Rows of int8 [n_points, dims], dims being 4 or 8: numbers [..., m] → int8 [..., m·dims].

    Taken as machine words, a row is one element, which numpy gathers many times faster than a row.
    """
    words = points.view(f"i{points.shape[1]}")[:, 0]
    return words[numbers].view(np.int8)


@block_format("IQ4_NL", 32, [D, ("qs", "u1", 16)], levels=IQ4_LEVELS, sub_block=32)
def split_iq4_nl(blocks: np.ndarray) -> Parts:
    """f16 d, 32 nibbles: the low ones are values 0–15, the high ones values 16–31.

    value = d·IQ4_LEVELS[nibble]
    """
    return Parts(_IQ4_TABLE[bit_fields(blocks["qs"], 4, 16)], float32(blocks["d"]))


@block_format(
    "IQ4_XS",
    256,
    [D, ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)],
    levels=IQ4_LEVELS,
    sub_block=32,
    scales=(-32, 31),
)
def split_iq4_xs(blocks: np.ndarray) -> Parts:
    """f16 d, a scale of 6 bits for each sub-block of 32 (the high pairs in order, then the low nibbles), nibbles.

    16 bytes of qs are a sub-block, laid out as in IQ4_NL.

    value = d·(scale − 32)·IQ4_LEVELS[nibble]
    """
    scales = bit_fields(blocks["scales_l"], 4, 1) | bit_fields(blocks["scales_h"], 2, 1) << 4
    return Parts(_IQ4_TABLE[bit_fields(blocks["qs"], 4, 16)], float32(blocks["d"]), signed(scales, 32))


@block_format(
    "IQ3_S",
    256,
    [D, ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
    levels=_with_signs(IQ3_S_LEVELS),
    sub_block=32,
    scales=(1, 31),
)
def split_iq3_s(blocks: np.ndarray) -> Parts:
    """f16 d, 64 point numbers of 9 bits (the low bytes, then the ninth bits in order), sign bits, 4-bit scales.

    The points have four coordinates, the sub-blocks 32 values.

    value = d·(2·scale + 1)·±point
    """
    numbers = blocks["qs"] | bit_fields(blocks["qh"], 1, 1).astype(np.uint16) << 8
    q = _gather(codebook("IQ3_S"), numbers) * _gather(_SIGNS, blocks["signs"])
    return Parts(q, float32(blocks["d"]), signed(2 * bit_fields(blocks["scales"], 4, 1) + 1))


@block_format(
    "IQ3_XXS",
    256,
    [D, ("qs", "u1", 64), ("signs", "<u4", 8)],
    levels=_with_signs(IQ3_XXS_LEVELS),
    sub_block=32,
    scales=(1, 31),
    gain=1 / 4,
)
def split_iq3_xxs(blocks: np.ndarray) -> Parts:
    """f16 d, 64 point numbers, and for each sub-block of 32 a word with four times 7 sign bits below a 4-bit scale.

    The points have four coordinates; seven sign bits serve eight values.

    value = d·(scale + ½)/2·±point
    """
    signs, scales = _signs_and_scales(blocks["signs"])
    return Parts(_gather(codebook("IQ3_XXS"), blocks["qs"]) * signs, float32(blocks["d"]) * np.float32(1 / 4), scales)


def _signs_and_scales(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words of four times 7 sign bits below a 4-bit scale, uint32 [b, k] → int8 signs [b, 32·k], int8 2·scale + 1."""
    *lead, k = words.shape
    sevens = words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & 127
    return _gather(_EVEN_SIGNS, sevens.reshape(*lead, 4 * k)), (2 * (words >> 28) + 1).astype(np.int8)


@block_format(
    "IQ2_S",
    256,
    [D, ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
    levels=_with_signs(IQ2_LEVELS),
    sub_block=16,
    scales=(1, 31),
    gain=1 / 8,
)
def split_iq2_s(blocks: np.ndarray) -> Parts:
    """f16 d, 32 point numbers of 10 bits (low bytes in qs, high pairs in qh), sign bits, 4-bit scales.

    The points have eight coordinates, the sub-blocks 16 values.

    value = d·(scale + ½)/4·±point
    """
    numbers = blocks["qs"] | bit_fields(blocks["qh"], 2, 1).astype(np.uint16) << 8
    q = _gather(codebook("IQ2_S"), numbers) * _gather(_SIGNS, blocks["signs"])
    scales = signed(2 * bit_fields(blocks["scales"], 4, 1) + 1)
    return Parts(q, float32(blocks["d"]) * np.float32(1 / 8), scales)


@block_format(
    "IQ2_XS",
    256,
    [D, ("qs", "<u2", 32), ("scales", "u1", 8)],
    levels=_with_signs(IQ2_LEVELS),
    sub_block=16,
    scales=(1, 31),
    gain=1 / 8,
)
def split_iq2_xs(blocks: np.ndarray) -> Parts:
    """f16 d, 32 words with a point number of 9 bits below 7 sign bits, 4-bit scales; otherwise as IQ2_S.

    value = d·(scale + ½)/4·±point
    """
    q = _gather(codebook("IQ2_XS"), blocks["qs"] & 511) * _gather(_EVEN_SIGNS, blocks["qs"] >> 9)
    scales = signed(2 * bit_fields(blocks["scales"], 4, 1) + 1)
    return Parts(q, float32(blocks["d"]) * np.float32(1 / 8), scales)


@block_format(
    "IQ2_XXS",
    256,
    [D, ("groups", [("points", "u1", 4), ("signs", "<u4")], 8)],
    levels=_with_signs(IQ2_LEVELS),
    sub_block=32,
    scales=(1, 31),
    gain=1 / 8,
)
def split_iq2_xxs(blocks: np.ndarray) -> Parts:
    """f16 d, and for each sub-block of 32 four point numbers and a word of signs and scale as in IQ3_XXS.

    value = d·(scale + ½)/4·±point
    """
    numbers = blocks["groups"]["points"].reshape(*blocks.shape, 32)
    signs, scales = _signs_and_scales(blocks["groups"]["signs"])
    return Parts(_gather(codebook("IQ2_XXS"), numbers) * signs, float32(blocks["d"]) * np.float32(1 / 8), scales)


# IQ1 shifts each coordinate −1, 0, 1 of its points by ⅛ up or down. Counted in eighths these are integers again, so
# that the shift, which IQ1_M chooses for every eight values, needs no offset.
IQ1_LEVELS = (-9, -7, -1, 1, 7, 9)


def _shifted_points(numbers: np.ndarray, down: np.ndarray) -> np.ndarray:
    """8·point + 1, or − 1 where `down` is set: uint16 [b, m] and uint8 [b, m] of 0 or 1 → int8 [b, 8·m]."""
    eighths = 8 * _gather(codebook("IQ1"), numbers)
    shift = signed(1 - 2 * down)
    return (eighths.reshape(*numbers.shape, 8) + shift[..., None]).reshape(eighths.shape)


@block_format(
    "IQ1_S",
    256,
    [D, ("qs", "u1", 32), ("qh", "<u2", 8)],
    levels=IQ1_LEVELS,
    sub_block=32,
    scales=(1, 15),
    gain=1 / 8,
)
def split_iq1_s(blocks: np.ndarray) -> Parts:
    """f16 d, the low bytes of 32 point numbers of 11 bits, and a word for each sub-block of 32.

    The word holds, from below, four times the high three bits of a number, a 3-bit scale, and the sign of the shift.

    value = d·(2·scale + 1)·(point ± ⅛)
    """
    high = blocks["qh"][..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7  # [b, 8, 4]
    numbers = blocks["qs"] | high.reshape(*blocks.shape, 32) << 8
    down = (blocks["qh"] >> 15).astype(np.uint8).repeat(4, axis=-1)
    scales = (2 * (blocks["qh"] >> 12 & 7) + 1).astype(np.int8)
    return Parts(_shifted_points(numbers, down), float32(blocks["d"]) * np.float32(1 / 8), scales)


def _iq1_m_d(blocks: np.ndarray) -> np.ndarray:
    """The f16 d that is spread over the top nibbles of the four words of scales, lowest first."""
    nibbles = blocks["scales"] >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16)
    return np.bitwise_or.reduce(nibbles, axis=-1).view(np.float16)


@block_format(
    "IQ1_M",
    256,
    [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)],
    levels=IQ1_LEVELS,
    sub_block=16,
    scales=(1, 15),
    gain=1 / 8,
)
def split_iq1_m(blocks: np.ndarray) -> Parts:
    """The low bytes of 32 point numbers of 11 bits, a nibble for each, four words of scales.

    The nibbles hold the high three bits of the number below the sign of its shift. A word of scales holds four times a
    3-bit scale, each for a sub-block of 16, below a nibble of the f16 d.

    value = d·(2·scale + 1)·(point ± ⅛)
    """
    nibbles = bit_fields(blocks["qh"], 4, 1)
    numbers = blocks["qs"] | (nibbles & 7).astype(np.uint16) << 8
    scales = blocks["scales"][..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7  # [b, 4, 4]
    scales = (2 * scales + 1).astype(np.int8).reshape(*blocks.shape, 16)
    d = float32(_iq1_m_d(blocks)) * np.float32(1 / 8)
    return Parts(_shifted_points(numbers, nibbles >> 3), d, scales)
