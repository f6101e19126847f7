"""Kernels that repack weights from the file's rows of blocks into panels of 16 rows, one per file type.

What differs by type is where a block keeps its codes and scales; the layouts are explained in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .abi import PACK
from .dequantize import BLOCK_FORMATS, PLAIN_TYPES
from .formats import FIELDS, PANEL_ROWS, SCALE_BYTES, TILES
from .simd import atomic_add, integer, load_i64, load_u8, load_u16, load_u32, store_i32, store_u8, store_u16
from .specialize import inline, specialize, static

_EVERY_BYTE = 0x01010101
_LOW_NIBBLES = 0x0F0F0F0F


def pack_blocks(args, thread, n_threads):
    """Panels of a quantized matrix. A word is 4 codes of a row, neighbours in the file's order, one in each byte."""
    rows = load_i64(args + static(A.rows))
    row_bytes = load_i64(args + static(A.row_bytes))
    source = load_i64(args + static(A.source))
    panels = load_i64(args + static(A.panels))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    tiles = load_i64(args + static(A.tiles))
    weights = load_i64(args + static(A.weights))
    while True:
        panel = atomic_add(args, 1)
        if panel >= panels:
            break
        for row in range(min(PANEL_ROWS, rows - panel * PANEL_ROWS)):
            block = source + (panel * PANEL_ROWS + row) * row_bytes
            tile = weights + panel * panel_bytes
            for _ in range(tiles):
                for index in range(static(T.blocks)):
                    for group in static(range(8)):
                        word[group] = read_word(block, index, integer(group))
                    at = tile + index * static(T.code_bytes) + 4 * row
                    for vector in static(range(T.bits)):
                        packed = 0
                        for part in static(PARTS[vector]):
                            packed |= (word[part[0]] & static(part[1])) << static(part[2])
                        store_i32(at + 64 * vector, packed)
                if static(T.integers is not None):
                    for index in range(static(T.blocks * T.halves)):
                        at = tile + static(T.integers_at) + 16 * index + row
                        store_u8(at, read_scale(block, index))
                        if static(T.minimum and T.integers != "u4"):
                            at = tile + static(T.integer_minima_at) + 16 * index + row
                            store_u8(at, read_minimum(block, index))
                if static(SCALE_BYTES[T.scale] == 1):
                    store_u8(tile + static(T.scales_at) + row, load_u8(block + static(FLOATS[0])))
                else:
                    store_u16(tile + static(T.scales_at) + 2 * row, load_u16(block + static(FLOATS[0])))
                if static(T.minimum):
                    minimum = load_u16(block + static(FLOATS[1])) ^ SIGN
                    store_u16(tile + static(T.minima_at) + 2 * row, minimum)
                block += static(BLOCK_BYTES)
                tile += static(T.bytes)


def pack_floats(args, thread, n_threads):
    """Panels of a float matrix: element i of a row goes to [i][row]."""
    rows = load_i64(args + static(A.rows))
    n_inputs = load_i64(args + static(A.n_inputs))
    row_bytes = load_i64(args + static(A.row_bytes))
    source = load_i64(args + static(A.source))
    panels = load_i64(args + static(A.panels))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    weights = load_i64(args + static(A.weights))
    while True:
        panel = atomic_add(args, 1)
        if panel >= panels:
            break
        for row in range(min(PANEL_ROWS, rows - panel * PANEL_ROWS)):
            element = source + (panel * PANEL_ROWS + row) * row_bytes
            target = weights + panel * panel_bytes + row * static(ELEMENT)
            for _ in range(n_inputs):
                move(target, element)
                element += static(ELEMENT)
                target += static(PANEL_ROWS * ELEMENT)


@inline
def move_u16(target, source):
    store_u16(target, load_u16(source))


@inline
def move_u32(target, source):
    store_i32(target, load_u32(source))


@inline
def spread_bits(bits):
    """The low four bits of an integer as bit 0 of four bytes."""
    return (bits & 15) * 0x00204081 & _EVERY_BYTE


@inline
def nibbles(qs, group):
    """Word of 16 bytes whose low nibbles are inputs 0–15, the high ones inputs 16–31."""
    return load_u32(qs + 4 * (group & 3)) >> 4 * (group >> 2) & _LOW_NIBBLES


@inline
def word_q8_0(block, index, group):
    return load_u32(block + 2 + 4 * group)


@inline
def word_q4_0(block, index, group):
    return nibbles(block + 2, group)


@inline
def word_q4_1(block, index, group):
    return nibbles(block + 4, group)


@inline
def word_q5_0(block, index, group):
    return nibbles(block + 6, group) | spread_bits(load_u32(block + 2) >> 4 * group) << 4


@inline
def word_q5_1(block, index, group):
    return nibbles(block + 8, group) | spread_bits(load_u32(block + 4) >> 4 * group) << 4


@inline
def word_mxfp4(block, index, group):
    return nibbles(block + 1, group)


@inline
def word_iq4_xs(block, index, group):
    return nibbles(block + 8 + 16 * index, group)


@inline
def bit_pairs(qs, index, group):
    """Word of 64 bytes: 32 bytes hold 128 inputs, their lowest pairs of bits inputs 0–31, and so on."""
    return load_u32(qs + 32 * (index >> 2) + 4 * group) >> 2 * (index & 3) & 3 * _EVERY_BYTE


@inline
def word_q2_k(block, index, group):
    return bit_pairs(block + 16, index, group)


@inline
def word_q3_k(block, index, group):
    high = load_u32(block + 4 * group) >> index & _EVERY_BYTE
    return bit_pairs(block + 32, index, group) | high << 2


@inline
def nibbles_q4_k(qs, index, group):
    """Word of 128 bytes: 32 bytes hold one block in their low nibbles and the next in their high ones."""
    return load_u32(qs + 32 * (index >> 1) + 4 * group) >> 4 * (index & 1) & _LOW_NIBBLES


@inline
def word_q4_k(block, index, group):
    return nibbles_q4_k(block + 16, index, group)


@inline
def word_q5_k(block, index, group):
    high = load_u32(block + 16 + 4 * group) >> index & _EVERY_BYTE
    return nibbles_q4_k(block + 48, index, group) | high << 4


@inline
def word_q6_k(block, index, group):
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


@dataclass(frozen=True)
class FileBlock:
    """Where a type's blocks keep what a tile of one row is made of.

    word(block, index, group): 4 codes of the 32 inputs number `index`. scale(block, index), minimum(block, index): its
    integers, as the tile stores them. `floats`: the fields of the scale and the minimum, whose sign `negate` turns.
    """

    word: Callable
    scale: Callable | None = None
    minimum: Callable | None = None
    floats: tuple[str, ...] = ("d",)
    negate: bool = False


FILE_BLOCKS = {
    "Q8_0": FileBlock(word_q8_0),
    "Q4_0": FileBlock(word_q4_0),
    "Q4_1": FileBlock(word_q4_1, floats=("d", "m")),
    "Q5_0": FileBlock(word_q5_0),
    "Q5_1": FileBlock(word_q5_1, floats=("d", "m")),
    "Q2_K": FileBlock(word_q2_k, scale_q2_k, floats=("d", "dmin"), negate=True),
    "Q3_K": FileBlock(word_q3_k, scale_q3_k),
    "Q4_K": FileBlock(word_q4_k, scale_q4_k, minimum_q4_k, floats=("d", "dmin"), negate=True),
    "Q5_K": FileBlock(word_q5_k, scale_q4_k, minimum_q4_k, floats=("d", "dmin"), negate=True),
    "Q6_K": FileBlock(word_q6_k, scale_q6_k),
    "IQ4_NL": FileBlock(word_q4_0),
    "IQ4_XS": FileBlock(word_iq4_xs, scale_iq4_xs),
    "MXFP4": FileBlock(word_mxfp4, floats=("e",)),
}


def build_pack(name: str) -> Callable:
    """The kernel for a file type: arguments abi.PACK."""
    if name in PLAIN_TYPES:
        element = PLAIN_TYPES[name].itemsize
        return specialize(pack_floats, A=PACK, ELEMENT=element, move=move_u32 if element == 4 else move_u16)
    block, form, tile = FILE_BLOCKS[name], BLOCK_FORMATS[name], TILES[name]
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(tile.bits)]
    for group, fields in enumerate(FIELDS[tile.bits]):
        for vector, shift, mask in fields:
            parts[vector].append((group, mask * _EVERY_BYTE, shift))
    return specialize(
        pack_blocks,
        A=PACK,
        T=tile,
        PARTS=parts,
        FLOATS=[form.layout.fields[field][1] for field in block.floats],
        SIGN=0x8000 if block.negate else 0,
        BLOCK_BYTES=form.n_bytes,
        read_word=block.word,
        read_scale=block.scale,
        read_minimum=block.minimum,
    )


KERNELS = {"pack": build_pack}
