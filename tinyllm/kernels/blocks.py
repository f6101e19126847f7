"""The plain block formats of GGUF: a block's bytes in, its integers and their scales out.

The dtype at the head of each function is the layout of a block, its docstring says what the fields mean and gives the
formula of a value.
"""

from __future__ import annotations

import numpy as np

from .block_format import Parts, bit_fields, block_format, float32, signed

D = ("d", "<f2")
K_SCALES = ("scales", "u1", 12)


@block_format("Q4_0", 32, [D, ("qs", "u1", 16)], lowest=-8, highest=7, sub_block=32)
def split_q4_0(blocks: np.ndarray) -> Parts:
    """f16 d, 32 nibbles: the low ones are values 0–15, the high ones values 16–31.

    value = d·(nibble − 8)
    """
    return Parts(signed(bit_fields(blocks["qs"], 4, 16), 8), float32(blocks["d"]))


@block_format("Q4_1", 32, [D, ("m", "<f2"), ("qs", "u1", 16)], lowest=0, highest=15, sub_block=32, has_offset=True)
def split_q4_1(blocks: np.ndarray) -> Parts:
    """f16 d, f16 m, 32 nibbles as in Q4_0.

    value = d·nibble + m
    """
    return Parts(signed(bit_fields(blocks["qs"], 4, 16)), float32(blocks["d"]), dmin=-float32(blocks["m"]))


@block_format("Q5_0", 32, [D, ("qh", "u1", 4), ("qs", "u1", 16)], lowest=-16, highest=15, sub_block=32)
def split_q5_0(blocks: np.ndarray) -> Parts:
    """f16 d, 32 bits in order, 32 nibbles as in Q4_0.

    value = d·((bit << 4 | nibble) − 16)
    """
    codes = bit_fields(blocks["qs"], 4, 16) | bit_fields(blocks["qh"], 1, 1) << 4
    return Parts(signed(codes, 16), float32(blocks["d"]))


@block_format(
    "Q5_1",
    32,
    [D, ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)],
    lowest=0,
    highest=31,
    sub_block=32,
    has_offset=True,
)
def split_q5_1(blocks: np.ndarray) -> Parts:
    """f16 d, f16 m, 32 bits in order, 32 nibbles as in Q4_0.

    value = d·(bit << 4 | nibble) + m
    """
    codes = bit_fields(blocks["qs"], 4, 16) | bit_fields(blocks["qh"], 1, 1) << 4
    return Parts(signed(codes), float32(blocks["d"]), dmin=-float32(blocks["m"]))


@block_format("Q8_0", 32, [D, ("qs", "i1", 32)], lowest=-128, highest=127, sub_block=32)
def split_q8_0(blocks: np.ndarray) -> Parts:
    """f16 d, 32 signed bytes q.

    value = d·q
    """
    return Parts(blocks["qs"], float32(blocks["d"]))


@block_format("Q8_1", 32, [D, ("s", "<f2"), ("qs", "i1", 32)], lowest=-128, highest=127, sub_block=32)
def split_q8_1(blocks: np.ndarray) -> Parts:
    """f16 d, f16 s = d·Σq, 32 signed bytes q. Made for activations: s serves dot products and adds nothing here.

    value = d·q
    """
    return Parts(blocks["qs"], float32(blocks["d"]))


@block_format("Q1_0", 128, [D, ("qs", "u1", 16)], levels=(-1, 1), sub_block=32)
def split_q1_0(blocks: np.ndarray) -> Parts:
    """f16 d, 128 bits in order.

    value = d·(2·bit − 1)
    """
    return Parts(signed(bit_fields(blocks["qs"], 1, 1) << 1, 1), float32(blocks["d"]))


@block_format("Q2_0", 64, [D, ("qs", "u1", 16)], lowest=-1, highest=2, sub_block=32)
def split_q2_0(blocks: np.ndarray) -> Parts:
    """f16 d, 64 pairs of bits in order.

    value = d·(pair − 1)
    """
    return Parts(signed(bit_fields(blocks["qs"], 2, 1), 1), float32(blocks["d"]))


@block_format(
    "Q2_K",
    256,
    [("scales", "u1", 16), ("qs", "u1", 64), D, ("dmin", "<f2")],
    lowest=0,
    highest=3,
    sub_block=16,
    scales=(0, 15),
    mins=(0, 15),
    has_offset=True,
)
def split_q2_k(blocks: np.ndarray) -> Parts:
    """A byte for each sub-block of 16 (low nibble: scale, high nibble: min), pairs of bits, f16 d, f16 dmin.

    32 bytes of qs hold 128 values: their lowest pairs are values 0–31, the next pairs values 32–63, and so on.

    value = d·scale·pair − dmin·min
    """
    scales, mins = signed(blocks["scales"] & 15), signed(blocks["scales"] >> 4)
    q = signed(bit_fields(blocks["qs"], 2, 32))
    return Parts(q, float32(blocks["d"]), scales, float32(blocks["dmin"]), mins)


@block_format(
    "Q3_K",
    256,
    [("hmask", "u1", 32), ("qs", "u1", 64), K_SCALES, D],
    lowest=-4,
    highest=3,
    sub_block=16,
    scales=(-32, 31),
)
def split_q3_k(blocks: np.ndarray) -> Parts:
    """32 bytes of third bits, pairs of bits as in Q2_K, 16 scales of 6 bits, f16 d; sub-blocks of 16.

    Bit n of the 32 bytes of hmask belongs to the 32 values from 32n on. Of the scales' 12 bytes, the first 8 hold the
    low four bits (scales 0–7 in the low nibbles, 8–15 in the high ones), the last 4 the high two (0–3 in the lowest
    pairs, then 4–7 and so on).

    value = d·(scale − 32)·((bit << 2 | pair) − 4)
    """
    low, high = blocks["scales"][..., :8], blocks["scales"][..., 8:]
    scales = signed(bit_fields(low, 4, 8) | bit_fields(high, 2, 4) << 4, 32)
    codes = bit_fields(blocks["qs"], 2, 32) | bit_fields(blocks["hmask"], 1, 32) << 2
    return Parts(signed(codes, 4), float32(blocks["d"]), scales)


@block_format(
    "Q4_K",
    256,
    [D, ("dmin", "<f2"), K_SCALES, ("qs", "u1", 128)],
    lowest=0,
    highest=15,
    sub_block=32,
    scales=(0, 63),
    mins=(0, 63),
    has_offset=True,
)
def split_q4_k(blocks: np.ndarray) -> Parts:
    """f16 d, f16 dmin, a scale and a min of 6 bits for each sub-block of 32, nibbles.

    32 bytes of qs hold one sub-block in their low nibbles and the next in their high ones.

    value = d·scale·nibble − dmin·min
    """
    scales, mins = _scales_and_mins(blocks["scales"])
    q = signed(bit_fields(blocks["qs"], 4, 32))
    return Parts(q, float32(blocks["d"]), scales, float32(blocks["dmin"]), mins)


@block_format(
    "Q5_K",
    256,
    [D, ("dmin", "<f2"), K_SCALES, ("qh", "u1", 32), ("qs", "u1", 128)],
    lowest=0,
    highest=31,
    sub_block=32,
    scales=(0, 63),
    mins=(0, 63),
    has_offset=True,
)
def split_q5_k(blocks: np.ndarray) -> Parts:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit n of them belongs to sub-block n.

    value = d·scale·(bit << 4 | nibble) − dmin·min
    """
    scales, mins = _scales_and_mins(blocks["scales"])
    codes = bit_fields(blocks["qs"], 4, 32) | bit_fields(blocks["qh"], 1, 32) << 4
    return Parts(signed(codes), float32(blocks["d"]), scales, float32(blocks["dmin"]), mins)


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes → 8 scales and 8 mins of 6 bits, int8 [b, 8].

    The low six bits of bytes 0–3 are scales 0–3, of bytes 4–7 mins 0–3. Scale 4 + i is the low nibble of byte 8 + i
    below the top two bits of byte i; min 4 + i is its high nibble below the top two bits of byte 4 + i.
    """
    first, nibbles = packed[..., :8], packed[..., 8:]
    top = first >> 6 << 4
    scales = np.concatenate([first[..., :4] & 63, nibbles & 15 | top[..., :4]], axis=-1)
    mins = np.concatenate([first[..., 4:] & 63, nibbles >> 4 | top[..., 4:]], axis=-1)
    return signed(scales), signed(mins)


@block_format(
    "Q6_K",
    256,
    [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), D],
    lowest=-32,
    highest=31,
    sub_block=16,
    scales=(-128, 127),
)
def split_q6_k(blocks: np.ndarray) -> Parts:
    """Nibbles, pairs of bits as in Q2_K, a signed byte of scale for each sub-block of 16, f16 d.

    64 bytes of ql hold 128 values, the low nibbles first.

    value = d·scale·((pair << 4 | nibble) − 32)
    """
    codes = bit_fields(blocks["ql"], 4, 64) | bit_fields(blocks["qh"], 2, 32) << 4
    return Parts(signed(codes, 32), float32(blocks["d"]), blocks["scales"])


@block_format(
    "Q8_K",
    256,
    [("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)],
    lowest=-128,
    highest=127,
    sub_block=32,
    scale_type="f32",
)
def split_q8_k(blocks: np.ndarray) -> Parts:
    """f32 d, 256 signed bytes q, sums of 16 q each. Made for activations, as Q8_1.

    value = d·q
    """
    return Parts(blocks["qs"], float32(blocks["d"]))


@block_format("TQ1_0", 256, [("qs", "u1", 48), ("qh", "u1", 4), D], lowest=-1, highest=1, sub_block=32)
def split_tq1_0(blocks: np.ndarray) -> Parts:
    """Ternary digits, five to a byte in qs and four to a byte in qh; f16 d.

    A byte is a fraction of 256 with the digits 3·(byte·3ⁿ mod 256)/256, rounded down, for n from 0. The bytes form
    runs of 32, 16 and 4: of each run all first digits come first, then all second digits, and so on.

    value = d·(digit − 1)
    """
    runs = (blocks["qs"][..., :32], 5), (blocks["qs"][..., 32:], 5), (blocks["qh"], 4)
    shifted = []
    for run, n_digits in runs:
        powers = np.uint8(3) ** np.arange(n_digits, dtype=np.uint8)
        shifted.append((run[..., None, :] * powers[:, None]).reshape(*run.shape[:-1], n_digits * run.shape[-1]))
    digits = np.concatenate(shifted, axis=-1).astype(np.uint16) * 3 >> 8
    return Parts(signed(digits.astype(np.uint8), 1), float32(blocks["d"]))


@block_format("TQ2_0", 256, [("qs", "u1", 64), D], lowest=-1, highest=2, sub_block=32)
def split_tq2_0(blocks: np.ndarray) -> Parts:
    """Pairs of bits as in Q2_K, f16 d. Ternary, so that a pair is 0, 1 or 2; 3 is read as it stands.

    value = d·(pair − 1)
    """
    return Parts(signed(bit_fields(blocks["qs"], 2, 32), 1), float32(blocks["d"]))


# E2M1 floats doubled, which makes them integers. The scales below are halved to make up for it.
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_FP4_TABLE = np.array(FP4_LEVELS, dtype=np.int8)
_E8M0_HALVES = np.ldexp(np.float32(1), np.arange(256) - 128)


def _ue4m3_halves() -> np.ndarray:
    """float32 [256]: half of each UE4M3 float: four bits of exponent with bias 7, three of mantissa, no sign."""
    exponent, mantissa = np.arange(256) >> 3 & 15, np.arange(256) & 7
    halves = np.ldexp(np.where(exponent == 0, 2 * mantissa, 8 + mantissa).astype(np.float32), exponent - 11)
    halves[0x7F] = 0  # the NaN, which ggml takes for zero
    return halves


_UE4M3_HALVES = _ue4m3_halves()


@block_format(
    "MXFP4",
    32,
    [("e", "u1"), ("qs", "u1", 16)],
    levels=FP4_LEVELS,
    sub_block=32,
    scale_type="e8m0",
)
def split_mxfp4(blocks: np.ndarray) -> Parts:
    """Exponent e, 32 nibbles as in Q4_0, each an E2M1 float. In ggml e = 255 is an exponent like any other.

    value = 2^(e − 128)·FP4_LEVELS[nibble] (OCP Microscaling Formats 1.0)
    """
    return Parts(_FP4_TABLE[bit_fields(blocks["qs"], 4, 16)], _E8M0_HALVES[blocks["e"]][..., None])


@block_format(
    "NVFP4",
    64,
    [("scales", "u1", 4), ("qs", "u1", 32)],
    levels=FP4_LEVELS,
    sub_block=16,
    scale_type="ue4m3",
    scale_span=16,
)
def split_nvfp4(blocks: np.ndarray) -> Parts:
    """A UE4M3 scale for each sub-block of 16, nibbles: 8 bytes are a sub-block, the low nibbles first.

    value = scale/2·FP4_LEVELS[nibble]
    """
    return Parts(_FP4_TABLE[bit_fields(blocks["qs"], 4, 8)], _UE4M3_HALVES[blocks["scales"]])
