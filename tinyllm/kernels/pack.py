"""Repacks weights from the file's rows of blocks into panels of 16 rows (see `formats.py`), without Numba.

Types that many files use have a compiled kernel each (`pack_blocks.py`), the others go through `dequantize.codes`. Rows
behind the last one stay zero: the memory comes zeroed, and a scale of zero makes a row of zeros.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .dequantize import BLOCK_FORMATS, Codes, codes
from .formats import BLOCK, FIELDS, PANEL_ROWS, Tile, tile_of

_FLOATS = ("F32", "F16", "BF16")
_LEGACY = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
KERNEL_TYPES = frozenset((*_FLOATS, *_LEGACY, *_K_QUANTS, "IQ4_NL", "IQ4_XS", "MXFP4"))

_EVERY_BYTE = 0x01010101
_WEIGHTS_AT_ONCE = 1 << 18  # bounds the memory that `pack_with_codes` takes, and keeps it in the cache


def kernel_of(type_name: str) -> str | None:
    """Name of the kernel (arguments: abi.PACK) that packs tensors of a file's type; None: `pack_with_codes` has to."""
    return f"pack_blocks.pack:{type_name}" if type_name in KERNEL_TYPES else None


def pack_with_codes(type_name: str, data: np.ndarray, n_inputs: int, panels: np.ndarray) -> None:
    """Pack a matrix of any block format: uint8 [rows, bytes_per_row] → zeroed, contiguous uint8 [panels · panel_bytes].

    Raises ValueError if the sizes do not fit together.
    """
    tile = tile_of(type_name)
    stored = _stored_codes(type_name)
    n_panels = -(-len(data) // PANEL_ROWS)
    tiles = panels.reshape(n_panels, n_inputs // (BLOCK * tile.blocks), tile.bytes)
    step = max(1, _WEIGHTS_AT_ONCE // (PANEL_ROWS * n_inputs))
    for first in range(0, n_panels, step):
        rows = data[first * PANEL_ROWS : (first + step) * PANEL_ROWS]
        _pack_tiles(tile, stored, codes(type_name, rows, n_inputs), tiles[first : first + step])


def _pack_tiles(tile: Tile, stored: np.ndarray, parts: Codes, tiles: np.ndarray) -> None:
    """`parts` of some panels' rows → their tiles, uint8 [panels, tiles_per_panel, tile.bytes]."""

    def by_tile(array: np.ndarray) -> np.ndarray:
        """[rows, m] → [panels, tiles_per_panel, m / tiles_per_panel, 16] with rows of zeros behind the last."""
        n_panels, n_tiles = tiles.shape[:2]
        padded = np.zeros((n_panels * PANEL_ROWS, array.shape[1]), array.dtype)
        padded[: len(array)] = array
        return padded.reshape(n_panels, PANEL_ROWS, n_tiles, -1).transpose(0, 2, 3, 1)

    def put(at: int, values: np.ndarray) -> None:
        flat = np.ascontiguousarray(values).reshape(*tiles.shape[:2], -1).view(np.uint8)
        tiles[..., at : at + flat.shape[-1]] = flat

    # Four codes are one word, and a word of each row makes a group.
    words = np.ascontiguousarray(by_tile(stored[parts.codes].view(np.uint32)))
    words = words.reshape(*tiles.shape[:2], tile.blocks, 8, PANEL_ROWS)
    vectors = np.zeros((*tiles.shape[:2], tile.blocks, tile.bits, PANEL_ROWS), np.uint32)
    for group, fields in enumerate(FIELDS[tile.bits]):
        for vector, shift, mask in fields:
            vectors[..., vector, :] |= (words[..., group, :] & np.uint32(mask * _EVERY_BYTE)) << np.uint32(shift)
    put(0, vectors)

    if tile.integers == "u4":
        put(tile.integers_at, by_tile(parts.scales | parts.mins << 4))
    elif tile.integers:
        put(tile.integers_at, by_tile(parts.scales))
        if tile.minimum:
            put(tile.integer_minima_at, by_tile(parts.mins.view(np.uint8)))

    per_tile = tile.halves if tile.integers is None else 1
    repeats = tiles.shape[1] * per_tile // parts.d.shape[1]
    put(tile.scales_at, by_tile(_encode(tile.scale, parts.d, tile.gain).repeat(repeats, axis=1)))
    if tile.minimum:
        put(tile.minima_at, by_tile(_encode(tile.scale, -parts.dmin, 1.0)))


@cache
def _stored_codes(type_name: str) -> np.ndarray:
    """uint8 [256]: what the tile stores for each of the file's codes."""
    tile, form = tile_of(type_name), BLOCK_FORMATS[type_name]
    values = np.arange(256) - form.zero
    if not tile.levels:
        return (values + tile.zero).astype(np.uint8)
    table = np.zeros(256, np.uint8)
    for index, level in reversed(list(enumerate(tile.levels))):
        table[level + form.zero] = index
    return table


def _encode(scale_type: str, values: np.ndarray, gain: float) -> np.ndarray:
    """Floats divided by `gain` as the tile's type, which holds them exactly."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = values / np.float32(gain)
        if scale_type == "f16":
            return values.astype(np.float16)
        if scale_type == "e8m0":  # 2^(e − 128)
            return (np.frexp(values)[1] + 127).astype(np.uint8)
        if scale_type == "ue4m3":  # as f16 the bits above mantissa and exponent are zero
            return (np.ldexp(values, -7).astype(np.float16).view(np.uint16) >> 7).astype(np.uint8)
        return values
