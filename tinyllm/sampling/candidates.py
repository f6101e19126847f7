"""The tokens that are still in the running: logits flow in, and ever smaller sets of ids with their logits flow out.

Everything here is exact and made for 150,000 tokens: what looks for the best few never sorts the rest.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache, cached_property

import numpy as np

from tinyllm.kernels.abi import SUM_EXP

SUM_EXP_KERNEL = "softmax.sum_exp"
_EXP_IS_SAFE = 60.0  # exp of logits up to here, a million of them summed, stays far inside float32
_PREFILTER_FROM = 4096  # fewer values are partitioned as they are
_BLOCKS_PER_PICK = 16  # block maxima looked at for each of the best that are wanted
_TWO_LEVELS_FROM = 4096  # longer weights are summed by blocks before they are summed one by one
_BLOCK = 256
_KERNEL_FROM = 16384  # the exponentials of more logits, if nothing but their sum is wanted, are left to a kernel


class Candidates:
    """Token ids with their logits. `ids` None: the whole vocabulary, in order of ids.

    `ordered`: best first, equal ones by id; else by id. Immutable: no array is written to once it is in here.
    """

    def __init__(self, ids: np.ndarray | None, logits: np.ndarray, ordered: bool = False) -> None:
        self.ids = ids  # int64 [n] | None
        self.logits = logits  # float32 [n]
        self.ordered = ordered

    def __len__(self) -> int:
        return len(self.logits)

    def token(self, at: int) -> int:
        """The token id at a position."""
        return int(at if self.ids is None else self.ids[at])

    @cached_property
    def max(self) -> float:
        """The largest logit; NaN if there is one."""
        return float(self.logits[0] if self.ordered else self.logits.max())

    @cached_property
    def weights(self) -> np.ndarray:
        """Probabilities times a constant: float32 [n]."""
        return np.exp(self.logits - np.float32(self._shift) if self._shift else self.logits)

    @cached_property
    def total(self) -> float:
        """The sum of `weights`."""
        return float(self.weights.sum())

    @cached_property
    def log_total(self) -> float:
        """log Σ exp(logits): what turns logits into log-probabilities."""
        known = len(self) < _KERNEL_FROM or "weights" in self.__dict__
        total = self.total if known else sum_exp(self.logits, self._shift)
        return math.log(total) + self._shift

    @property
    def probs(self) -> np.ndarray:
        """Probabilities: float64 [n]."""
        return self.weights.astype(np.float64) / self.total

    @cached_property
    def _shift(self) -> float:
        return 0.0 if abs(self.max) < _EXP_IS_SAFE else self.max

    def pick(self, positions: np.ndarray | slice, ordered: bool | None = None) -> Candidates:
        """Only the candidates at `positions`; without `ordered` in the order in which they were."""
        if self.ids is not None:
            ids = self.ids[positions]
        elif isinstance(positions, slice):
            ids = np.arange(len(self))[positions]
        else:
            ids = positions
        return Candidates(ids, self.logits[positions], self.ordered if ordered is None else ordered)

    def replace(self, logits: np.ndarray) -> Candidates:
        """The same ids with other logits, whose order may be another."""
        return Candidates(self.ids, logits)

    def scale(self, factor: float) -> Candidates:
        """All logits multiplied by a positive factor."""
        return Candidates(self.ids, self.logits * np.float32(factor), self.ordered)

    def best(self, k: int) -> Candidates:
        """The k best, best first (all, if there are no more)."""
        if self.ordered:
            return self.pick(slice(k))
        return self.pick(largest(self.logits, k), ordered=True)

    def locate(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of those `tokens` that are candidates, and which of `tokens` these are (a boolean array).

        Candidates must be in order of ids.
        """
        if self.ids is None:
            inside = tokens < len(self)
            return tokens[inside], inside
        at = np.minimum(np.searchsorted(self.ids, tokens), len(self.ids) - 1)
        inside = self.ids[at] == tokens
        return at[inside], inside


def sum_exp(logits: np.ndarray, shift: float) -> float:
    """Σ exp(logits - shift) of float32 [n], compiled: no array of exponentials, a fifth of NumPy's time."""
    logits = np.ascontiguousarray(logits)
    result = np.empty(2, np.float32)
    words = SUM_EXP.pack(n_rows=0, n=len(logits), x=logits.ctypes.data, shift=float(shift), result=result.ctypes.data)
    arguments = np.array(words, np.int64)
    _sum_exp_kernel()(arguments.ctypes.data, 0, 1)
    return float(result[0]) + float(result[1])


@cache
def _sum_exp_kernel() -> Callable[[int, int, int], None]:
    from tinyllm.kernels.jit import kernel_addresses  # llvmlite is not needed before

    (address,) = kernel_addresses([SUM_EXP_KERNEL]).values()
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k largest values (or all), largest first, equal ones by position."""
    chosen = largest_unordered(values, k)
    return chosen[np.argsort(-values[chosen], kind="stable")]


def largest_unordered(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k largest values (or all) in ascending order; of equal ones at the border, the first."""
    k = min(k, len(values))
    if k <= 0:
        return np.empty(0, np.int64)
    n_blocks = k * _BLOCKS_PER_PICK
    where: np.ndarray | None = None
    if len(values) >= max(_PREFILTER_FROM, 2 * n_blocks):
        # At least k values reach the k-th largest of the block maxima. A block is a column, so that maxima are taken
        # of whole rows, which is fast.
        n_blocks = max(n_blocks, _PREFILTER_FROM // 2)
        rows = len(values) // n_blocks
        maxima = values[: rows * n_blocks].reshape(rows, n_blocks).max(axis=0)
        where = np.flatnonzero(values >= np.partition(maxima, n_blocks - k)[n_blocks - k])
    few = values if where is None else values[where]
    least = np.partition(few, len(few) - k)[len(few) - k]
    chosen = few > least
    chosen[np.flatnonzero(few == least)[: k - np.count_nonzero(chosen)]] = True
    chosen = np.flatnonzero(chosen)
    return chosen if where is None else where[chosen]


def reach(weights: np.ndarray, target: float, beyond: bool = False) -> int:
    """The first position at which the running sum of `weights` reaches `target`, or goes `beyond` it.

    If rounding keeps it from getting there: the last position that has a weight.
    """
    start, done, part = 0, 0.0, weights
    side = "right" if beyond else "left"
    if len(weights) >= _TWO_LEVELS_FROM:
        starts = np.arange(0, len(weights), _BLOCK)
        sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
        block = min(int(np.searchsorted(sums, target, side)), len(sums) - 1)
        start, done = block * _BLOCK, float(sums[block - 1]) if block else 0.0
        part = weights[start : start + _BLOCK]
    at = start + int(np.searchsorted(np.cumsum(part, dtype=np.float64), target - done, side))
    return at if at < start + len(part) else int(np.flatnonzero(weights)[-1])
