"""A plan's result without a copy: its ops are pointed to memory that the caller then keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from .buffers import Buffer
from .plan import Plan


class SingleResult:
    """Hands out the first row of a buffer as an array of its own, which the ops wrote to directly.

    Between two tokens all caches are cold, and copying the logits costs more than the rest of Python's work. So does
    finding new memory: arrays are used again as soon as nobody refers to them, nor to a view of them.
    """

    def __init__(self, plan: Plan, buffer: Buffer):
        self._plan, self._buffer = plan, buffer
        self._uses = plan.uses_of(buffer)
        self._home = buffer.address
        self._rows: list[tuple[np.ndarray, int]] = []

    def fill(self, run: Callable[[], object]) -> np.ndarray:
        """float32 [1, width]: what `run` makes the plan's ops write."""
        row, address = self._unused()
        words = self._plan.words
        for number in self._uses:
            words[number] = address
        try:
            run()
        finally:
            for number in self._uses:
                words[number] = self._home
        return row[:, : self._buffer.width]

    def _unused(self) -> tuple[np.ndarray, int]:
        for entry in self._rows:
            # Two references: the entry's, and that of the call. Views refer to the array that owns the memory.
            if sys.getrefcount(entry[0]) == 2:
                return entry
        row = np.zeros((1, self._buffer.stride // 4), np.float32)
        entry = (row, row.ctypes.data)
        self._rows.append(entry)
        return entry
