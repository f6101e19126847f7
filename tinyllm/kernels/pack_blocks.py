"""Kernels that repack weights from the file's rows of blocks into panels of 16 rows, one per file type.

What differs by type is where a block keeps its codes and scales; the layouts are explained in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from .abi import PACK
from .block_format import BlockFormat
from .dequantize import BLOCK_FORMATS, PLAIN_TYPES
from .formats import BLOCK, FIELDS, PANEL_ROWS, SCALE_BYTES, tile_of
from .pack_words import PLAIN_BLOCKS
from .pack_words_iq import IQ_BLOCKS
from .simd import atomic_add, integer, load_i64, load_u8, load_u16, load_u32, store_i32, store_u8, store_u16
from .specialize import inline, specialize, static

_EVERY_BYTE = 0x01010101


def pack_blocks(args, thread, n_threads):
    """Panels of a quantized matrix. A word is 4 codes of a row, neighbours in the file's order, one in each byte."""
    rows = load_i64(args + static(A.rows))
    row_bytes = load_i64(args + static(A.row_bytes))
    source = load_i64(args + static(A.source))
    panels = load_i64(args + static(A.panels))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    gap = load_i64(args + static(A.gap))
    tiles = load_i64(args + static(A.tiles))
    weights = load_i64(args + static(A.weights))
    table = load_i64(args + static(A.table))
    while True:
        panel = atomic_add(args, 1)
        if panel >= panels:
            break
        for row in range(min(PANEL_ROWS, rows - panel * PANEL_ROWS)):
            block = source + (panel * PANEL_ROWS + row) * row_bytes
            tile = weights + panel * panel_bytes + panel // 2 * gap
            for _ in range(tiles // static(TILES_PER_BLOCK)):
                for number in range(static(TILES_PER_BLOCK)):
                    for index in range(static(T.blocks)):
                        at = tile + index * static(T.code_bytes) + 4 * row
                        for group in static(range(8)):
                            word[group] = read_word(block, number + index, integer(group), table)
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
                    for half in range(static(T.floats)):
                        at = tile + static(T.scales_at) + static(FLOAT_BYTES) * (PANEL_ROWS * half + row)
                        store_float(at, read_float(block, number * static(T.floats) + half))
                    if static(T.minimum):
                        store_float(
                            tile + static(T.minima_at) + static(FLOAT_BYTES) * row, read_float_minimum(block, 0)
                        )
                    tile += static(T.bytes)
                block += static(BLOCK_BYTES)


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


FILE_BLOCKS = PLAIN_BLOCKS | IQ_BLOCKS

_LOAD = {1: load_u8, 2: load_u16, 4: load_u32}
_STORE = {1: store_u8, 2: store_u16, 4: store_i32}


def _float_reader(form: BlockFormat, field: str, flip: int = 0) -> Callable:
    """float(block, index): the bits of a field, some of them flipped."""
    dtype, offset = form.layout.fields[field][:2]
    load = _LOAD[dtype.itemsize]

    @inline
    def read(block, index):
        return load(block + offset) ^ flip

    return read


def build_pack(name: str) -> Callable:
    """The kernel for a file type: arguments abi.PACK."""
    if name in PLAIN_TYPES:
        element = PLAIN_TYPES[name].itemsize
        return specialize(pack_floats, A=PACK, ELEMENT=element, move=move_u32 if element == 4 else move_u16)
    block, form, tile = FILE_BLOCKS[name], BLOCK_FORMATS[name], tile_of(name)
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(tile.bits)]
    for group, fields in enumerate(FIELDS[tile.bits]):
        for vector, shift, mask in fields:
            parts[vector].append((group, mask * _EVERY_BYTE, shift))
    float_bytes = SCALE_BYTES[tile.scale]
    return specialize(
        pack_blocks,
        A=PACK,
        T=tile,
        PARTS=parts,
        FLOAT_BYTES=float_bytes,
        TILES_PER_BLOCK=form.n_values // (BLOCK * tile.blocks),
        BLOCK_BYTES=form.n_bytes,
        read_word=block.word,
        read_scale=block.scale,
        read_minimum=block.minimum,
        read_float=block.float or _float_reader(form, block.d),
        read_float_minimum=_float_reader(form, block.m or block.negative_m, 0x8000 if block.negative_m else 0)
        if tile.minimum
        else None,
        store_float=_STORE[float_bytes],
    )


KERNELS = {"pack": build_pack}
