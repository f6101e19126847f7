"""The steps of attention between its two products: scores of one page of positions become weights, and the weighted
sums of several pages and partitions are joined (online softmax, Milakov & Gimelshein 2018).

Scores are kept in units of log 2, so that their exponentials are powers of two. Those of a row are 32 floats.
"""

from __future__ import annotations

import numpy as np

from .abi import PAGE
from .elementwise import load_part, store_part
from .simd import (
    add,
    add_i32,
    broadcast_f32,
    exp2,
    fma,
    lane_index,
    less,
    less_i32,
    load_f32,
    load_f32x16,
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
    to_f32,
    zero_f32,
)
from .specialize import inline

MASKED = np.float32(-1e30)
LOG2E = np.float32(1.0 / np.log(2.0))


@inline
def scale_queries(source, target, n, scale):
    """A head's query, times the factor that all its scores have."""
    factor = splat_f32(scale)
    for i in range(0, n, 16):
        store_part(target, i, n, mul(load_part(source, i, n), factor))


@inline
def sees_all(base, first, last, window_left, window_right, causal, length):
    """Whether queries at the positions first … last see all of the page that begins at `base`, as they mostly do."""
    if causal == 0:
        return base >= last - window_left and base + PAGE - 1 <= min(first + window_right, length - 1)
    return base >= last - window_left and base + PAGE - 1 <= first


@inline
def mask_scores(scores, n_rows, group, base, position, softcap, slopes, window_left, window_right, causal, length):
    """Cap scores, add the slopes of ALiBi, and hide positions that a row does not see: rows are `group` query heads for
    each position from `position` on, and `slopes` are those heads'."""
    for r in range(n_rows):
        at = scores + r * 128
        query_position = position + r // group
        s_low = load_f32x16(at)
        s_high = load_f32x16(at + 64)
        if softcap != 0.0:
            s_low = soft_cap(s_low, softcap)
            s_high = soft_cap(s_high, softcap)
        if slopes != 0:
            slope = splat_f32(load_f32(slopes + 4 * (r % group)) * LOG2E)
            s_low = fma(slope, to_f32(add_i32(lane_index(), splat_i32(base - query_position))), s_low)
            s_high = fma(slope, to_f32(add_i32(lane_index(), splat_i32(base + 16 - query_position))), s_high)
        visible_to = query_position
        if causal == 0:
            visible_to = min(query_position + window_right, length - 1)
        store_f32x16(at, hide(s_low, base, query_position - window_left, visible_to))
        store_f32x16(at + 64, hide(s_high, base + 16, query_position - window_left, visible_to))


@inline
def weigh_scores(scores, n_rows, all_seen, tops, part_max, part_sums, rescale):
    """Scores of a page to weights relative to the largest score so far, `part_max`; what was summed before is to be
    multiplied by `rescale`, and `part_sums` holds 16 partial sums of each row's weights."""
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
def write_row(target, all_max, all_sum, all_out, v_dim, sink_at):
    """Divide by the softmax denominator, to which a sink (gpt-oss; 0: none) adds a score without a value."""
    total = load_f32(all_sum)
    factor = np.float32(1.0)
    if sink_at != 0:
        sink = load_f32(sink_at) * LOG2E
        top = max(load_f32(all_max), sink)
        factor = scalar_exp2(load_f32(all_max) - top)
        total = total * factor + scalar_exp2(sink - top)
    inverse = splat_f32(factor / total)
    for i in range(0, v_dim, 16):
        store_part(target, i, v_dim, mul(load_part(all_out, i, v_dim), inverse))


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
