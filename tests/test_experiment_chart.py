"""Charts: places of points, ticks and their labels, and texts that cannot break the picture."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from experiment_cases import SVG, check_picture

from tinyllm.experiments.axes import Axis, number, scale_of
from tinyllm.experiments.chart import Series, bar_chart, line_chart

HOSTILE = 'a<b> & "c" \x00\x1b\ud800\u202e 日本語'
X, Y = Axis("length (tokens)"), Axis("time (ms)")


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def lines(root: ElementTree.Element) -> list[ElementTree.Element]:
    """The lines of the plot, without the samples of the legend."""
    return [path for path in root.iter(f"{SVG}path") if path.get("class") == "line" and "h24" not in path.get("d")]


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split())) for pair in path.get("d").lstrip("M").split("L")]


def ticks(root: ElementTree.Element, kind: str) -> dict[str, float]:
    """Label → place, of the x axis ("mid dim") or the y axis ("end dim")."""
    side = "x" if kind == "mid dim" else "y"
    return {text.text: float(text.get(side)) for text in root.iter(f"{SVG}text") if text.get("class") == kind}


@pytest.mark.parametrize(
    ("values", "axis", "expected"),
    [
        ([0, 230], Axis(""), [0, 50, 100, 150, 200, 250]),
        ([3, 4], Axis(""), [0, 1, 2, 3, 4]),
        ([26.01, 26.07], Axis("", from_zero=False), [26.01, 26.02, 26.03, 26.04, 26.05, 26.06, 26.07]),
        ([-0.3, 0.5], Axis(""), [-0.4, -0.2, 0, 0.2, 0.4, 0.6]),
        ([5], Axis("", from_zero=False), [2, 3, 4, 5, 6, 7, 8]),
        ([0], Axis(""), [-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6]),
        ([16, 256], Axis("", base=2), [16, 32, 64, 128, 256]),
        ([20, 200], Axis("", base=2), [16, 32, 64, 128, 256]),
        ([64, 131072], Axis("", base=2), [64, 256, 1024, 4096, 16384, 65536]),
        ([3, 40], Axis("", base=10), [2, 5, 10, 20, 50]),
        ([0.02, 900], Axis("", base=10), [0.01, 0.1, 1, 10, 100, 1000]),
        ([7, 0, -1, math.inf], Axis("", base=10), [5, 10]),
        ([1], Axis("", base=2), [0.5, 1, 2]),
        ([1], Axis("", base=10), [1, 2]),
    ],
    ids=str,
)
def test_ticks(values, axis, expected):
    scale = scale_of(values, axis)
    assert scale.ticks == pytest.approx(expected)
    assert all(0 <= scale.place(value) <= 1 for value in values if axis.shows(value))


def test_an_axis_may_end_where_the_values_end():
    scale = scale_of([0, 4096], X, whole=False)
    assert (scale.low, scale.high, scale.ticks[-1]) == (0, 4096, 4000)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(0, "0"), (0.5, "0.5"), (4096, "4096"), (16384, "16\u2009384"), (1234567, "1\u2009234\u2009567")],
        *[(1e7, "10⁷"), (2.5e9, "2.5·10⁹"), (1e-6, "10⁻⁶"), (-3, "-3"), (math.inf, "inf")],
    ],
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_numbers_to_four_digits():
    assert [number(value, 4) for value in (3.14159, 123456, 0.000123456)] == ["3.142", "123\u2009456", "0.0001235"]


def test_points_lie_where_the_ticks_say():
    data = [(0, 10), (40, 20), (100, 40)]
    root = parse(line_chart("t", [Series("a", data)], X, Y, "d"))
    x, y = ticks(root, "mid dim"), ticks(root, "end dim")
    (line,) = lines(root)
    # Labels stand 4 pixels below the line that they belong to.
    assert points(line) == [(x[number(a)], y[number(b)] - 4) for a, b in data]
    assert y["40"] < y["20"] < y["0"] and x["0"] < x["40"]


@pytest.mark.parametrize("base", [2, 10])
def test_powers_are_evenly_apart_on_a_logarithmic_axis(base):
    data = [(base**i, base ** (3 * i)) for i in range(1, 5)]
    root = parse(line_chart("t", [Series("a", data)], Axis("x", base), Axis("y", base), "d"))
    (line,) = lines(root)
    steps = {(round(b[0] - a[0]), round(b[1] - a[1])) for a, b in zip(points(line), points(line)[1:], strict=False)}
    assert len(steps) == 1


@pytest.mark.parametrize("hole", [math.nan, math.inf, 0, -1])
def test_what_an_axis_cannot_show_leaves_a_gap(hole):
    data = [(1, 5), (2, 6), (3, hole), (4, 7)]
    root = parse(line_chart("t", [Series("a", data)], X, Axis("y", 10), "d"))
    assert [len(points(line)) for line in lines(root)] == [2, 1]
    titles = [title.text for title in root.iter(f"{SVG}title")][1:]
    assert titles == ["a: 5 at 1", "a: 6 at 2", "a: 7 at 4"]


def test_nothing_to_show_is_an_error():
    for series in ([], [Series("a", [])], [Series("a", [(1, math.nan)])]):
        with pytest.raises(ValueError, match="at least one value"):
            line_chart("t", series, X, Y, "d")
    with pytest.raises(ValueError, match="base 2 or 10"):
        Axis("x", 3)


def test_texts_cannot_break_the_picture(tmp_path):
    series = [Series(HOSTILE, [(1, 2), (2, 3)])]
    path = tmp_path / "chart.svg"
    path.write_text(line_chart(HOSTILE, series, Axis(HOSTILE), Axis(HOSTILE), HOSTILE), encoding="utf-8")
    clean = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    root = check_picture(path, clean)
    assert (root[0].text, root[1].text) == (clean, clean)
    path.write_text(bar_chart(HOSTILE, [HOSTILE], {HOSTILE: [1], "b": [2]}, Axis(HOSTILE), HOSTILE), encoding="utf-8")
    check_picture(path, clean)


def test_series_differ_in_more_than_colour():
    series = [Series(f"s{i}", [(1, i), (2, i + 1)]) for i in range(12)]
    root = parse(line_chart("t", series, X, Y, "d"))
    looks = set()
    for group in root.iter(f"{SVG}g"):
        line, mark = (next(p for p in group if p.get("class") == kind) for kind in ("line", "mark"))
        looks.add((group.get("class"), line.get("stroke-dasharray"), mark.get("d")))
    assert len(looks) == 12 and len({mark for _, _, mark in looks}) == 8
    style = root.find(f"{SVG}style").text
    assert set(re.findall("#[0-9A-F]{6}", style)) == {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"}
    assert "@media (prefers-color-scheme:dark)" in style


def test_theory_is_dashed_in_the_colour_of_what_it_is_about():
    data = [(1, 2), (2, 3)]
    series = [
        Series("alone", data, theory=True),
        Series("a", data),
        Series("b", data),
        Series("of b", data, theory=True),
    ]
    root = parse(line_chart("t", series, X, Y, "d"))
    groups = list(root.iter(f"{SVG}g"))[len(series) :]
    assert [group.get("class") for group in groups] == ["s6", "s0", "s1", "s1"]
    assert [group[0].get("stroke-dasharray") is not None for group in groups] == [True, False, False, True]
    assert [len(group) for group in groups] == [1, 3, 3, 1]  # without markers


def test_bars_are_as_long_as_their_values():
    root = parse(bar_chart("t", ["one", "two"], {"a": [1, 2], "b": [-1, math.nan]}, Axis("size (MB)"), "d"))
    bars = [path for path in root.iter(f"{SVG}path") if path.get("class") == "bar" and "h22" not in path.get("d")]
    lengths = {}
    for bar in bars:
        start, end = re.match(r"M(\S+) \S+H(\S+)v", bar.get("d")).groups()
        lengths[bar.find(f"{SVG}title").text] = float(end) - float(start)
    assert list(lengths) == ["one, a: 1", "one, b: -1", "two, a: 2"]
    one, minus, two = lengths.values()
    assert two == pytest.approx(2 * one, abs=0.2) and minus == pytest.approx(-one, abs=0.2)


def test_bars_that_would_say_nothing_are_refused():
    with pytest.raises(ValueError, match="for each label"):
        bar_chart("t", ["one"], {"a": [1, 2]}, Axis("x"), "d")
    with pytest.raises(ValueError, match="linear"):
        bar_chart("t", ["one"], {"a": [1]}, Axis("x", 10), "d")


def test_long_legends_and_titles_stay_inside():
    series = [Series("a rather long name of a series " * 6, [(1, 2), (2, 3)]) for _ in range(4)]
    root = parse(line_chart("many words " * 30, series, X, Y, "d"))
    width = float(root.get("width"))
    for text in root.iter(f"{SVG}text"):
        if text.get("class") is None:
            assert float(text.get("x")) + 0.6 * 12 * len(text.text) <= width
    height = float(root.get("height"))
    assert all(float(text.get("y")) < height for text in root.iter(f"{SVG}text"))
