"""How weights get from the file's rows of blocks into panels of 16 rows (see `formats.py`), without Numba.

A kernel of `pack_blocks.py` does the work. Rows behind the last one stay zero, for the memory comes zeroed and a scale
of zero makes a row of zeros.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .codebooks import codebook
from .formats import tile_of

_CODEBOOKS = {name: name for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")}
_CODEBOOKS |= {"IQ1_S": "IQ1", "IQ1_M": "IQ1"}


def kernel_of(type_name: str) -> str:
    """Name of the kernel (arguments: abi.PACK) that packs tensors of a file's type.

    Raises UnsupportedModelError if no tile holds them.
    """
    tile_of(type_name)
    return f"pack_blocks.pack:{type_name}"


@cache
def table_of(type_name: str) -> np.ndarray | None:
    """The table that the type's kernel reads: its codebook's points as numbers of the tile's levels.

    uint8 [n_points, dims], read-only; of IQ1 the points are those with the shift down.
    """
    if type_name not in _CODEBOOKS:
        return None
    points = codebook(_CODEBOOKS[type_name]).astype(np.int64)
    if _CODEBOOKS[type_name] == "IQ1":
        points = 8 * points - 1
    numbers = {level: number for number, level in enumerate(tile_of(type_name).levels)}
    table = np.vectorize(numbers.__getitem__, otypes=[np.uint8])(points)
    table.setflags(write=False)
    return table
