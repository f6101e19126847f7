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

from .abi import RECORD_NEGATIVE, RECORD_SUMS
from .simd import (
    TARGET,
    address,
    by_register,
    call_llvm,
    constant_ir,
    i8x64,
    i16x32,
    i32x16,
    join_ir,
    load_ir,
    operation,
    reduce_ir,
    splat_ir,
    split_ir,
    store_ir,
)

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_I32X4, _I32X8 = ir.VectorType(_I32, 4), ir.VectorType(_I32, 8)

# Whether the hardware sums the products of pairs in 16 bits.
SUMS_PAIRS = TARGET.dot in ("avx2_madd", "avx512_madd")

# Whether the instructions of AVX2 are there, also where wider ones are used for the dot product.
HAS_AVX2 = SUMS_PAIRS or TARGET.dot in ("avx512_vnni", "avx_vnni")

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


@operation(types.void, address, i32x16, i32x16, types.float32)
def store_codes(builder, record, low, high, scale):
    """Write 32 codes into a record, and their sums: of the halves and of all, times the scale, and the starts' words.

    A word is −Σ codes as int32, or where pairs are summed in 16 bits, two int16 that add up to it: of the inputs that
    `pmaddubsw` puts into even and into odd lanes.
    """

    def at(offset):
        return builder.add(record, ir.IntType(64)(offset))

    if HAS_AVX2:
        codes = _pack(builder, low, high)
        pairs = _sums_of_pairs(builder, codes)
        minus = call_llvm(builder, "llvm.x86.sse2.pmadd.wd", _I32X4, pairs, ir.Constant(pairs.type, [1] * 8))
        words = builder.bitcast(pairs, _I32X4) if SUMS_PAIRS else minus
    else:
        codes = join_ir(builder, [builder.trunc(v, ir.VectorType(_I8, 16)) for v in (low, high)])
        sums = [reduce_ir(builder, v, builder.add) for v in (low, high, builder.add(low, high))]
        words = minus = ir.Constant(_I32X4, ir.Undefined)
        for lane, value in enumerate(sums):
            words = minus = builder.insert_element(minus, builder.neg(value), _I32(lane))
    store_ir(builder, record, codes)
    # Three sums, then three words: what the first store writes into a fourth place, the second overwrites.
    sums = builder.sitofp(builder.neg(minus), ir.VectorType(ir.FloatType(), 4))
    store_ir(builder, at(RECORD_SUMS), builder.fmul(sums, splat_ir(builder, scale, 4)))
    store_ir(builder, at(RECORD_NEGATIVE), words)


def _pack(builder, low, high):
    """Two vectors of int32 that hold int8 as 32 bytes."""
    parts = [part for v in (low, high) for part in split_ir(builder, v, 2)]
    words = [
        call_llvm(builder, "llvm.x86.avx2.packssdw", ir.VectorType(_I16, 16), parts[i], parts[i + 1]) for i in (0, 2)
    ]
    codes = call_llvm(builder, "llvm.x86.avx2.packsswb", ir.VectorType(_I8, 32), *words)
    # The instructions work on halves of a register: fours of a, b, c, d come out as a c e g, b d f h.
    fours = builder.bitcast(codes, ir.VectorType(_I32, 8))
    return builder.bitcast(_lanes(builder, fours, fours, [0, 4, 1, 5, 2, 6, 3, 7]), codes.type)


def _sums_of_pairs(builder, codes):
    """−Σ of the low 16 codes, of the high ones, and of all, each as two int16, the fourth lane is nothing: 8 int16."""
    ones = ir.Constant(codes.type, [1] * 32)
    pairs = call_llvm(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(_I16, 16), ones, codes)
    low, high = (
        builder.bitcast(half, _I32X4) for half in split_ir(builder, builder.bitcast(builder.neg(pairs), _I32X8), 2)
    )

    def add(a, b):
        return builder.bitcast(builder.add(builder.bitcast(a, pair_type), builder.bitcast(b, pair_type)), _I32X4)

    pair_type = ir.VectorType(_I16, 8)
    sums = add(_lanes(builder, low, high, [0, 1, 4, 5]), _lanes(builder, low, high, [2, 3, 6, 7]))
    sums = add(sums, _lanes(builder, sums, sums, [1, 0, 3, 2]))
    none = ir.Constant(_I32X4, [0] * 4)
    sums = add(_lanes(builder, sums, sums, [0, 2, 0, 2]), _lanes(builder, sums, none, [4, 4, 2, 0]))
    return builder.bitcast(sums, pair_type)


def _lanes(builder, a, b, lanes):
    """The numbered lanes of a, and from its width on of b."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


@dataclass(frozen=True)
class Dot:
    """The steps of a dot product.

    start(address of a word of `store_codes`) -> sum; dot(sum, codes, activations) -> sum; close(sum) -> i32x16.
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
