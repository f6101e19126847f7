"""What rows of logits say: the likeliest tokens, and the sums of which entropies, divergences and ranks are made.

A row is read while it lies in the cache; a lens has thousands of them, and a vocabulary of 50,000 to 260,000 each.
"""

from __future__ import annotations

from .dealing import draw
from .elementwise import load_part
from .lens_words import BEST, N_TOP, RANKS, SUM_CROSS, SUM_LOGITS, SUM_WEIGHTED, SUM_WEIGHTS, SUMS, SUMS_BYTES
from .simd import (
    add,
    exp,
    fma,
    keep_first,
    less,
    load_f32,
    load_f32x16,
    load_i64,
    max_lanes,
    maximum,
    mul,
    select,
    splat_f32,
    store_f32,
    store_i64,
    sub,
    sum_lanes,
    zero_f32,
)
from .specialize import inline, specialize, static

# Logits that are passed over together where none of them is among the best, and summed up in float32.
BLOCK = 512
LOWEST = -3.4e38


@inline
def insert(value, column, values, columns, n_top):
    """Put a value into a list in descending order, behind equal ones; the smallest in the list then."""
    k = n_top - 1
    while k > 0 and value > load_f32(values + 4 * (k - 1)):
        store_f32(values + 4 * k, load_f32(values + 4 * (k - 1)))
        store_i64(columns + 8 * k, load_i64(columns + 8 * (k - 1)))
        k -= 1
    store_f32(values + 4 * k, value)
    store_i64(columns + 8 * k, column)
    return load_f32(values + 4 * (n_top - 1))


def best(args, thread, n_threads):
    """The largest of each row, equal ones by column. Of rows that are too short the columns are -1."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    sign = load_f32(args + static(A.sign))
    signs = splat_f32(sign)
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        x = load_i64(args + static(A.x)) + row * load_i64(args + static(A.x_stride))
        values = load_i64(args + static(A.values)) + row * static(4 * N_TOP)
        columns = load_i64(args + static(A.columns)) + row * static(8 * N_TOP)
        for k in static(range(N_TOP)):
            store_f32(values + 4 * k, LOWEST)
            store_i64(columns + 8 * k, -1)
        least = load_f32(values)
        whole = n - n % 16
        for start in range(0, n, BLOCK):
            end = min(start + BLOCK, n)
            peak = splat_f32(LOWEST)
            for i in range(start, min(end, whole), 16):
                peak = maximum(peak, mul(load_f32x16(x + 4 * i), signs))
            if max_lanes(peak) > least or end > whole:
                for i in range(start, end):
                    value = sign * load_f32(x + 4 * i)
                    if value > least:
                        least = insert(value, i, values, columns, static(N_TOP))


def sums(args, thread, n_threads):
    """With s = x - max(x): Σ e^s, Σ e^s · s, Σ e^(s of the final row) · s, Σ x."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    x_stride = load_i64(args + static(A.x_stride))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        x = load_i64(args + static(A.x)) + row * x_stride
        final_row = load_i64(load_i64(args + static(A.finals)) + 8 * row)
        final = load_i64(args + static(A.x)) + final_row * x_stride
        values = load_i64(args + static(A.values))
        top = splat_f32(load_f32(values + row * static(4 * N_TOP)))
        final_top = splat_f32(load_f32(values + final_row * static(4 * N_TOP)))
        weights, weighted, cross, logits = 0.0, 0.0, 0.0, 0.0
        for start in range(0, n, BLOCK):
            part_weights, part_weighted, part_cross, part_logits = zero_f32(), zero_f32(), zero_f32(), zero_f32()
            for i in range(start, min(start + BLOCK, n), 16):
                value = load_part(x, i, n)
                shifted = keep_first(sub(value, top), n - i)
                weight = keep_first(exp(shifted), n - i)
                final_weight = keep_first(exp(sub(load_part(final, i, n), final_top)), n - i)
                part_weights = add(part_weights, weight)
                part_weighted = fma(weight, shifted, part_weighted)
                part_cross = fma(final_weight, shifted, part_cross)
                part_logits = add(part_logits, value)
            weights += sum_lanes(part_weights)
            weighted += sum_lanes(part_weighted)
            cross += sum_lanes(part_cross)
            logits += sum_lanes(part_logits)
        found = load_i64(args + static(A.sums)) + row * static(SUMS_BYTES)
        store_f32(found + static(SUM_WEIGHTS), weights)
        store_f32(found + static(SUM_WEIGHTED), weighted)
        store_f32(found + static(SUM_CROSS), cross)
        store_f32(found + static(SUM_LOGITS), logits)


def ranks(args, thread, n_threads):
    """How many are likelier than each row's answer, or as likely in an earlier column."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    one, none = splat_f32(1.0), zero_f32()
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        x = load_i64(args + static(A.x)) + row * load_i64(args + static(A.x_stride))
        answer = load_i64(load_i64(args + static(A.answers)) + 8 * row)
        own = load_f32(x + 4 * answer)
        limit = splat_f32(own)
        before = answer - answer % 16
        behind = min(before + 16, n)
        count = zero_f32()
        for i in range(0, before, 16):
            count = add(count, select(less(load_f32x16(x + 4 * i), limit), none, one))
        for i in range(behind, n, 16):
            count = add(count, keep_first(select(less(limit, load_part(x, i, n)), one, none), n - i))
        rank = int(sum_lanes(count))
        for i in range(before, behind):
            value = load_f32(x + 4 * i)
            if value > own or (value == own and i < answer):
                rank += 1
        store_i64(load_i64(args + static(A.ranks)) + 8 * row, rank)


KERNELS = {
    "best": lambda: specialize(best, A=BEST, N_TOP=N_TOP, BLOCK=BLOCK),
    "sums": lambda: specialize(
        sums,
        A=SUMS,
        N_TOP=N_TOP,
        BLOCK=BLOCK,
        SUM_WEIGHTS=SUM_WEIGHTS,
        SUM_WEIGHTED=SUM_WEIGHTED,
        SUM_CROSS=SUM_CROSS,
        SUM_LOGITS=SUM_LOGITS,
        SUMS_BYTES=SUMS_BYTES,
    ),
    "ranks": lambda: specialize(ranks, A=RANKS),
}
