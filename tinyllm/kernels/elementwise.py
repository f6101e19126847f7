"""Kernels over rows of float32 activations: norms, gated activations, and their quantization into int8 records.

Rows are padded with zeros to a multiple of 32; a record holds 32 inputs (see `abi.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .abi import (
    COPY_HEADS,
    GATED,
    GATHER,
    JOIN,
    LIMIT,
    NORM,
    QUANTIZE,
    RECORD,
    RECORD_SCALE,
    SPAN,
    SPLIT,
    WEIGH,
)
from .dealing import draw
from .dot import store_codes
from .simd import (
    absolute,
    add,
    fma,
    keep_first,
    load_f32,
    load_f32x16,
    load_first,
    load_i8x16,
    load_i64,
    max_lanes,
    maximum,
    minimum,
    mul,
    round_to_i32,
    sigmoid,
    splat_f32,
    store_f32,
    store_f32x16,
    store_first,
    sub,
    sum_lanes,
    zero_f32,
)
from .specialize import inline, specialize, static

# Inputs of a row that one thread takes at a time.
SEGMENT = 256
# In float32, or the kernels would compute in float64. Below the least peak, its inverse overflows: codes are zero.
_ONE, _SCALE, _NOTHING, _LEAST_PEAK = np.float32([1.0, 1.0 / 127.0, 0.0, 1e-36])


@inline
def load_part(at, i, n):
    """Floats i … i+15 of a row of n, zeros behind its end."""
    if i + 16 <= n:
        return load_f32x16(at + 4 * i)
    return load_first(at + 4 * i, n - i)


@inline
def store_part(at, i, n, value):
    if i + 16 <= n:
        store_f32x16(at + 4 * i, value)
    else:
        store_first(at + 4 * i, value, n - i)


@inline
def quantize_block(low, high, record):
    """Write the record of 32 values: scale = max|x| / 127, codes rounded to nearest even."""
    peak = max_lanes(maximum(absolute(low), absolute(high)))
    scale = peak * _SCALE
    inverse = _ONE / scale if peak > _LEAST_PEAK else _NOTHING
    factor = splat_f32(inverse)
    store_f32(record + RECORD_SCALE, scale)
    store_codes(record, round_to_i32(mul(low, factor)), round_to_i32(mul(high, factor)), scale)


def quantize(args, thread, n_threads):
    """Records of float32 rows. PRIVATE: of one row, for each thread its own (`Plan` says when)."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    records = load_i64(args + static(A.records))
    records_stride = load_i64(args + static(A.records_stride))
    if static(PRIVATE):
        record = records + thread * records_stride
        for i in range(0, n, 32):
            quantize_block(load_f32x16(x + 4 * i), load_f32x16(x + 4 * i + 64), record + 2 * i)
    else:
        segments = (n + SEGMENT - 1) // SEGMENT
        while True:
            unit = draw(args, thread, n_threads, n_rows * segments)
            if unit < 0:
                break
            row = unit // segments
            start = (unit - row * segments) * SEGMENT
            at = x + row * x_stride
            record = records + row * records_stride
            for i in range(start, min(start + SEGMENT, n), 32):
                quantize_block(load_f32x16(at + 4 * i), load_f32x16(at + 4 * i + 64), record + 2 * i)


def split(args, thread, n_threads):
    """Records of float32 rows at twice the precision: row i as rows 2i, rounded, and 2i + 1, what rounding left
    over.
    """
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    records = load_i64(args + static(A.records))
    records_stride = load_i64(args + static(A.records_stride))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        at = x + row * x_stride
        record = records + 2 * row * records_stride
        for i in range(0, n, 32):
            low, high = load_f32x16(at + 4 * i), load_f32x16(at + 4 * i + 64)
            quantize_block(low, high, record)
            scale = splat_f32(-load_f32(record + RECORD_SCALE))
            rest_low = fma(load_i8x16(record), scale, low)
            rest_high = fma(load_i8x16(record + 16), scale, high)
            quantize_block(rest_low, rest_high, record + records_stride)
            record += RECORD


def join(args, thread, n_threads):
    """y[i] = x[2i] + x[2i + 1]: a product of rows that were split."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        first = x + 2 * row * x_stride
        for i in range(0, n, 16):
            store_part(y + row * y_stride, i, n, add(load_part(first, i, n), load_part(first + x_stride, i, n)))


def norm(args, thread, n_threads):
    """RMSNorm (Zhang & Sennrich 2019): x / sqrt(mean x² + eps) · weight, or LayerNorm (Ba et al. 2016): the same of x
    - mean x.

    A row may hold several norms side by side (`segments`, one per head). Records are of the whole row. PRIVATE: of one
    row, for each thread in a row of its own.
    """
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    eps = load_f32(args + static(A.eps))
    weight = load_i64(args + static(A.weight))
    weight_stride = load_i64(args + static(A.weight_stride))
    bias = load_i64(args + static(A.bias))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    h = load_i64(args + static(A.h))
    h_stride = load_i64(args + static(A.h_stride))
    records = load_i64(args + static(A.records))
    records_stride = load_i64(args + static(A.records_stride))
    segments = load_i64(args + static(A.segments))
    accumulate = load_i64(args + static(A.accumulate))
    scale = splat_f32(load_f32(args + static(A.scale)))
    while True:
        if static(PRIVATE):
            row = 0
            target = thread
        else:
            row = draw(args, thread, n_threads, n_rows)
            if row < 0:
                break
            target = row
        for segment in range(segments):
            at = x + row * x_stride + segment * n * 4
            out = h + target * h_stride + segment * n * 4
            mean = zero_f32()
            if static(CENTRED):
                total = zero_f32()
                for i in range(0, n, 16):
                    total = add(total, load_part(at, i, n))
                mean = splat_f32(sum_lanes(total) / n)
            squares = zero_f32()
            for i in range(0, n, 16):
                value = load_part(at, i, n)
                if static(CENTRED):
                    value = keep_first(sub(value, mean), n - i)
                squares = fma(value, value, squares)
            factor = splat_f32(1.0 / np.sqrt(sum_lanes(squares) / n + eps))
            for i in range(0, n, 16):
                value = load_part(at, i, n)
                if static(CENTRED):
                    value = sub(value, mean)
                value = mul(value, factor)
                if weight != 0:
                    value = mul(value, load_part(weight + segment * weight_stride, i, n))
                if bias != 0:
                    value = add(value, load_part(bias, i, n))
                if accumulate != 0:
                    value = fma(value, scale, load_part(out, i, n))
                else:
                    value = mul(value, scale)
                store_part(out, i, n, value)
        if records != 0:
            at = h + target * h_stride
            record = records + target * records_stride
            for i in range(0, n * segments, 32):
                quantize_block(load_f32x16(at + 4 * i), load_f32x16(at + 4 * i + 64), record + 2 * i)
        if static(PRIVATE):
            break


def gather(args, thread, n_threads):
    """y[i] = x[index[i]]: the rows whose logits are wanted."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    index = load_i64(args + static(A.index))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        source = x + load_i64(index + 8 * row) * x_stride
        for i in range(0, n, 16):
            store_part(y + row * y_stride, i, n, load_part(source, i, n))


def activate(args, thread, n_threads):
    """y = act(gate), times up where there is one (SwiGLU, Shazeer 2020, and its kin), and the records of y."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    segments = (n + SEGMENT - 1) // SEGMENT
    while True:
        unit = draw(args, thread, n_threads, n_rows * segments)
        if unit < 0:
            break
        row = unit // segments
        start = (unit - row * segments) * SEGMENT
        activate_span(args, row, row + 1, start, start + SEGMENT)


def activate_part(args, rows, columns):
    """The same for a span of rows and one of columns that begins at a multiple of 32."""
    activate_span(args, rows // SPAN, rows % SPAN, columns // SPAN, columns % SPAN)


def activate_span(args, row_start, row_end, start, end):
    n = load_i64(args + static(A.n))
    gate = load_i64(args + static(A.gate))
    up = load_i64(args + static(A.up))
    x_stride = load_i64(args + static(A.x_stride))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    records = load_i64(args + static(A.records))
    records_stride = load_i64(args + static(A.records_stride))
    for row in range(row_start, row_end):
        gate_at = gate + row * x_stride
        up_at = up + row * x_stride
        out = y + row * y_stride
        record = records + row * records_stride
        for i in range(start, min(end, n), 32):
            for part in static((0, 16)):
                g[part] = load_part(gate_at, i + part, n)
                if static(GATED):
                    a[part] = mul(act(g[part]), raise_up(load_part(up_at, i + part, n)))
                else:
                    a[part] = act(g[part])
                store_part(out, i + part, n, a[part])
            if records != 0:
                quantize_block(a[0], a[16], record + 2 * i)


def limit(args, thread, n_threads):
    """Keep x within ±limit, in place: smoothly (limit · tanh(x / limit)) or by cutting off."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    bound = load_f32(args + static(A.limit))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        at = x + row * x_stride
        for i in range(0, n, 16):
            store_part(at, i, n, within(load_part(at, i, n), bound))


def weigh(args, thread, n_threads):
    """x = weight · x per row, in place."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    weights = load_i64(args + static(A.weights))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        at = x + row * x_stride
        weight = splat_f32(load_f32(weights + 4 * row))
        for i in range(0, n, 16):
            store_part(at, i, n, mul(load_part(at, i, n), weight))


@inline
def cap(v, bound):
    """bound · tanh(v / bound), by tanh x = 2·sigmoid(2x) - 1."""
    return fma(sigmoid(mul(v, splat_f32(2.0 / bound))), splat_f32(2.0 * bound), splat_f32(-bound))


@inline
def clamp(v, bound):
    return minimum(maximum(v, splat_f32(-bound)), splat_f32(bound))


def copy_heads(args, thread, n_threads):
    """Columns of each head to other places."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    n_heads = load_i64(args + static(A.n_heads))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    x_step = load_i64(args + static(A.x_step))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    y_step = load_i64(args + static(A.y_step))
    while True:
        row = draw(args, thread, n_threads, n_rows)
        if row < 0:
            break
        for head in range(n_heads):
            source = x + row * x_stride + head * x_step
            target = y + row * y_stride + head * y_step
            for i in range(0, n, 16):
                store_part(target, i, n, load_part(source, i, n))


@inline
def unchanged(v):
    return v


@inline
def silu(v):
    return mul(v, sigmoid(v))


_GELU_FACTOR = np.float32(2.0 * math.sqrt(2.0 / math.pi))


@inline
def gelu(v):
    """GELU by its tanh formula (Hendrycks & Gimpel 2016): v · sigmoid(2·sqrt(2/π)·(v + 0.044715 v³))."""
    cube = mul(mul(v, v), v)
    inner = fma(cube, splat_f32(np.float32(0.044715)), v)
    return mul(v, sigmoid(mul(inner, splat_f32(_GELU_FACTOR))))


@inline
def relu_squared(v):
    positive = maximum(v, zero_f32())
    return mul(positive, positive)


_CLAMP = np.float32(7.0)


@inline
def clamped_silu(v):
    """v · sigmoid(1.702 v) of values up to 7 (gpt-oss)."""
    v = minimum(v, splat_f32(_CLAMP))
    return mul(v, sigmoid(mul(v, splat_f32(np.float32(1.702)))))


@inline
def clamped_plus_one(v):
    return add(clamp(v, _CLAMP), splat_f32(np.float32(1.0)))


# What is done to the gate, and to what it multiplies.
ACTIVATIONS = {
    "silu": (silu, unchanged),
    "gelu": (gelu, unchanged),
    "relu2": (relu_squared, unchanged),
    "clamped_swiglu": (clamped_silu, clamped_plus_one),
}


def build_activation(name: str, gated: bool, part: bool = False) -> Callable:
    act, raise_up = ACTIVATIONS[name]
    span = inline(specialize(activate_span, A=GATED, GATED=gated, act=act, raise_up=raise_up))
    return specialize(activate_part if part else activate, A=GATED, SPAN=SPAN, activate_span=span)


KERNELS = {
    "copy_heads": lambda: specialize(copy_heads, A=COPY_HEADS),
    "gather": lambda: specialize(gather, A=GATHER),
    "gated": lambda activation: build_activation(activation, True),
    "gated_part": lambda activation: build_activation(activation, True, part=True),
    "join": lambda: specialize(join, A=JOIN),
    "limit": lambda kind: specialize(limit, A=LIMIT, within=cap if kind == "cap" else clamp),
    "norm": lambda kind: specialize(norm, A=NORM, CENTRED=kind == "layer", PRIVATE=False),
    "norm_private": lambda kind: specialize(norm, A=NORM, CENTRED=kind == "layer", PRIVATE=True),
    "plain": lambda activation: build_activation(activation, False),
    "quantize": lambda: specialize(quantize, A=QUANTIZE, PRIVATE=False),
    "quantize_private": lambda: specialize(quantize, A=QUANTIZE, PRIVATE=True),
    "split": lambda: specialize(split, A=SPLIT),
    "weigh": lambda: specialize(weigh, A=WEIGH),
}
