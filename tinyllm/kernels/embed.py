"""Rows of the embedding table, read straight from the file's blocks and decoded to float32: the first op of a step.

`DECODERS` has a step for each format that embeddings are usually found in; the others are decoded by `dequantize.py`,
which is also the specification of these.
"""

from __future__ import annotations

from collections.abc import Callable

from .abi import EMBED, ROW_BYTES, ROW_TOKEN
from .dealing import draw
from .simd import (
    add_i32,
    and_i32,
    fma,
    lane_index,
    load_bf16x16,
    load_bytes_i32,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i8x16,
    load_i64,
    load_u8,
    load_u32,
    mul,
    or_i32,
    shift_left_i32,
    shift_right_each_i32,
    shift_right_i32,
    splat_f32,
    splat_i32,
    store_f32x16,
    to_f32,
)
from .specialize import inline, specialize, static


def embed(args, thread, n_threads):
    """x[row] = scale · table[token of the row]."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    rows = load_i64(args + static(A.row_table))
    n_blocks = load_i64(args + static(A.n_blocks))
    table = load_i64(args + static(A.table))
    row_bytes = load_i64(args + static(A.row_bytes))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    scale = load_f32(args + static(A.scale))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        block = table + load_i64(rows + row * ROW_BYTES + ROW_TOKEN) * row_bytes
        out = x + row * x_stride
        for _ in range(n_blocks):
            decode_block(block, out)
            if scale != 1.0:
                for i in range(0, static(4 * VALUES), 64):
                    store_f32x16(out + i, mul(load_f32x16(out + i), splat_f32(scale)))
            block += static(BLOCK_BYTES)
            out += static(4 * VALUES)


@inline
def decode_f32(block, out):
    store_f32x16(out, load_f32x16(block))


@inline
def decode_f16(block, out):
    store_f32x16(out, load_f16x16(block))


@inline
def decode_bf16(block, out):
    store_f32x16(out, load_bf16x16(block))


@inline
def decode_q8_0(block, out):
    scale = splat_f32(load_f16(block))
    store_f32x16(out, mul(load_i8x16(block + 2), scale))
    store_f32x16(out + 64, mul(load_i8x16(block + 18), scale))


@inline
def fifth_bits(plane, first):
    """Bits first … first + 15 of a plane, as the fifth bit of 16 codes."""
    bits = shift_right_each_i32(splat_i32(plane), add_i32(lane_index(), splat_i32(first)))
    return shift_left_i32(and_i32(bits, 1), 4)


@inline
def decode_q4_0(block, out):
    scale = splat_f32(load_f16(block))
    nibbles = load_bytes_i32(block + 2)
    minus_8 = splat_i32(-8)
    store_f32x16(out, mul(to_f32(add_i32(and_i32(nibbles, 15), minus_8)), scale))
    store_f32x16(out + 64, mul(to_f32(add_i32(shift_right_i32(nibbles, 4), minus_8)), scale))


@inline
def decode_q4_1(block, out):
    scale, minimum = splat_f32(load_f16(block)), splat_f32(load_f16(block + 2))
    nibbles = load_bytes_i32(block + 4)
    store_f32x16(out, fma(to_f32(and_i32(nibbles, 15)), scale, minimum))
    store_f32x16(out + 64, fma(to_f32(shift_right_i32(nibbles, 4)), scale, minimum))


@inline
def decode_q5_0(block, out):
    scale, plane = splat_f32(load_f16(block)), load_u32(block + 2)
    nibbles = load_bytes_i32(block + 6)
    minus_16 = splat_i32(-16)
    low = or_i32(and_i32(nibbles, 15), fifth_bits(plane, 0))
    high = or_i32(shift_right_i32(nibbles, 4), fifth_bits(plane, 16))
    store_f32x16(out, mul(to_f32(add_i32(low, minus_16)), scale))
    store_f32x16(out + 64, mul(to_f32(add_i32(high, minus_16)), scale))


@inline
def decode_q5_1(block, out):
    scale, minimum, plane = splat_f32(load_f16(block)), splat_f32(load_f16(block + 2)), load_u32(block + 4)
    nibbles = load_bytes_i32(block + 8)
    low = or_i32(and_i32(nibbles, 15), fifth_bits(plane, 0))
    high = or_i32(shift_right_i32(nibbles, 4), fifth_bits(plane, 16))
    store_f32x16(out, fma(to_f32(low), scale, minimum))
    store_f32x16(out + 64, fma(to_f32(high), scale, minimum))


@inline
def six_bit_pair(packed, index):
    """Scale and minimum number `index` of a Q4_K or Q5_K block, 256 times the minimum plus the scale.

    The first four have six bits of a byte each; the others four bits, and two on top of the first ones' bytes.
    """
    a, b, c = load_u8(packed + (index & 3)), load_u8(packed + 4 + (index & 3)), load_u8(packed + 8 + (index & 3))
    later = index >> 2
    scale = (1 - later) * (a & 63) + later * ((c & 15) + 16 * (a >> 6))
    return scale + 256 * ((1 - later) * (b & 63) + later * ((c >> 4) + 16 * (b >> 6)))


@inline
def decode_q4_k(block, out):
    d, d_min = load_f16(block), load_f16(block + 2)
    for part in range(8):
        pair = six_bit_pair(block + 4, part)
        scale, minimum = splat_f32(d * (pair & 255)), splat_f32(-(d_min * (pair >> 8)))
        codes = block + 16 + 32 * (part // 2)
        for half in range(2):
            nibbles = and_i32(shift_right_i32(load_bytes_i32(codes + 16 * half), 4 * (part & 1)), 15)
            store_f32x16(out + 128 * part + 64 * half, fma(to_f32(nibbles), scale, minimum))


@inline
def decode_q6_k(block, out):
    d = load_f16(block + 208)
    minus_32 = splat_i32(-32)
    for part in range(16):
        # 128 values use 64 bytes of nibbles and 32 of bit pairs: first the low nibbles of each, then the high ones.
        half, quarter, side = part // 8, part % 8 // 2, part & 1
        nibbles = load_bytes_i32(block + 64 * half + 32 * (quarter & 1) + 16 * side)
        pairs = load_bytes_i32(block + 128 + 32 * half + 16 * side)
        low = and_i32(shift_right_i32(nibbles, 4 * (quarter // 2)), 15)
        high = shift_left_i32(and_i32(shift_right_i32(pairs, 2 * quarter), 3), 4)
        signed = load_u8(block + 192 + part)
        scale = splat_f32(d * (signed - 256 * (signed >> 7)))
        store_f32x16(out + 64 * part, mul(to_f32(add_i32(or_i32(low, high), minus_32)), scale))


# Per format: the step, values and bytes of a block.
DECODERS = {
    "F32": (decode_f32, 16, 64),
    "F16": (decode_f16, 16, 32),
    "BF16": (decode_bf16, 16, 32),
    "Q8_0": (decode_q8_0, 32, 34),
    "Q4_0": (decode_q4_0, 32, 18),
    "Q4_1": (decode_q4_1, 32, 20),
    "Q5_0": (decode_q5_0, 32, 22),
    "Q5_1": (decode_q5_1, 32, 24),
    "Q4_K": (decode_q4_k, 256, 144),
    "Q6_K": (decode_q6_k, 256, 210),
}


def build_embed(name: str) -> Callable:
    step, values, block_bytes = DECODERS[name]
    return specialize(embed, A=EMBED, decode_block=step, VALUES=values, BLOCK_BYTES=block_bytes)


KERNELS = {"embed": build_embed}
