"""Breakdowns of `bench --layers` for people: a table by stage, a strip by layer, and a sentence on what to do next."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyllm_cli import render
from tinyllm_cli.bench_tables import print_markdown_table, speed
from tinyllm_cli.text import counted

if TYPE_CHECKING:
    from rich.text import Text

    from tinyllm.bench import Result
    from tinyllm.measure.breakdown import Breakdown, Entry
    from tinyllm.measure.roofs import RoofPair

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_MEDIAN_HEIGHT = 3  # index in _HEIGHTS
_LAYERS_PER_LINE = 50
_SLOW = 1.2


@dataclass(frozen=True)
class Column:
    """A column of the table by stage. `narrow`: the phases for whose tests it is shown in 80 columns."""

    name: str
    cell: Callable[[Entry, Breakdown], str]
    narrow: str = "decode prefill"


def _rate(value: float) -> str:
    return "" if value == 0 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _amount(value: float) -> str:
    return "" if value == 0 else f"{value:.2f}" if value < 0.995 else _rate(value)


def milliseconds(ms: float) -> str:
    """`12.3`, `0.78`; below a tenth in microseconds: `56 µs`."""
    if abs(ms) < 0.0005:
        return "0"
    if abs(ms) < 0.0995:
        return f"{1000 * ms:.0f} µs"
    return f"{ms:.2f}" if abs(ms) < 9.995 else f"{ms:.1f}" if abs(ms) < 99.95 else f"{ms:.0f}"


def with_unit(ms: float) -> str:
    """The same as a phrase: `12.3 ms`, `56 µs`."""
    text = milliseconds(ms)
    return text if text.endswith("µs") else f"{text} ms"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}" if whole else ""


COLUMNS = (
    Column("calls", lambda entry, whole: f"{entry.calls:.0f}", narrow=""),
    Column("ms", lambda entry, whole: milliseconds(entry.ms)),
    Column("%", lambda entry, whole: _share(entry.ms, whole.wall_ms)),
    Column("MB", lambda entry, whole: _amount(entry.work.n_bytes / 1e6), narrow="decode"),
    Column("GB/s", lambda entry, whole: _rate(entry.gb_per_s), narrow="decode"),
    Column("GOP", lambda entry, whole: _amount(entry.work.ops / 1e9), narrow="prefill"),
    Column("GOP/s", lambda entry, whole: _rate(entry.gop_per_s), narrow="prefill"),
    Column("limit", lambda entry, whole: entry.limit),
)
BEHIND = (
    Column("lost", lambda entry, whole: milliseconds(entry.lost_ms)),
    Column("bal", lambda entry, whole: f"{entry.balance:.2f}", narrow=""),
    Column("wait", lambda entry, whole: f"{_share(entry.wait_ms, entry.ms)} %"),
)


def _phase(result: Result) -> str:
    return "prefill" if result.trial.n_prompt else "decode"


def title(result: Result) -> str:
    """What was measured, in one line."""
    breakdown, trial = result.breakdown, result.trial
    tokens = counted(trial.n_prompt, "token") if trial.n_prompt else ""
    if trial.n_gen:
        tokens += (" + " if tokens else "") + f"{counted(trial.n_gen, 'token')} one by one"
    depth = f" @ depth {trial.n_depth}" if trial.n_depth else ""
    rate = f"{speed(result.avg_ts, result.stddev_ts)} t/s"
    return " | ".join(
        (_phase(result), tokens + depth, counted(result.n_threads, "thread"), rate,
         f"{with_unit(breakdown.wall_ms)}/{breakdown.unit}")
    )  # fmt: skip


def roofs_line(roofs: RoofPair) -> str:
    """The machine's limits, as ranges where the two measurements do not agree."""
    best, worst = roofs.best, roofs.worst
    parts = [
        f"read {_range(worst.read_gb_s, best.read_gb_s, roofs.noisy)} GB/s",
        f"int8 {_range(worst.int8_gop_s, best.int8_gop_s, roofs.noisy)} GOP/s",
        f"f32 {_range(worst.f32_gflop_s, best.f32_gflop_s, roofs.noisy)} GFLOP/s",
    ]
    return f"roofs: {', '.join(parts)}" + (" (noisy machine)" if roofs.noisy else "")


def _range(low: float, high: float, noisy: bool) -> str:
    a, b = _rate(low), _rate(high)
    return b if a == b or not noisy else f"{a}–{b}"


def print_text(result: Result) -> None:
    """The breakdown on a terminal, as wide as that is, or as plain text in 80 columns."""
    from rich.text import Text

    breakdown = result.breakdown
    console = render.out()
    width = 80 if render.is_plain(sys.stdout) else max(60, console.width)
    console.print()
    console.print(title(result), style="bold")
    console.print(roofs_line(result.roofs), style="yellow" if result.roofs.noisy else "dim")
    for line in _stage_lines(breakdown, _phase(result), width):
        console.print(line)
    for line in _strip(breakdown.by_layer()):
        console.print(line)
    console.print(Text(sentence(result)))


def _stage_lines(breakdown: Breakdown, phase: str, width: int) -> list[Text]:
    from rich.text import Text

    front = [column for column in COLUMNS if width >= 104 or phase in column.narrow]
    behind = [column for column in BEHIND if width >= 104 or phase in column.narrow]
    entries = [*breakdown.by_stage(), breakdown.ops]
    cells = [[column.cell(entry, breakdown) for column in (*front, *behind)] for entry in entries]
    widths = [max(len(c.name), *(len(row[i]) for row in cells)) for i, c in enumerate((*front, *behind))]
    names = max(5, *(len(entry.stage) for entry in entries))
    bar = min(20, width - names - sum(widths) - 2 * len(widths) - 8)
    lines = [Text(style="bold")]
    lines[0].append("stage".ljust(names))
    for i, column in enumerate(front):
        lines[0].append("  " + column.name.rjust(widths[i]))
    lines[0].append("  " + "of roof".ljust(max(bar, 0) + 6))
    for i, column in enumerate(behind, len(front)):
        lines[0].append("  " + column.name.rjust(widths[i]))
    for entry, row in zip(entries, cells, strict=True):
        line = Text(style="bold" if entry is entries[-1] else "")
        line.append(entry.stage.ljust(names))
        for i in range(len(front)):
            line.append("  " + row[i].rjust(widths[i]))
        line.append("  ")
        if bar >= 4:
            line.append(_bar(entry.roof_share, bar), style="cyan")
        line.append(f"{100 * entry.roof_share:4.0f} %" if entry.least_ms else " " * 6)
        for i in range(len(front), len(row)):
            line.append("  " + row[i].rjust(widths[i]))
        lines.append(line)
    wall = f"   wall {milliseconds(breakdown.wall_ms)}" if width >= 104 else ""
    lines[-1].append(wall)
    return lines


def _bar(share: float, width: int) -> str:
    eighths = round(8 * width * min(1.0, share))
    if not _can_draw(_EIGHTHS):
        return ("#" * (eighths // 8)).ljust(width)
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


def _can_draw(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _strip(layers: Sequence[Entry]) -> list[Text]:
    """A bar per layer, the median at half height."""
    from rich.text import Text

    if not layers:
        return []
    median = statistics.median(entry.ms for entry in layers)
    heights = _HEIGHTS if _can_draw(_HEIGHTS) else "12345678"
    lines = []
    for start in range(0, len(layers), _LAYERS_PER_LINE):
        line = Text("layers " if start == 0 else "       ")
        for entry in layers[start : start + _LAYERS_PER_LINE]:
            if entry.layer % 10 == 0:
                line.append(f" {entry.layer} ", style="dim")
            ratio = entry.ms / median if median else 1.0
            height = min(len(heights) - 1, max(0, round((_MEDIAN_HEIGHT + 1) * ratio) - 1))
            line.append(heights[height], style="yellow" if ratio > _SLOW else "")
        lines.append(line)
    slow = [str(entry.layer) for entry in layers if entry.ms > _SLOW * median]
    legend = f"{heights[_MEDIAN_HEIGHT]} = {with_unit(median)}"
    if slow:
        shown = ", ".join(slow[:5]) + (" …" if len(slow) > 5 else "")
        legend += f"; over {_SLOW} × that: {shown}"
    lines[-1].append(f"  {legend}", style="dim")
    return lines


_REASONS = {
    "mem": "reading memory",
    "cache": "reading the cache",
    "int8": "int8 arithmetic",
    "f32": "float arithmetic",
    "sync": "threads waiting",
    "python": "Python between steps",
}


def sentence(result: Result) -> str:
    """What limits the test, what the limit would allow, and where most time is lost."""
    breakdown = result.breakdown
    by_memory = sum(e.ms for e in breakdown.entries if max(e.roof_ms, key=e.roof_ms.get, default="") == "mem")
    least = breakdown.ops.least_ms
    worst = breakdown.by_stage()[0]
    at_roof = f"at the roof {result.avg_ts * breakdown.wall_ms / least:.0f} t/s; " if least else ""
    return (
        f"{100 * by_memory / breakdown.wall_ms:.0f} % of the time is in memory-bound ops; {at_roof}"
        f"most is lost in {worst.stage} ({with_unit(worst.lost_ms)}, {_REASONS[worst.limit]})"
    )


def print_markdown(result: Result) -> None:
    """The table by stage with all columns, as Markdown."""
    breakdown = result.breakdown
    print(f"\n**{title(result)}**  \n{roofs_line(result.roofs)}\n")
    everything = (*COLUMNS, *BEHIND)
    headers = ["stage", *(column.name for column in COLUMNS), "of roof", *(column.name for column in BEHIND)]
    rows = []
    for entry in (*breakdown.by_stage(), breakdown.ops):
        cells = [column.cell(entry, breakdown) for column in everything]
        cells.insert(len(COLUMNS), f"{100 * entry.roof_share:.0f} %" if entry.least_ms else "")
        rows.append([entry.stage, *cells])
    print_markdown_table(headers, rows, ("stage", "limit"))
    layers = breakdown.by_layer()
    print("\n" + " ".join(f"{entry.layer}: {milliseconds(entry.ms)}" for entry in layers) if layers else "")
    print("\n" + sentence(result))
