"""What a step is fed with: rows' positions and page tables, blocks of rows, rotary tables, where kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .buffers import aligned_zeros
from .config import ModelConfig
from .kernels import abi
from .plan import Plan


class Run(NamedTuple):
    """Tokens of one sequence from a position on, the address of its page tables, and those of its recurrent states:
    the one before the run and the one that the step fills."""

    position: int
    tokens: Sequence[int]
    pages: int
    states: tuple[int, int] = (0, 0)


class StepInputs:
    """Memory for the rows of a step, which the plan's kernels read."""

    def __init__(self, config: ModelConfig, plan: Plan, n_positions: int):
        self._ropes = config.ropes
        self._n_rotary = 0
        n = plan.max_rows
        self.rows = aligned_zeros(n * abi.ROW_BYTES).view(np.int64).reshape(n, -1)
        self.blocks = aligned_zeros(n * abi.BLOCK_BYTES).view(np.int64).reshape(n, -1)
        self.n_blocks = np.zeros(1, np.int64)
        self.runs = aligned_zeros(n * abi.RUN_BYTES).view(np.int64).reshape(n, -1)
        self.n_runs = np.zeros(1, np.int64)
        # Rotary tables of all positions: filled as far as sequences have come, committed by the system likewise.
        self.ropes = [np.zeros((n_positions, 2, rope.n_rot), np.float32) for rope in config.ropes]
        self._warming = config.warming
        self.warmth = np.ones(n, np.float32)
        self.out_index = np.zeros(n, np.int64)
        # The first row, block and run as words, and the first row's position.
        self._row, self._block, self._run = (memoryview(table[0]) for table in (self.rows, self.blocks, self.runs))
        self._counts = memoryview(self.n_runs), memoryview(self.n_blocks)
        self._out = memoryview(self.out_index)
        self._first_position = self.rows[:1, abi.ROW_POSITION // 8]

    @property
    def first_position(self) -> int:
        """Position of the first row of the step."""
        return self._row[abi.ROW_POSITION // 8]

    def fill(self, runs: Sequence[Run], out: Sequence[int], block_tokens: int) -> np.ndarray:
        """Lay the runs' rows out one behind the other, dealt out in blocks of `block_tokens`; the rows' positions.

        `out`: numbers of the rows whose results are wanted.
        """
        if len(runs) == 1 and len(runs[0].tokens) == 1 and out and self._warming is None:
            return self._fill_one(runs[0])
        block = row = 0
        self.n_runs[0] = len(runs)
        for index, (position, tokens, pages, states) in enumerate(runs):
            n = len(tokens)
            self.runs[index] = (row, n, *states)
            self.rows[row : row + n, abi.ROW_POSITION // 8] = range(position, position + n)
            self.rows[row : row + n, abi.ROW_PAGES // 8] = pages
            self.rows[row : row + n, abi.ROW_TOKEN // 8] = tokens
            for start in range(0, n, block_tokens):
                size = min(block_tokens, n - start)
                self.blocks[block] = (row + start, size, position + start, position + n, pages)
                block += 1
            row += n
            self._fill_rotary(position + n)
        self.n_blocks[0] = block
        self.out_index[: len(out)] = out
        positions = self.rows[:row, abi.ROW_POSITION // 8]
        if self._warming is not None:
            self.warmth[:row] = self._warming.factors(positions)
        return positions

    def _fill_one(self, run: Run) -> np.ndarray:
        """The same for one row, word by word: caches are cold between two tokens, and each call of NumPy is felt."""
        position, (token,), pages, states = run
        row, block, words = self._row, self._block, self._run
        row[abi.ROW_POSITION // 8] = block[abi.BLOCK_POSITION // 8] = position
        row[abi.ROW_PAGES // 8] = block[abi.BLOCK_PAGES // 8] = pages
        row[abi.ROW_TOKEN // 8] = token
        block[abi.BLOCK_FIRST // 8], block[abi.BLOCK_ROWS // 8], block[abi.BLOCK_LENGTH // 8] = 0, 1, position + 1
        words[abi.RUN_FIRST // 8], words[abi.RUN_ROWS // 8] = 0, 1
        words[abi.RUN_SOURCE // 8], words[abi.RUN_TARGET // 8] = states
        n_runs, n_blocks = self._counts
        n_runs[0] = n_blocks[0] = 1
        self._out[0] = 0
        if position >= self._n_rotary:
            self._fill_rotary(position + 1)
        return self._first_position

    def _fill_rotary(self, n_positions: int) -> None:
        """Have rotary tables for at least so many positions."""
        if n_positions > self._n_rotary:
            start, end = self._n_rotary, n_positions + 256
            for rope, table in zip(self._ropes, self.ropes, strict=True):
                new = np.arange(start, min(end, len(table)))
                table[start : start + len(new)] = rope.table(new)
            self._n_rotary = end
