"""Rotary positions, and writing keys and values into cache pages: the rows of a step go in, with the positions and
page tables that they carry."""

from __future__ import annotations

from .abi import PAGE, ROPE, ROW_BYTES, ROW_PAGES, ROW_POSITION
from .cache_types import CACHE_ACCESS
from .dealing import draw
from .elementwise import load_part, store_part
from .simd import fma, load_i32, load_i64, mul, swap_neighbours
from .specialize import inline, specialize, static


def rope_and_store(args, thread, n_threads):
    """Rotate the heads of q and k in place (RoPE, Su et al. 2021), then write k and v into the row's cache page.

    The table of a position holds a cosine, then a signed sine, for each rotated dimension; the partner of dimension i
    is its neighbour (NORM, adjacent pairs) or the one n_rot/2 away (NEOX, half-split pairs). Without a pool, nothing is
    written.
    """
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    rows = load_i64(args + static(A.row_table))
    q = load_i64(args + static(A.q))
    q_stride = load_i64(args + static(A.q_stride))
    k = load_i64(args + static(A.k))
    k_stride = load_i64(args + static(A.k_stride))
    v = load_i64(args + static(A.v))
    v_stride = load_i64(args + static(A.v_stride))
    n_heads = load_i64(args + static(A.n_heads))
    n_kv_heads = load_i64(args + static(A.n_kv_heads))
    head_dim = load_i64(args + static(A.head_dim))
    v_dim = load_i64(args + static(A.v_dim))
    n_rot = load_i64(args + static(A.n_rot))
    offset = load_i64(args + static(A.offset))
    tables = load_i64(args + static(A.cos_sin))
    table_stride = load_i64(args + static(A.table_stride))
    page_table_index = load_i64(args + static(A.pages))
    pool = load_i64(args + static(A.pool))
    page_bytes = load_i64(args + static(A.page_bytes))
    head_bytes = load_i64(args + static(A.head_bytes))
    v_offset = load_i64(args + static(A.v_offset))
    n_parts = n_heads + n_kv_heads
    # A single row is dealt out head by head.
    parts_at_once = 2 if n_rows == 1 else n_parts
    units_per_row = (n_parts + parts_at_once - 1) // parts_at_once
    while True:
        unit = draw(args, thread, n_threads, n_rows * units_per_row)
        if unit < 0:
            break
        row = unit // units_per_row
        first = (unit - row * units_per_row) * parts_at_once
        position = load_i64(rows + row * ROW_BYTES + ROW_POSITION)
        table = tables + position * table_stride
        for part in range(first, min(first + parts_at_once, n_parts)):
            if part < n_heads:
                if n_rot != 0:
                    rotate(q + row * q_stride + 4 * (part * head_dim + offset), table, n_rot)
                continue
            head = part - n_heads
            key = k + row * k_stride + 4 * head * head_dim
            if n_rot != 0:
                rotate(key + 4 * offset, table, n_rot)
            if pool == 0:
                continue
            page_table = load_i64(load_i64(rows + row * ROW_BYTES + ROW_PAGES) + 8 * page_table_index)
            slot = position & (PAGE - 1)
            out = pool + load_i32(page_table + 4 * (position // PAGE)) * page_bytes + head * head_bytes
            store_key(out, slot, key, head_dim)
            store_value(out + v_offset, slot, v + row * v_stride + 4 * head * v_dim, v_dim)


@inline
def rotate_adjacent(x, table, n_rot):
    """x cos + swap(x) sin, where the sine of the first of a pair is negative."""
    sines = table + 4 * n_rot
    for i in range(0, n_rot, 16):
        value = load_part(x, i, n_rot)
        turned = mul(swap_neighbours(value), load_part(sines, i, n_rot))
        store_part(x, i, n_rot, fma(value, load_part(table, i, n_rot), turned))


@inline
def rotate_halves(x, table, n_rot):
    """The same for pairs half a head apart."""
    half = n_rot // 2
    sines = table + 4 * n_rot
    upper = x + 4 * half
    for i in range(0, half, 16):
        a, b = load_part(x, i, half), load_part(upper, i, half)
        cosine = load_part(table, i, half)
        store_part(x, i, half, fma(a, cosine, mul(b, load_part(sines, i, half))))
        store_part(upper, i, half, fma(b, cosine, mul(a, load_part(sines + 4 * half, i, half))))


def build_rope(parameter: str):
    """`parameter`: how dimensions are paired ("halves" or "adjacent") and the type of the cache, with "-" between."""
    pairing, kv_type = parameter.split("-")
    access = CACHE_ACCESS[kv_type]
    return specialize(
        rope_and_store,
        A=ROPE,
        PAGE=PAGE,
        store_key=access.store_key,
        store_value=access.store_value,
        rotate=rotate_halves if pairing == "halves" else rotate_adjacent,
    )


KERNELS = {"rotate_and_store": build_rope}
