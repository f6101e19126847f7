"""Repacks weights from the file's rows of blocks into panels of 16 rows (see `formats.py`), one kernel per file format.

Rows behind the last one stay zero: the memory comes zeroed, and a scale of zero makes a row of zeros.
"""

from __future__ import annotations

from .abi import PACK
from .simd import atomic_add, load_i64, load_u16, load_u32, store_i32, store_u16
from .specialize import specialize, static
from .unpack import inline


def pack_blocks(args, thread, n_threads):
    """Panels of a quantized matrix: `pack_block(source, tile, row)` moves one block of one row to its places."""
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
        for row in range(min(16, rows - panel * 16)):
            block = source + (panel * 16 + row) * row_bytes
            tile = weights + panel * panel_bytes
            for _ in range(tiles):
                pack_block(block, tile, row)
                block += static(BLOCK_BYTES)
                tile += static(TILE_BYTES)


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
        for row in range(min(16, rows - panel * 16)):
            element = source + (panel * 16 + row) * row_bytes
            target = weights + panel * panel_bytes + row * static(ELEMENT)
            for _ in range(n_inputs):
                move(target, element)
                element += static(ELEMENT)
                target += static(16 * ELEMENT)


@inline
def move_u16(target, source):
    store_u16(target, load_u16(source))


@inline
def move_u32(target, source):
    store_i32(target, load_u32(source))


@inline
def pack_q8_0(block, tile, row):
    """f16 scale, 32 signed bytes."""
    for word in range(8):
        store_i32(tile + 64 * word + 4 * row, load_u32(block + 2 + 4 * word))
    store_u16(tile + 512 + 2 * row, load_u16(block))


@inline
def pack_q4_0(block, tile, row):
    """f16 scale, 16 bytes of nibbles: low ones are inputs 0-15, high ones 16-31, as in the tile."""
    for word in range(4):
        store_i32(tile + 64 * word + 4 * row, load_u32(block + 2 + 4 * word))
    store_u16(tile + 256 + 2 * row, load_u16(block))


@inline
def pack_q4_1(block, tile, row):
    """f16 scale, f16 minimum, nibbles as in Q4_0."""
    for word in range(4):
        store_i32(tile + 64 * word + 4 * row, load_u32(block + 4 + 4 * word))
    store_u16(tile + 256 + 2 * row, load_u16(block))
    store_u16(tile + 288 + 2 * row, load_u16(block + 2))


# Per file format: the step, bytes of a file block, bytes of the tile it goes to.
PACKERS = {
    "Q8_0": (pack_q8_0, 34, 544),
    "Q4_0": (pack_q4_0, 18, 288),
    "Q4_1": (pack_q4_1, 20, 320),
}


def build_pack(name: str):
    if name in ("F16", "BF16", "F32"):
        size = 4 if name == "F32" else 2
        return specialize(pack_floats, A=PACK, ELEMENT=size, move=move_u32 if size == 4 else move_u16)
    step, block_bytes, tile_bytes = PACKERS[name]
    return specialize(pack_blocks, A=PACK, pack_block=step, BLOCK_BYTES=block_bytes, TILE_BYTES=tile_bytes)


def kernel_of(type_name: str) -> str | None:
    """Name of the kernel that packs tensors of this type; None where `pack_with_codes` has to."""
    return f"pack.pack:{type_name}"


KERNELS = {"pack": build_pack}
