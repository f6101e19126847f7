"""Numbers for a page: arrays become deflated base64, attention maps a few bits per value, and thumbnails of heads."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.trace.texts import say

if TYPE_CHECKING:
    from tinyllm.trace.attention import LayerAttention

THUMBNAIL = 32
_LEVEL = 5  # 6 takes twice as long for 3 %


@dataclass(frozen=True)
class MapCoding:
    """How maps are stored: √p in `bits`, values below `least` dropped, only the `top` of each row (0: all), every n-th
    layer (1 or 2) counted from the last, and only the `last_queries` (0: all)."""

    bits: int
    least: float = 0.0
    top: int = 0
    every: int = 1
    last_queries: int = 0

    def words(self, language: str, only_some_layers: bool) -> str:
        """What readers of the maps must know, in one sentence."""
        parts = [say(language, "maps"), say(language, "maps_bits", bits=self.bits)]
        if self.least:
            parts.append(say(language, "maps_least", percent=100 * self.least))
        if self.top:
            parts.append(say(language, "maps_top", n=self.top))
        if self.every > 1:
            parts.append(say(language, "maps_every"))
        if self.last_queries:
            parts.append(say(language, "maps_last", n=self.last_queries))
        if only_some_layers:
            parts.append(say(language, "maps_layers"))
        return "".join([*parts, say(language, "maps_end")])


def packed(array: np.ndarray) -> str:
    """The bytes of an array (little endian), raw deflate, base64."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    data = np.ascontiguousarray(array).tobytes()
    return base64.b64encode(compressor.compress(data) + compressor.flush()).decode("ascii")


def coarse(array: np.ndarray) -> np.ndarray:
    """float32 with 12 bits of precision: what people read of a number, in two thirds of the bytes when deflated."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x800) & 0xFFFFF000).view(np.float32)


def code_maps(layer: LayerAttention, coding: MapCoding) -> np.ndarray:
    """uint8: for each head the rows of its queries, each up to the diagonal; two values a byte if there are 4 bits."""
    start = max(0, layer.probs.shape[1] - coding.last_queries) if coding.last_queries else 0
    probs = layer.probs[:, start:]
    queries = layer.first_query + start + np.arange(probs.shape[1])
    if coding.top and probs.shape[2] > coding.top:
        least = np.partition(probs, -coding.top, axis=2)[:, :, -coding.top, None]
        probs = np.where(probs >= least, probs, 0)
    if coding.least:
        probs = np.where(probs >= coding.least, probs, 0)
    top = (1 << coding.bits) - 1
    codes = np.rint(np.sqrt(probs) * top).astype(np.uint8)
    flat = codes[:, np.arange(probs.shape[2]) <= queries[:, None]].ravel()
    if coding.bits > 4:
        return flat
    flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
    return flat[::2] | flat[1::2] << 4


def thumbnails(layer: LayerAttention) -> np.ndarray:
    """√p in 16 steps, of each cell the largest value in it: uint8 [n_heads, size, size], size at most 32."""
    maps = layer.probs
    if layer.first_query:  # queries without a map are empty
        maps = np.concatenate([np.zeros((maps.shape[0], layer.first_query, maps.shape[2]), np.float32), maps], axis=1)
    n = maps.shape[2]
    if n > THUMBNAIL:
        edges = np.arange(THUMBNAIL) * n // THUMBNAIL
        maps = np.maximum.reduceat(np.maximum.reduceat(maps, edges, axis=1), edges, axis=2)
    return np.rint(np.sqrt(maps) * 15).astype(np.uint8)
