"""Rotary positions, writing keys and values into cache pages, and flash attention over the pages.

A page holds 32 positions of one KV head: keys as [head_dim][32] and values as [32][v_dim], so that both products of
attention run along the lanes. All query heads of a KV head are computed together, so that a page is read once.
"""

from __future__ import annotations

import numpy as np

from .abi import (
    ATTEND,
    BLOCK_BYTES,
    BLOCK_FIRST,
    BLOCK_LENGTH,
    BLOCK_PAGES,
    BLOCK_POSITION,
    BLOCK_ROWS,
    PAGE,
    PARTITION,
    ROPE,
    ROW_BYTES,
    ROW_PAGES,
    ROW_POSITION,
)
from .cache_types import CACHE_ACCESS
from .dealing import draw
from .elementwise import load_part, store_part
from .simd import (
    TARGET,
    add,
    add_i32,
    atomic_add,
    broadcast_f32,
    exp2,
    fma,
    lane_index,
    less,
    less_i32,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    max_lanes,
    maximum,
    mul,
    select,
    sigmoid,
    splat_f32,
    splat_i32,
    store_f32,
    store_f32x16,
    sub,
    sum_lanes,
    swap_neighbours,
    to_f32,
    zero_f32,
)
from .specialize import inline, specialize, static

# Rows (query heads times tokens) by vectors of 16 lanes whose sums are held in registers at a time. With the 16
# registers of AVX2 one vector by six rows measured 94 of 102 GFLOP/s, two by three spill and halve that.
ROW_WIDTHS = (6, 3, 1)
LANE_VECTORS = 2 if TARGET.wide_registers else 1
MASKED = np.float32(-1e30)
# Scores are kept in units of log 2: their exponentials are powers of two.
LOG2E = np.float32(1.0 / np.log(2.0))


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


def attend(args, thread, n_threads):
    """softmax(q·K · scale) V over the cache pages, without a score matrix (flash attention, Dao et al. 2022).

    A unit of work is a block of rows of one sequence and one KV head; for a single row it is one KV head and one
    partition of positions, so that all threads have something to do. Softmax is computed online within a partition,
    partitions are merged in order, so the
    result depends neither on threads nor on how a prompt was cut into chunks.
    """
    blocks = load_i64(args + static(A.blocks))
    n_blocks = load_i64(load_i64(args + static(A.n_blocks)))
    q = load_i64(args + static(A.q))
    q_stride = load_i64(args + static(A.q_stride))
    out = load_i64(args + static(A.out))
    out_stride = load_i64(args + static(A.out_stride))
    n_heads = load_i64(args + static(A.n_heads))
    n_kv_heads = load_i64(args + static(A.n_kv_heads))
    head_dim = load_i64(args + static(A.head_dim))
    v_dim = load_i64(args + static(A.v_dim))
    pool = load_i64(args + static(A.pool))
    page_bytes = load_i64(args + static(A.page_bytes))
    head_bytes = load_i64(args + static(A.head_bytes))
    v_offset = load_i64(args + static(A.v_offset))
    page_table_index = load_i64(args + static(A.pages))
    scale = load_f32(args + static(A.scale)) * LOG2E
    softcap = load_f32(args + static(A.softcap)) * LOG2E
    window_left = load_i64(args + static(A.window_left))
    window_right = load_i64(args + static(A.window_right))
    causal = load_i64(args + static(A.causal))
    slopes = load_i64(args + static(A.slopes))
    sinks = load_i64(args + static(A.sinks))
    partials = load_i64(args + static(A.partials))
    max_rows = load_i64(args + static(A.max_rows))
    max_partitions = load_i64(args + static(A.max_partitions))
    group = n_heads // n_kv_heads
    v_padded = (v_dim + 31) // 32 * 32
    # Thread-private scratch: scaled queries, keys and values of a page in float32, scores, and per row m, l and output,
    # of the current partition and of all before it.
    scratch = load_i64(args + static(A.scratch)) + thread * load_i64(args + static(A.scratch_stride))
    keys = scratch
    values = keys + head_dim * PAGE * 4
    queries = values + PAGE * v_padded * 4
    scores = queries + max_rows * head_dim * 4
    part_out = scores + max_rows * PAGE * 4
    all_out = part_out + max_rows * v_padded * 4
    # Vectors of 16 rows may reach behind the last row.
    numbers = 4 * (max_rows + 15)
    part_max = all_out + max_rows * v_padded * 4
    part_sum = part_max + numbers
    all_max = part_sum + numbers
    all_sum = all_max + numbers
    tops = all_sum + numbers
    rescale = tops + numbers
    part_sums = rescale + numbers
    single = n_blocks == 1 and load_i64(blocks + BLOCK_ROWS) == 1
    partition_start = max(load_i64(blocks + BLOCK_POSITION) - window_left, 0) // PARTITION
    n_partitions = load_i64(blocks + BLOCK_POSITION) // PARTITION + 1 - partition_start
    n_units = n_partitions * n_kv_heads if single else n_blocks * n_kv_heads
    while True:
        unit = draw(args, thread, n_threads, n_units)
        if unit < 0:
            break
        head = unit % n_kv_heads
        block = blocks if single else blocks + unit // n_kv_heads * BLOCK_BYTES
        first_row = load_i64(block + BLOCK_FIRST)
        n_tokens = load_i64(block + BLOCK_ROWS)
        position = load_i64(block + BLOCK_POSITION)
        length = load_i64(block + BLOCK_LENGTH)
        page_table = load_i64(load_i64(block + BLOCK_PAGES) + 8 * page_table_index)
        n_rows = n_tokens * group
        for token in range(n_tokens):
            for g in range(group):
                source = q + (first_row + token) * q_stride + 4 * (head * group + g) * head_dim
                target = queries + (token * group + g) * head_dim * 4
                for i in range(head_dim):
                    store_f32(target + 4 * i, load_f32(source + 4 * i) * scale)
        lowest = max(position - window_left, 0)
        highest = position + n_tokens - 1
        if causal == 0:
            highest = min(highest + window_right, length - 1)
        for r in range(n_rows):
            store_f32(all_max + 4 * r, MASKED)
            store_f32(all_sum + 4 * r, np.float32(0.0))
        if single:
            partition_first = partition_start + unit // n_kv_heads
            partition_last = partition_first
        else:
            partition_first = lowest // PARTITION
            partition_last = highest // PARTITION
        for partition in range(partition_first, partition_last + 1):
            for r in range(n_rows):
                store_f32(part_max + 4 * r, MASKED)
                store_f32x16(part_sums + 64 * r, zero_f32())
                for i in range(0, v_padded, 16):
                    store_f32x16(part_out + (r * v_padded + i) * 4, zero_f32())
            page_first = max(partition * PARTITION, lowest) // PAGE
            page_last = min(partition * PARTITION + (PARTITION - 1), highest) // PAGE
            for page_index in range(page_first, page_last + 1):
                base = page_index * PAGE
                page = pool + load_i32(page_table + 4 * page_index) * page_bytes + head * head_bytes
                load_keys(page, keys, head_dim)
                if static(LATENT):
                    # The values are the first dimensions of the keys.
                    for i in range(v_dim):
                        for slot in range(PAGE):
                            store_f32(values + 4 * (slot * v_padded + i), load_f32(keys + 4 * (i * PAGE + slot)))
                else:
                    load_values(page + v_offset, values, v_padded)
                row = 0
                for width in static(WIDTHS):
                    while row + width <= n_rows:
                        for lane in range(0, PAGE, static(16 * VECTORS)):
                            for t in static(range(width)):
                                for v in static(range(VECTORS)):
                                    acc[t, v] = zero_f32()
                            q_at = queries + row * head_dim * 4
                            k_at = keys + 4 * lane
                            for _ in range(head_dim):
                                for v in static(range(VECTORS)):
                                    key[v] = load_f32x16(k_at + static(64 * v))
                                for t in static(range(width)):
                                    factor = broadcast_f32(q_at + t * head_dim * 4)
                                    for v in static(range(VECTORS)):
                                        acc[t, v] = fma(key[v], factor, acc[t, v])
                                q_at += 4
                                k_at += static(4 * PAGE)
                            for t in static(range(width)):
                                for v in static(range(VECTORS)):
                                    store_f32x16(scores + (row + t) * 128 + 4 * lane + static(64 * v), acc[t, v])
                        row += width
                # Most pages are seen as a whole by all rows.
                all_seen = base >= position + n_tokens - 1 - window_left
                if causal == 0:
                    all_seen = all_seen and base + PAGE - 1 <= min(position + window_right, length - 1)
                else:
                    all_seen = all_seen and base + PAGE - 1 <= position
                if softcap != 0.0 or slopes != 0 or not all_seen:
                    for r in range(n_rows):
                        at = scores + r * 128
                        query_position = position + r // group
                        s_low = load_f32x16(at)
                        s_high = load_f32x16(at + 64)
                        if softcap != 0.0:
                            s_low = soft_cap(s_low, softcap)
                            s_high = soft_cap(s_high, softcap)
                        if slopes != 0:
                            slope = splat_f32(load_f32(slopes + 4 * (head * group + r % group)) * LOG2E)
                            distance = splat_i32(base - query_position)
                            s_low = fma(slope, to_f32(add_i32(lane_index(), distance)), s_low)
                            s_high = fma(
                                slope, to_f32(add_i32(lane_index(), splat_i32(base + 16 - query_position))), s_high
                            )
                        visible_from = query_position - window_left
                        visible_to = query_position
                        if causal == 0:
                            visible_to = min(query_position + window_right, length - 1)
                        store_f32x16(at, hide(s_low, base, visible_from, visible_to))
                        store_f32x16(at + 64, hide(s_high, base + 16, visible_from, visible_to))
                for r in range(n_rows):
                    at = scores + r * 128
                    store_f32(tops + 4 * r, max_lanes(maximum(load_f32x16(at), load_f32x16(at + 64))))
                # Sixteen rows' maxima at a time; a row's loops have no branches and no sums across lanes.
                for r in range(0, n_rows, 16):
                    old_max = load_f32x16(part_max + 4 * r)
                    new_max = maximum(old_max, load_f32x16(tops + 4 * r))
                    store_f32x16(part_max + 4 * r, new_max)
                    store_f32x16(rescale + 4 * r, exp2(sub(old_max, new_max)))
                for r in range(n_rows):
                    at = scores + r * 128
                    top = broadcast_f32(part_max + 4 * r)
                    s_low, s_high = load_f32x16(at), load_f32x16(at + 64)
                    p_low, p_high = exp2(sub(s_low, top)), exp2(sub(s_high, top))
                    if not all_seen:
                        p_low, p_high = zero_if_hidden(p_low, s_low), zero_if_hidden(p_high, s_high)
                    store_f32x16(at, p_low)
                    store_f32x16(at + 64, p_high)
                    kept = mul(load_f32x16(part_sums + 64 * r), broadcast_f32(rescale + 4 * r))
                    store_f32x16(part_sums + 64 * r, add(kept, add(p_low, p_high)))
                row = 0
                for width in static(WIDTHS):
                    while row + width <= n_rows:
                        for i in range(0, v_padded, static(16 * VECTORS)):
                            o_at = part_out + (row * v_padded + i) * 4
                            for t in static(range(width)):
                                kept = broadcast_f32(rescale + 4 * (row + t))
                                for v in static(range(VECTORS)):
                                    acc[t, v] = mul(kept, load_f32x16(o_at + t * v_padded * 4 + static(64 * v)))
                            p_at = scores + row * 128
                            v_at = values + 4 * i
                            for _ in range(PAGE):
                                for v in static(range(VECTORS)):
                                    key[v] = load_f32x16(v_at + static(64 * v))
                                for t in static(range(width)):
                                    factor = broadcast_f32(p_at + t * 128)
                                    for v in static(range(VECTORS)):
                                        acc[t, v] = fma(key[v], factor, acc[t, v])
                                p_at += 4
                                v_at += v_padded * 4
                            for t in static(range(width)):
                                for v in static(range(VECTORS)):
                                    store_f32x16(o_at + t * v_padded * 4 + static(64 * v), acc[t, v])
                        row += width
            for r in range(n_rows):
                store_f32(part_sum + 4 * r, sum_lanes(load_f32x16(part_sums + 64 * r)))
            if not single:
                for r in range(n_rows):
                    merge(
                        all_max + 4 * r,
                        all_sum + 4 * r,
                        all_out + r * v_padded * 4,
                        part_max + 4 * r,
                        part_sum + 4 * r,
                        part_out + r * v_padded * 4,
                        v_padded,
                    )
        if not single:
            for r in range(n_rows):
                token = r // group
                query_head = head * group + r % group
                target = out + (first_row + token) * out_stride + query_head * v_dim * 4
                write_row(
                    target, all_max + 4 * r, all_sum + 4 * r, all_out + r * v_padded * 4, v_dim, sinks, query_head
                )
        else:
            # The partition's result goes to memory that all threads see; whoever finishes a head last merges it.
            row_bytes = 64 + v_padded * 4
            head_partials = partials + 64 * n_kv_heads + head * group * max_partitions * row_bytes
            for g in range(group):
                slot = head_partials + ((partition_first - partition_start) * group + g) * row_bytes
                store_f32(slot, load_f32(part_max + 4 * g))
                store_f32(slot + 4, load_f32(part_sum + 4 * g))
                for i in range(0, v_padded, 16):
                    store_f32x16(slot + 64 + 4 * i, load_f32x16(part_out + (g * v_padded + i) * 4))
            finished = partials + 64 * head
            if atomic_add(finished, 1) == n_partitions - 1:
                atomic_add(finished, -n_partitions)
                for g in range(group):
                    for p in range(n_partitions):
                        slot = head_partials + (p * group + g) * row_bytes
                        merge(
                            all_max + 4 * g,
                            all_sum + 4 * g,
                            all_out + g * v_padded * 4,
                            slot,
                            slot + 4,
                            slot + 64,
                            v_padded,
                        )
                    query_head = head * group + g
                    target = out + first_row * out_stride + query_head * v_dim * 4
                    write_row(
                        target, all_max + 4 * g, all_sum + 4 * g, all_out + g * v_padded * 4, v_dim, sinks, query_head
                    )


@inline
def merge(all_max, all_sum, all_out, part_max, part_sum, part_out, n):
    """Join two softmax-weighted sums: both are brought to the larger maximum."""
    old, new = load_f32(all_max), load_f32(part_max)
    if new > MASKED:
        if old > MASKED:
            top = max(old, new)
            a, b = scalar_exp2(old - top), scalar_exp2(new - top)
            store_f32(all_max, top)
            store_f32(all_sum, load_f32(all_sum) * a + load_f32(part_sum) * b)
            a16, b16 = splat_f32(a), splat_f32(b)
            for i in range(0, n, 16):
                store_f32x16(
                    all_out + 4 * i, fma(load_f32x16(part_out + 4 * i), b16, mul(load_f32x16(all_out + 4 * i), a16))
                )
        else:
            store_f32(all_max, new)
            store_f32(all_sum, load_f32(part_sum))
            for i in range(0, n, 16):
                store_f32x16(all_out + 4 * i, load_f32x16(part_out + 4 * i))


@inline
def write_row(target, all_max, all_sum, all_out, v_dim, sinks, query_head):
    """Divide by the softmax denominator, to which a sink (gpt-oss) adds a score without a value."""
    total = load_f32(all_sum)
    factor = np.float32(1.0)
    if sinks != 0:
        sink = load_f32(sinks + 4 * query_head) * LOG2E
        top = max(load_f32(all_max), sink)
        factor = scalar_exp2(load_f32(all_max) - top)
        total = total * factor + scalar_exp2(sink - top)
    inverse = factor / total
    for i in range(v_dim):
        store_f32(target + 4 * i, load_f32(all_out + 4 * i) * inverse)


@inline
def scalar_exp2(x):
    return max_lanes(exp2(splat_f32(x)))


@inline
def zero_if_hidden(p, s):
    """Exactly zero for hidden positions, also where all are hidden."""
    return select(less(splat_f32(MASKED), s), p, zero_f32())


@inline
def hide(s, first, visible_from, visible_to):
    lanes = add_i32(lane_index(), splat_i32(first))
    s = select(less_i32(lanes, splat_i32(visible_from)), splat_f32(MASKED), s)
    return select(less_i32(splat_i32(visible_to), lanes), splat_f32(MASKED), s)


@inline
def soft_cap(s, cap):
    """cap · tanh(s / cap), by tanh x = 2·sigmoid(2x) - 1."""
    doubled = mul(s, splat_f32(2.0 / cap))
    return fma(sigmoid(doubled), splat_f32(2.0 * cap), splat_f32(-cap))


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


def build_attend(parameter: str):
    """`parameter` is the type of the cache; "-latent" behind it: values are not stored, they are part of the keys."""
    kv_type, _, latent = parameter.partition("-")
    access = CACHE_ACCESS[kv_type]
    return specialize(
        attend,
        A=ATTEND,
        LATENT=bool(latent),
        PAGE=PAGE,
        WIDTHS=ROW_WIDTHS,
        VECTORS=LANE_VECTORS,
        load_keys=access.load_keys,
        load_values=access.load_values,
    )


KERNELS = {
    "rope": build_rope,
    "attend": build_attend,
}
