"""What a smaller file costs in quality: sizes and measures of models go in, a picture of the two comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .axes import Axis, number
from .chart import Series, line_chart


@dataclass(frozen=True)
class Point:
    """One model: the bytes of its file, and its perplexity or bits per byte."""

    name: str
    n_bytes: int
    measure: float


def picture(points: Sequence[Point], one_vocabulary: bool, text: str) -> str:
    """An SVG of size against perplexity, or against bits per byte where perplexities cannot be compared."""
    measure = "perplexity" if one_vocabulary else "bits per byte"
    said = ", ".join(f"{p.name}: {number(p.n_bytes / 1e6, 3)} MB, {number(p.measure, 4)}" for p in points)
    return line_chart(
        f"Size and {measure} of {text}",
        [Series(point.name, [(point.n_bytes / 1e6, point.measure)]) for point in points],
        Axis("size of the file (MB)"),
        Axis(measure, from_zero=False),
        f"{measure.capitalize()} by the size of the file. {said}.",
    )
