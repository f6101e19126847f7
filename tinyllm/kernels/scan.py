"""State space scans of Mamba and Mamba-2: each row decays a state, adds its input, and reads an output from it.

Channels lie in the lanes; a state is [panels of 16 channels][n_state][16]. Rows of a sequence are taken one after
another, so a prompt may be cut anywhere and the results stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

from .abi import HEAD_SCAN, RUN_BYTES, RUN_FIRST, RUN_ROWS, RUN_SOURCE, RUN_TARGET, SELECTIVE_SCAN
from .dealing import draw
from .elementwise import load_part, silu, store_part
from .simd import (
    add,
    broadcast_f32,
    exp,
    fma,
    load_f32x16,
    load_i64,
    mul,
    softplus,
    store_f32x16,
    zero_f32,
)
from .specialize import specialize, static


def selective_scan(args, thread, n_threads):
    """Mamba (Gu & Dao 2023): h[s] = h[s] · exp(dt · a[s]) + dt · x · b[s]; y = (Σ h[s] · c[s] + d · x) · silu(z).

    dt goes through softplus here. `a` is laid out like a state.
    """
    runs = load_i64(args + static(A.runs))
    n_runs = load_i64(load_i64(args + static(A.n_runs)))
    n = load_i64(args + static(A.n))
    n_state = load_i64(args + static(A.n_state))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    dt = load_i64(args + static(A.dt))
    dt_stride = load_i64(args + static(A.dt_stride))
    b = load_i64(args + static(A.b))
    c = load_i64(args + static(A.c))
    bc_stride = load_i64(args + static(A.bc_stride))
    a = load_i64(args + static(A.a))
    d = load_i64(args + static(A.d))
    z = load_i64(args + static(A.z))
    z_stride = load_i64(args + static(A.z_stride))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    state = load_i64(args + static(A.state))
    panels = (n + 15) // 16
    while True:
        panel = draw(args, thread, n_threads, panels)
        if panel < 0:
            break
        channel = 16 * panel
        panel_at = panel * n_state * 64
        direct = load_part(d, channel, n)
        for run_index in range(n_runs):
            run = runs + run_index * RUN_BYTES
            first = load_i64(run + RUN_FIRST)
            before = load_i64(run + RUN_SOURCE) + state + panel_at
            target = load_i64(run + RUN_TARGET) + state + panel_at
            for row in range(first, first + load_i64(run + RUN_ROWS)):
                value = load_part(x + row * x_stride, channel, n)
                step = softplus(load_part(dt + row * dt_stride, channel, n))
                scaled = mul(step, value)
                b_at = b + row * bc_stride
                c_at = c + row * bc_stride
                for t in static(range(UNROLL)):
                    total[t] = zero_f32()
                for s in range(0, n_state, UNROLL):
                    for t in static(range(UNROLL)):
                        at = 64 * (s + t)
                        h = mul(load_f32x16(before + at), exp(mul(step, load_f32x16(a + panel_at + at))))
                        h = fma(scaled, broadcast_f32(b_at + 4 * (s + t)), h)
                        store_f32x16(target + at, h)
                        total[t] = fma(h, broadcast_f32(c_at + 4 * (s + t)), total[t])
                before = target
                if static(UNROLL == 4):
                    total[0] = add(add(total[0], total[1]), add(total[2], total[3]))
                out = fma(direct, value, total[0])
                gate = silu(load_part(z + row * z_stride, channel, n))
                store_part(y + row * y_stride, channel, n, mul(out, gate))


def head_scan(args, thread, n_threads):
    """Mamba-2 (Dao & Gu 2024): as `selective_scan`, but dt, a and d belong to a head, b and c to a group of heads.

    dt receives its bias and goes through softplus here.
    """
    runs = load_i64(args + static(A.runs))
    n_runs = load_i64(load_i64(args + static(A.n_runs)))
    n_heads = load_i64(args + static(A.n_heads))
    head_dim = load_i64(args + static(A.head_dim))
    n_groups = load_i64(args + static(A.n_groups))
    n_state = load_i64(args + static(A.n_state))
    x = load_i64(args + static(A.x))
    b = load_i64(args + static(A.b))
    c = load_i64(args + static(A.c))
    xbc_stride = load_i64(args + static(A.xbc_stride))
    dt = load_i64(args + static(A.dt))
    dt_stride = load_i64(args + static(A.dt_stride))
    dt_bias = load_i64(args + static(A.dt_bias))
    a = load_i64(args + static(A.a))
    d = load_i64(args + static(A.d))
    z = load_i64(args + static(A.z))
    z_stride = load_i64(args + static(A.z_stride))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    state = load_i64(args + static(A.state))
    parts = (head_dim + 15) // 16
    heads_per_group = n_heads // n_groups
    while True:
        panel = draw(args, thread, n_threads, n_heads * parts)
        if panel < 0:
            break
        head = panel // parts
        channel = 16 * (panel - head * parts)
        head_at = 4 * head * head_dim
        group_at = 4 * (head // heads_per_group) * n_state
        panel_at = panel * n_state * 64
        decay_rate = broadcast_f32(a + 4 * head)
        direct = broadcast_f32(d + 4 * head)
        step_bias = broadcast_f32(dt_bias + 4 * head)
        for run_index in range(n_runs):
            run = runs + run_index * RUN_BYTES
            first = load_i64(run + RUN_FIRST)
            before = load_i64(run + RUN_SOURCE) + state + panel_at
            target = load_i64(run + RUN_TARGET) + state + panel_at
            for row in range(first, first + load_i64(run + RUN_ROWS)):
                value = load_part(x + row * xbc_stride + head_at, channel, head_dim)
                step = softplus(add(broadcast_f32(dt + row * dt_stride + 4 * head), step_bias))
                decay = exp(mul(step, decay_rate))
                scaled = mul(step, value)
                b_at = b + row * xbc_stride + group_at
                c_at = c + row * xbc_stride + group_at
                for t in static(range(UNROLL)):
                    total[t] = zero_f32()
                for s in range(0, n_state, UNROLL):
                    for t in static(range(UNROLL)):
                        at = 64 * (s + t)
                        h = fma(scaled, broadcast_f32(b_at + 4 * (s + t)), mul(load_f32x16(before + at), decay))
                        store_f32x16(target + at, h)
                        total[t] = fma(h, broadcast_f32(c_at + 4 * (s + t)), total[t])
                before = target
                if static(UNROLL == 4):
                    total[0] = add(add(total[0], total[1]), add(total[2], total[3]))
                out = fma(direct, value, total[0])
                gate = silu(load_part(z + row * z_stride + head_at, channel, head_dim))
                store_part(y + row * y_stride + head_at, channel, head_dim, mul(out, gate))


# A kernel's parameter is how many states it takes at a time: 4, so that four sums hide each other's latency, or 1 where
# 4 does not divide their number.
KERNELS: dict[str, Callable] = {
    "selective": lambda unroll: specialize(selective_scan, A=SELECTIVE_SCAN, UNROLL=int(unroll)),
    "head": lambda unroll: specialize(head_scan, A=HEAD_SCAN, UNROLL=int(unroll)),
}
