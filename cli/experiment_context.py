"""`tinyllm experiment context`: models go in, the speed of decoding by the length of the context comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm_cli import render
from tinyllm_cli.bench_tables import notes, speed
from tinyllm_cli.experiment_output import (
    AsJson,
    CacheType,
    ModelNames,
    SvgFile,
    Threads,
    numbers_of,
    print_json,
    progress,
    say,
    write_picture,
)
from tinyllm_cli.loading import find_file, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL
from tinyllm_cli.text import one_line, size

if TYPE_CHECKING:
    from pathlib import Path

    from tinyllm.bench import Result, Trial
    from tinyllm.experiments.context import Row

    Measured = list[tuple[Row, Result]]


def context(
    model: ModelNames = [DEFAULT_MODEL],  # noqa: B006 (Typer copies it)
    depths: Annotated[
        list[str],
        typer.Option("--depths", "-d", help="Tokens in the cache, as far as the model's context goes.", metavar="LIST"),
    ] = ["0,256,1024,4096"],  # noqa: B006
    n_gen: Annotated[
        int, typer.Option("--n-gen", "-n", help="Tokens that are timed at each depth.", metavar="N", min=1)
    ] = 16,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", help="Times that each depth is measured.", metavar="N", min=1)
    ] = 3,
    threads: Threads = None,
    cache_type: CacheType = "f16",
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure how the speed of decoding falls as the context grows, and what of it is attention.

    Every token reads all weights, and the keys and values of all tokens before it. Times are those of `tinyllm bench
    -p 0 -n N -d DEPTH --layers`.
    """
    with usage_errors():
        at = numbers_of("--depths", depths)
    measured: dict[str, Measured] = {}
    try:
        for path in dict.fromkeys(map(find_file, model)):
            _measure(path, at, n_gen, repetitions, threads, cache_type, measured.setdefault(path.stem, []))
    finally:
        # A run that is ended early still shows what it has found out.
        shown = {name: found for name, found in measured.items() if found}
        if shown:
            if as_json:
                print_json({"experiment": "context", "models": [as_object(found) for found in shown.values()]})
            else:
                _print_table(shown)
    write_picture(svg, lambda: picture({name: [row for row, _ in found] for name, found in shown.items()}))


def _measure(
    path: Path, at: Sequence[int], n_gen: int, repetitions: int, threads: int | None, kv_type: str, found: Measured
) -> None:
    """Measure one model and add what is found as it comes."""
    from tinyllm.experiments.context import depths_of, measure

    with usage_errors(), progress() as tell:
        fitting = depths_of(path, at, n_gen)
        if fitting.beyond:
            left_out = ", ".join(map(str, fitting.beyond))
            render.note(f"{path.stem}: its context has {fitting.n_ctx} positions, so there is no depth {left_out}")

        def on_run(trial: Trial, repetition: int) -> None:
            tell(f"{path.stem} {trial.name}: {'warm-up' if repetition < 0 else f'run {repetition + 1}'}")

        for each in measure(
            path,
            fitting.inside,
            n_gen=n_gen,
            repetitions=repetitions,
            n_threads=threads,
            kv_type=kv_type,
            on_run=on_run,
        ):
            found.append(each)


def as_object(found: Measured) -> dict[str, Any]:
    """What `--json` prints for one model."""
    result = found[0][1]
    about = {"model": result.model_filename, "model_type": result.model_type}
    about |= {"n_threads": result.n_threads, "cache_type": result.kv_type, "n_gen": result.trial.n_gen}
    return about | {"rows": [asdict(row) for row, _ in found]}


def _print_table(measured: dict[str, Measured]) -> None:
    headers = ["depth", "tok/s", "ms/token", "attention", "KV read/token", "all read/token", "if by bytes tok/s"]
    several = len(measured) > 1
    cells = []
    for name, found in measured.items():
        for i, (row, _) in enumerate(found):
            line = [
                str(row.depth),
                speed(row.speed, row.deviation),
                f"{row.ms:.2f}",
                f"{100 * row.attention:.0f} %",
                size(row.cache_bytes),
                size(row.token_bytes),
                f"{row.predicted:.1f}",
            ]
            cells.append([one_line(name) if i == 0 else "", *line] if several else line)
    headers = ["model", *headers] if several else headers
    render.table(headers, cells, right=range(int(several), len(headers)))
    lines = [_finding(name, [row for row, _ in found]) for name, found in measured.items() if len(found) > 1]
    say([*lines, *notes([result for found in measured.values() for _, result in found])])


def _finding(name: str, rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    per_position = (last.ms - first.ms) / (last.depth - first.depth) * 1e3
    return (
        f"{name}: at {last.depth} tokens {100 * last.speed / first.speed:.0f} % of the speed at {first.depth}; "
        f"{per_position:.2f} ms more per token for 1000 tokens of context"
    )


def picture(measured: dict[str, list[Row]]) -> str:
    """Speed by depth, and the speed if time went with the bytes."""
    from tinyllm.experiments.axes import Axis
    from tinyllm.experiments.chart import Series, line_chart

    series, parts = [], []
    several = len(measured) > 1
    for name, rows in measured.items():
        prefix = f"{name}, " if several else ""
        series.append(Series(f"{prefix}measured", [(row.depth, row.speed) for row in rows]))
        series.append(Series(f"{prefix}if by bytes read", [(row.depth, row.predicted) for row in rows], theory=True))
        parts.append(f"{name}: from {rows[0].speed:.3g} tokens/s to {rows[-1].speed:.3g} at {rows[-1].depth} tokens")
    title = "Speed of decoding by the length of the context"
    return line_chart(
        title if several else f"{next(iter(measured))}: {title[0].lower()}{title[1:]}",
        series,
        Axis("context before the token (tokens)"),
        Axis("speed (tokens/s)"),
        "; ".join(parts),
    )
