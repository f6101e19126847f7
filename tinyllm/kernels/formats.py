"""The tile layout of each weight format: what a panel of 16 output rows looks like in memory, without Numba.

A tile holds a block of 32 inputs, or a super-block of 8 of them, for 16 rows: vectors of 64 bytes with the codes of 4
consecutive inputs of each row, then the rows' integer scales and minima, then their float scales and minima.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModelError
from .dequantize import BLOCK_FORMATS

PANEL_ROWS = 16
# File formats whose embedding rows a kernel decodes (see `embed.py`).
EMBEDDED_BY_KERNEL = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
BLOCK = 32

SCALE_BYTES = {"f32": 4, "f16": 2, "e8m0": 1, "ue4m3": 1}


@dataclass(frozen=True)
class Tile:
    """Geometry of a tile: value = scale · (code − zero) + minimum, or scale · levels[code] + minimum.

    scale is a float, or `gain` times a float for the whole tile times an integer for each block or half; minimum
    likewise, without a gain.
    """

    name: str
    bits: int
    """Width of the stored codes; 8: signed bytes, 16 and 32: floats without scales."""
    zero: int = 0
    levels: tuple[int, ...] = ()
    blocks: int = 1
    """Blocks of 32 inputs in a tile."""
    halves: int = 1
    """2 where scales belong to 16 inputs."""
    minimum: bool = False
    scale: str = "f16"
    """Type of the float scales and minima: a key of SCALE_BYTES."""
    integers: str | None = None
    """Type of the integer scales and minima: i8, u8, or u4 (a byte holds the scale and, above it, the minimum)."""
    gain: float = 1.0

    @property
    def is_float(self) -> bool:
        return self.bits >= 16

    @property
    def floats(self) -> int:
        """Float scales of a row: one, unless halves have floats of their own."""
        return 1 if self.integers else self.halves

    @property
    def code_bytes(self) -> int:
        """Size of a block's codes."""
        return PANEL_ROWS * BLOCK * self.bits // 8

    @property
    def integers_at(self) -> int:
        """Offset of the integer scales: 16 bytes for each half of each block."""
        return self.blocks * self.code_bytes

    @property
    def integer_minima_at(self) -> int:
        return self.integers_at + (0 if self.integers == "u4" else self._integer_bytes)

    @property
    def scales_at(self) -> int:
        """Offset of the 16 float scales, for each half if there are no integer scales."""
        last = self.integer_minima_at if self.minimum else self.integers_at
        return last + self._integer_bytes

    @property
    def minima_at(self) -> int:
        return self.scales_at + self._float_bytes

    @property
    def bytes(self) -> int:
        """Size of a tile, that is of 16 rows."""
        if self.is_float:
            return self.code_bytes
        return self.minima_at + (self._float_bytes if self.minimum else 0)

    @property
    def bits_per_weight(self) -> float:
        return self.bytes * 8 / (PANEL_ROWS * BLOCK * self.blocks)

    def panel_bytes(self, n_inputs: int) -> int:
        """Bytes of 16 rows; the last tile is padded with zeros."""
        return -(-n_inputs // (BLOCK * self.blocks)) * self.bytes

    @property
    def _integer_bytes(self) -> int:
        return PANEL_ROWS * self.blocks * self.halves if self.integers else 0

    @property
    def _float_bytes(self) -> int:
        return PANEL_ROWS * SCALE_BYTES[self.scale] * self.floats


def _with_levels(name: str, bits: int, middle: tuple[int, ...] = (), **layout: Any) -> Tile:
    """The tile of a format whose codes are the numbers of levels, perhaps with more levels in their middle."""
    form = BLOCK_FORMATS[name]
    half = len(form.levels) // 2
    return Tile(name, bits, levels=form.levels[:half] + middle + form.levels[half:], gain=form.gain, **layout)


# The six levels of IQ2 are filled up to eight: the complement of a number is then the number of the negative level.
_UNUSED = (0, 0)

TILES = {
    tile.name: tile
    for tile in (
        Tile("F32", 32),
        Tile("F16", 16),
        Tile("BF16", 16),
        Tile("Q8_0", 8),
        Tile("Q8_K", 8, scale="f32", blocks=8),
        Tile("Q4_0", 4, zero=8),
        Tile("Q4_1", 4, minimum=True),
        Tile("Q5_0", 5, zero=16),
        Tile("Q5_1", 5, minimum=True),
        Tile("Q2_0", 2, zero=1),
        Tile("TQ2_0", 2, zero=1, blocks=8),
        Tile("Q2_K", 2, blocks=8, halves=2, minimum=True, integers="u4"),
        Tile("Q3_K", 3, zero=4, blocks=8, halves=2, integers="i8"),
        Tile("Q4_K", 4, blocks=8, minimum=True, integers="u8"),
        Tile("Q5_K", 5, blocks=8, minimum=True, integers="u8"),
        Tile("Q6_K", 6, zero=32, blocks=8, halves=2, integers="i8"),
        _with_levels("MXFP4", 4, scale="e8m0"),
        _with_levels("NVFP4", 4, scale="ue4m3", halves=2),
        _with_levels("IQ4_NL", 4),
        _with_levels("IQ4_XS", 4, blocks=8, integers="i8"),
        _with_levels("IQ3_S", 4, blocks=8, integers="u8"),
        _with_levels("IQ3_XXS", 4, blocks=8, integers="u8"),
        _with_levels("IQ2_S", 3, _UNUSED, blocks=8, halves=2, integers="u8"),
        _with_levels("IQ2_XXS", 3, _UNUSED, blocks=8, integers="u8"),
        _with_levels("IQ1_S", 3, blocks=8, integers="u8"),
        _with_levels("IQ1_M", 3, blocks=8, halves=2, integers="u8"),
    )
}

# File types that share the tile of another.
_TILE_OF = {"Q8_1": "Q8_0", "Q1_0": "Q2_0", "TQ1_0": "TQ2_0", "IQ2_XS": "IQ2_S"}
TILE_OF = {name: TILES[_TILE_OF.get(name, name)] for name in ("F32", "F16", "BF16", *BLOCK_FORMATS)}


def tile_of(type_name: str) -> Tile:
    """The tile that holds tensors of a file's type. Raises UnsupportedModelError if none does."""
    if type_name not in TILE_OF:
        message = f"weights of type {type_name} cannot be multiplied; use a file of another quantization"
        raise UnsupportedModelError(message)
    return TILE_OF[type_name]


# Where the codes of a block lie in its vectors of 64 bytes, by their width: for each of the 8 groups of 4 inputs, its
# fields (vector, shift, mask). A code is its fields, shifted right and masked, put together. Codes stay whole as far as
# possible, for the lowest ones in a byte cost one operation; the bits above them make up the remaining groups.
FIELDS = {
    2: tuple(((group // 4, 2 * (group % 4), 3),) for group in range(8)),
    3: (
        ((0, 0, 7),),
        ((0, 3, 7),),
        ((0, 6, 3), (1, 1, 4)),
        ((1, 0, 7),),
        ((2, 0, 7),),
        ((2, 3, 7),),
        ((2, 6, 3), (1, 5, 4)),
        ((1, 4, 7),),
    ),
    4: tuple(((group % 4, group // 4 * 4, 15),) for group in range(8)),
    5: (
        ((0, 0, 31),),
        ((1, 0, 31),),
        ((0, 5, 7), (1, 2, 24)),
        ((2, 0, 31),),
        ((3, 0, 31),),
        ((2, 5, 7), (3, 2, 24)),
        ((4, 0, 31),),
        ((4, 5, 7), (1, 4, 8), (3, 3, 16)),
    ),
    6: (
        ((0, 0, 63),),
        ((1, 0, 63),),
        ((2, 0, 63),),
        ((0, 6, 3), (1, 4, 12), (2, 2, 48)),
        ((3, 0, 63),),
        ((4, 0, 63),),
        ((5, 0, 63),),
        ((3, 6, 3), (4, 4, 12), (5, 2, 48)),
    ),
    8: tuple(((group, 0, 255),) for group in range(8)),
}
