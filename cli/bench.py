"""`tinyllm bench`: models and tests go in, tokens per second and where the time went come out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.bench_options import Setting, ShowOptions, TestOptions, settings_of, trials_of
from tinyllm_cli.loading import tell_trained, usage_errors
from tinyllm_cli.option_groups import option_groups
from tinyllm_cli.outputs import written
from tinyllm_cli.text import counted, one_line
from tinyllm_cli.usage import refuse

if TYPE_CHECKING:
    from tinyllm.bench import Result, Trial


@option_groups
def bench(ctx: typer.Context, tests: TestOptions, show: ShowOptions) -> None:
    """Measure how fast models run, as llama-bench does, and where the time goes (--layers).

    Each test is run -r times on random tokens, without tokenizing and sampling. All combinations of the lists are run.
    """
    if show.trace is None:
        refuse(ctx, "without --trace", "trace_steps", "no_trace_args")
    with usage_errors():
        settings, trials, form = settings_of(tests), trials_of(tests), show.format
        earlier = _earlier(show, form)
    if form != "text":
        refuse(ctx, f"with -o {form}: --layers has its numbers", "roofline")
    results: list[Result] = []
    try:
        for setting in settings:
            first = setting == next(other for other in settings if other.model == setting.model)
            for result in _measure(setting, trials, tests, show, first):
                results.append(result)
                if form == "jsonl":
                    _print(form, [result])
    finally:
        # A run that is ended early still shows what it has found out.
        if results and form != "jsonl":
            _print(form, results)
    if form == "text" and show.roofline:
        _print_roofline(results)
    if earlier is not None:
        from tinyllm_cli.bench_compare import print_comparison

        print_comparison(results, earlier, str(show.compare))
    if show.trace is not None:
        _write_trace(results, show)


def _earlier(show: ShowOptions, form: str) -> list[dict[str, Any]] | None:
    if show.compare is None:
        return None
    if form != "text":
        raise InvalidParameterError(f"--compare shows text and cannot be had with -o {form}")
    from tinyllm_cli.bench_compare import read_earlier

    return read_earlier(show.compare)


def _measure(
    setting: Setting, trials: list[Trial], tests: TestOptions, show: ShowOptions, first: bool
) -> Iterator[Result]:
    from tinyllm import hub
    from tinyllm.bench import Bench

    with render.download_progress() as progress:
        path = hub.resolve(setting.model, progress)
    with ExitStack() as stack:
        tell = stack.enter_context(_progress(one_line(path.stem), tests.repetitions))
        with usage_errors():
            running = stack.enter_context(
                Bench(
                    path,
                    trials,
                    n_threads=setting.n_threads,
                    n_batch=setting.n_batch,
                    kv_type=setting.kv_type,
                    repetitions=tests.repetitions,
                    warm_up=not tests.no_warmup,
                    layers=show.layers or show.roofline,
                    trace_steps=show.trace_steps if show.trace is not None else 0,
                    on_run=tell,
                )
            )
        if first:
            longest = max(trial.n_depth + trial.n_tokens for trial in trials)
            tell_trained(path.stem, longest, running.model.config.n_ctx_train)
        yield from running.results()


@contextmanager
def _progress(name: str, repetitions: int) -> Iterator[Any]:
    """Tells on a terminal's stderr what is being run, in a line that is only drawn between the runs."""
    if render.is_plain(sys.stderr):
        yield lambda trial, repetition: None
        return

    def draw(line: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{line}")
        sys.stderr.flush()

    def tell(trial: Trial, repetition: int) -> None:
        what = "warm-up" if repetition < 0 else f"run {repetition + 1} of {repetitions}"
        draw(f"{name} {trial.name}: {what}")

    try:
        yield tell
    finally:
        draw("")


def _print(form: str, results: Sequence[Result]) -> None:
    from tinyllm_cli import bench_layers, bench_tables

    if form in ("json", "jsonl"):
        bench_tables.print_json(results, lines=form == "jsonl")
    elif form == "csv":
        bench_tables.print_csv(results)
    else:
        table, breakdown = (
            (bench_tables.print_markdown, bench_layers.print_markdown)
            if form == "md"
            else (bench_tables.print_text, bench_layers.print_text)
        )
        table(results)
        for result in results:
            if result.breakdown is not None:
                breakdown(result)
    sys.stdout.flush()


def _print_roofline(results: Sequence[Result]) -> None:
    from tinyllm_cli.bench_roofline import plot

    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault((result.model_type, result.n_threads, result.n_batch, result.kv_type), []).append(result)
    for (model_type, n_threads, *_), group in groups.items():
        render.out().print()
        render.out().print(f"{model_type}, {counted(n_threads, 'thread')}", style="bold")
        for line in plot(group):
            render.out().print(line)


def _write_trace(results: Sequence[Result], show: ShowOptions) -> None:
    from tinyllm.measure import machine
    from tinyllm.measure.perfetto import TracedResult, write_trace

    traced = [
        TracedResult(
            process=f"tinyllm {result.model_type}, {counted(result.n_threads, 'thread')}",
            trace=result.trace,
            incidents={
                "kernels compiled (s)": result.compile_s if first else 0.0,
                "page-ins": result.disturbances.major_faults,
            },
        )
        for result, first in zip(results, _firsts(results), strict=True)
        if result.trace is not None
    ]
    about = {
        "model": ", ".join(dict.fromkeys(result.model_filename for result in results)),
        "cpu": f"{machine.cpu_name()} ({machine.cpu_target()})",
        "threads": sorted({result.n_threads for result in results}),
        "roofs": [result.roofs.best.as_dict() for result in results if result.roofs is not None],
        "cmd": shlex.join(["tinyllm", *sys.argv[1:]]),
    }
    with written(show.trace):
        write_trace(show.trace, traced, about, with_args=not show.no_trace_args)
    render.note(f"wrote {show.trace}: open it at https://ui.perfetto.dev or chrome://tracing")


def _firsts(results: Sequence[Result]) -> list[bool]:
    seen: set[tuple[Any, ...]] = set()
    flags = []
    for result in results:
        key = (result.model_filename, result.n_threads, result.n_batch, result.kv_type)
        flags.append(key not in seen)
        seen.add(key)
    return flags
