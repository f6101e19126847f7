"""The tile layout of each weight format: what a panel of 16 output rows looks like in memory, without Numba.

A tile holds one block of 32 inputs, or a super-block of 8 of them, for 16 rows: vectors of 64 bytes with 4 consecutive
inputs of each row, then the rows' scales (and minima). `unpack.py` has the step that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedModelError

PANEL_ROWS = 16
BLOCK = 32


@dataclass(frozen=True)
class Tile:
    """Geometry of a tile.

    `bits`: width of the unsigned codes (8: signed bytes). `zero`: constant subtracted from each code.
    `blocks`: blocks of 32 inputs per tile. `halves`: 2 where scales belong to 16 inputs. `minimum`: a true offset exists.
    `bytes`: size for 16 rows. Float tiles have `bits` 16 or 32 and no scales.
    """

    name: str
    bits: int
    zero: int
    blocks: int
    halves: int
    minimum: bool
    bytes: int

    @property
    def is_float(self) -> bool:
        return self.bits >= 16

    @property
    def bits_per_weight(self) -> float:
        return self.bytes * 8 / (PANEL_ROWS * BLOCK * self.blocks)

    def panel_bytes(self, n_inputs: int) -> int:
        """Bytes of 16 rows; the last tile is padded with zeros."""
        return -(-n_inputs // (BLOCK * self.blocks)) * self.bytes


TILES = {
    tile.name: tile
    for tile in (
        Tile("F32", 32, 0, 1, 1, False, 2048),
        Tile("F16", 16, 0, 1, 1, False, 1024),
        Tile("BF16", 16, 0, 1, 1, False, 1024),
        Tile("Q8_0", 8, 0, 1, 1, False, 512 + 32),
        Tile("Q4_0", 4, 8, 1, 1, False, 256 + 32),
        Tile("Q4_1", 4, 0, 1, 1, True, 256 + 64),
    )
}


def tile_of(type_name: str) -> Tile:
    """The tile that holds tensors of a file's type. Raises UnsupportedModelError if none does."""
    if type_name not in TILES:
        raise UnsupportedModelError(f"weights of type {type_name} cannot be multiplied; use a file of another quantization")
    return TILES[type_name]
