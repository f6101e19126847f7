"""Short causal convolution of each channel along its sequence; the last inputs are kept as state for the next step.

Channels lie in the lanes. A state holds the kernel - 1 inputs before the next row, oldest first.
"""

from __future__ import annotations

from collections.abc import Callable

from .abi import CONVOLVE, RUN_BYTES, RUN_FIRST, RUN_ROWS, RUN_SOURCE, RUN_TARGET
from .dealing import draw
from .elementwise import load_part, silu, store_part
from .simd import fma, load_f32x16, load_i64, mul, store_f32x16, zero_f32
from .specialize import specialize, static


def convolve(args, thread, n_threads):
    """y[t] = silu(bias + Σ taps[i] · x[t - last + i]), or y[t] = gate_out[t] · Σ taps[i] · (gate_in · x)[t - last + i].

    The first form feeds the scans (Mamba, gated delta net), the second is LFM2's mixer. Taps and state are
    [kernel][channels] and [kernel - 1][channels], padded to whole panels of 16 channels.
    """
    runs = load_i64(args + static(A.runs))
    n_runs = load_i64(load_i64(args + static(A.n_runs)))
    n = load_i64(args + static(A.n))
    taps = load_i64(args + static(A.taps))
    bias = load_i64(args + static(A.bias))
    x = load_i64(args + static(A.x))
    x_stride = load_i64(args + static(A.x_stride))
    gate_in = load_i64(args + static(A.gate_in))
    gate_out = load_i64(args + static(A.gate_out))
    y = load_i64(args + static(A.y))
    y_stride = load_i64(args + static(A.y_stride))
    state = load_i64(args + static(A.state))
    panels = (n + 15) // 16
    width = 64 * panels
    while True:
        panel = draw(args, thread, n_threads, panels)
        if panel < 0:
            break
        channel = 16 * panel
        offset = zero_f32()
        if bias != 0:
            offset = load_part(bias, channel, n)
        for i in static(range(KERNEL)):
            tap[i] = load_f32x16(taps + i * width + 64 * panel)
        for run_index in range(n_runs):
            run = runs + run_index * RUN_BYTES
            first = load_i64(run + RUN_FIRST)
            source = load_i64(run + RUN_SOURCE) + state + 64 * panel
            target = load_i64(run + RUN_TARGET) + state + 64 * panel
            for i in static(range(LAST)):
                past[i] = load_f32x16(source + i * width)
            for row in range(first, first + load_i64(run + RUN_ROWS)):
                past[LAST] = load_part(x + row * x_stride, channel, n)
                if static(GATED):
                    past[LAST] = mul(past[LAST], load_part(gate_in + row * x_stride, channel, n))
                total = offset
                for i in static(range(KERNEL)):
                    total = fma(past[i], tap[i], total)
                if static(GATED):
                    gate = load_part(gate_out + row * x_stride, channel, n)
                    store_part(y + row * y_stride, channel, n, mul(total, gate))
                else:
                    store_part(y + row * y_stride, channel, n, silu(total))
                for i in static(range(LAST)):
                    past[i] = past[i + 1]
            for i in static(range(LAST)):
                store_f32x16(target + i * width, past[i])


def build_convolve(parameter: str) -> Callable:
    form, kernel = parameter.split("-")
    return specialize(convolve, A=CONVOLVE, KERNEL=int(kernel), LAST=int(kernel) - 1, GATED=form == "gated")


KERNELS = {"convolve": build_convolve}
