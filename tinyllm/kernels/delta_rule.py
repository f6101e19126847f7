"""The gated delta rule of linear attention: a state per head maps keys to values and is corrected by each row.

Value dimensions lie in the lanes; a state is [heads][parts of 16 values][k_dim][16]. Rows of a sequence are taken one
after another, so a prompt may be cut anywhere and the results stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

from .abi import DELTA_RULE, RUN_BYTES, RUN_FIRST, RUN_ROWS, RUN_SOURCE, RUN_TARGET
from .dealing import draw
from .elementwise import load_part, store_part
from .simd import (
    add,
    broadcast_f32,
    exp,
    fma,
    load_f32x16,
    load_i64,
    mul,
    sigmoid,
    softplus,
    store_f32x16,
    sub,
    zero_f32,
)
from .specialize import specialize, static


def delta_rule(args, thread, n_threads):
    """Gated delta rule (Yang, Kautz & Hatamizadeh 2024): S ← S·g + k ⊗ (v - kᵀ·S·g)·β; y = qᵀ·S.

    g = exp(a · softplus(alpha + dt_bias)), β = sigmoid(beta); q and k come normalised and scaled.
    """
    runs = load_i64(args + static(A.runs))
    n_runs = load_i64(load_i64(args + static(A.n_runs)))
    n_heads = load_i64(args + static(A.n_heads))
    k_dim = load_i64(args + static(A.k_dim))
    v_dim = load_i64(args + static(A.v_dim))
    n_key_heads = load_i64(args + static(A.n_key_heads))
    key_div = load_i64(args + static(A.key_div))
    q = load_i64(args + static(A.q))
    k = load_i64(args + static(A.k))
    v = load_i64(args + static(A.v))
    qkv_stride = load_i64(args + static(A.qkv_stride))
    beta = load_i64(args + static(A.beta))
    alpha = load_i64(args + static(A.alpha))
    gate_stride = load_i64(args + static(A.gate_stride))
    group = load_i64(args + static(A.group))
    group_bytes = load_i64(args + static(A.group_bytes))
    a = load_i64(args + static(A.a))
    dt_bias = load_i64(args + static(A.dt_bias))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    state = load_i64(args + static(A.state))
    parts = (v_dim + 15) // 16
    while True:
        panel = draw(args, thread, n_threads, n_heads * parts)
        if panel < 0:
            break
        head = panel // parts
        part = 16 * (panel - head * parts)
        head_at = 4 * head * v_dim
        key_at = 4 * (head // key_div % n_key_heads) * k_dim
        gate_at = head // group * group_bytes + 4 * (head % group)
        panel_at = panel * k_dim * 64
        decay_rate = broadcast_f32(a + 4 * head)
        step_bias = broadcast_f32(dt_bias + 4 * head)
        for run_index in range(n_runs):
            run = runs + run_index * RUN_BYTES
            first = load_i64(run + RUN_FIRST)
            before = load_i64(run + RUN_SOURCE) + state + panel_at
            target = load_i64(run + RUN_TARGET) + state + panel_at
            for row in range(first, first + load_i64(run + RUN_ROWS)):
                step = softplus(add(broadcast_f32(alpha + row * gate_stride + gate_at), step_bias))
                decay = exp(mul(step, decay_rate))
                rate = sigmoid(broadcast_f32(beta + row * gate_stride + gate_at))
                q_at = q + row * qkv_stride + key_at
                k_at = k + row * qkv_stride + key_at
                for t in static(range(UNROLL)):
                    known[t] = zero_f32()
                    total[t] = zero_f32()
                for i in range(0, k_dim, UNROLL):
                    for t in static(range(UNROLL)):
                        s = load_f32x16(before + 64 * (i + t))
                        known[t] = fma(s, broadcast_f32(k_at + 4 * (i + t)), known[t])
                if static(UNROLL == 4):
                    known[0] = add(add(known[0], known[1]), add(known[2], known[3]))
                value = load_part(v + row * qkv_stride + head_at, part, v_dim)
                correction = mul(sub(value, mul(known[0], decay)), rate)
                for i in range(0, k_dim, UNROLL):
                    for t in static(range(UNROLL)):
                        s = mul(load_f32x16(before + 64 * (i + t)), decay)
                        s = fma(correction, broadcast_f32(k_at + 4 * (i + t)), s)
                        store_f32x16(target + 64 * (i + t), s)
                        total[t] = fma(s, broadcast_f32(q_at + 4 * (i + t)), total[t])
                before = target
                if static(UNROLL == 4):
                    total[0] = add(add(total[0], total[1]), add(total[2], total[3]))
                store_part(y + row * y_stride + head_at, part, v_dim, total[0])


# The parameter is how many keys are taken at a time: 4, so that four sums hide each other's latency, or 1 where 4 does
# not divide k_dim.
KERNELS: dict[str, Callable] = {"delta_rule": lambda unroll: specialize(delta_rule, A=DELTA_RULE, UNROLL=int(unroll))}
