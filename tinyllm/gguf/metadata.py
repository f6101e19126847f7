"""Metadata of GGUF files: places of values in a mapped file flow in, Python values flow out when they are asked for."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np


class ValueType(IntEnum):
    """The types of metadata values, with the ids of the file format."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
LENGTH = struct.Struct("<Q")

STRINGS_PER_STEP = 1 << 16
JOINED_BYTES = 1 << 23
"""Arrays of strings are handled in pieces of so many strings and bytes, which bounds the memory that this takes."""


class StoredText(NamedTuple):
    """Where the bytes of a string lie in the file."""

    start: int
    end: int

    def read(self, buffer: mmap.mmap) -> str:
        return _text(buffer[self.start : self.end])


class StoredNumbers(NamedTuple):
    """Where an array of numbers or booleans lies in the file."""

    kind: ValueType
    start: int
    count: int

    def read(self, buffer: mmap.mmap) -> np.ndarray:
        """A read-only copy."""
        items = np.frombuffer(buffer, SCALARS[self.kind].format, self.count, self.start)
        items = items.astype(bool if self.kind is ValueType.BOOL else items.dtype.newbyteorder("="))
        items.flags.writeable = False
        return items


class StoredStrings(NamedTuple):
    """Where an array of strings lies in the file; each is its length (8 bytes) followed by its characters."""

    bounds: np.ndarray
    """int64 [count + 1]: string i, with its length, is at bounds[i] to bounds[i + 1]."""

    def read(self, buffer: mmap.mmap) -> list[str]:
        strings: list[str] = []
        for first in range(0, len(self.bounds) - 1, STRINGS_PER_STEP):
            strings += _read_strings(buffer, self.bounds[first : first + STRINGS_PER_STEP + 1])
        return strings


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _read_strings(buffer: mmap.mmap, bounds: np.ndarray) -> list[str]:
    """Decode strings in one piece: the length in front of each gives way to one NUL, at which the whole is split.

    This takes a third of the time of decoding them one by one, which a vocabulary of 262,144 tokens feels.
    """
    start, end = int(bounds[0]), int(bounds[-1])
    if end - start <= JOINED_BYTES:
        raw = np.frombuffer(buffer, np.uint8, end - start, start).copy()
        lengths = bounds[:-1] - start
        raw[lengths] = 0
        keep = np.ones(len(raw), bool)
        for byte in range(1, LENGTH.size):
            keep[lengths + byte] = False
        joined = _text(raw[keep].tobytes())
        if joined.count("\0") == len(lengths):
            return joined.split("\0")[1:]
    # Some string is very long or holds a NUL of its own.
    places = zip((bounds[:-1] + LENGTH.size).tolist(), bounds[1:].tolist(), strict=True)
    return [_text(buffer[start:end]) for start, end in places]


StoredArray = StoredNumbers | StoredStrings
Stored = StoredText | StoredArray
Value = int | float | bool | Stored


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a file: int, float, bool, str, list[str], or a read-only numpy array of numbers.

    Strings and arrays are decoded anew at each access, so keep what you need twice. Bytes that are not UTF-8 come as
    lone surrogates: `text.encode("utf-8", "surrogateescape")` gives the file's bytes.
    """

    def __init__(self, values: Mapping[str, Value], buffer: mmap.mmap):
        self._values = values
        self._buffer = buffer

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return value.read(self._buffer) if isinstance(value, Stored) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
