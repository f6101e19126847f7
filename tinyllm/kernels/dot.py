"""The int8 dot product, lowered to what the CPU has: unsigned or signed weight codes times signed activations.

A kernel opens a partial sum per row (16 lanes), adds products of 4 inputs at a time with `dot`, and closes it with
`fold`, which adds the partial sum to an int32 vector. Where the hardware sums pairs in 16 bits (`pmaddubsw`), a partial
sum may hold only so many products before it overflows: `groups_per_fold(bits)` says how many.
"""

from __future__ import annotations

import llvmlite.ir as ir

from .simd import (
    TARGET,
    Vector,
    call_llvm,
    constant_ir,
    i8x64,
    i16x32,
    i32x16,
    operation,
)

_MADD = TARGET.dot in ("avx2_madd", "avx512_madd")
_REGISTER_BYTES = {"avx512_vnni": 64, "avx512_madd": 64, "avx_vnni": 32, "avx2_madd": 32, "neon_dotprod": 16}

# On these targets the products of unsigned codes below 128 fit the signed instruction; 8-bit codes are kept signed.
SIGNED_BYTES = TARGET.dot != "avx512_vnni" and TARGET.dot != "avx_vnni"


def groups_per_fold(bits: int) -> int:
    """How many groups of 4 inputs a partial sum holds, of the 8 in a block of 32, for weight codes of `bits` bits.

    With |x| ≤ 127 a pair of products is at most 2·127·(2^bits − 1), and 16 bits hold 32767.
    """
    if not _MADD:
        return 8
    if bits == 8:
        return 1
    fitting = 32767 // (2 * 127 * (2**bits - 1))
    return max(n for n in (1, 2, 4, 8) if n <= max(fitting, 1))


def partial_type(bits: int) -> Vector:
    return i16x32 if _MADD and bits < 8 else i32x16


def _split(builder, value: ir.Value, parts: int) -> list[ir.Value]:
    width = value.type.count // parts
    undefined = ir.Constant(value.type, ir.Undefined)
    index = ir.VectorType(ir.IntType(32), width)
    return [
        builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(i * width, (i + 1) * width))))
        for i in range(parts)
    ]


def _join(builder, values: list[ir.Value]) -> ir.Value:
    while len(values) > 1:
        width = values[0].type.count
        index = ir.Constant(ir.VectorType(ir.IntType(32), 2 * width), list(range(2 * width)))
        values = [builder.shuffle_vector(a, b, index) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _by_register(builder, emit, *values: ir.Value) -> ir.Value:
    """Apply `emit` to each register-sized part of the values and put the results together."""
    parts = 64 // _REGISTER_BYTES[TARGET.dot]
    if parts == 1:
        return emit(*values)
    return _join(builder, [emit(*p) for p in zip(*(_split(builder, v, parts) for v in values), strict=True)])


def _maddubs(builder, unsigned, signed):
    """pmaddubsw: 64 bytes to 32 int16, adjacent products summed with saturation."""
    wide = _REGISTER_BYTES[TARGET.dot] == 64
    name = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
    result = ir.VectorType(ir.IntType(16), 32 if wide else 16)
    return _by_register(builder, lambda u, s: call_llvm(builder, name, result, u, s), unsigned, signed)


def _pairs_to_i32(builder, v):
    """pmaddwd by ones: 32 int16 to 16 int32, adjacent values summed."""
    wide = _REGISTER_BYTES[TARGET.dot] == 64
    name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
    result = ir.VectorType(ir.IntType(32), 16 if wide else 8)
    ones = constant_ir(i16x32, 1)
    return _by_register(builder, lambda a, b: call_llvm(builder, name, result, a, b), v, ones)


def _dpbusd(builder, acc, unsigned, signed):
    """vpdpbusd: int32 lanes plus four products each of unsigned by signed bytes."""
    lanes = _REGISTER_BYTES[TARGET.dot] // 4
    result = ir.VectorType(ir.IntType(32), lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{lanes * 32}"

    def emit(a, u, s):
        return call_llvm(builder, name, result, a, builder.bitcast(u, result), builder.bitcast(s, result))

    return _by_register(builder, emit, acc, unsigned, signed)


def _sdot(builder, acc, a, b):
    """NEON sdot: int32 lanes plus four products each of signed bytes."""
    result = ir.VectorType(ir.IntType(32), 4)
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return _by_register(builder, lambda s, x, y: call_llvm(builder, name, result, s, x, y), acc, a, b)


def _generic_dot(builder, acc, weights, activations, weights_signed: bool):
    extend = builder.sext if weights_signed else builder.zext
    i16x64 = ir.VectorType(ir.IntType(16), 64)
    # 255·127 and 128·127 both fit 16 bits, their sums of two do not.
    products = builder.mul(extend(weights, i16x64), builder.sext(activations, i16x64))
    undefined = ir.Constant(i16x64, ir.Undefined)
    for start in range(4):
        index = ir.Constant(ir.VectorType(ir.IntType(32), 16), list(range(start, 64, 4)))
        acc = builder.add(acc, builder.sext(builder.shuffle_vector(products, undefined, index), i32x16.ir))
    return acc


def make_dot(bits: int):
    """(zero, dot, fold) for weight codes of `bits` bits; 8-bit codes are signed where SIGNED_BYTES says so."""
    partial = partial_type(bits)

    @operation(partial)
    def zero(builder):
        return constant_ir(partial, 0)

    @operation(partial, partial, i8x64, i8x64)
    def dot(builder, acc, weights, activations):
        """acc + Σ weights·activations, 4 inputs for each of 16 rows."""
        if TARGET.dot in ("avx512_vnni", "avx_vnni"):
            return _dpbusd(builder, acc, weights, activations)
        if TARGET.dot == "neon_dotprod":
            return _sdot(builder, acc, weights, activations)
        if TARGET.dot == "generic":
            return _generic_dot(builder, acc, weights, activations, weights_signed=bits == 8)
        if bits < 8:
            return builder.add(acc, _maddubs(builder, weights, activations))
        # pmaddubsw wants unsigned by signed: move the weight's sign over to the activation. |w| ≤ 128 and |x| ≤ 127
        # keep a pair within 16 bits.
        magnitude = call_llvm(builder, "llvm.abs.v64i8", i8x64.ir, weights, ir.Constant(ir.IntType(1), 0))

        def psign(x, w):
            wide = _REGISTER_BYTES[TARGET.dot] == 64
            if wide:
                negative = builder.icmp_signed("<", w, ir.Constant(w.type, [0] * w.type.count))
                return builder.select(negative, builder.neg(x), x)
            return call_llvm(builder, "llvm.x86.avx2.psign.b", x.type, x, w)

        moved = _by_register(builder, psign, activations, weights)
        return builder.add(acc, _pairs_to_i32(builder, _maddubs(builder, magnitude, moved)))

    @operation(i32x16, i32x16, partial)
    def fold(builder, total, acc):
        """total + the partial sums as int32."""
        if partial is i16x32:
            acc = _pairs_to_i32(builder, acc)
        return builder.add(total, acc)

    return zero, dot, fold
