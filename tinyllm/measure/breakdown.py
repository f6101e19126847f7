"""Where the time of a test went: ticks, work and roofs of each op go in, tables by stage and by layer come out.

All times are milliseconds per unit: one prompt, one generated token, or one run of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..plan import Op, Plan
from .costs import Costs, Work
from .roofs import Roofs
from .timeline import OpTicks

PYTHON = "python"
"""The stage of the time between steps: preparing inputs, copying logits."""

_CACHE_SHARE = 1.05  # faster than memory can be read by more than its own noise: the bytes came from a cache
_IDLE_SHARE = 0.5


@dataclass(frozen=True)
class Entry:
    """One op, or several ops together.

    `samples`: ms in each repetition. `mean_ms` and `longest_ms`: the threads' own work, on average and of the slowest.
    `roof_ms`: the least time that the work needs, by the resource that limits it (mem, int8, f32).
    """

    stage: str
    layer: int | None
    calls: float
    samples: tuple[float, ...]
    mean_ms: float
    longest_ms: float
    work: Work
    roof_ms: dict[str, float]
    kernels: tuple[str, ...] = ()

    @cached_property
    def ms(self) -> float:
        return float(np.mean(self.samples))

    @cached_property
    def stddev_ms(self) -> float:
        """Sample standard deviation over the repetitions; 0 for a single one."""
        return float(np.std(self.samples, ddof=1)) if len(self.samples) > 1 else 0.0

    @property
    def wait_ms(self) -> float:
        """Time in which no thread works: waking up and the barrier."""
        return max(0.0, self.ms - self.longest_ms)

    @property
    def balance(self) -> float:
        """Work of the average thread by that of the slowest."""
        return self.mean_ms / self.longest_ms if self.longest_ms else 1.0

    @property
    def least_ms(self) -> float:
        """Time at the roof."""
        return sum(self.roof_ms.values())

    @property
    def lost_ms(self) -> float:
        """Time above the roof."""
        return max(0.0, self.ms - self.least_ms)

    @property
    def roof_share(self) -> float:
        """Time at the roof by the time that was needed; above 1 if the bytes came from a cache."""
        return self.least_ms / self.ms if self.ms else 0.0

    @property
    def limit(self) -> str:
        """What holds it: mem, int8, f32, cache (faster than memory), sync (threads wait), python."""
        if self.stage == PYTHON:
            return PYTHON
        if self.ms - self.mean_ms > _IDLE_SHARE * self.ms:
            return "sync"
        resource = max(self.roof_ms, key=self.roof_ms.__getitem__, default="sync")
        return "cache" if resource == "mem" and self.roof_share > _CACHE_SHARE else resource

    @property
    def gb_per_s(self) -> float:
        return self.work.n_bytes / self.ms / 1e6 if self.ms else 0.0

    @property
    def gop_per_s(self) -> float:
        """Of int8 and float operations together."""
        return self.work.ops / self.ms / 1e6 if self.ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: ms, 10^9 bytes and operations per unit."""
        return {
            "stage": self.stage,
            "layer": self.layer,
            "calls": _short(self.calls),
            "ms": _short(self.ms),
            "ms_stddev": _short(self.stddev_ms),
            "gb": _short(self.work.n_bytes / 1e9),
            "gop": _short(self.work.int8_ops / 1e9),
            "gflop": _short(self.work.f32_ops / 1e9),
            "gb_s": _short(self.gb_per_s),
            "gop_s": _short(self.gop_per_s),
            "limit": self.limit,
            "roof_ms": _short(self.least_ms),
            "lost_ms": _short(self.lost_ms),
            "balance": _short(self.balance),
            "wait_ms": _short(self.wait_ms),
            "kernels": list(self.kernels),
        }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class Breakdown:
    """The time of a test by op. `unit` is "prompt", "token" or "run"; the entries' ms add up to `wall_ms`."""

    unit: str
    entries: tuple[Entry, ...]

    @cached_property
    def wall_ms(self) -> float:
        return sum(entry.ms for entry in self.entries)

    @cached_property
    def ops(self) -> Entry:
        """All ops together."""
        return merge("sum", None, [entry for entry in self.entries if entry.stage != PYTHON])

    def by_stage(self) -> list[Entry]:
        """One entry per stage, most milliseconds lost first."""
        stages = _group(self.entries, lambda entry: entry.stage)
        return sorted((merge(stage, None, group) for stage, group in stages.items()), key=lambda entry: -entry.lost_ms)

    def by_layer(self) -> list[Entry]:
        """One entry per layer, in order."""
        layers = _group([e for e in self.entries if e.layer is not None], lambda entry: entry.layer)
        return [merge("layer", layer, group) for layer, group in layers.items()]


def _group(entries: Iterable[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def merge(stage: str, layer: int | None, entries: Sequence[Entry]) -> Entry:
    """The sum of entries."""
    roof_ms: dict[str, float] = {}
    for entry in entries:
        for resource, ms in entry.roof_ms.items():
            roof_ms[resource] = roof_ms.get(resource, 0.0) + ms
    return Entry(
        stage,
        layer,
        calls=sum(entry.calls for entry in entries),
        samples=tuple(map(float, np.sum([entry.samples for entry in entries], axis=0))),
        mean_ms=sum(entry.mean_ms for entry in entries),
        longest_ms=sum(entry.longest_ms for entry in entries),
        work=sum((entry.work for entry in entries), Work()),
        roof_ms=roof_ms,
        kernels=tuple(dict.fromkeys(kernel for entry in entries for kernel in entry.kernels)),
    )


def break_down(
    plan: Plan,
    repetitions: Sequence[OpTicks],
    wall_s: Sequence[float],
    seconds_per_tick: float,
    roofs: Roofs,
    unit: str,
    n_units: int,
) -> Breakdown:
    """Join times, work and roofs. `wall_s` and `repetitions` are per repetition, each of `n_units` units."""
    ms = 1e3 * seconds_per_tick / n_units
    totals = np.array([ticks.total for ticks in repetitions]) * ms
    means = np.mean([ticks.mean for ticks in repetitions], axis=0) * ms
    longest = np.mean([ticks.longest for ticks in repetitions], axis=0) * ms
    shapes, costs = repetitions[0].shapes, Costs(plan)
    entries: dict[tuple[int | None, str], list[Entry]] = {}
    for index, op in enumerate(plan.ops):
        work = sum((costs.of(op, shape) for shape in shapes), Work()) * (1 / n_units)
        times = roofs.times(work)
        resource = max(times, key=times.__getitem__)
        # What is done within the op before belongs to that op's stage.
        stage, calls = (plan.ops[index - 1].stage, 0) if op.done_before else (op.stage, len(shapes) / n_units)
        entry = Entry(
            stage,
            op.layer,
            calls=calls,
            samples=tuple(map(float, totals[:, index])),
            mean_ms=float(means[index]),
            longest_ms=float(longest[index]),
            work=work,
            roof_ms={resource: 1e3 * times[resource]} if times[resource] else {},
            kernels=() if op.done_before else _kernels(op, shapes),
        )
        entries.setdefault((op.layer, stage), []).append(entry)
    between = np.array(wall_s) * 1e3 / n_units - totals.sum(axis=1)
    python = Entry(
        PYTHON, None, len(shapes) / n_units, tuple(map(float, between)), *[float(between.mean())] * 2, Work(), {}
    )
    return Breakdown(unit, (*(merge(stage, layer, group) for (layer, stage), group in entries.items()), python))


def _kernels(op: Op, shapes: Sequence) -> tuple[str, ...]:
    one, many = op.calls or (op.one, op.many)
    return tuple(dict.fromkeys(one if shape.n_rows == 1 else many for shape in shapes))
