"""The sum of exponentials that turns logits into probabilities, over a whole vocabulary at once."""

from __future__ import annotations

import numpy as np

from .abi import SUM_EXP
from .elementwise import load_part
from .simd import (
    add,
    exp,
    keep_first,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32,
    store_f32,
    sub,
    sum_lanes,
    zero_f32,
)
from .specialize import specialize, static

# Values whose exponentials a lane adds up in float32 before they go into a sum in float64.
_BLOCK = 1024


def sum_exp(args, thread, n_threads):
    """result[0] + result[1] = Σ exp(x[i] - shift): a double as two float32."""
    n = load_i64(args + static(A.n))
    x = load_i64(args + static(A.x))
    shift = splat_f32(load_f32(args + static(A.shift)))
    result = load_i64(args + static(A.result))
    total = 0.0
    whole = n - n % 64
    for start in range(0, whole, BLOCK):
        for k in static(range(4)):
            part[k] = zero_f32()
        for i in range(start, min(start + BLOCK, whole), 64):
            for k in static(range(4)):
                part[k] = add(part[k], exp(sub(load_f32x16(x + 4 * i + 64 * k), shift)))
        total += sum_lanes(add(add(part[0], part[1]), add(part[2], part[3])))
    for i in range(whole, n, 16):
        total += sum_lanes(keep_first(exp(sub(load_part(x, i, n), shift)), n - i))
    high = np.float32(total)
    store_f32(result, high)
    store_f32(result + 4, total - high)


KERNELS = {"sum_exp": lambda: specialize(sum_exp, A=SUM_EXP, BLOCK=_BLOCK)}
