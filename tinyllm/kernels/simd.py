"""The vocabulary that kernels are written in: LLVM vectors as Numba values, and the few operations that are needed on
them.

Every vector has 16 lanes of 4 bytes (`f32x16`, `i32x16`) or the same 64 bytes seen as `i8x64` and `i16x32`; LLVM splits
them into the registers that the CPU has. Only the int8 dot product (`dot.py`) and half precision differ by target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from .target import current_target

TARGET = current_target()

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_ELEMENTS = {"i1": _I1, "i8": _I8, "i16": _I16, "i32": _I32, "f32": _F32}


class Vector(types.Type):
    """An LLVM vector of `lanes` elements as a Numba value."""

    def __init__(self, element: str, lanes: int):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")

    @property
    def ir(self) -> ir.VectorType:
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


i8x64, i16x32, i32x16, f32x16, b1x16 = (
    Vector("i8", 64),
    Vector("i16", 32),
    Vector("i32", 16),
    Vector("f32", 16),
    Vector("i1", 16),
)
address = types.int64


def operation(result: types.Type, *parameters: types.Type) -> Callable:
    """Make a function that emits LLVM IR, `emit(builder, *values) -> value`, callable from kernels with these types."""

    def decorate(emit: Callable) -> Any:
        signature = result(*parameters)

        def codegen(context, builder, _signature, values):
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        wrappers = (
            lambda typingctx: (signature, codegen),
            lambda typingctx, a: (signature, codegen),
            lambda typingctx, a, b: (signature, codegen),
            lambda typingctx, a, b, c: (signature, codegen),
            lambda typingctx, a, b, c, d: (signature, codegen),
        )
        wrapper = wrappers[len(parameters)]
        wrapper.__name__ = wrapper.__qualname__ = emit.__name__
        wrapper.__doc__ = emit.__doc__
        return intrinsic(wrapper)

    return decorate


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic or an external C function by name."""
    function_type = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)


def load_ir(builder: ir.IRBuilder, where: ir.Value, what: ir.Type, align: int = 1) -> ir.Value:
    loaded = builder.load(builder.inttoptr(where, what.as_pointer()))
    loaded.align = align
    return loaded


def store_ir(builder: ir.IRBuilder, where: ir.Value, value: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(where, value.type.as_pointer())).align = align


def splat_ir(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    )


def constant_ir(vector: Vector, value: float) -> ir.Constant:
    return ir.Constant(vector.ir, [value] * vector.lanes)


def split_ir(builder: ir.IRBuilder, value: ir.Value, parts: int) -> list[ir.Value]:
    width = value.type.count // parts
    undefined = ir.Constant(value.type, ir.Undefined)
    index = ir.VectorType(_I32, width)
    return [
        builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(i * width, (i + 1) * width))))
        for i in range(parts)
    ]


def join_ir(builder: ir.IRBuilder, values: list[ir.Value]) -> ir.Value:
    while len(values) > 1:
        width = values[0].type.count
        index = ir.Constant(ir.VectorType(_I32, 2 * width), list(range(2 * width)))
        values = [builder.shuffle_vector(a, b, index) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def by_register(builder: ir.IRBuilder, emit: Callable[..., ir.Value], *values: ir.Value) -> ir.Value:
    """Apply `emit` to each register-sized part of the 64-byte values and put the results together."""
    parts = 64 // TARGET.register_bytes
    if parts == 1:
        return emit(*values)
    return join_ir(builder, [emit(*p) for p in zip(*(split_ir(builder, v, parts) for v in values), strict=True)])


_BYTE_SHUFFLES = {
    16: "llvm.aarch64.neon.tbl1.v16i8",
    32: "llvm.x86.avx2.pshuf.b",
    64: "llvm.x86.avx512.pshuf.b.512",
}


def table16_ir(builder: ir.IRBuilder, v: ir.Value, table: list[int]) -> ir.Value:
    """The entries of a table of at most 16 bytes that the bytes of v, all below 16, are the numbers of."""
    table = [entry & 0xFF for entry in table] + [0] * (16 - len(table))
    size = TARGET.register_bytes
    if size in _BYTE_SHUFFLES:
        register = ir.VectorType(_I8, size)
        entries = ir.Constant(register, table * (size // 16))
        return by_register(builder, lambda n: call_llvm(builder, _BYTE_SHUFFLES[size], register, entries, n), v)
    candidates = [constant_ir(i8x64, entry) for entry in table]
    for bit in range(4):
        is_set = builder.icmp_unsigned("!=", builder.and_(v, constant_ir(i8x64, 1 << bit)), constant_ir(i8x64, 0))
        candidates = [
            builder.select(is_set, odd, even) for even, odd in zip(candidates[::2], candidates[1::2], strict=True)
        ]
    return candidates[0]


# Scalars in memory.


@operation(types.int64, address)
def load_i64(builder, where):
    return load_ir(builder, where, _I64, 8)


@operation(types.int64, address)
def load_i32(builder, where):
    return builder.sext(load_ir(builder, where, _I32), _I64)


@operation(types.int64, address)
def load_u8(builder, where):
    return builder.zext(load_ir(builder, where, _I8), _I64)


@operation(types.int64, address)
def load_u16(builder, where):
    return builder.zext(load_ir(builder, where, _I16), _I64)


@operation(types.int64, address)
def load_u32(builder, where):
    return builder.zext(load_ir(builder, where, _I32), _I64)


@operation(types.float32, address)
def load_f32(builder, where):
    return load_ir(builder, where, _F32)


@operation(types.void, address, types.int64)
def store_i64(builder, where, value):
    store_ir(builder, where, value, 8)


@operation(types.void, address, types.int64)
def store_i32(builder, where, value):
    store_ir(builder, where, builder.trunc(value, _I32))


@operation(types.void, address, types.int64)
def store_u8(builder, where, value):
    store_ir(builder, where, builder.trunc(value, _I8))


@operation(types.void, address, types.int64)
def store_u16(builder, where, value):
    store_ir(builder, where, builder.trunc(value, _I16))


@operation(types.void, address, types.float32)
def store_f32(builder, where, value):
    store_ir(builder, where, value)


@operation(types.void, address, types.float32)
def store_f16(builder, where, value):
    """Round to half precision and store. Goes through a vector, so that no target needs a library call."""
    store_ir(builder, where, builder.extract_element(_to_half_bits(builder, splat_ir(builder, value, 16)), _I32(0)))


# Vectors in memory.


@operation(i8x64, address)
def load_i8x64(builder, where):
    return load_ir(builder, where, i8x64.ir)


@operation(types.void, address, i8x64)
def store_i8x64(builder, where, value):
    store_ir(builder, where, value)


@operation(types.void, address)
def prefetch(builder, where):
    """Ask for the cache line at an address; harmless behind the end of memory."""
    pointer = builder.inttoptr(where, _I8.as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])


@operation(f32x16, address)
def load_f32x16(builder, where):
    return load_ir(builder, where, f32x16.ir, 4)


@operation(types.void, address, f32x16)
def store_f32x16(builder, where, value):
    store_ir(builder, where, value, 4)


def _lane_mask(builder, count):
    lanes = splat_ir(builder, builder.trunc(count, _I32), 16)
    return builder.icmp_signed("<", ir.Constant(i32x16.ir, list(range(16))), lanes)


@operation(f32x16, address, types.int64)
def load_first(builder, where, count):
    """The first `count` (at most 16) floats from memory, zeros in the other lanes; nothing behind them is touched."""
    pointer = builder.inttoptr(where, f32x16.ir.as_pointer())
    function_type = ir.FunctionType(f32x16.ir, [pointer.type, _I32, ir.VectorType(_I1, 16), f32x16.ir])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.masked.load.v16f32.p0")
    return builder.call(function, [pointer, _I32(4), _lane_mask(builder, count), constant_ir(f32x16, 0.0)])


@operation(types.void, address, f32x16, types.int64)
def store_first(builder, where, value, count):
    """Store the first `count` lanes."""
    pointer = builder.inttoptr(where, f32x16.ir.as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [f32x16.ir, pointer.type, _I32, ir.VectorType(_I1, 16)])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, pointer, _I32(4), _lane_mask(builder, count)])


@operation(f32x16, f32x16, types.int64)
def keep_first(builder, v, count):
    """Zeros in all lanes but the first `count`."""
    return builder.select(_lane_mask(builder, count), v, constant_ir(f32x16, 0.0))


def _from_half_bits(builder, bits):
    """<16 x i16> holding IEEE half precision to <16 x float>; exact, infinities and NaNs too."""
    if TARGET.f16c:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(_F16, 16)), f32x16.ir)
    wide = builder.zext(bits, i32x16.ir)
    magnitude = builder.shl(builder.and_(wide, constant_ir(i32x16, 0x7FFF)), constant_ir(i32x16, 13))
    # Moving the exponent by a multiplication with 2^112 makes subnormals come out right as well.
    scaled = builder.fmul(builder.bitcast(magnitude, f32x16.ir), constant_ir(f32x16, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant_ir(i32x16, 0x7C00 << 13))
    infinite = builder.or_(magnitude, constant_ir(i32x16, 0x7F800000))
    sign = builder.shl(builder.and_(wide, constant_ir(i32x16, 0x8000)), constant_ir(i32x16, 16))
    value = builder.select(special, infinite, builder.bitcast(scaled, i32x16.ir))
    return builder.bitcast(builder.or_(value, sign), f32x16.ir)


def _to_half_bits(builder, value):
    """<16 x float> to <16 x i16> of half precision, rounded to nearest even."""
    if TARGET.f16c:
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(_F16, 16)), ir.VectorType(_I16, 16))
    bits = builder.bitcast(value, i32x16.ir)
    sign = builder.lshr(builder.and_(bits, constant_ir(i32x16, 0x80000000)), constant_ir(i32x16, 16))
    magnitude = builder.and_(bits, constant_ir(i32x16, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, constant_ir(i32x16, 13)), constant_ir(i32x16, 1))
    rounded = builder.add(magnitude, builder.add(odd, constant_ir(i32x16, 0xFFF)))
    normal = builder.lshr(builder.sub(rounded, constant_ir(i32x16, 112 << 23)), constant_ir(i32x16, 13))
    # Below 2^-14 the result is subnormal: adding 0.5 lets the float addition do the rounding.
    shifted = builder.fadd(builder.bitcast(magnitude, f32x16.ir), constant_ir(f32x16, 0.5))
    subnormal = builder.sub(builder.bitcast(shifted, i32x16.ir), constant_ir(i32x16, 0x3F000000))
    result = builder.select(builder.icmp_unsigned("<", magnitude, constant_ir(i32x16, 113 << 23)), subnormal, normal)
    too_large = builder.icmp_unsigned(">=", magnitude, constant_ir(i32x16, 0x477FF000))
    nan = builder.icmp_unsigned(">", magnitude, constant_ir(i32x16, 0x7F800000))
    result = builder.select(too_large, constant_ir(i32x16, 0x7C00), result)
    result = builder.select(nan, constant_ir(i32x16, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), ir.VectorType(_I16, 16))


@operation(f32x16, address)
def load_f16x16(builder, where):
    """16 half-precision values as float32."""
    return _from_half_bits(builder, load_ir(builder, where, ir.VectorType(_I16, 16)))


@operation(types.void, address, f32x16)
def store_f16x16(builder, where, value):
    store_ir(builder, where, _to_half_bits(builder, value))


@operation(types.void, address, types.int64, f32x16)
def scatter_f16(builder, where, stride, value):
    """Round the 16 lanes to half precision and store them `stride` bytes apart."""
    bits = _to_half_bits(builder, value)
    for lane in range(16):
        store_ir(builder, where, builder.extract_element(bits, _I32(lane)))
        where = builder.add(where, stride)


@operation(types.void, address, types.int64, f32x16)
def scatter_f32(builder, where, stride, value):
    """Store the 16 lanes `stride` bytes apart."""
    for lane in range(16):
        store_ir(builder, where, builder.extract_element(value, _I32(lane)))
        where = builder.add(where, stride)


@operation(types.void, address, types.int64, i32x16)
def scatter_i8(builder, where, stride, value):
    """Store the low bytes of the 16 lanes `stride` bytes apart."""
    codes = builder.trunc(value, ir.VectorType(_I8, 16))
    for lane in range(16):
        store_ir(builder, where, builder.extract_element(codes, _I32(lane)))
        where = builder.add(where, stride)


@operation(f32x16, f32x16)
def swap_neighbours(builder, v):
    """Lanes 1, 0, 3, 2, …"""
    order = ir.Constant(ir.VectorType(_I32, 16), [lane ^ 1 for lane in range(16)])
    return builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), order)


@operation(types.float32, address)
def load_f16(builder, where):
    """One half-precision value as float32."""
    bits = splat_ir(builder, load_ir(builder, where, _I16), 16)
    return builder.extract_element(_from_half_bits(builder, bits), _I32(0))


@operation(i32x16, address)
def load_bytes_i32(builder, where):
    """16 unsigned bytes, one in each lane."""
    return builder.zext(load_ir(builder, where, ir.VectorType(_I8, 16)), i32x16.ir)


@operation(f32x16, address)
def load_bf16x16(builder, where):
    """16 bfloat16 values as float32."""
    bits = builder.zext(load_ir(builder, where, ir.VectorType(_I16, 16)), i32x16.ir)
    return builder.bitcast(builder.shl(bits, constant_ir(i32x16, 16)), f32x16.ir)


@operation(f32x16, address)
def load_i8x16(builder, where):
    """16 signed bytes as float32."""
    return builder.sitofp(load_ir(builder, where, ir.VectorType(_I8, 16)), f32x16.ir)


@operation(f32x16, address)
def load_u8x16(builder, where):
    """16 unsigned bytes as float32."""
    wide = builder.zext(load_ir(builder, where, ir.VectorType(_I8, 16)), i32x16.ir)
    return builder.sitofp(wide, f32x16.ir)


def _load_nibbles(shift: int):
    @operation(f32x16, address)
    def load(builder, where):
        wide = builder.zext(load_ir(builder, where, ir.VectorType(_I8, 16)), i32x16.ir)
        nibbles = builder.and_(builder.lshr(wide, constant_ir(i32x16, shift)), constant_ir(i32x16, 15))
        return builder.sitofp(nibbles, f32x16.ir)

    return load


load_low4x16, load_high4x16 = _load_nibbles(0), _load_nibbles(4)  # the nibbles of 16 bytes as float32


@operation(f32x16, address)
def load_e8m0x16(builder, where):
    """16 bytes e as 2^(e − 128): half of what E8M0 means, as the doubled levels of MXFP4 want it."""
    e = builder.zext(load_ir(builder, where, ir.VectorType(_I8, 16)), i32x16.ir)
    # The bits of the normal numbers, e - 1 in the exponent, are the larger from e = 2 on.
    normal = builder.sub(builder.shl(e, constant_ir(i32x16, 23)), constant_ir(i32x16, 1 << 23))
    subnormal = builder.add(builder.shl(e, constant_ir(i32x16, 21)), constant_ir(i32x16, 1 << 21))
    is_normal = builder.icmp_signed(">", normal, subnormal)
    return builder.bitcast(builder.select(is_normal, normal, subnormal), f32x16.ir)


@operation(f32x16, address)
def load_ue4m3x16(builder, where):
    """16 bytes with 4 bits of exponent and 3 of mantissa as half of the UE4M3 float, likewise."""
    bits = builder.zext(load_ir(builder, where, ir.VectorType(_I8, 16)), ir.VectorType(_I16, 16))
    halves = _from_half_bits(builder, builder.shl(bits, ir.Constant(bits.type, [7] * 16)))
    return builder.fmul(halves, constant_ir(f32x16, 2.0**7))  # the exponents' biases are 8 apart


@operation(types.void, address, i32x16)
def store_i8x16(builder, where, value):
    """Store the low byte of each lane."""
    store_ir(builder, where, builder.trunc(value, ir.VectorType(_I8, 16)))


@operation(i8x64, address)
def broadcast4(builder, where):
    """Four bytes from memory, repeated in each of the 16 lanes."""
    return builder.bitcast(splat_ir(builder, load_ir(builder, where, _I32), 16), i8x64.ir)


@operation(f32x16, address)
def broadcast_f32(builder, where):
    """One float32 from memory in all 16 lanes."""
    return splat_ir(builder, load_ir(builder, where, _F32), 16)


# Arithmetic.


@operation(f32x16)
def zero_f32(builder):
    return constant_ir(f32x16, 0.0)


@operation(i32x16)
def zero_i32(builder):
    return constant_ir(i32x16, 0)


@operation(f32x16, types.float32)
def splat_f32(builder, value):
    return splat_ir(builder, value, 16)


@operation(i32x16, types.int64)
def splat_i32(builder, value):
    return splat_ir(builder, builder.trunc(value, _I32), 16)


@operation(i32x16)
def lane_index(builder):
    """0, 1, … 15."""
    return ir.Constant(i32x16.ir, list(range(16)))


@operation(i32x16, i32x16, i32x16)
def add_i32(builder, a, b):
    return builder.add(a, b)


@operation(i32x16, i32x16, types.int64)
def shift_left_i32(builder, v, bits):
    return builder.shl(v, splat_ir(builder, builder.trunc(bits, _I32), 16))


@operation(i32x16, i32x16, types.int64)
def shift_right_i32(builder, v, bits):
    """Zeros come in from the left."""
    return builder.lshr(v, splat_ir(builder, builder.trunc(bits, _I32), 16))


@operation(i32x16, i32x16, i32x16)
def shift_right_each_i32(builder, v, bits):
    """Each lane by its own number of bits."""
    return builder.lshr(v, bits)


@operation(i32x16, i32x16, types.int64)
def and_i32(builder, v, mask):
    return builder.and_(v, splat_ir(builder, builder.trunc(mask, _I32), 16))


@operation(i32x16, i32x16, i32x16)
def or_i32(builder, a, b):
    return builder.or_(a, b)


@operation(f32x16, i32x16)
def to_f32(builder, v):
    return builder.sitofp(v, f32x16.ir)


@operation(i32x16, f32x16)
def round_to_i32(builder, v):
    """To the nearest integer, ties to even."""
    return builder.fptosi(call_llvm(builder, "llvm.rint.v16f32", f32x16.ir, v), i32x16.ir)


@operation(f32x16, f32x16, f32x16)
def add(builder, a, b):
    return builder.fadd(a, b)


@operation(f32x16, f32x16, f32x16)
def sub(builder, a, b):
    return builder.fsub(a, b)


@operation(f32x16, f32x16, f32x16)
def mul(builder, a, b):
    return builder.fmul(a, b)


@operation(f32x16, f32x16, f32x16, f32x16)
def fma(builder, a, b, c):
    """a·b + c, fused where the target can."""
    return call_llvm(builder, "llvm.fmuladd.v16f32", f32x16.ir, a, b, c)


@operation(f32x16, f32x16, f32x16)
def maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(f32x16, f32x16, f32x16)
def minimum(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@operation(f32x16, f32x16)
def absolute(builder, v):
    return call_llvm(builder, "llvm.fabs.v16f32", f32x16.ir, v)


@operation(b1x16, i32x16, i32x16)
def less_i32(builder, a, b):
    return builder.icmp_signed("<", a, b)


@operation(b1x16, f32x16, f32x16)
def less(builder, a, b):
    return builder.fcmp_ordered("<", a, b)


@operation(f32x16, b1x16, f32x16, f32x16)
def select(builder, mask, a, b):
    return builder.select(mask, a, b)


def reduce_ir(builder, v, combine, lanes: int = 1):
    """Lanes combined pairwise, halves first: the same order on every target. The element, or the vector of `lanes`."""
    width = v.type.count
    while width > lanes:
        width //= 2
        undefined = ir.Constant(v.type, ir.Undefined)
        indices = ir.VectorType(_I32, width)
        low = builder.shuffle_vector(v, undefined, ir.Constant(indices, list(range(width))))
        high = builder.shuffle_vector(v, undefined, ir.Constant(indices, list(range(width, 2 * width))))
        v = combine(low, high)
    return builder.extract_element(v, _I32(0)) if lanes == 1 else v


@operation(types.float32, f32x16)
def sum_lanes(builder, v):
    return reduce_ir(builder, v, builder.fadd)


@operation(types.float32, f32x16)
def max_lanes(builder, v):
    return reduce_ir(builder, v, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@operation(f32x16, f32x16)
def sqrt(builder, v):
    return call_llvm(builder, "llvm.sqrt.v16f32", f32x16.ir, v)


_LOG2E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp(r) on |r| ≤ ln 2 / 2: the minimax polynomial of the Cephes library (expf); relative error 1e-7.
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp_ir(builder, v):
    def c(value):
        return constant_ir(f32x16, float(np.float32(value)))

    def fused(a, b, d):
        return call_llvm(builder, "llvm.fmuladd.v16f32", f32x16.ir, a, b, d)

    v = builder.select(builder.fcmp_ordered("<", v, c(-87.3)), c(-87.3), v)
    v = builder.select(builder.fcmp_ordered(">", v, c(88.0)), c(88.0), v)
    n = call_llvm(builder, "llvm.rint.v16f32", f32x16.ir, builder.fmul(v, c(_LOG2E)))
    r = fused(n, c(-_LN2_HIGH), v)
    r = fused(n, c(-_LN2_LOW), r)
    p = c(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = fused(p, r, c(coefficient))
    p = builder.fadd(fused(p, builder.fmul(r, r), r), c(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, i32x16.ir), constant_ir(i32x16, 127)), constant_ir(i32x16, 23))
    return builder.fmul(p, builder.bitcast(exponent, f32x16.ir))


@operation(f32x16, f32x16)
def exp(builder, v):
    """e^v with a relative error of about 1e-7; arguments below -87.3 give e^-87.3 (1e-38)."""
    return exp_ir(builder, v)


# (2^r - 1) / r on |r| ≤ 1/2: the polynomial that makes the largest relative error of 2^r least (2e-9, Lawson 1961).
_EXP2_POLYNOMIAL = (1.5345812e-4, 1.3399931e-3, 9.6184890e-3, 5.5503288e-2, 2.4022647e-1, 6.9314721e-1)


def exp2_ir(builder, v):
    def c(value):
        return constant_ir(f32x16, float(np.float32(value)))

    v = builder.select(builder.fcmp_ordered("<", v, c(-126.0)), c(-126.0), v)
    n = call_llvm(builder, "llvm.rint.v16f32", f32x16.ir, v)
    r = builder.fsub(v, n)
    p = c(_EXP2_POLYNOMIAL[0])
    for coefficient in (*_EXP2_POLYNOMIAL[1:], 1.0):
        p = call_llvm(builder, "llvm.fmuladd.v16f32", f32x16.ir, p, r, c(coefficient))
    exponent = builder.shl(builder.fptosi(n, i32x16.ir), constant_ir(i32x16, 23))
    return builder.bitcast(builder.add(builder.bitcast(p, i32x16.ir), exponent), f32x16.ir)


@operation(f32x16, f32x16)
def exp2(builder, v):
    """2^v for v ≤ 127 with a relative error of 1e-7, in fewer operations than `exp`; 1 for 0, at least 2^-126."""
    return exp2_ir(builder, v)


@operation(f32x16, f32x16)
def sigmoid(builder, v):
    """1 / (1 + e^-v); at least 2^-126."""
    one, highest = constant_ir(f32x16, 1.0), constant_ir(f32x16, 126.0)
    exponent = builder.fmul(v, constant_ir(f32x16, -_LOG2E))
    exponent = builder.select(builder.fcmp_ordered(">", exponent, highest), highest, exponent)
    return builder.fdiv(one, builder.fadd(one, exp2_ir(builder, exponent)))


# log(1 + r) on sqrt(1/2) ≤ 1 + r ≤ sqrt(2): the polynomial of the Cephes library (logf); relative error 1e-7.
_LOG_POLYNOMIAL = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def _log1p_ir(builder, u):
    """log(1 + u) for 0 ≤ u ≤ 1, with a small relative error for tiny u too."""

    def c(value):
        return constant_ir(f32x16, float(np.float32(value)))

    def fused(a, b, d):
        return call_llvm(builder, "llvm.fmuladd.v16f32", f32x16.ir, a, b, d)

    w = builder.fadd(u, c(1.0))
    # What the sum has rounded away comes back as the first term of its series.
    lost = builder.fdiv(builder.fsub(u, builder.fsub(w, c(1.0))), w)
    halved = builder.fcmp_ordered(">", w, c(math.sqrt(2.0)))
    m = builder.select(halved, builder.fmul(w, c(0.5)), w)
    offset = builder.select(halved, c(math.log(2.0)), c(0.0))
    r = builder.fsub(m, c(1.0))
    p = c(_LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        p = fused(p, r, c(coefficient))
    square = builder.fmul(r, r)
    tail = fused(builder.fmul(square, r), p, builder.fmul(square, c(-0.5)))
    return builder.fadd(builder.fadd(builder.fadd(r, tail), offset), lost)


@operation(f32x16, f32x16)
def softplus(builder, v):
    """log(1 + e^v), as max(v, 0) + log(1 + e^-|v|)."""
    zero = constant_ir(f32x16, 0.0)
    decay = exp_ir(builder, builder.fneg(call_llvm(builder, "llvm.fabs.v16f32", f32x16.ir, v)))
    return builder.fadd(builder.select(builder.fcmp_ordered(">", v, zero), v, zero), _log1p_ir(builder, decay))


@operation(types.int64, types.int64)
def integer(builder, value):
    """The value, but to Numba not a literal: it would compile a function anew for each literal that it is called
    with.
    """
    return value


@operation(types.int64, types.int64)
def opaque(builder, value):
    """The value, unknown to the optimizer: a loop up to it stays a loop, which keeps its order and its registers."""
    barrier = ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "", "=r,0", side_effect=False)
    return builder.call(barrier, [value])


# Threads and time.


@operation(types.int64, address, types.int64)
def atomic_add(builder, where, value):
    """Add to an int64 in memory, sequentially consistent; the value before."""
    return builder.atomic_rmw("add", builder.inttoptr(where, _I64.as_pointer()), value, "seq_cst")


@operation(types.int64, address)
def atomic_load(builder, where):
    return builder.load_atomic(builder.inttoptr(where, _I64.as_pointer()), "seq_cst", 8)


@operation(types.void, address, types.int64)
def atomic_store(builder, where, value):
    builder.store_atomic(value, builder.inttoptr(where, _I64.as_pointer()), "seq_cst", 8)


@operation(types.void)
def pause(builder):
    """Tell the core that this is a waiting loop."""
    if TARGET.machine in ("x86_64", "amd64"):
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif TARGET.machine in ("aarch64", "arm64"):
        call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), _I32(1))


@operation(types.void)
def sched_yield(builder):
    """Give the rest of the time slice to another thread."""
    call_llvm(builder, "sched_yield", _I32)


@operation(types.void, types.int64)
def sleep_us(builder, microseconds):
    call_llvm(builder, "usleep", _I32, builder.trunc(microseconds, _I32))


@operation(types.int64)
def clock_ticks(builder):
    """A counter that runs at a constant rate (TSC, CNTVCT)."""
    if TARGET.machine in ("aarch64", "arm64"):
        read = ir.InlineAsm(ir.FunctionType(_I64, []), "mrs $0, cntvct_el0", "=r", side_effect=True)
        return builder.call(read, [])
    return call_llvm(builder, "llvm.readcyclecounter", _I64)


@operation(types.void, address, address, types.int64, types.int64)
def call_kernel(builder, function, arguments, thread, n_threads):
    """Call `void function(int64 arguments, int64 thread, int64 n_threads)` by its address."""
    function_type = ir.FunctionType(ir.VoidType(), [_I64] * 3)
    builder.call(builder.inttoptr(function, function_type.as_pointer()), [arguments, thread, n_threads])
