"""Axes of charts: values and what an axis shall be go in; places between 0 and 1, ticks and their labels come out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_THIN_SPACE = "\u2009"


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `label` names the quantity and its unit ("time (ms)").

    `base`: a logarithmic axis with ticks at powers of 2 or 10; None: a linear one. `from_zero`: a linear axis over
    values of one sign begins at 0, so that lengths can be compared.
    """

    label: str
    base: int | None = None
    from_zero: bool = True

    def __post_init__(self) -> None:
        if self.base not in (None, 2, 10):
            raise ValueError(f"an axis is linear (None) or has base 2 or 10, not {self.base!r}")

    def shows(self, value: float) -> bool:
        """Whether a value has a place on the axis: it is finite, and above 0 where the axis is logarithmic."""
        return math.isfinite(value) and (self.base is None or value > 0)


@dataclass(frozen=True)
class Scale:
    """A stretch of an axis. `low` and `high` are its ends and `ticks` lie between them, in the units of the values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    base: int | None

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.base is not None:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def scale_of(values: Iterable[float], axis: Axis, most_ticks: int = 7, whole: bool = True) -> Scale:
    """The scale that holds all values which the axis can show.

    A linear one ends at ticks, or, if it need not be `whole`, where the values end.

    Raises ValueError if there is no such value.
    """
    shown = [value for value in values if axis.shows(value)]
    if not shown:
        raise ValueError(f"a chart needs at least one value that its axis {axis.label!r} can show")
    low, high = min(shown), max(shown)
    if axis.base is not None:
        return _logarithmic(low, high, axis.base, most_ticks)
    if axis.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    scale = _linear(low, high, most_ticks)
    if whole or low == high:
        return scale
    return Scale(low, high, tuple(tick for tick in scale.ticks if low <= tick <= high), None)


def _linear(low: float, high: float, most_ticks: int) -> Scale:
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _step((high - low) / (most_ticks - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks, None)


def _step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _logarithmic(low: float, high: float, base: int, most_ticks: int) -> Scale:
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    if base == 10 and last - first <= 2:
        between = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
        below = max((tick for tick in between if tick <= low * (1 + 1e-9)), default=low)
        above = min((tick for tick in between if tick >= high * (1 - 1e-9)), default=high)
        if below == above:
            below, above = below / 2, above * 2
        return Scale(below, above, tuple(tick for tick in between if below <= tick <= above), base)
    if first == last:
        first, last = first - 1, last + 1
    every = -(-(last - first + 1) // most_ticks)
    ticks = tuple(float(base) ** power for power in range(first, last + 1, every))
    return Scale(float(base) ** first, float(base) ** last, ticks, base)


def number(value: float, digits: int = 6) -> str:
    """A value as people read it, to so many significant digits: `4096`, `16 384`, `0.25`, `1.5·10⁹`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1e7:
        text = f"{value:,.{digits}g}"
        if "e" in text:
            text = f"{value:,.0f}"
        return text.replace(",", _THIN_SPACE) if abs(value) >= 1e4 else text.replace(",", "")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"
