"""The types of cached keys and values: how a position is written into a page, and how a page is read as float32.

A page of one KV head has keys as [n dimensions][32 positions], then values as [32 positions][n dimensions]. Behind the
int8 codes of q8_0 follow their half-precision scales: keys [n / 32][32], values [32][n / 32].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .abi import PAGE
from .simd import (
    absolute,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i8x16,
    max_lanes,
    maximum,
    mul,
    round_to_i32,
    scatter_f16,
    scatter_f32,
    scatter_i8,
    splat_f32,
    store_f16,
    store_f16x16,
    store_f32,
    store_f32x16,
    store_i8x16,
)
from .specialize import inline, specialize


class CacheAccess(NamedTuple):
    """Functions of kernels; `page` is the address of a head's keys or values, n its dimensions.

    `store_key(page, slot, key, n)` and `store_value(page, slot, value, n)` write n floats as one position;
    `load_keys(page, keys, n)` and `load_values(page, values, n)` fill float32 [n][32] and [32][n], n padded to 32.
    `load_key(page, i, slot, n)` and `load_value(page, slot, i, n)` are 16 float32: dimension i of positions from slot
    on, and dimensions from i on of one position.
    """

    store_key: Callable
    store_value: Callable
    load_keys: Callable
    load_values: Callable
    load_key: Callable
    load_value: Callable


def store_key(page, slot, key, n):
    n_whole = n // 16 * 16
    for i in range(0, n_whole, 16):
        scatter_vector(page + (i * PAGE + slot) * SIZE, PAGE * SIZE, load_f32x16(key + 4 * i))
    for i in range(n_whole, n):
        store_number(page + (i * PAGE + slot) * SIZE, load_f32(key + 4 * i))


def store_value(page, slot, value, n):
    n_whole = n // 16 * 16
    out = page + slot * ((n + 31) // 32 * 32) * SIZE
    for i in range(0, n_whole, 16):
        store_vector(out + i * SIZE, load_f32x16(value + 4 * i))
    for i in range(n_whole, n):
        store_number(out + i * SIZE, load_f32(value + 4 * i))


def load_page(page, target, n):
    for i in range(0, n * PAGE, 16):
        store_f32x16(target + 4 * i, load_vector(page + i * SIZE))


def load_key(page, i, slot, n):
    return load_vector(page + (i * PAGE + slot) * SIZE)


def load_value(page, slot, i, n):
    return load_vector(page + (slot * n + i) * SIZE)


@inline
def load_latent_values(keys, values, v_dim, v_padded):
    """Values that are the first dimensions of the keys: float32 [n][32] to [32][v_padded]."""
    for i in range(v_dim):
        for slot in range(PAGE):
            store_f32(values + 4 * (slot * v_padded + i), load_f32(keys + 4 * (i * PAGE + slot)))


def plain(size: int, store: Callable, store_vector: Callable, scatter_vector: Callable, load: Callable) -> CacheAccess:
    """A type that keeps each number by itself, in `size` bytes."""
    names = {
        "SIZE": size,
        "store_number": store,
        "store_vector": store_vector,
        "scatter_vector": scatter_vector,
        "load_vector": load,
    }
    functions = (store_key, store_value, load_page, load_page, load_key, load_value)
    return CacheAccess(*(inline(specialize(function, **names)) for function in functions))


@inline
def peak_of(low, high):
    return max_lanes(maximum(absolute(low), absolute(high)))


@inline
def code_factor(peak):
    """What values are multiplied by to become codes up to 127; the scale of what is nearly zero is zero in f16."""
    return splat_f32(127.0 / peak if peak > 1e-30 else 0.0)


@inline
def store_q8_key(page, slot, key, n):
    scale_at = page + n * PAGE + 2 * slot
    for i in range(0, n, 32):
        low, high = load_f32x16(key + 4 * i), load_f32x16(key + 4 * i + 64)
        peak = peak_of(low, high)
        factor = code_factor(peak)
        codes = page + i * PAGE + slot
        scatter_i8(codes, PAGE, round_to_i32(mul(low, factor)))
        scatter_i8(codes + 16 * PAGE, PAGE, round_to_i32(mul(high, factor)))
        store_f16(scale_at, peak * (1.0 / 127.0))
        scale_at += 2 * PAGE


@inline
def store_q8_value(page, slot, value, n):
    codes = page + slot * n
    scale_at = page + n * PAGE + slot * (n // 32) * 2
    for i in range(0, n, 32):
        low, high = load_f32x16(value + 4 * i), load_f32x16(value + 4 * i + 64)
        peak = peak_of(low, high)
        factor = code_factor(peak)
        store_i8x16(codes + i, round_to_i32(mul(low, factor)))
        store_i8x16(codes + i + 16, round_to_i32(mul(high, factor)))
        store_f16(scale_at, peak * (1.0 / 127.0))
        scale_at += 2


@inline
def load_q8_keys(page, keys, n):
    scales = page + n * PAGE
    for _ in range(n // 32):
        low, high = load_f16x16(scales), load_f16x16(scales + 32)
        for _ in range(32):
            store_f32x16(keys, mul(load_i8x16(page), low))
            store_f32x16(keys + 64, mul(load_i8x16(page + 16), high))
            page += PAGE
            keys += 4 * PAGE
        scales += 2 * PAGE


@inline
def load_q8_values(page, values, n):
    scale_at = page + n * PAGE
    for _ in range(n // 32 * PAGE):
        scale = splat_f32(load_f16(scale_at))
        store_f32x16(values, mul(load_i8x16(page), scale))
        store_f32x16(values + 64, mul(load_i8x16(page + 16), scale))
        page += 32
        values += 128
        scale_at += 2


@inline
def load_q8_key(page, i, slot, n):
    return mul(load_i8x16(page + i * PAGE + slot), load_f16x16(page + n * PAGE + 2 * (i // 32 * PAGE + slot)))


@inline
def load_q8_value(page, slot, i, n):
    scale = splat_f32(load_f16(page + n * PAGE + 2 * (slot * (n // 32) + i // 32)))
    return mul(load_i8x16(page + slot * n + i), scale)


# A row per type of `abi.CACHE_TYPES`.
CACHE_ACCESS = {
    "f16": plain(2, store_f16, store_f16x16, scatter_f16, load_f16x16),
    "f32": plain(4, store_f32, store_f32x16, scatter_f32, load_f32x16),
    "q8_0": CacheAccess(store_q8_key, store_q8_value, load_q8_keys, load_q8_values, load_q8_key, load_q8_value),
}
