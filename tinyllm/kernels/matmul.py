"""Matrix products over tiles of 16 rows: y = W x for one row of activations (GEMV) and for many (GEMM).

One GEMV and one GEMM serve every quantized format, one pair every float format. Both sum the blocks of a row in the
same order with the same operations, so a token's result does not depend on how many tokens were computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from .abi import LINEAR, RECORD, RECORD_NEGATIVE, RECORD_SCALE, RECORD_SUM, RECORD_SUMS, SPAN, STREAMS
from .dealing import draw
from .dot import make_dot
from .formats import TILES
from .simd import (
    TARGET,
    add,
    broadcast4,
    broadcast_f32,
    call_kernel,
    fma,
    integer,
    load_f32,
    load_f32x16,
    load_i8x64,
    load_i64,
    mul,
    opaque,
    prefetch,
    splat_f32,
    store_f32x16,
    store_i8x64,
    to_f32,
    zero_f32,
)
from .specialize import inline, specialize, static
from .unpack import UNPACK, UNPACK_FLOAT

# Tokens whose accumulators are held in registers at a time; chosen by measurement.
GEMM_WIDTHS = (12, 4, 1) if TARGET.wide_registers else (4, 1)
FLOAT_WIDTHS = (12, 4, 1) if TARGET.wide_registers else (6, 3, 1)
# Groups of 4 inputs that are unrolled: with 32 registers all of a block; with 16 the others stay a loop, or LLVM
# reorders them and spills. Where sums start at zero, the first products need no addition.
UNROLL = 8 if TARGET.wide_registers else 2
# Distance in bytes at which the GEMV asks for its weights, in several streams and in one; the hardware stops at page
# borders. Where a tile holds several blocks, their scales lie behind all codes, and the first block needs them: it asks
# a whole tile further ahead. A line that is asked for twice costs more than it is worth.
PREFETCH = {STREAMS: 1024, 1: 2048}
# Blocks of 32 inputs that are unpacked at a time: codes and scales stay in the first-level cache.
CHUNK_BLOCKS = 24
# Most tokens per pass over the chunk, a multiple of 4: their activations stay in the second-level cache.
CHUNK_TOKENS = 128


@inline
def finish(acc, y, bias, accumulate, scale):
    """Write y = scale · (acc + bias), or add it to y."""
    if bias != 0:
        acc = add(acc, load_f32x16(bias))
    if accumulate != 0:
        acc = fma(acc, splat_f32(scale), load_f32x16(y))
    else:
        acc = mul(acc, splat_f32(scale))
    store_f32x16(y, acc)


@inline
def row_address(base, number_at, stride):
    """Address of the row whose number is in memory at `number_at` (0: the first)."""
    return base if number_at == 0 else base + load_i64(number_at) * stride


@inline
def place_of(panel, twin):
    """Where in a row a panel's outputs go, in panels: `twin` matrices lie in turns of two panels."""
    if twin == 0:
        return panel
    return panel // 4 * 2 + panel % 2 + (twin if panel % 4 >= 2 else 0)


@inline
def go_on(then, then_arguments, row_start, row_end, panel_start, panel_end):
    """Hand what is complete of twins to the kernel that goes on with it, as long as it is in the cache."""
    if then != 0:
        call_kernel(then, then_arguments, row_start * SPAN + row_end, 8 * (panel_start * SPAN + panel_end))


@inline
def count_units(panels, stream, turn):
    """Units of work of a product with one row: `turn` panels of each stream, then as many of what is left over."""
    return stream // turn + (panels - STREAMS * stream + turn - 1) // turn


@inline
def first_panel(unit, stream, turn):
    """The first panel of a unit, of the first stream if it is one of streams."""
    return unit * turn + ((STREAMS - 1) * stream if unit * turn >= stream else 0)


def gemv(args, thread, n_threads):
    """One row of quantized activations times a quantized matrix.

    Panels are walked in several streams, each through a part of the matrix of its own, and what is left over in one.
    """
    stream = load_i64(args + static(A.stream))
    turn = load_i64(args + static(A.turn))
    panels = load_i64(args + static(A.panels))
    tiles = load_i64(args + static(A.tiles))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    weights = load_i64(args + static(A.weights))
    first_row = load_i64(args + static(A.first_row))
    x = row_address(load_i64(args + static(A.x)), first_row, load_i64(args + static(A.x_stride)))
    if load_i64(args + static(A.private)) != 0:
        x += thread * load_i64(args + static(A.x_stride))
    y = row_address(load_i64(args + static(A.y)), first_row, load_i64(args + static(A.y_stride)))
    bias = load_i64(args + static(A.bias))
    accumulate = load_i64(args + static(A.accumulate))
    out_scale = load_f32(args + static(A.scale))
    twin = load_i64(args + static(A.twin))
    then = load_i64(args + static(A.then))
    then_arguments = load_i64(args + static(A.then_arguments))
    n_units = count_units(panels, stream, turn)
    while True:
        unit = draw(args, thread, n_threads, n_units)
        if unit < 0:
            break
        start = first_panel(unit, stream, turn)
        end = min(start + turn, panels)
        for streams in static((STREAMS, 1)):
            if (start < stream) == static(streams > 1):
                for s in static(range(streams)):
                    tile[s] = weights + (start + s * stream) * panel_bytes
                    asked[s] = (tile[s] + static(PREFETCH[streams])) & -64
                for panel in range(start, end):
                    record = x
                    for s in static(range(streams)):
                        acc[s] = zero_f32()
                    for _ in range(tiles):
                        for block in range(BLOCKS):
                            factor = broadcast_f32(record + SCALE)
                            for s in static(range(streams)):
                                for line in static(range(BLOCK_BYTES // 64)):
                                    prefetch(asked[s] + 64 * line)
                                asked[s] += static(BLOCK_BYTES // 64 * 64)
                                if static(BLOCK_BYTES % 64):
                                    behind = tile[s] + block * BLOCK_BYTES + static(BLOCK_BYTES + PREFETCH[streams])
                                    if asked[s] < behind - 63:
                                        prefetch(asked[s])
                                        asked[s] += 64
                                codes_at = tile[s] + block * CODE_STRIDE
                                for half in static(range(HALVES)):
                                    products = dot_start(record + static(NEGATIVE[half]))
                                    for group in static(GROUPS[half]):
                                        products = dot(products, codes[group](codes_at), broadcast4(record + 4 * group))
                                    row_scale = mul(scale(tile[s], block, integer(half)), factor)
                                    acc[s] = fma(row_scale, to_f32(dot_close(products)), acc[s])
                                    if static(MINIMUM):
                                        sums = broadcast_f32(record + static(SUMS[half]))
                                        acc[s] = fma(minimum(tile[s], block, integer(half)), sums, acc[s])
                            record += RECORD
                        for s in static(range(streams)):
                            tile[s] += TILE_BYTES
                    for s in static(range(streams)):
                        column = 64 * place_of(panel + s * stream, twin)
                        finish(acc[s], y + column, bias + column if bias != 0 else 0, accumulate, out_scale)
                for s in static(range(streams)):
                    go_on(then, then_arguments, 0, 1, start + s * stream, end + s * stream)


def gemm(args, thread, n_threads):
    """Many rows of quantized activations times a quantized matrix.

    A panel's chunk is unpacked once into thread-private scratch and used for up to CHUNK_TOKENS rows. Partial sums wait
    in scratch while the inputs are walked chunk by chunk.
    """
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    grain = load_i64(args + static(A.grain))
    panels = load_i64(args + static(A.panels))
    tiles = load_i64(args + static(A.tiles))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    weights = load_i64(args + static(A.weights))
    first_row = load_i64(args + static(A.first_row))
    x_stride = load_i64(args + static(A.x_stride))
    x = row_address(load_i64(args + static(A.x)), first_row, x_stride)
    if n_rows == 1 and load_i64(args + static(A.private)) != 0:
        x += thread * x_stride
    y_stride = load_i64(args + static(A.y_stride))
    y = row_address(load_i64(args + static(A.y)), first_row, y_stride)
    bias = load_i64(args + static(A.bias))
    accumulate = load_i64(args + static(A.accumulate))
    out_scale = load_f32(args + static(A.scale))
    unpacked = load_i64(args + static(A.scratch)) + thread * load_i64(args + static(A.scratch_stride))
    pairs = opaque(static((len(GROUPS[0]) - UNROLL) // 2))
    sums_at = unpacked + static(CHUNK_BLOCKS * UNPACKED)
    twin = load_i64(args + static(A.twin))
    then = load_i64(args + static(A.then))
    then_arguments = load_i64(args + static(A.then_arguments))
    n_groups = (panels + grain - 1) // grain
    n_chunks = (n_rows + static(CHUNK_TOKENS - 1)) // CHUNK_TOKENS
    chunk_tokens = ((n_rows + n_chunks - 1) // n_chunks + 3) // 4 * 4
    while True:
        # All panels of some rows, then of the next: what a thread has made of its rows, it goes on with.
        unit = draw(args, thread, n_threads, n_chunks * n_groups)
        if unit < 0:
            break
        chunk = unit // n_groups
        start = (unit - chunk * n_groups) * grain
        count = min(grain, panels - start)
        token_start = chunk * chunk_tokens
        token_end = min(token_start + chunk_tokens, n_rows)
        for tile_start in range(0, tiles, CHUNK_TILES):
            tile_end = min(tile_start + CHUNK_TILES, tiles)
            n_blocks = (tile_end - tile_start) * BLOCKS
            for nth in range(count):
                panel = start + nth
                tile = weights + panel * panel_bytes + tile_start * TILE_BYTES
                out = unpacked
                for _ in range(tile_start, tile_end):
                    for block in range(BLOCKS):
                        codes_at = tile + block * CODE_STRIDE
                        for group in static(range(8)):
                            store_i8x64(out + 64 * group, codes[group](codes_at))
                        for half in static(range(HALVES)):
                            store_f32x16(out + static(512 + 64 * half), scale(tile, block, integer(half)))
                            if static(MINIMUM):
                                store_f32x16(
                                    out + static(512 + 64 * (HALVES + half)), minimum(tile, block, integer(half))
                                )
                        out += UNPACKED
                    tile += TILE_BYTES
                column = 64 * place_of(panel, twin)
                panel_bias = bias + column if bias != 0 else 0
                sums_panel = sums_at + nth * static(64 * CHUNK_TOKENS)
                token = token_start
                for width in static(WIDTHS):
                    while token + width <= token_end:
                        records = x + token * x_stride + tile_start * static(BLOCKS * RECORD)
                        kept = sums_panel + 64 * (token - token_start)
                        for t in static(range(width)):
                            if tile_start == 0:
                                acc[t] = zero_f32()
                            else:
                                acc[t] = load_f32x16(kept + 64 * t)
                            record[t] = records + t * x_stride
                        w = unpacked
                        for _ in range(n_blocks):
                            for half in static(range(HALVES)):
                                for t in static(range(width)):
                                    products[t] = dot_start(record[t] + static(NEGATIVE[half]))
                                for at in static(GROUPS[half][:UNROLL]):
                                    weight_codes = load_i8x64(w + 64 * at)
                                    for t in static(range(width)):
                                        products[t] = dot(products[t], weight_codes, broadcast4(record[t] + 4 * at))
                                if static(len(GROUPS[half]) > UNROLL):
                                    for pair in range(pairs):
                                        for i in static(range(2)):
                                            at = static(GROUPS[half][UNROLL] + i) + 2 * pair
                                            weight_codes = load_i8x64(w + 64 * at)
                                            for t in static(range(width)):
                                                inputs = broadcast4(record[t] + 4 * at)
                                                products[t] = dot(products[t], weight_codes, inputs)
                                weight_scale = load_f32x16(w + static(512 + 64 * half))
                                for t in static(range(width)):
                                    factor = mul(weight_scale, broadcast_f32(record[t] + SCALE))
                                    acc[t] = fma(factor, to_f32(dot_close(products[t])), acc[t])
                                if static(MINIMUM):
                                    weight_minimum = load_f32x16(w + static(512 + 64 * (HALVES + half)))
                                    for t in static(range(width)):
                                        sums = broadcast_f32(record[t] + static(SUMS[half]))
                                        acc[t] = fma(weight_minimum, sums, acc[t])
                            for t in static(range(width)):
                                record[t] += RECORD
                            w += UNPACKED
                        for t in static(range(width)):
                            if tile_end == tiles:
                                finish(
                                    acc[t],
                                    y + (token + t) * y_stride + column,
                                    panel_bias,
                                    accumulate,
                                    out_scale,
                                )
                            else:
                                store_f32x16(kept + 64 * t, acc[t])
                        token += width
        go_on(then, then_arguments, token_start, token_end, start, start + count)


def gemv_float(args, thread, n_threads):
    """One row of float32 activations times a float matrix, in streams as `gemv`."""
    stream = load_i64(args + static(A.stream))
    turn = load_i64(args + static(A.turn))
    panels = load_i64(args + static(A.panels))
    tiles = load_i64(args + static(A.tiles))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    weights = load_i64(args + static(A.weights))
    first_row = load_i64(args + static(A.first_row))
    x = row_address(load_i64(args + static(A.x)), first_row, load_i64(args + static(A.x_stride)))
    if load_i64(args + static(A.private)) != 0:
        x += thread * load_i64(args + static(A.x_stride))
    y = row_address(load_i64(args + static(A.y)), first_row, load_i64(args + static(A.y_stride)))
    bias = load_i64(args + static(A.bias))
    accumulate = load_i64(args + static(A.accumulate))
    out_scale = load_f32(args + static(A.scale))
    n_units = count_units(panels, stream, turn)
    while True:
        unit = draw(args, thread, n_threads, n_units)
        if unit < 0:
            break
        start = first_panel(unit, stream, turn)
        end = min(start + turn, panels)
        for streams in static((STREAMS, 1)):
            if (start < stream) == static(streams > 1):
                for panel in range(start, end):
                    at = x
                    for s in static(range(streams)):
                        tile[s] = weights + (panel + s * stream) * panel_bytes
                        acc[s] = zero_f32()
                    for _ in range(tiles):
                        for i in range(32):
                            for s in static(range(streams)):
                                acc[s] = fma(load_row(tile[s], i), broadcast_f32(at + 4 * i), acc[s])
                        at += 128
                        for s in static(range(streams)):
                            tile[s] += TILE_BYTES
                    for s in static(range(streams)):
                        column = 64 * (panel + s * stream)
                        finish(acc[s], y + column, bias + column if bias != 0 else 0, accumulate, out_scale)


def gemm_float(args, thread, n_threads):
    """Rows of float32 activations times a float matrix, some rows at a time."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    grain = load_i64(args + static(A.grain))
    panels = load_i64(args + static(A.panels))
    tiles = load_i64(args + static(A.tiles))
    panel_bytes = load_i64(args + static(A.panel_bytes))
    weights = load_i64(args + static(A.weights))
    first_row = load_i64(args + static(A.first_row))
    x_stride = load_i64(args + static(A.x_stride))
    x = row_address(load_i64(args + static(A.x)), first_row, x_stride)
    if n_rows == 1 and load_i64(args + static(A.private)) != 0:
        x += thread * x_stride
    y_stride = load_i64(args + static(A.y_stride))
    y = row_address(load_i64(args + static(A.y)), first_row, y_stride)
    bias = load_i64(args + static(A.bias))
    accumulate = load_i64(args + static(A.accumulate))
    out_scale = load_f32(args + static(A.scale))
    n_groups = (panels + grain - 1) // grain
    while True:
        unit = draw(args, thread, n_threads, n_groups)
        if unit < 0:
            break
        for panel in range(unit * grain, min(unit * grain + grain, panels)):
            column = 64 * panel
            row = 0
            for width in static(WIDTHS):
                while row + width <= n_rows:
                    for t in static(range(width)):
                        at[t] = x + (row + t) * x_stride
                        acc[t] = zero_f32()
                    tile = weights + panel * panel_bytes
                    for _ in range(tiles):
                        for i in range(32):
                            weight = load_row(tile, i)
                            for t in static(range(width)):
                                acc[t] = fma(weight, broadcast_f32(at[t] + 4 * i), acc[t])
                        for t in static(range(width)):
                            at[t] += 128
                        tile += TILE_BYTES
                    for t in static(range(width)):
                        target = y + (row + t) * y_stride + column
                        finish(acc[t], target, bias + column if bias != 0 else 0, accumulate, out_scale)
                    row += width


def _quantized_parameters(name: str) -> dict:
    unpack = UNPACK[name]
    tile = unpack.tile
    halves = tile.halves
    dot = make_dot(unpack.bits, unpack.highest, unpack.zero, 8 // halves)
    return {
        "A": LINEAR,
        "RECORD": RECORD,
        "SCALE": RECORD_SCALE,
        "NEGATIVE": (RECORD_NEGATIVE, RECORD_NEGATIVE + 4) if halves == 2 else (RECORD_NEGATIVE + 8,),
        "SUMS": (RECORD_SUMS, RECORD_SUMS + 4) if halves == 2 else (RECORD_SUM,),
        "BLOCKS": tile.blocks,
        "HALVES": halves,
        "MINIMUM": tile.minimum,
        "TILE_BYTES": tile.bytes,
        "BLOCK_BYTES": tile.bytes // tile.blocks,
        "CODE_STRIDE": tile.code_bytes,
        "GROUPS": [range(half * 8 // halves, (half + 1) * 8 // halves) for half in range(halves)],
        "STREAMS": STREAMS,
        "PREFETCH": {n: bytes_ + (tile.bytes if tile.blocks > 1 else 0) for n, bytes_ in PREFETCH.items()},
        "UNROLL": UNROLL,
        "CHUNK_BLOCKS": CHUNK_BLOCKS,
        "CHUNK_TILES": CHUNK_BLOCKS // tile.blocks,
        "CHUNK_TOKENS": CHUNK_TOKENS,
        "UNPACKED": unpacked_bytes(name),
        "WIDTHS": GEMM_WIDTHS,
        **{f"codes_{group}": codes for group, codes in enumerate(unpack.codes)},
        "scale": unpack.scale,
        "minimum": unpack.minimum,
        "dot_start": dot.start,
        "dot": dot.dot,
        "dot_close": dot.close,
    }


def unpacked_bytes(name: str) -> int:
    """Size of an unpacked block in scratch: codes, then scales and minima in float32."""
    tile = TILES[name]
    return 512 + 64 * tile.halves * (2 if tile.minimum else 1)


def _float_parameters(name: str) -> dict:
    tile = TILES[name]
    return {"A": LINEAR, "TILE_BYTES": tile.bytes, "load_row": UNPACK_FLOAT[name]}


def build_gemv(name: str) -> Callable:
    if TILES[name].is_float:
        return specialize(gemv_float, STREAMS=STREAMS, **_float_parameters(name))
    return specialize(gemv, **_quantized_parameters(name))


def build_gemm(name: str) -> Callable:
    if TILES[name].is_float:
        return specialize(gemm_float, WIDTHS=FLOAT_WIDTHS, **_float_parameters(name))
    return specialize(gemm, **_quantized_parameters(name))


KERNELS = {"gemv": build_gemv, "gemm": build_gemm}
