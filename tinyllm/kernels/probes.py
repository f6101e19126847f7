"""Kernels that find out what the machine can do at most: read memory, sum int8 products, multiply and add float32.

They are written in the vocabulary of the real kernels, so what they reach is what a perfect kernel would reach.
"""

from __future__ import annotations

from .abi import PROBE, STREAMS
from .dot import make_dot
from .simd import (
    TARGET,
    add,
    add_i32,
    atomic_add,
    broadcast4,
    constant_ir,
    fma,
    i8x64,
    load_f32x16,
    load_i8x64,
    load_i64,
    opaque,
    operation,
    store_f32x16,
    store_i8x64,
    to_f32,
    zero_f32,
    zero_i32,
)
from .specialize import specialize, static

# Independent sums that hide the latency of the arithmetic and still fit the registers.
SUMS = 12 if TARGET.wide_registers else 5


@operation(i8x64)
def nothing(builder):
    return constant_ir(i8x64, 0)


@operation(i8x64, i8x64, i8x64)
def either(builder, a, b):
    return builder.or_(a, b)


def read(args, thread, n_threads):
    """Read chunks of memory, as decode reads weights: several streams at a time, with the least work that keeps the
    loads."""
    memory = load_i64(args + static(A.memory))
    chunk_bytes = load_i64(args + static(A.chunk_bytes))
    n_chunks = load_i64(args + static(A.n_chunks))
    result = load_i64(args + static(A.result)) + 64 * thread
    stream_bytes = chunk_bytes // STREAMS
    for s in static(range(STREAMS)):
        seen[s] = nothing()
    while True:
        chunk = atomic_add(args, 1)
        if chunk >= n_chunks:
            break
        at = memory + chunk * chunk_bytes
        for _ in range(stream_bytes // 64):
            for s in static(range(STREAMS)):
                seen[s] = either(seen[s], load_i8x64(at + s * stream_bytes))
            at += 64
    everything = nothing()
    for s in static(range(STREAMS)):
        everything = either(everything, seen[s])
    store_i8x64(result, everything)


def dot_products(args, thread, n_threads):
    """int8 products of 4-bit codes as a GEMM forms them: one vector of weights, one broadcast input per sum.

    A chunk is `vectors` vectors of 64 products, a multiple of SUMS.
    """
    memory = load_i64(args + static(A.memory))
    n_chunks = load_i64(args + static(A.n_chunks))
    turns = load_i64(args + static(A.vectors)) // SUMS
    result = load_i64(args + static(A.result)) + 64 * thread
    for s in static(range(SUMS)):
        partial[s] = dot_start(memory)
    while True:
        if atomic_add(args, 1) >= n_chunks:
            break
        for turn in range(opaque(turns)):
            # The inputs change from turn to turn, so that no product can be computed before the loop.
            at = memory + 64 * (turn & 31)
            weights = load_i8x64(at)
            for s in static(range(SUMS)):
                partial[s] = dot(partial[s], weights, broadcast4(at + 4 * s))
    total = zero_i32()
    for s in static(range(SUMS)):
        total = add_i32(total, dot_close(partial[s]))
    store_f32x16(result, to_f32(total))


def fused_multiply_add(args, thread, n_threads):
    """Chains of float32 multiply-adds. A chunk is `vectors` vectors of 16, a multiple of SUMS."""
    memory = load_i64(args + static(A.memory))
    n_chunks = load_i64(args + static(A.n_chunks))
    turns = load_i64(args + static(A.vectors)) // SUMS
    result = load_i64(args + static(A.result)) + 64 * thread
    factor = load_f32x16(memory)
    summand = load_f32x16(memory + 64)
    for s in static(range(SUMS)):
        chain[s] = zero_f32()
    while True:
        if atomic_add(args, 1) >= n_chunks:
            break
        for _ in range(opaque(turns)):
            for s in static(range(SUMS)):
                chain[s] = fma(chain[s], factor, summand)
    total = zero_f32()
    for s in static(range(SUMS)):
        total = add(total, chain[s])
    store_f32x16(result, total)


def _build_dot():
    steps = make_dot(bits=4, highest=15, zero=0, groups=8)
    return specialize(dot_products, A=PROBE, SUMS=SUMS, dot_start=steps.start, dot=steps.dot, dot_close=steps.close)


KERNELS = {
    "read": lambda: specialize(read, A=PROBE, STREAMS=STREAMS),
    "dot": _build_dot,
    "fma": lambda: specialize(fused_multiply_add, A=PROBE, SUMS=SUMS),
}
