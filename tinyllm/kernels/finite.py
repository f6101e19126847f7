"""Looks through packed weights for infinities and NaN, as broken files have them; panels go in, a flag comes out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .abi import CHECK
from .dealing import draw
from .formats import TILES
from .simd import fma, integer, load_i64, mul, splat_f32, store_i64, sum_lanes, zero_f32
from .specialize import specialize, static
from .unpack import UNPACK, UNPACK_FLOAT


def check(args, thread, n_threads):
    """Set the flag if a scale, a minimum or a plain weight of some panels is not finite: times zero it is no zero."""
    panels = load_i64(args + static(A.panels))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    gap = load_i64(args + static(A.gap))
    tiles = load_i64(args + static(A.tiles))
    weights = load_i64(args + static(A.weights))
    while True:
        panel = draw(args, thread, n_threads, panels)
        if panel < 0:
            break
        tile = weights + panel * panel_bytes + panel // 2 * gap
        zeros = zero_f32()
        for _ in range(tiles):
            if static(FLOAT):
                for i in static(range(32)):
                    zeros = fma(load_row(tile, integer(i)), zero_f32(), zeros)
            else:
                for block in range(BLOCKS):
                    for half in static(range(HALVES)):
                        largest = mul(scale(tile, block, integer(half)), splat_f32(PEAK))
                        zeros = fma(largest, zero_f32(), zeros)
                        if static(MINIMUM):
                            zeros = fma(minimum(tile, block, integer(half)), zero_f32(), zeros)
            tile += TILE_BYTES
        if sum_lanes(zeros) != 0.0:
            store_i64(load_i64(args + static(A.flag)), 1)


def build_check(name: str) -> Callable:
    """`name` is the tile's format."""
    tile = TILES[name]
    fixed = {"A": CHECK, "FLOAT": tile.is_float, "TILE_BYTES": tile.bytes}
    if tile.is_float:
        return specialize(check, load_row=UNPACK_FLOAT[name], **fixed)
    unpack = UNPACK[name]
    return specialize(
        check,
        BLOCKS=tile.blocks,
        HALVES=tile.halves,
        MINIMUM=tile.minimum,
        # Scales that are powers of two can be so large that only their products are infinite.
        PEAK=np.float32(max(map(abs, tile.levels), default=1)),
        scale=unpack.scale,
        minimum=unpack.minimum,
        **fixed,
    )


KERNELS = {"check": build_check}
