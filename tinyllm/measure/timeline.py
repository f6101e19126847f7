"""From the executor's clock stamps to seconds per op: a recorder receives the stamps of every run of a plan.

Three moments of each op and thread are known: it begins (all threads have finished the op before), the thread's own
work is done, and everybody's is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..kernels import abi
from ..plan import Plan
from ..team import Team
from .costs import StepShape
from .roofs import Roofs

# Memory for stamps before they are summed up, which should not happen while somebody measures.
_BLOCK_BYTES = 32 << 20
_TRIES = 5
_MIN_SPAN = 0.05


class Clock:
    """The scale of the executor's ticks, from looks at both clocks at the beginning and at the end of a measurement."""

    def __init__(self, team: Team):
        self._team = team
        self._first = self._last = self._look()

    def _look(self) -> tuple[float, int]:
        """The same moment on both clocks: the narrowest of a few tries."""
        nothing = np.zeros((0, abi.OP_BYTES // 8), np.int64)
        stamps = np.zeros((self._team.n_threads, 1), np.int64)
        looks = []
        for _ in range(_TRIES):
            before = time.perf_counter()
            self._team.run(nothing, stamps)
            after = time.perf_counter()
            looks.append((after - before, (before + after) / 2, int(stamps[0, 0])))
        _, seconds, ticks = min(looks)
        return seconds, ticks

    def stop(self) -> None:
        """Take the second look; waits if the first one was less than 50 ms ago."""
        time.sleep(max(0.0, _MIN_SPAN - (time.perf_counter() - self._first[0])))
        self._last = self._look()

    @property
    def seconds_per_tick(self) -> float:
        (start, start_ticks), (end, end_ticks) = self._first, self._last
        return (end - start) / (end_ticks - start_ticks)

    def moment(self, ticks: np.ndarray | int) -> np.ndarray | float:
        """When the counter stood at `ticks`, on the scale of `time.perf_counter`."""
        return self._first[0] + (ticks - self._first[1]) * self.seconds_per_tick


def bounds_of(stamps: np.ndarray, alone: np.ndarray | bool = False) -> np.ndarray:
    """When the ops of steps began and ended: ticks [..., n_threads, 2 · n_ops + 1] → [..., n_ops + 1].

    An op ends when its last thread is done with it. A thread that lost its processor notices that late, when others
    have begun the next op, so no single thread's view of the ends is taken. Ops that each thread does `alone`
    (bool [..., n_ops]) end when the first one goes on: nobody waits for the others.
    """
    own_ends = stamps[..., 1::2]
    done = np.where(alone, own_ends.min(axis=-2), own_ends.max(axis=-2))
    done[..., -1] = stamps[..., 0, -1]
    return np.concatenate([stamps[..., 0, :1], done], axis=-1)


@dataclass(frozen=True)
class Step:
    """The stamps of a run of a plan, int64 [n_threads, 2 · n_ops + 1], and which ops have no barrier: bool [n_ops]."""

    shape: StepShape
    stamps: np.ndarray
    alone: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Ticks at which each thread began each op: [n_threads, n_ops]."""
        return self.stamps[:, 0:-1:2]

    @property
    def own_ends(self) -> np.ndarray:
        """Ticks at which each thread had done its own share."""
        return self.stamps[:, 1::2]

    @property
    def ends(self) -> np.ndarray:
        """Ticks at which all threads had finished, as each of them saw it."""
        return self.stamps[:, 2::2]

    @property
    def bounds(self) -> np.ndarray:
        """Ticks between ops: [n_ops + 1]."""
        return bounds_of(self.stamps, self.alone)


@dataclass(frozen=True)
class Trace:
    """Steps of a plan that were kept whole. `marks`: when each call of the engine began and ended (perf_counter)."""

    plan: Plan
    steps: tuple[Step, ...]
    marks: tuple[float, ...]
    clock: Clock
    roofs: Roofs


@dataclass(frozen=True)
class OpTicks:
    """Ticks per op, summed over the steps of a repetition: float64 [n_ops] each.

    `total`: from the moment when all threads had done their work in the op before, to the same moment of this one;
    `mean` and `longest`: of the threads' own work. So total = mean + imbalance (longest − mean) + waiting (the rest).
    """

    total: np.ndarray
    mean: np.ndarray
    longest: np.ndarray
    shapes: tuple[StepShape, ...]


class Recorder:
    """Hands out memory for the stamps of a plan's runs (`Team.recorder`) and sums them up.

    `shape` tells the shape of the step that is about to run. The first `keep` steps are kept whole.
    """

    def __init__(self, plan: Plan, shape: Callable[[], StepShape], keep: int = 0):
        self._plan, self._table, self._shape = plan, plan.table, shape
        self._n_ops, self._n_threads = len(plan.ops), plan.n_threads
        row = self._n_threads * (2 * self._n_ops + 1)
        self._block = np.zeros((max(1, _BLOCK_BYTES // (8 * row)), self._n_threads, 2 * self._n_ops + 1), np.int64)
        # Once, not in every step: what NumPy takes for an address is time between the ops that are measured.
        self._address = self._block.ctypes.data
        self._keep = keep
        self.kept: list[Step] = []
        self._clear()

    def _clear(self) -> None:
        self._filled = 0
        self._shapes: list[StepShape] = []
        self._sums = np.zeros((3, self._n_ops))

    def __call__(self, table: np.ndarray) -> int:
        """Address for the stamps of a run, 0 if it is of another plan."""
        if table is not self._table:
            return 0
        if self._filled == len(self._block):
            self._sum_up()
        self._shapes.append(self._shape())
        self._filled += 1
        return self._address + (self._filled - 1) * self._block.strides[0]

    @property
    def last(self) -> np.ndarray:
        """The stamps of the last run: int64 [n_threads, 2 · n_ops + 1]."""
        return self._block[self._filled - 1]

    def _sum_up(self) -> None:
        first = len(self._shapes) - self._filled
        alone = [self._plan.alone(shape.n_rows, shape.n_out) for shape in self._shapes[first:]]
        alone = np.array(alone, bool).reshape(-1, self._n_ops)
        for i in range(min(self._filled, self._keep - len(self.kept))):
            self.kept.append(Step(self._shapes[first + i], self._block[i].copy(), alone[i]))
        stamps = self._block[: self._filled]
        work = stamps[:, :, 1::2] - stamps[:, :, 0:-1:2]
        total = np.diff(bounds_of(stamps, alone), axis=1)
        longest = np.minimum(work.max(axis=1), total)
        self._sums += [total.sum(axis=0), np.minimum(work.mean(axis=1), longest).sum(axis=0), longest.sum(axis=0)]
        self._filled = 0

    def take(self) -> OpTicks:
        """The sums since the last call."""
        self._sum_up()
        result = OpTicks(*self._sums, tuple(self._shapes))
        self._clear()
        return result
