"""Gates on a mixer's output, head by head: after a norm (gated delta net), or plain (gated attention)."""

from __future__ import annotations

import numpy as np

from .abi import GATED_NORM, SIGMOID_GATE
from .dealing import draw
from .elementwise import load_part, silu, store_part
from .simd import fma, load_f32, load_i64, mul, sigmoid, splat_f32, sum_lanes, zero_f32
from .specialize import specialize, static


def gated_norm(args, thread, n_threads):
    """y = x / sqrt(mean x² + eps) · weight · silu(gate), for each segment (head) of a row; all share the weight."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    segments = load_i64(args + static(A.segments))
    eps = load_f32(args + static(A.eps))
    weight = load_i64(args + static(A.weight))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    gate = load_i64(args + static(A.gate))
    gate_stride = load_i64(args + static(A.gate_stride))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    while True:
        unit = draw(args, thread, n_threads, n_rows * segments)
        if unit < 0:
            break
        row = unit // segments
        column = 4 * (unit - row * segments) * n
        x_at = x + row * x_stride + column
        gate_at = gate + row * gate_stride + column
        squares = zero_f32()
        for i in range(0, n, 16):
            value = load_part(x_at, i, n)
            squares = fma(value, value, squares)
        factor = splat_f32(1.0 / np.sqrt(sum_lanes(squares) / n + eps))
        for i in range(0, n, 16):
            value = mul(mul(load_part(x_at, i, n), factor), load_part(weight, i, n))
            store_part(y + row * y_stride + column, i, n, mul(value, silu(load_part(gate_at, i, n))))


def sigmoid_gate(args, thread, n_threads):
    """x = x · sigmoid(gate), in place, for each segment (head) of a row; gates have a stride of their own."""
    n_rows = load_i64(load_i64(args + static(A.n_rows)))
    n = load_i64(args + static(A.n))
    segments = load_i64(args + static(A.segments))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    gate = load_i64(args + static(A.gate))
    gate_stride = load_i64(args + static(A.gate_stride))
    gate_segment = load_i64(args + static(A.gate_segment))
    while True:
        unit = draw(args, thread, n_threads, n_rows * segments)
        if unit < 0:
            break
        row = unit // segments
        segment = unit - row * segments
        x_at = x + row * x_stride + 4 * segment * n
        gate_at = gate + row * gate_stride + segment * gate_segment
        for i in range(0, n, 16):
            store_part(x_at, i, n, mul(load_part(x_at, i, n), sigmoid(load_part(gate_at, i, n))))


KERNELS = {
    "gated_norm": lambda: specialize(gated_norm, A=GATED_NORM),
    "sigmoid_gate": lambda: specialize(sigmoid_gate, A=SIGMOID_GATE),
}
