"""Mixture of experts around the matrix products: scores to chosen experts, rows sorted by expert, outputs put together.

A step's rows that chose the same expert become neighbours ("pairs" of a row and a choice), so that each expert's
weights are read once however many rows want them, and those of experts that nobody chose are not read at all.
"""

from __future__ import annotations

import numpy as np

from .abi import COMBINE, GROUP, ROUTE
from .dealing import draw
from .elementwise import load_part, store_part
from .simd import (
    add,
    atomic_add,
    exp,
    fma,
    keep_first,
    load_f32,
    load_i64,
    max_lanes,
    maximum,
    mul,
    sigmoid,
    splat_f32,
    store_f32,
    store_i64,
    sub,
    sum_lanes,
    zero_f32,
)
from .specialize import inline, specialize, static

# Below every score. A chosen expert, or one outside the chosen groups, gets it so that it is not chosen again.
TAKEN = np.float32(-3e38)
# llama.cpp divides by no less than the smallest normal half-precision number when it makes weights sum to 1.
LEAST_SUM = np.float32(6.103515625e-5)


@inline
def scalar_exp(x):
    return max_lanes(exp(splat_f32(x)))


def route(args, thread, n_threads):
    """Choose n_used experts per row, best first; of equal scores the lower number wins.

    `scores` becomes probabilities in place; `choice` is what experts are chosen by: probabilities plus a bias.
    """
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n_experts = load_i64(args + static(A.n_experts))
    n_used = load_i64(args + static(A.n_used))
    n_groups = load_i64(args + static(A.n_groups))
    n_groups_used = load_i64(args + static(A.n_groups_used))
    bias = load_i64(args + static(A.bias))
    normalise = load_i64(args + static(A.normalise))
    scale = load_f32(args + static(A.scale))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        scores = load_i64(args + static(A.scores)) + row * load_i64(args + static(A.scores_stride))
        choice = load_i64(args + static(A.choice)) + row * load_i64(args + static(A.choice_stride))
        ids = load_i64(args + static(A.ids)) + 8 * row * n_used
        weights = load_i64(args + static(A.weights)) + 4 * row * n_used
        to_probabilities(scores, n_experts)
        for i in range(0, n_experts, 16):
            value = load_part(scores, i, n_experts)
            if bias != 0:
                value = add(value, load_part(bias, i, n_experts))
            store_part(choice, i, n_experts, value)
        if n_groups > n_groups_used:
            close_groups(choice, n_experts, n_groups, n_groups_used)
        total = np.float32(0.0)
        for k in range(n_used):
            best = highest(choice, 0, n_experts)
            store_f32(choice + 4 * best, TAKEN)
            store_i64(ids + 8 * k, best)
            weight = load_f32(scores + 4 * best)
            if static(CHOSEN):
                weight = scalar_exp(weight - load_f32(scores + 4 * load_i64(ids)))
            store_f32(weights + 4 * k, weight)
            total = total + weight
        if static(CHOSEN):
            scale_all(weights, n_used, 1.0 / total)
        elif normalise != 0:
            scale_all(weights, n_used, 1.0 / max(total, LEAST_SUM))
        scale_all(weights, n_used, scale)


@inline
def highest(values, first, end):
    """Index of the largest value; of equal ones the first."""
    best = first
    top = load_f32(values + 4 * first)
    for i in range(first + 1, end):
        value = load_f32(values + 4 * i)
        if value > top:
            top = value
            best = i
    return best


@inline
def close_groups(choice, n_experts, n_groups, n_groups_used):
    """Leave the n_groups_used groups with the highest sums of their two best experts (DeepSeek-V3, section 2.1.2)."""
    size = n_experts // n_groups
    for _ in range(n_groups - n_groups_used):
        worst = 0
        lowest = np.float32(3e38)
        for group in range(n_groups):
            first = group * size
            best = highest(choice, first, first + size)
            top = load_f32(choice + 4 * best)
            if top > TAKEN:
                second = TAKEN
                for i in range(first, first + size):
                    if i != best:
                        second = max(second, load_f32(choice + 4 * i))
                # Of equal groups the later one goes.
                total = top + second if size > 1 else top
                if total <= lowest:
                    lowest = total
                    worst = group
        for i in range(worst * size, worst * size + size):
            store_f32(choice + 4 * i, TAKEN)


@inline
def scale_all(values, n, factor):
    for i in range(n):
        store_f32(values + 4 * i, load_f32(values + 4 * i) * factor)


@inline
def softmax_all(scores, n):
    top = splat_f32(np.float32(-3e38))
    for i in range(0, n, 16):
        # Lanes behind the end repeat the first score.
        first = splat_f32(load_f32(scores + 4 * i))
        value = load_part(scores, i, n)
        top = maximum(top, add(first, keep_first(sub(value, first), n - i)))
    peak = splat_f32(max_lanes(top))
    total = zero_f32()
    for i in range(0, n, 16):
        value = keep_first(exp(sub(load_part(scores, i, n), peak)), n - i)
        total = add(total, value)
        store_part(scores, i, n, value)
    inverse = splat_f32(1.0 / sum_lanes(total))
    for i in range(0, n, 16):
        store_part(scores, i, n, mul(load_part(scores, i, n), inverse))


@inline
def sigmoid_all(scores, n):
    for i in range(0, n, 16):
        store_part(scores, i, n, sigmoid(load_part(scores, i, n)))


@inline
def unchanged_all(scores, n):
    return


def group(args, thread, n_threads):
    """Sort the step's pairs by expert (a counting sort by one thread: rows keep their order within an expert)."""
    if atomic_add(args, 1) != 0:
        return
    n_experts = load_i64(args + static(A.n_experts))
    n_used = load_i64(args + static(A.n_used))
    ids = load_i64(args + static(A.ids))
    counts = load_i64(args + static(A.counts))
    firsts = load_i64(args + static(A.firsts))
    active = load_i64(args + static(A.active))
    weights = load_i64(args + static(A.weights))
    pair_rows = load_i64(args + static(A.pair_rows))
    pair_weights = load_i64(args + static(A.pair_weights))
    places = load_i64(args + static(A.places))
    parts = load_i64(args + static(A.parts))
    n_pairs = load_i64(load_i64(args + static(A.n_rows))) * n_used
    for expert in range(n_experts):
        store_i64(counts + 8 * expert, 0)
    for pair in range(n_pairs):
        count = counts + 8 * load_i64(ids + 8 * pair)
        store_i64(count, load_i64(count) + 1)
    first = 0
    n_active = 0
    for expert in range(n_experts):
        count = load_i64(counts + 8 * expert)
        store_i64(firsts + 8 * expert, first)
        if count > 0:
            store_i64(active + 8 * n_active, expert)
            n_active += 1
        first += count
    for pair in range(n_pairs):
        next_place = firsts + 8 * load_i64(ids + 8 * pair)
        place = load_i64(next_place)
        store_i64(next_place, place + 1)
        store_i64(places + 8 * pair, place)
        store_i64(pair_rows + 8 * place, pair // n_used)
        store_f32(pair_weights + 4 * place, load_f32(weights + 4 * pair))
    for expert in range(n_experts):
        # The first place was counted up to the end; from here on both are in rows.
        count = load_i64(counts + 8 * expert)
        store_i64(firsts + 8 * expert, (load_i64(firsts + 8 * expert) - count) * parts)
        store_i64(counts + 8 * expert, count * parts)
    store_i64(load_i64(args + static(A.n_active)), n_active)
    store_i64(load_i64(args + static(A.n_pairs)), n_pairs)


def combine(args, thread, n_threads):
    """Sum of a row's chosen experts' outputs by weight, plus the shared expert's, to or onto y."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    n_used = load_i64(args + static(A.n_used))
    z = load_i64(args + static(A.z))
    z_stride = load_i64(args + static(A.z_stride))
    shared = load_i64(args + static(A.shared))
    gate = load_i64(args + static(A.gate))
    accumulate = load_i64(args + static(A.accumulate))
    scale = splat_f32(load_f32(args + static(A.scale)))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        weights = load_i64(args + static(A.weights))
        places = load_i64(args + static(A.places)) + 8 * row * n_used
        shared_row = shared + row * load_i64(args + static(A.shared_stride))
        y = load_i64(args + static(A.y)) + row * load_i64(args + static(A.y_stride))
        share = splat_f32(np.float32(1.0))
        if gate != 0:
            share = sigmoid(splat_f32(load_f32(gate + row * load_i64(args + static(A.gate_stride)))))
        for i in range(0, n, 16):
            total = zero_f32()
            for k in range(n_used):
                value = load_part(z + load_i64(places + 8 * k) * z_stride, i, n)
                if weights != 0:
                    value = mul(value, splat_f32(load_f32(weights + 4 * (row * n_used + k))))
                total = add(total, value)
            if shared != 0:
                total = fma(share, load_part(shared_row, i, n), total)
            if accumulate != 0:
                total = fma(total, scale, load_part(y, i, n))
            else:
                total = mul(total, scale)
            store_part(y, i, n, total)


TO_PROBABILITIES = {"softmax": softmax_all, "sigmoid": sigmoid_all, "chosen": unchanged_all}

KERNELS = {
    "combine": lambda: specialize(combine, A=COMBINE),
    "group": lambda: specialize(group, A=GROUP),
    "route": lambda scoring: specialize(
        route, A=ROUTE, CHOSEN=scoring == "chosen", to_probabilities=TO_PROBABILITIES[scoring]
    ),
}
