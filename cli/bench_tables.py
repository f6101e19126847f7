"""Results of `bench` as tables: for a terminal, in Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinyllm_cli import render
from tinyllm_cli.bench_options import DEFAULT_BATCH, DEFAULT_CACHE_TYPE
from tinyllm_cli.text import counted

if TYPE_CHECKING:
    from tinyllm.bench import Result

_LEFT = ("model", "type_k", "test")


def columns(results: Sequence[Result], decimals: int | None = 2) -> dict[str, list[str]]:
    """The columns that llama-bench shows, and how much was moved and computed: name → a cell per result.

    A column for the batch size or the cache type appears when it is not the default. `decimals` of the speeds; None: as
    many as are worth reading.
    """
    table = {
        "model": [result.model_type for result in results],
        "size": [_mebibytes(result.model_size) for result in results],
        "params": [_parameters(result.n_params) for result in results],
        "threads": [str(result.n_threads) for result in results],
    }
    if any(result.n_batch != DEFAULT_BATCH for result in results):
        table["n_batch"] = [str(result.n_batch) for result in results]
    if any(result.kv_type != DEFAULT_CACHE_TYPE for result in results):
        table["type_k"] = [result.kv_type for result in results]
    return table | {
        "test": [result.trial.name for result in results],
        "t/s": [speed(result.avg_ts, result.stddev_ts, decimals) for result in results],
        "GB/s": [f"{result.gb_per_s:.1f}" for result in results],
        "GOP/s": [f"{result.gop_per_s:.0f}" for result in results],
    }


def speed(average: float, deviation: float, decimals: int | None = None) -> str:
    """Tokens per second with their standard deviation."""
    if decimals is None:
        decimals = 0 if average >= 999.5 else 1 if average >= 9.995 else 2
    return f"{average:.{decimals}f} ± {deviation:.{decimals}f}"


def _mebibytes(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def _parameters(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def print_text(results: Sequence[Result]) -> None:
    """The table on a terminal or as plain text, and a line on each load behind it."""
    table = columns(results, decimals=None)
    if not render.is_plain(sys.stdout):
        _narrow(table, render.out().width)
    right = [i for i, name in enumerate(table) if name not in _LEFT]
    render.table(list(table), [list(row) for row in zip(*table.values(), strict=True)], right)
    render.out().print()
    for line in notes(results):
        render.out().print(line, style="dim")


def _narrow(table: dict[str, list[str]], width: int) -> None:
    """Leave out what the model's name tells as well, until the table fits the terminal."""
    for name in ("params", "size"):
        if sum(2 + max(len(name), *map(len, cells)) for name, cells in table.items()) - 2 > width:
            del table[name]


def print_markdown(results: Sequence[Result]) -> None:
    """The table as llama-bench prints it, and the lines on each load as a list."""
    table = columns(results)
    print_markdown_table(list(table), list(zip(*table.values(), strict=True)), _LEFT)
    print()
    for line in notes(results):
        print(f"- {line}")


def print_markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> None:
    """A Markdown table with aligned source; columns not named in `left` are flush right."""
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    widths = [max(3, len(header), *(len(row[i]) for row in cells)) for i, header in enumerate(headers)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if header in left else cell.rjust(width)
            for cell, header, width in zip(row, headers, widths, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    print(line(headers))
    rules = ["-" * w if h in left else "-" * (w - 1) + ":" for h, w in zip(headers, widths, strict=True)]
    print(f"| {' | '.join(rules)} |")
    for row in cells:
        print(line(row))


def notes(results: Sequence[Result]) -> list[str]:
    """Lines on each load of a model (load, compiling, first token), and on the machine."""
    from tinyllm import __version__
    from tinyllm.measure import machine

    lines = []
    loads: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        key = (result.model_filename, result.model_type, result.n_threads, result.n_batch, result.kv_type)
        loads.setdefault(key, []).append(result)
    for (_, model_type, n_threads, _, _), group in loads.items():
        compiled = f"{group[0].compile_s:.1f} s" if group[0].compile_s else "0 s (kept from before)"
        lines.append(
            f"{model_type}, {counted(n_threads, 'thread')}: load {group[0].load_s:.2f} s, compile kernels {compiled}"
        )
        first = {
            result.trial.name: f"{result.first_token_ns / 1e9:.2f} s"
            for result in group
            if result.first_token_ns is not None and not result.trial.n_gen
        }
        lines += [f"first token after {name}: {seconds}" for name, seconds in first.items()]
    faults = sum(result.disturbances.major_faults for result in results)
    preemptions = sum(result.disturbances.preemptions for result in results)
    governor = f", {machine.governor()}" if machine.governor() else ""
    lines.append(f"tinyllm {__version__} on {machine.cpu_name()} ({machine.cpu_target()}{governor})")
    lines.append(
        f"meanwhile {counted(preemptions, 'preemption')}, {counted(faults, 'page-in')}; "
        "no test has tokenizing or sampling in it"
    )
    return lines


def print_json(results: Sequence[Result], lines: bool = False) -> None:
    """A list of objects with llama-bench's keys; `lines`: each on a line of its own."""
    rows = [result.as_dict() for result in results]
    if lines:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    else:
        print(json.dumps(rows, indent=2, ensure_ascii=False))


def print_csv(results: Sequence[Result]) -> None:
    """A row per result; with breakdowns, a row per result, stage and layer."""
    rows = []
    for result in results:
        whole = result.as_dict()
        roofs = whole.pop("roofs", {})
        per_layer = whole.pop("per_layer", None)
        flat = {key: value for key, value in whole.items() if not isinstance(value, list)}
        flat |= {f"roof_{name}_{when}": value for when, values in roofs.items() for name, value in values.items()}
        for entry in per_layer or [{}]:
            rows.append(flat | {k: "+".join(v) if isinstance(v, list) else v for k, v in entry.items()})
    writer = csv.DictWriter(sys.stdout, list(rows[0]), quoting=csv.QUOTE_ALL, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
