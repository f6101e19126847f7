"""Charts as self-contained SVG: names and numbers go in, the text of a picture comes out.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind people tell apart; markers and
dashes differ too. The picture follows the reader's light or dark theme, and every point tells its values when asked.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .axes import Axis, Scale, number, scale_of

WIDTH = 720
_LEFT, _RIGHT, _MARGIN = 76, 24, 20
_PLOT_HEIGHT = 300
_BAR, _BAR_GAP, _GROUP_GAP = 16, 2, 12
_LINE = 18

_BACKGROUND, _INK, _DIM, _GRID = (
    ("#ffffff", "#12161a"),
    ("#1b1f24", "#e6e8eb"),
    ("#57606a", "#a3abb4"),
    ("#d8dde2", "#363d45"),
)
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "ink")
_MARKERS = (
    "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -4.8L4.6 3.4H-4.6Z",
    "M0 -5.2L5.2 0L0 5.2L-5.2 0Z",
    "M0 4.8L4.6 -3.4H-4.6Z",
    "M-1.6 -4.8H1.6V-1.6H4.8V1.6H1.6V4.8H-1.6V1.6H-4.8V-1.6H-1.6Z",
    "M0 -5L4.8 -1.5L2.9 4.1H-2.9L-4.8 -1.5Z",
    "M-4.8 -2.5H4.8V2.5H-4.8Z",
)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Series:
    """A line. `points`: x and y; one that its axes cannot show (NaN, or 0 on a logarithmic axis) leaves a gap.

    `theory`: not measured, so it is dashed, without markers, and in the colour of the measured line before it, or in
    that of the text where none is before it.
    """

    name: str
    points: Sequence[tuple[float, float]]
    theory: bool = False


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, description: str) -> str:
    """An SVG of lines with markers. `description` says in a sentence what is to be seen, for those who cannot see it.

    Raises ValueError if no point can be shown.
    """
    looks = _looks(series)
    head, top = _head(title, [(line.name, look, line.theory) for line, look in zip(series, looks, strict=True)])
    top += _LINE + 4  # the label of the y axis
    shown = [(a, b) for line in series for a, b in line.points if x.shows(a) and y.shows(b)]
    x_scale, y_scale = scale_of((a for a, _ in shown), x, 10, whole=False), scale_of((b for _, b in shown), y)
    box = _Box(_LEFT, top, WIDTH - _LEFT - _RIGHT, _PLOT_HEIGHT, x_scale, y_scale)
    parts = [*head, _text(_MARGIN, top - 14, y.label, "dim"), *_horizontal_grid(box), *_x_axis(box, x.label)]
    for line, look in zip(series, looks, strict=True):
        parts += _line(look, line, x, y, box)
    return _document(title, description, box.bottom + 50, parts)


def bar_chart(
    title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], axis: Axis, description: str
) -> str:
    """An SVG of horizontal bars: a group for each label, in it a bar for each series (name → a value per label).

    Raises ValueError if the numbers of labels and values differ, the axis is logarithmic (a bar's length would say
    nothing), or there is no value.
    """
    if any(len(values) != len(labels) for values in series.values()):
        raise ValueError("every series of a bar chart needs a value for each label")
    if axis.base is not None or not axis.from_zero:
        raise ValueError("bars begin at 0 of a linear axis")
    several = len(series) > 1
    head, top = _head(title, [(name, look, None) for look, name in enumerate(series)] if several else [])
    left = min(WIDTH // 2, _MARGIN + 12 + max(_width(label, 12) for label in labels))
    group = len(series) * (_BAR + _BAR_GAP) + _GROUP_GAP
    values_width = 64  # room for the number behind the longest bar
    scale = scale_of((value for values in series.values() for value in values), axis)
    box = _Box(left, top, WIDTH - left - _RIGHT - values_width, group * len(labels), scale, Scale(0, 1, (), None))
    parts = [*head, *_x_axis(box, axis.label)]
    for row, label in enumerate(labels):
        y = top + row * group + _GROUP_GAP / 2
        middle = y + (group - _GROUP_GAP) / 2 + 4
        parts.append(_text(left - 8, middle, _cut(label, left - _MARGIN - 8), "end"))
        for index, (name, values) in enumerate(series.items()):
            if axis.shows(values[row]):
                parts += _bar(index, f"{label}, {name}" if several else label, values[row], y, box, several)
            y += _BAR + _BAR_GAP
    return _document(title, description, box.bottom + 50, parts)


@dataclass(frozen=True)
class _Box:
    """The plot's place in pixels, and the scales of its sides."""

    left: float
    top: float
    width: float
    height: float
    x_scale: Scale
    y_scale: Scale

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.width * self.x_scale.place(value)

    def y(self, value: float) -> float:
        return self.bottom - self.height * self.y_scale.place(value)


def _looks(series: Sequence[Series]) -> list[int]:
    """The number of the colour and marker of each series."""
    looks, measured = [], -1
    for line in series:
        measured += not line.theory
        looks.append(measured if measured >= 0 else _COLOURS.index("ink"))
    return looks


def _head(title: str, names: Sequence[tuple[str, int, bool | None]]) -> tuple[list[str], float]:
    """Title and legend, and the height at which the plot may begin.

    `names`: of the series, with their looks and whether they are theory; None: they are bars.
    """
    parts, y = [], float(_MARGIN + 8)
    for line in _wrapped(title, WIDTH - 2 * _MARGIN, 16):
        parts.append(_text(_MARGIN, y, line, "title"))
        y += 22
    x = float(_MARGIN)
    for name, index, theory in names:
        name = _cut(name, WIDTH - 2 * _MARGIN - 40)
        width = 32 + _width(name, 12) + 20
        if x > _MARGIN and x + width > WIDTH - _MARGIN + 20:
            x, y = float(_MARGIN), y + _LINE
        if theory is None:
            sample = f'<path class="bar" d="M{_n(x)} {_n(y - 9)}h22v10h-22Z"/>{_marker(index, x + 11, y - 4)}'
        else:
            dash = _dash(index, theory)
            sample = f'<path class="line" d="M{_n(x)} {_n(y - 4)}h24"{dash}/>'
            sample += "" if theory else _marker(index, x + 12, y - 4)
        parts += [f'<g class="s{index % len(_COLOURS)}">{sample}</g>', _text(x + 30, y, name)]
        x += width
    return parts, y + (_LINE if names else 0)


def _horizontal_grid(box: _Box) -> Iterator[str]:
    for tick in box.y_scale.ticks:
        y = box.y(tick)
        yield f'<path class="grid" d="M{_n(box.left)} {_n(y)}H{_n(box.right)}"/>'
        yield _text(box.left - 8, y + 4, number(tick), "end dim")


def _x_axis(box: _Box, label: str) -> Iterator[str]:
    for tick in box.x_scale.ticks:
        x = box.x(tick)
        yield f'<path class="grid" d="M{_n(x)} {_n(box.top)}V{_n(box.bottom)}"/>'
        yield _text(x, box.bottom + 18, number(tick), "mid dim")
    yield f'<path class="axis" d="M{_n(box.left)} {_n(box.bottom)}H{_n(box.right)}"/>'
    yield _text(box.left + box.width / 2, box.bottom + 38, label, "mid dim")


def _line(index: int, line: Series, x: Axis, y: Axis, box: _Box) -> Iterator[str]:
    yield f'<g class="s{index % len(_COLOURS)}">'
    for is_shown, run in groupby(line.points, lambda point: x.shows(point[0]) and y.shows(point[1])):
        if not is_shown:
            continue
        points = [(a, b, box.x(a), box.y(b)) for a, b in run]
        path = "L".join(f"{_n(px)} {_n(py)}" for _, _, px, py in points)
        yield f'<path class="line" d="M{path}"{_dash(index, line.theory)}/>'
        if not line.theory:
            for a, b, px, py in points:
                yield _marker(index, px, py, f"{line.name}: {number(b, 4)} at {number(a)}")
    yield "</g>"


def _bar(index: int, name: str, value: float, y: float, box: _Box, marked: bool) -> Iterator[str]:
    zero, end = box.x(0.0), box.x(value)
    yield f'<g class="s{index % len(_COLOURS)}"><path class="bar" d="M{_n(zero)} {_n(y)}H{_n(end)}v{_BAR}H{_n(zero)}Z">'
    yield f"<title>{_escaped(f'{name}: {number(value, 4)}')}</title></path>"
    if marked and abs(end - zero) > _BAR:
        yield _marker(index, zero + (_BAR / 2 if end > zero else -_BAR / 2), y + _BAR / 2)
    yield "</g>"
    yield _text(max(end, zero) + 6, y + 12, number(value, 4))


def _marker(index: int, x: float, y: float, title: str = "") -> str:
    shape = f'<path class="mark" transform="translate({_n(x)} {_n(y)})" d="{_MARKERS[index % len(_MARKERS)]}"'
    return f"{shape}><title>{_escaped(title)}</title></path>" if title else f"{shape}/>"


def _dash(index: int, theory: bool) -> str:
    """Theory is dashed; so are lines whose colours have been used before, in another way."""
    if theory:
        return ' stroke-dasharray="7 5"'
    return ' stroke-dasharray="2 3"' if index >= len(_COLOURS) else ""


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{name}>{_escaped(text)}</text>'


def _document(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    size = f"{WIDTH} {_n(height)}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {size}" width="{WIDTH}" '
            f'height="{_n(height)}">',
            f"<title>{_escaped(title)}</title>",
            f"<desc>{_escaped(description)}</desc>",
            f"<style>{_style(0)}@media (prefers-color-scheme:dark){{{_style(1)}}}</style>",
            f'<path class="ground" d="M0 0H{WIDTH}V{_n(height)}H0Z"/>',
            *parts,
            "</svg>\n",
        )
    )


def _style(theme: int) -> str:
    """The rules of a theme; those that are the same in both come with the light one."""
    ink, ground = _INK[theme], _BACKGROUND[theme]
    rules = {
        ".chart text": f"fill:{ink}",
        ".chart .dim": f"fill:{_DIM[theme]}",
        ".chart .ground": f"fill:{ground}",
        ".chart .grid": f"stroke:{_GRID[theme]}",
        ".chart .axis": f"stroke:{_DIM[theme]}",
        ".chart .mark": f"stroke:{ground}",
        f".chart .s{_COLOURS.index('ink')}": f"color:{ink}",
    }
    if theme == 0:
        rules[".chart text"] += ";font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"
        rules[".chart .title"] = "font-size:16px;font-weight:600"
        rules |= {".chart .end": "text-anchor:end", ".chart .mid": "text-anchor:middle"}
        rules |= {".chart .line": "fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round"}
        rules |= {".chart .mark,.chart .bar": "fill:currentColor"}
        rules |= {f".chart .s{i}": f"color:{colour}" for i, colour in enumerate(_COLOURS) if colour != "ink"}
    return "".join(f"{selector}{{{rule}}}" for selector, rule in rules.items())


def _escaped(text: str) -> str:
    return html.escape(_NOT_XML.sub("\ufffd", text))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _width(text: str, size: float) -> float:
    """About the pixels that a text takes, whatever the font."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return size * (0.6 * (len(text) - wide) + wide)


def _cut(text: str, width: float) -> str:
    if _width(text, 12) <= width:
        return text
    while text and _width(text + "…", 12) > width:
        text = text[:-1]
    return text + "…"


def _wrapped(text: str, width: float, size: float) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and _width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
