"""Flash attention of many rows over the cache's pages.

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
)
from .cache_types import CACHE_ACCESS, load_latent_values
from .dealing import draw
from .online_softmax import LOG2E, MASKED, mask_scores, merge, scale_queries, sees_all, weigh_scores, write_row
from .simd import (
    TARGET,
    broadcast_f32,
    fma,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    mul,
    store_f32,
    store_f32x16,
    sum_lanes,
    zero_f32,
)
from .specialize import specialize, static

# Rows (query heads times tokens) by vectors of 16 lanes whose sums are held in registers at a time. With the 16
# registers of AVX2 one vector by six rows measured 94 of 102 GFLOP/s, two by three spill and halve that.
ROW_WIDTHS = (6, 3, 1)
LANE_VECTORS = 2 if TARGET.wide_registers else 1


def attend(args, thread, n_threads):
    """softmax(q·K · scale) V over the cache pages, without a score matrix (flash attention, Dao et al. 2022).

    A unit of work is a block of rows of one sequence and one KV head. Softmax is computed online within a partition of
    positions, partitions are merged in order, so the result depends neither on threads nor on how a prompt was cut into
    chunks, and is that of `attention_one`.
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
    max_rows = load_i64(args + static(A.max_rows))
    group = n_heads // n_kv_heads
    v_padded = (v_dim + 31) // 32 * 32
    # Thread-private scratch: keys and values of a page in float32, scaled queries, scores, and per row m, l and output,
    # of the current partition and of all before it.
    keys = load_i64(args + static(A.scratch)) + thread * load_i64(args + static(A.scratch_stride))
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
    while True:
        unit = draw(args, thread, n_threads, n_blocks * n_kv_heads)
        if unit < 0:
            break
        head = unit % n_kv_heads
        block = blocks + unit // n_kv_heads * BLOCK_BYTES
        first_row = load_i64(block + BLOCK_FIRST)
        n_tokens = load_i64(block + BLOCK_ROWS)
        position = load_i64(block + BLOCK_POSITION)
        length = load_i64(block + BLOCK_LENGTH)
        page_table = load_i64(load_i64(block + BLOCK_PAGES) + 8 * page_table_index)
        head_slopes = slopes + 4 * head * group if slopes != 0 else 0
        n_rows = n_tokens * group
        for token in range(n_tokens):
            for g in range(group):
                source = q + (first_row + token) * q_stride + 4 * (head * group + g) * head_dim
                scale_queries(source, queries + (token * group + g) * head_dim * 4, head_dim, scale)
        lowest = max(position - window_left, 0)
        highest = position + n_tokens - 1
        if causal == 0:
            highest = min(highest + window_right, length - 1)
        for r in range(n_rows):
            store_f32(all_max + 4 * r, MASKED)
            store_f32(all_sum + 4 * r, np.float32(0.0))
        for partition in range(lowest // PARTITION, highest // PARTITION + 1):
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
                    load_latent_values(keys, values, v_dim, v_padded)
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
                all_seen = sees_all(base, position, position + n_tokens - 1, window_left, window_right, causal, length)
                if softcap != 0.0 or slopes != 0 or not all_seen:
                    mask_scores(
                        scores,
                        n_rows,
                        group,
                        base,
                        position,
                        softcap,
                        head_slopes,
                        window_left,
                        window_right,
                        causal,
                        length,
                    )
                weigh_scores(scores, n_rows, all_seen, tops, part_max, part_sums, rescale)
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
                merge(
                    all_max + 4 * r,
                    all_sum + 4 * r,
                    all_out + r * v_padded * 4,
                    part_max + 4 * r,
                    part_sum + 4 * r,
                    part_out + r * v_padded * 4,
                    v_padded,
                )
        for r in range(n_rows):
            query_head = head * group + r % group
            target = out + (first_row + r // group) * out_stride + query_head * v_dim * 4
            sink_at = sinks + 4 * query_head if sinks != 0 else 0
            write_row(target, all_max + 4 * r, all_sum + 4 * r, all_out + r * v_padded * 4, v_dim, sink_at)


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


KERNELS = {"attend": build_attend}
