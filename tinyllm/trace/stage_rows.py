"""Rows of one stage, step by step: they flow in as kernels leave them, norms, ranges and what was to be kept flow out.

Single rows wait until there are enough of them to be worth a pass of NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

N_BINS = 16
N_TOP_NEURONS = 8
ACTIVE_SHARE = 0.1
"""A neuron counts as active above this share of its row's largest magnitude."""
_ENOUGH = 32


@dataclass(eq=False)
class StageRange:
    """Size and spread of a stage's rows: float32 [n_tokens] each; `histogram` (int [16]) is of the last row.

    The bins are equal parts from the last row's smallest to its largest value. `seconds`: the time of the ops from the
    stage before it to it.
    """

    width: int
    norm: np.ndarray
    low: np.ndarray
    high: np.ndarray
    histogram: np.ndarray
    seconds: float


@dataclass(eq=False)
class Activations:
    """Feed-forward activations of one layer, per token: `active` share above a tenth of the row's largest magnitude;
    `carriers` neurons that carry 50 and 90 % of the energy (int [T, 2], -1 where unknown); `index`, `value` of the
    strongest ([T, 8])."""

    active: np.ndarray
    carriers: np.ndarray
    index: np.ndarray
    value: np.ndarray


class StageRows:
    """The rows of a stage; `keep`: copies of them shall be had in the end."""

    def __init__(self, keep: bool):
        self.seconds = 0.0
        self._keep = keep
        self._waiting: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._sizes: list[tuple[np.ndarray, ...]] = []
        self._last: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """Take the rows of a step: float32 [n, width], memory that the next step overwrites."""
        if self._keep or len(rows) < _ENOUGH:
            rows = rows.copy()
        if self._keep:
            self._kept.append(rows)
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= _ENOUGH:
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        rows = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        ends = np.cumsum([len(part) for part in self._waiting]) - 1
        self._waiting.clear()
        self._last = rows[-1].copy()
        self._measure(rows, ends)

    def _measure(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """`ends`: numbers of the rows that were the last of their step."""
        self._sizes.append((np.sqrt(np.einsum("ij,ij->i", rows, rows)), rows.min(axis=1), rows.max(axis=1)))

    def range(self) -> StageRange:
        self._settle()
        norm, low, high = map(np.concatenate, zip(*self._sizes, strict=True))
        return StageRange(len(self._last), norm, low, high, _histogram(self._last, low[-1], high[-1]), self.seconds)

    def kept(self) -> np.ndarray | None:
        """float32 [n_tokens, width]; None if it was not to be kept."""
        return np.concatenate(self._kept) if self._kept else None


class ActivationRows(StageRows):
    """Activations of feed-forward neurons: also how many are active, and which are the strongest."""

    def __init__(self, keep: bool):
        super().__init__(keep)
        self._activity: list[tuple[np.ndarray, ...]] = []
        self._ends: list[np.ndarray] = []

    def _measure(self, rows: np.ndarray, ends: np.ndarray) -> None:
        super()._measure(rows, ends)
        size = np.abs(rows)
        active = np.count_nonzero(size > ACTIVE_SHARE * size.max(axis=1, keepdims=True), axis=1) / rows.shape[1]
        k = min(N_TOP_NEURONS, rows.shape[1])
        top = np.argpartition(size, rows.shape[1] - k, axis=1)[:, -k:]
        top = np.take_along_axis(top, np.argsort(-np.take_along_axis(size, top, 1), axis=1), 1)
        # Energy shares are wanted where a token is chosen: the last row of a step.
        energy = np.cumsum(np.sort(size[ends], axis=1)[:, ::-1].astype(np.float64) ** 2, axis=1)
        carriers = np.full((len(rows), 2), -1)
        for column, share in enumerate((0.5, 0.9)):
            carriers[ends, column] = np.count_nonzero(energy < share * energy[:, -1:], axis=1) + 1
        self._activity.append((active, carriers, top, np.take_along_axis(rows, top, 1)))
        self._ends.append(rows[ends])

    def activations(self) -> Activations:
        self._settle()
        return Activations(*map(np.concatenate, zip(*self._activity, strict=True)))

    def step_ends(self) -> np.ndarray:
        """The last row of each step: float32 [n_steps, n_ff]."""
        self._settle()
        return np.concatenate(self._ends)


def _histogram(values: np.ndarray, low: float, high: float) -> np.ndarray:
    if not high > low:
        return np.bincount([0], minlength=N_BINS) * len(values)
    bins = ((values - low) * (N_BINS / (high - low))).astype(np.int64)
    return np.bincount(np.clip(bins, 0, N_BINS - 1), minlength=N_BINS)
