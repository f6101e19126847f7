"""The int8 dot product, lowered to what the CPU has: unsigned or signed weight codes times signed activations.

A kernel starts a total (int32) for each scale and a partial sum for each fold, adds products of 4 inputs at a time to
the partial sum, and folds it into the total. Where the hardware sums pairs in 16 bits (`pmaddubsw`), a fold is as long
as nothing overflows. The zero of the codes costs nothing, because the sums start at −zero · Σ activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.ir as ir
from numba import types

from .simd import (
    TARGET,
    Vector,
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

_MADD = TARGET.dot in ("avx2_madd", "avx512_madd")

# On these targets the products of unsigned codes below 128 fit the signed instruction; 8-bit codes are kept signed.
SIGNED_BYTES = TARGET.dot != "avx512_vnni" and TARGET.dot != "avx_vnni"

_MAX_ACTIVATION = 127
_MAX_I16 = 32767


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
    if not _MADD:
        return builder.sext(reduce_ir(builder, builder.neg(codes), builder.add), ir.IntType(64))
    quads = reduce_ir(builder, builder.neg(codes), builder.add, lanes=4)
    a, b, c, d = (builder.extract_element(quads, ir.IntType(32)(lane)) for lane in range(4))
    even = builder.and_(builder.add(a, b), ir.IntType(32)(0xFFFF))
    odd = builder.shl(builder.add(c, d), ir.IntType(32)(16))
    return builder.zext(builder.or_(even, odd), ir.IntType(64))


@dataclass(frozen=True)
class Dot:
    """The steps of a dot product; `groups_per_fold` groups of 4 inputs go into a partial sum.

    start_total(address of negative_sums' word) -> i32x16, start_partial likewise; dot(partial, codes, activations);
    fold(total, partial) -> i32x16.
    """

    groups_per_fold: int
    start_total: Callable
    start_partial: Callable
    dot: Callable
    fold: Callable


def _groups_per_fold(groups: int, highest: int, zero: int) -> int:
    """How many of the `groups` of a scale a 16-bit partial sum holds.

    A lane takes two products of each group. If it takes all groups it starts at −zero · Σ x, and then never leaves
    ± max(zero, highest − zero) · Σ |x|.
    """
    fitting = _MAX_I16 // (2 * _MAX_ACTIVATION)
    if max(zero, highest - zero) * groups <= fitting:
        return groups
    return max((n for n in (1, 2, 4) if n < groups and highest * n <= fitting), default=0)


def make_dot(bits: int, highest: int, zero: int, groups: int) -> Dot:
    """The dot product for weight codes of `bits` bits, at most `highest`, and scales of `groups` groups of 4 inputs.

    8-bit codes are signed where SIGNED_BYTES says so, and then have no zero.
    """
    fold_groups = _groups_per_fold(groups, highest, zero) if _MADD and bits < 8 else groups
    partial = i16x32 if _MADD and bits < 8 and fold_groups > 1 else i32x16
    if partial is i32x16:
        fold_groups = groups
    starts_partial = fold_groups == groups

    def start(vector: Vector, used: bool):
        @operation(vector, types.int64)
        def start(builder, negative_at):
            """−zero · Σ activations, or zeros if that is where the other sum starts."""
            if zero == 0 or not used:
                return constant_ir(vector, 0)
            words = splat_ir(builder, load_ir(builder, negative_at, ir.IntType(32)), 16)
            if not _MADD:
                return builder.mul(words, constant_ir(i32x16, zero))
            pairs = builder.bitcast(words, i16x32.ir)
            if vector is i16x32:
                return builder.mul(pairs, constant_ir(i16x32, zero))
            return _pairs_to_i32(builder, pairs, zero)

        return start

    @operation(partial, partial, i8x64, i8x64)
    def dot(builder, acc, weights, activations):
        """acc + Σ weights·activations, 4 inputs for each of 16 rows."""
        if TARGET.dot in ("avx512_vnni", "avx_vnni"):
            return _dpbusd(builder, acc, weights, activations)
        if TARGET.dot == "neon_dotprod":
            return _sdot(builder, acc, weights, activations)
        if TARGET.dot == "generic":
            return _generic_dot(builder, acc, weights, activations, weights_signed=bits == 8)
        if partial is i16x32:
            return builder.add(acc, _maddubs(builder, weights, activations))
        if bits == 8:
            weights, activations = _move_sign(builder, weights, activations)
        return builder.add(acc, _pairs_to_i32(builder, _maddubs(builder, weights, activations)))

    @operation(i32x16, i32x16, partial)
    def fold(builder, total, acc):
        """total + the partial sums as int32."""
        return builder.add(total, _pairs_to_i32(builder, acc) if partial is i16x32 else acc)

    return Dot(fold_groups, start(i32x16, not starts_partial), start(partial, starts_partial), dot, fold)
