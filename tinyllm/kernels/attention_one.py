"""Flash attention of a single row over the cache's pages, as decode needs it.

Keys and values are taken from the pages as they lie there, and what a page holds behind the row's position is not
computed. Positions are dealt out in partitions, so that all threads have something to do.
"""

from __future__ import annotations

import numpy as np

from .abi import ATTEND, BLOCK_LENGTH, BLOCK_PAGES, BLOCK_POSITION, CACHE_TYPES, PAGE, PARTITION
from .cache_types import CACHE_ACCESS, load_latent_values
from .dealing import draw
from .online_softmax import LOG2E, MASKED, mask_scores, merge, scale_queries, sees_all, weigh_scores, write_row
from .simd import (
    TARGET,
    atomic_add,
    broadcast_f32,
    fma,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    mul,
    prefetch,
    store_f32,
    store_f32x16,
    sum_lanes,
    zero_f32,
)
from .specialize import specialize, static

# Query heads whose sums are held in registers at a time, each for a vector of 16 lanes, or for two.
MOST_HEADS = 6
TWO_VECTORS = 6 if TARGET.wide_registers else 2


def attend(args, thread, n_threads):
    """softmax(q·K · scale) V of the only row of a step, by the operations of `attention.attend` in the same order.

    A unit of work is one KV head and one partition of positions; whoever finishes a head last merges its partitions.
    """
    block = load_i64(args + static(A.blocks))
    q = load_i64(args + static(A.q))
    out = load_i64(args + static(A.out))
    n_kv_heads = load_i64(args + static(A.n_kv_heads))
    head_dim = load_i64(args + static(A.head_dim))
    v_dim = load_i64(args + static(A.v_dim))
    pool = load_i64(args + static(A.pool))
    page_bytes = load_i64(args + static(A.page_bytes))
    head_bytes = load_i64(args + static(A.head_bytes))
    v_offset = load_i64(args + static(A.v_offset))
    scale = load_f32(args + static(A.scale)) * LOG2E
    softcap = load_f32(args + static(A.softcap)) * LOG2E
    window_left = load_i64(args + static(A.window_left))
    window_right = load_i64(args + static(A.window_right))
    causal = load_i64(args + static(A.causal))
    slopes = load_i64(args + static(A.slopes))
    sinks = load_i64(args + static(A.sinks))
    partials = load_i64(args + static(A.partials))
    max_partitions = load_i64(args + static(A.max_partitions))
    v_padded = (v_dim + 31) // 32 * 32
    # Thread-private scratch: scaled queries, scores, and per query head m, l and output of a partition and of all.
    queries = load_i64(args + static(A.scratch)) + thread * load_i64(args + static(A.scratch_stride))
    scores = queries + GROUP * head_dim * 4
    part_out = scores + GROUP * PAGE * 4
    all_out = part_out + GROUP * v_padded * 4
    # Vectors of 16 heads may reach behind the last one.
    numbers = static(4 * (GROUP + 15))
    part_max = all_out + GROUP * v_padded * 4
    part_sum = part_max + numbers
    all_max = part_sum + numbers
    all_sum = all_max + numbers
    tops = all_sum + numbers
    rescale = tops + numbers
    part_sums = rescale + numbers
    keys = part_sums + GROUP * 64
    values = keys + head_dim * PAGE * 4
    position = load_i64(block + BLOCK_POSITION)
    length = load_i64(block + BLOCK_LENGTH)
    page_table = load_i64(load_i64(block + BLOCK_PAGES) + 8 * load_i64(args + static(A.pages)))
    lowest = max(position - window_left, 0)
    highest = position if causal != 0 else min(position + window_right, length - 1)
    first_partition = lowest // PARTITION
    n_partitions = highest // PARTITION + 1 - first_partition
    while True:
        unit = draw(args, thread, n_threads, n_partitions * n_kv_heads)
        if unit < 0:
            break
        head = unit % n_kv_heads
        partition = first_partition + unit // n_kv_heads
        head_slopes = slopes + 4 * head * GROUP if slopes != 0 else 0
        scale_queries(q + 4 * head * GROUP * head_dim, queries, GROUP * head_dim, scale)
        for r in range(GROUP):
            store_f32(part_max + 4 * r, MASKED)
            store_f32x16(part_sums + 64 * r, zero_f32())
            for i in range(0, v_padded, 16):
                store_f32x16(part_out + (r * v_padded + i) * 4, zero_f32())
        page_first = max(partition * PARTITION, lowest) // PAGE
        page_last = min(partition * PARTITION + (PARTITION - 1), highest) // PAGE
        for page_index in range(page_first, page_last + 1):
            base = page_index * PAGE
            seen = min(highest + 1 - base, PAGE)
            page = pool + load_i32(page_table + 4 * page_index) * page_bytes + head * head_bytes
            if static(LATENT):
                load_keys(page, keys, head_dim)
                load_latent_values(keys, values, v_dim, v_padded)
            else:
                keys = page
                values = page + v_offset
            # What follows: the next page of the head, or else the first one of the next head.
            next_head = head if page_index < page_last else (head + 1) % n_kv_heads
            next_index = page_index + 1 if page_index < page_last or next_head == 0 else page_first
            next_keys = page
            if next_index <= highest // PAGE:
                next_keys = pool + load_i32(page_table + 4 * next_index) * page_bytes + next_head * head_bytes
            row = 0
            for width in static(WIDTHS):
                while row + width <= GROUP:
                    # Scores of lanes that nobody sees stay what they were, and are masked.
                    for lane in range(0, seen, static(16 * VECTORS[width])):
                        for t in static(range(width)):
                            for v in static(range(VECTORS[width])):
                                acc[t, v] = zero_f32()
                        q_at = queries + row * head_dim * 4
                        ahead = page + v_offset + lane * head_dim * BLOCK_BYTES // 32
                        for i in range(head_dim):
                            if i % static(PERIODS[width]) == 0:
                                prefetch(ahead)
                                ahead += 64
                            for v in static(range(VECTORS[width])):
                                key[v] = load_key(keys, i, lane + static(16 * v), head_dim)
                            for t in static(range(width)):
                                factor = broadcast_f32(q_at + t * head_dim * 4)
                                for v in static(range(VECTORS[width])):
                                    acc[t, v] = fma(key[v], factor, acc[t, v])
                            q_at += 4
                        for t in static(range(width)):
                            for v in static(range(VECTORS[width])):
                                store_f32x16(scores + (row + t) * 128 + 4 * lane + static(64 * v), acc[t, v])
                    row += width
            all_seen = sees_all(base, position, position, window_left, window_right, causal, length)
            if softcap != 0.0 or slopes != 0 or not all_seen:
                mask_scores(
                    scores,
                    GROUP,
                    GROUP,
                    base,
                    position,
                    softcap,
                    head_slopes,
                    window_left,
                    window_right,
                    causal,
                    length,
                )
            weigh_scores(scores, GROUP, all_seen, tops, part_max, part_sums, rescale)
            row = 0
            for width in static(WIDTHS):
                while row + width <= GROUP:
                    for i in range(0, v_padded, static(16 * VECTORS[width])):
                        o_at = part_out + (row * v_padded + i) * 4
                        for t in static(range(width)):
                            kept = broadcast_f32(rescale + 4 * (row + t))
                            for v in static(range(VECTORS[width])):
                                acc[t, v] = mul(kept, load_f32x16(o_at + t * v_padded * 4 + static(64 * v)))
                        p_at = scores + row * 128
                        ahead = next_keys + i * BLOCK_BYTES
                        for slot in range(seen):
                            if slot % static(PERIODS[width]) == 0:
                                prefetch(ahead)
                                ahead += 64
                            for v in static(range(VECTORS[width])):
                                value[v] = load_value(values, slot, i + static(16 * v), v_padded)
                            for t in static(range(width)):
                                factor = broadcast_f32(p_at + t * 128)
                                for v in static(range(VECTORS[width])):
                                    acc[t, v] = fma(value[v], factor, acc[t, v])
                            p_at += 4
                        for t in static(range(width)):
                            for v in static(range(VECTORS[width])):
                                store_f32x16(o_at + t * v_padded * 4 + static(64 * v), acc[t, v])
                    row += width
        for r in range(GROUP):
            store_f32(part_sum + 4 * r, sum_lanes(load_f32x16(part_sums + 64 * r)))
        if n_partitions > 1:
            # The partition's result goes to memory that all threads see.
            row_bytes = 64 + v_padded * 4
            head_partials = partials + 64 * n_kv_heads + head * GROUP * max_partitions * row_bytes
            for g in range(GROUP):
                slot = head_partials + ((partition - first_partition) * GROUP + g) * row_bytes
                store_f32(slot, load_f32(part_max + 4 * g))
                store_f32(slot + 4, load_f32(part_sum + 4 * g))
                for i in range(0, v_padded, 16):
                    store_f32x16(slot + 64 + 4 * i, load_f32x16(part_out + (g * v_padded + i) * 4))
            finished = partials + 64 * head
            if atomic_add(finished, 1) != n_partitions - 1:
                continue
            atomic_add(finished, -n_partitions)
            for g in range(GROUP):
                store_f32(all_max + 4 * g, MASKED)
                store_f32(all_sum + 4 * g, np.float32(0.0))
                for p in range(n_partitions):
                    slot = head_partials + (p * GROUP + g) * row_bytes
                    merge(
                        all_max + 4 * g,
                        all_sum + 4 * g,
                        all_out + g * v_padded * 4,
                        slot,
                        slot + 4,
                        slot + 64,
                        v_padded,
                    )
        row_max = all_max if n_partitions > 1 else part_max
        row_sum = all_sum if n_partitions > 1 else part_sum
        row_out = all_out if n_partitions > 1 else part_out
        for g in range(GROUP):
            query_head = head * GROUP + g
            sink_at = sinks + 4 * query_head if sinks != 0 else 0
            target = out + query_head * v_dim * 4
            write_row(target, row_max + 4 * g, row_sum + 4 * g, row_out + g * v_padded * 4, v_dim, sink_at)


def widths_of(group: int) -> list[int]:
    """How many query heads are computed at a time: parts of about the same size."""
    passes = -(-group // MOST_HEADS)
    width = -(-group // passes)
    return [n for n in (width, group % width) if n]


def build_attend(parameter: str):
    """`parameter`: the type of the cache and the query heads of a KV head; "-latent" behind them as for `attention`."""
    kv_type, group, *latent = parameter.split("-")
    access = CACHE_ACCESS["f32" if latent else kv_type]
    block_bytes = CACHE_TYPES[kv_type].block_bytes
    widths = widths_of(int(group))
    vectors = {width: 2 if width <= TWO_VECTORS else 1 for width in widths}
    return specialize(
        attend,
        A=ATTEND,
        LATENT=bool(latent),
        PAGE=PAGE,
        GROUP=int(group),
        WIDTHS=widths,
        VECTORS=vectors,
        # Steps from line to line, so that while one product is computed, the other one's operands arrive.
        PERIODS={width: max(1, round(128 / block_bytes) // vectors[width]) for width in widths},
        BLOCK_BYTES=block_bytes,
        load_keys=CACHE_ACCESS[kv_type].load_keys,
        load_key=access.load_key,
        load_value=access.load_value,
    )


KERNELS = {"attend": build_attend}
