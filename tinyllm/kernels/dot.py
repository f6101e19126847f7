"""The int8 dot product, lowered to what the CPU has: unsigned or signed weight codes times signed activations.

A kernel starts a sum for each scale at −zero · Σ activations, so that the zero of the codes costs nothing, adds the
products of 4 inputs at a time for each of 16 rows, and closes it to int32. Where the hardware sums pairs in 16 bits
(`pmaddubsw`), the sum stays in 16 bits if it cannot overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.ir as ir
from numba import types

from .simd import (
    TARGET,
    by_register,
    call_llvm,
    constant_ir,
    i8x64,
    i16x32,
    i32x16,
    load_ir,
    operation,
    reduce_ir,
    splat_ir,
)

# Whether the hardware sums the products of pairs in 16 bits.
SUMS_PAIRS = TARGET.dot in ("avx2_madd", "avx512_madd")

# On these targets the products of unsigned codes below 128 fit the signed instruction; 8-bit codes are kept signed.
SIGNED_BYTES = TARGET.dot != "avx512_vnni" and TARGET.dot != "avx_vnni"

_MAX_ACTIVATION, _MAX_I16 = 127, 32767


def _maddubs(builder, unsigned, signed):
    """pmaddubsw: 64 bytes to 32 int16, adjacent products summed with saturation."""
    wide = TARGET.register_bytes == 64
    name = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
    result = ir.VectorType(ir.IntType(16), 32 if wide else 16)
    return by_register(builder, lambda u, s: call_llvm(builder, name, result, u, s), unsigned, signed)


def _pairs_to_i32(builder, v, factor=1):
    """pmaddwd: 32 int16 to 16 int32, adjacent values summed and multiplied."""
    wide = TARGET.register_bytes == 64
    name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
    result = ir.VectorType(ir.IntType(32), 16 if wide else 8)
    factors = constant_ir(i16x32, factor)
    return by_register(builder, lambda a, b: call_llvm(builder, name, result, a, b), v, factors)


def _move_sign(builder, weights, activations):
    """pmaddubsw wants unsigned by signed: |w| and x with the sign of w. |w| ≤ 128, |x| ≤ 127 keep a pair in 16 bits."""
    magnitude = call_llvm(builder, "llvm.abs.v64i8", i8x64.ir, weights, ir.Constant(ir.IntType(1), 0))

    def psign(x, w):
        if TARGET.register_bytes == 64:
            negative = builder.icmp_signed("<", w, ir.Constant(w.type, [0] * w.type.count))
            return builder.select(negative, builder.neg(x), x)
        return call_llvm(builder, "llvm.x86.avx2.psign.b", x.type, x, w)

    return magnitude, by_register(builder, psign, activations, weights)


def _dpbusd(builder, acc, unsigned, signed):
    """vpdpbusd: int32 lanes plus four products each of unsigned by signed bytes."""
    lanes = TARGET.register_bytes // 4
    result = ir.VectorType(ir.IntType(32), lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{lanes * 32}"

    def emit(a, u, s):
        return call_llvm(builder, name, result, a, builder.bitcast(u, result), builder.bitcast(s, result))

    return by_register(builder, emit, acc, unsigned, signed)


def _sdot(builder, acc, a, b):
    """NEON sdot: int32 lanes plus four products each of signed bytes."""
    result = ir.VectorType(ir.IntType(32), 4)
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return by_register(builder, lambda s, x, y: call_llvm(builder, name, result, s, x, y), acc, a, b)


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


@operation(types.int64, i32x16)
def negative_sums(builder, codes):
    """The word that the starts read, for 64 bytes of activations' codes, one to a lane: −Σ codes.

    As int32, or where pairs are summed in 16 bits, as two int16 that add up to it: of the inputs that `pmaddubsw` puts
    into even and into odd lanes.
    """
    if not SUMS_PAIRS:
        return builder.sext(reduce_ir(builder, builder.neg(codes), builder.add), ir.IntType(64))
    quads = reduce_ir(builder, builder.neg(codes), builder.add, lanes=4)
    a, b, c, d = (builder.extract_element(quads, ir.IntType(32)(lane)) for lane in range(4))
    even = builder.and_(builder.add(a, b), ir.IntType(32)(0xFFFF))
    odd = builder.shl(builder.add(c, d), ir.IntType(32)(16))
    return builder.zext(builder.or_(even, odd), ir.IntType(64))


@dataclass(frozen=True)
class Dot:
    """The steps of a dot product.

    start(address of negative_sums' word) -> sum; dot(sum, codes, activations) -> sum; close(sum) -> i32x16.
    """

    start: Callable
    dot: Callable
    close: Callable


def fits_16_bits(highest: int, zero: int, groups: int) -> bool:
    """Whether a sum over groups of 4 inputs can stay in 16 bits where pairs are summed in 16 bits.

    A lane takes two products of each group; from −zero · Σ x on, it never leaves ± max(zero, highest − zero) · Σ |x|.
    """
    return max(zero, highest - zero) * groups * 2 * _MAX_ACTIVATION <= _MAX_I16


def make_dot(bits: int, highest: int, zero: int, groups: int) -> Dot:
    """The dot product for weight codes of `bits` bits, at most `highest`, and scales of `groups` groups of 4 inputs.

    8-bit codes are signed where SIGNED_BYTES says so, and then have no zero.
    """
    running = i16x32 if SUMS_PAIRS and bits < 8 and fits_16_bits(highest, zero, groups) else i32x16

    @operation(running, types.int64)
    def start(builder, negative_at):
        """−zero · Σ activations."""
        if zero == 0:
            return constant_ir(running, 0)
        words = splat_ir(builder, load_ir(builder, negative_at, ir.IntType(32)), 16)
        if not SUMS_PAIRS:
            return builder.mul(words, constant_ir(i32x16, zero))
        pairs = builder.bitcast(words, i16x32.ir)
        if running is i16x32:
            return builder.mul(pairs, constant_ir(i16x32, zero))
        return _pairs_to_i32(builder, pairs, zero)

    @operation(running, running, i8x64, i8x64)
    def dot(builder, acc, weights, activations):
        """acc + Σ weights·activations, 4 inputs for each of 16 rows."""
        if TARGET.dot in ("avx512_vnni", "avx_vnni"):
            return _dpbusd(builder, acc, weights, activations)
        if TARGET.dot == "neon_dotprod":
            return _sdot(builder, acc, weights, activations)
        if TARGET.dot == "generic":
            return _generic_dot(builder, acc, weights, activations, weights_signed=bits == 8)
        if running is i16x32:
            return builder.add(acc, _maddubs(builder, weights, activations))
        if bits == 8:
            weights, activations = _move_sign(builder, weights, activations)
        return builder.add(acc, _pairs_to_i32(builder, _maddubs(builder, weights, activations)))

    @operation(i32x16, running)
    def close(builder, acc):
        """The sum as int32."""
        return _pairs_to_i32(builder, acc) if running is i16x32 else acc

    return Dot(start, dot, close)
