"""The table of GGUF's block formats, which `blocks` and `blocks_iq` fill, and what their split functions share.

A format reads blocks as `Parts`, small integers with their scales, and its table row tells packers which integer tile
holds it without loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Parts(NamedTuple):
    """What blocks are made of: value = scale·q − offset, where scale = d·scales and offset = dmin·mins.

    `b` stands for any leading axes and then the blocks, `k` for the sub-blocks of a block that have a scale each.
    Products of a float with an integer scale are exact in float32; scale·q and the difference are rounded once each.
    """

    q: np.ndarray  # int8 [b, n_values]
    d: np.ndarray  # float32 [b, 1], or [b, k] when each sub-block has a float of its own
    scales: np.ndarray | None = None  # int8 [b, k]
    dmin: np.ndarray | None = None  # float32 [b, 1]
    mins: np.ndarray | None = None  # int8 [b, k]

    @property
    def scale(self) -> np.ndarray:
        """float32 [b, k]"""
        return self.d if self.scales is None else self.d * self.scales

    @property
    def offset(self) -> np.ndarray | None:
        """float32 [b, k], or None for formats without offsets."""
        return self.dmin if self.mins is None else self.dmin * self.mins


@dataclass(frozen=True)
class BlockFormat:
    """A block format, and the integer tile that holds it without loss.

    A tile stores the unsigned code = q − lowest in `code_bits`. Where q takes few values, `levels` lists them: then
    the index of a level, in `level_bits`, and a table hold q as well. Nothing is lost if the tile also keeps d/gain as
    `scale_type`, the integer scales and mins as bytes, and applies `gain` after widening d to float32.
    """

    name: str  # as ggml spells it
    n_values: int  # in a block
    layout: np.dtype  # of a block
    split: Callable[[np.ndarray], Parts]  # blocks [b] of that layout → their parts
    lowest: int  # of q
    highest: int
    sub_block: int  # values of a tile that share a scale, 16 or 32
    scale_span: int  # values of the file that share one d
    levels: tuple[int, ...] = ()  # the values of q, in the order of the format's nibbles if it stores nibbles
    scale_type: str = "f16"  # holds d/gain exactly: f16, f32, e8m0 or ue4m3
    gain: float = 1.0  # power of two within d; in f16, d itself could fall among the subnormals and lose bits
    scales: tuple[int, int] | None = None  # range of the integer scales
    mins: tuple[int, int] | None = None  # range of the integers of the offsets
    has_offset: bool = False

    @property
    def n_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.itemsize

    @property
    def zero(self) -> int:
        """The code of q = 0."""
        return -self.lowest

    @property
    def code_bits(self) -> int:
        """Bits of the largest code."""
        return (self.highest - self.lowest).bit_length()

    @property
    def level_bits(self) -> int | None:
        """Bits of an index in `levels`; None without levels."""
        return (len(self.levels) - 1).bit_length() if self.levels else None

    @property
    def level_of(self) -> np.ndarray:
        """uint8 [256]: the index in `levels` of each code's q, the first where two are equal; 255 for other codes."""
        table = np.full(256, 255, dtype=np.uint8)
        for index, level in reversed(list(enumerate(self.levels))):
            table[level - self.lowest] = index
        return table


BLOCK_FORMATS: dict[str, BlockFormat] = {}


def block_format(name: str, n_values: int, layout: list[Any], **facts: Any) -> Callable[[Any], Any]:
    """Put the decorated split function into the table as the format `name`, its `facts` being BlockFormat's fields."""
    dtype = np.dtype(layout)
    facts.setdefault("scale_span", n_values)
    if "levels" in facts:
        facts.update(lowest=min(facts["levels"]), highest=max(facts["levels"]))

    def register(split: Callable[[np.ndarray], Parts]) -> Callable[[np.ndarray], Parts]:
        BLOCK_FORMATS[name] = BlockFormat(name, n_values, dtype, split, **facts)
        return split

    return register


def bit_fields(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpack the `bits`-bit fields of bytes uint8 [..., m] to uint8 [..., m·8/bits].

    The bytes are taken in runs: first the lowest field of every byte of the run, then the next field of every byte.
    A run of 1 is thus the plain order, in which a byte holds neighbouring values.
    """
    *lead, m = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = packed.reshape(*lead, m // run, 1, run) >> shifts[:, None]
    return (fields & np.uint8((1 << bits) - 1)).reshape(*lead, m * len(shifts))


def signed(codes: np.ndarray, zero: int = 0) -> np.ndarray:
    """uint8 codes → int8 code − zero."""
    return (codes - np.uint8(zero)).view(np.int8)


def float32(field: np.ndarray) -> np.ndarray:
    """One float of each block, [b] → float32 [b, 1]."""
    return field.astype(np.float32)[..., None]
