"""Memory for the activations of a step: a name and a width go in, out come rows that kernels address."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .kernels import abi


def padded(n: int) -> int:
    """Floats of a row of n: whole records."""
    return -(-n // 32) * 32


def _odd_lines(n_bytes: int) -> int:
    """At least so many bytes, an odd number of cache lines.

    A panel writes the same columns of many rows: with an odd stride they spread over all sets of a cache, with one of
    12 kB they share one of its 64 sets.
    """
    return (n_bytes // 64 | 1) * 64


def aligned_zeros(n_bytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed bytes, committed by the system as they are touched."""
    memory = np.zeros(n_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + n_bytes]


def huge_zeros(n_bytes: int) -> np.ndarray:
    """Zeroed bytes in huge pages where the system has them, for what is streamed from end to end.

    The mapping must be private: shared memory, Python's default, gets no huge pages, and reading it is a third slower.
    """
    huge = 2 << 20
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    mapping = mmap.mmap(-1, n_bytes + huge, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % huge
    return memory[start : start + n_bytes]


@dataclass(eq=False)
class Buffer:
    """A named matrix of activations: float32 [max_rows, stride], its first `width` columns in use, zeros behind.

    `records` holds the same values quantized to int8 in blocks of 32 (`abi.RECORD`), where a consumer wants them.
    """

    name: str
    width: int
    max_rows: int
    column: int = 0
    base: Buffer | None = None
    _wants_records: bool = False
    _memory: np.ndarray | None = field(default=None, repr=False)
    _records: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self):
        if self.base is None:
            self._memory = aligned_zeros(self.max_rows * self.stride)

    @property
    def root(self) -> Buffer:
        return self.base or self

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return self.base.stride if self.base else _odd_lines(padded(self.width) * 4)

    @property
    def address(self) -> int:
        return self.root._memory.ctypes.data + 4 * self.column

    @property
    def wants_records(self) -> bool:
        return self.root._wants_records

    @wants_records.setter
    def wants_records(self, wanted: bool) -> None:
        self.root._wants_records = wanted

    @property
    def records(self) -> int:
        """Address of the records; only columns that begin at a multiple of 32 have some."""
        root = self.root
        if root._records is None:
            root._records = aligned_zeros(root.max_rows * root.records_stride)
        if self.column % 32:
            raise ValueError(f"columns of {self.name} begin within a record")
        return root._records.ctypes.data + self.column // 32 * abi.RECORD

    @property
    def records_stride(self) -> int:
        return _odd_lines(padded(self.root.width) // 32 * abi.RECORD)

    def at(self, name: str) -> dict[str, int]:
        """Address and stride, as the arguments of this name that kernels have."""
        return {name: self.address, f"{name}_stride": self.stride}

    def columns(self, start: int, width: int, name: str) -> Buffer:
        """A view of some columns."""
        return Buffer(name, width, self.max_rows, column=self.column + start, base=self.root)

    @cached_property
    def array(self) -> np.ndarray:
        """float32 [max_rows, width], a view of the live memory."""
        rows = self.root._memory.view(np.float32).reshape(self.max_rows, -1)
        return rows[:, self.column : self.column + self.width]
