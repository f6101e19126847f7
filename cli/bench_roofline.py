"""The roofline of `bench --roofline` as a plot in text: speed against operations per byte, one letter per stage."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyllm.bench import Result
    from tinyllm.measure.breakdown import Entry
    from tinyllm.measure.roofs import Roofs

WIDTH, HEIGHT = 60, 12
_MIN_SHARE = 0.01


@dataclass(frozen=True)
class Point:
    """A stage of a test: operations per byte, and 10^9 operations per second."""

    letter: str
    intensity: float
    speed: float


def plot(results: Sequence[Result]) -> list[str]:
    """Lines of a log–log plot of 60 × 12 characters with its legend; nothing if no stage takes a hundredth of the time.

    Decode's stages are lower-case letters and prefill's the same in upper case; `/` and `-` are the roofs of memory and
    int8 arithmetic, `=` that of floats.
    """
    letters = _letters(results)
    points = _points(results, letters)
    if not points:
        return []
    roofs = results[-1].roofs.best
    ridge = roofs.int8_gop_s / roofs.read_gb_s
    across = _Axis(
        min(ridge / 4, *(p.intensity for p in points)), max(ridge * 4, *(p.intensity for p in points)), WIDTH
    )
    upward = _Axis(min(p.speed for p in points), max(roofs.int8_gop_s, *(p.speed for p in points)), HEIGHT)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    _draw_roofs(grid, across, upward, roofs)
    # Where several meet, the one with most time is seen.
    for point in reversed(points):
        grid[upward.place(point.speed)][across.place(point.intensity)] = point.letter
    rows = [f"{_label(upward.value(row)):>8} |{''.join(grid[row])}".rstrip() for row in reversed(range(HEIGHT))]
    rows[0] = rows[0].ljust(9 + WIDTH) + "  GOP/s"
    return [*rows, " " * 9 + "+" + "-" * WIDTH, _ticks(across), *_legend(results, letters), _ridge(ridge, roofs)]


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis of `cells` characters."""

    low: float
    high: float
    cells: int

    def place(self, value: float) -> int:
        part = math.log(value / self.low) / math.log(self.high / self.low) if self.high > self.low else 0.0
        return min(self.cells - 1, max(0, round(part * (self.cells - 1))))

    def value(self, cell: int) -> float:
        return self.low * (self.high / self.low) ** (cell / (self.cells - 1))


def _label(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"


def _ticks(across: _Axis) -> str:
    line = [" "] * (WIDTH + 12)
    for cell in range(0, WIDTH, 12):
        label = _label(across.value(cell))
        line[10 + cell : 10 + cell + len(label)] = label
    return "".join(line).rstrip() + "  op/byte"


def _share(entry: Entry, result: Result) -> float:
    return entry.ms / result.breakdown.wall_ms


def _letters(results: Sequence[Result]) -> dict[str, str]:
    """A letter for each stage that takes some time and has operations and bytes, most time first."""
    shares: dict[str, float] = {}
    for result in results:
        for entry in result.breakdown.by_stage():
            if entry.work.ops and entry.work.n_bytes and _share(entry, result) >= _MIN_SHARE:
                shares[entry.stage] = shares.get(entry.stage, 0.0) + _share(entry, result)
    ranked = sorted(shares, key=shares.__getitem__, reverse=True)
    return dict(zip(ranked, string.ascii_lowercase, strict=False))


def _points(results: Sequence[Result], letters: dict[str, str]) -> list[Point]:
    """In the order of the letters."""
    return [
        Point(letter.upper() if result.trial.n_prompt else letter, entry.work.ops / entry.work.n_bytes, entry.gop_per_s)
        for stage, letter in letters.items()
        for result in results
        for entry in result.breakdown.by_stage()
        if entry.stage == stage and entry.ms > 0
    ]


def _draw_roofs(grid: list[list[str]], across: _Axis, upward: _Axis, roofs: Roofs) -> None:
    for cell in range(WIDTH):
        slope = across.value(cell) * roofs.read_gb_s
        for peak, mark in ((roofs.f32_gflop_s, "="), (roofs.int8_gop_s, "-")):
            if min(slope, peak) >= upward.low:
                grid[upward.place(min(slope, peak))][cell] = "/" if slope < peak else mark


def _legend(results: Sequence[Result], letters: dict[str, str]) -> list[str]:
    shares: dict[str, list[str]] = {stage: [] for stage in letters}
    for result in results:
        for entry in result.breakdown.by_stage():
            if entry.stage in letters:
                shares[entry.stage].append(f"{100 * _share(entry, result):.0f}")
    parts = [f"{letter} {stage} {'/'.join(shares[stage])} %" for stage, letter in letters.items()]
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > 76:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + part
    tests = "/".join(result.trial.name for result in results)
    return [*lines, f"share of the time in {tests}; upper case: with a prompt"]


def _ridge(ridge: float, roofs: Roofs) -> str:
    return (
        f"/ memory {_label(roofs.read_gb_s)} GB/s, - int8 {_label(roofs.int8_gop_s)} GOP/s,"
        f" = f32 {_label(roofs.f32_gflop_s)} GFLOP/s; the roofs meet at {_label(ridge)} op/byte"
    )
