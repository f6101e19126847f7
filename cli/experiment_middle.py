"""`tinyllm experiment middle`: a model, lengths and depths go in, where in a text it finds a fact comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.experiment_output import (
    AsJson,
    CacheType,
    ModelName,
    SvgFile,
    Threads,
    numbers_of,
    print_json,
    progress,
    say,
    write_picture,
)
from tinyllm_cli.loading import load_model, tell_trained, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL, ModelOptions

if TYPE_CHECKING:
    from tinyllm.experiments.middle import Cell, Probe


def middle(
    model: ModelName = DEFAULT_MODEL,
    lengths: Annotated[
        list[str], typer.Option("--lengths", "-l", help="Tokens of the whole prompt, as in 512 or 1k.", metavar="LIST")
    ] = ["256,512,1024"],  # noqa: B006 (Typer copies it)
    depths: Annotated[
        str, typer.Option("--depths", "-d", help="Places of the fact in percent of the text.", metavar="LIST")
    ] = "0,25,50,75,100",
    n_facts: Annotated[int, typer.Option("--facts", "-n", help="Facts that are averaged.", metavar="N", min=1)] = 3,
    n_others: Annotated[
        int, typer.Option("--others", help="Facts about other people in the same text.", metavar="N", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the facts and the text.", min=0)] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", "--no-chat", help="Ask in plain text, without the chat template.")
    ] = False,
    threads: Threads = None,
    cache_type: CacheType = "f16",
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Find out whether a model gets lost in the middle: a fact stands at different places of a text without interest.

    Each time the model is asked for it. Shown are how often the reply contains the right word, and how likely that word
    is behind the opening of the right answer, in nats (0: certain), and in ranks (0: the likeliest).
    """
    from tinyllm.experiments.middle import ROOM, measure, picture

    with usage_errors():
        sizes = numbers_of("--lengths", lengths)
        places = _shares(depths)
        loaded = load_model(
            ModelOptions(model=model, threads=threads, cache_type=cache_type, ctx_size=max(sizes) + ROOM)
        )
        tell_trained(loaded.path.stem, max(sizes) + ROOM, loaded.config.n_ctx_train)
        with progress() as tell:
            probes = measure(
                loaded, sizes, places, n_facts, n_others, seed, raw,
                progress=lambda done, total: tell(f"question {done + 1} of {total}"),
            )  # fmt: skip
    write_picture(svg, lambda: picture(probes, loaded.path.stem))
    if as_json:
        print_json(as_object(loaded.path.name, probes))
    else:
        _print(probes)


def _shares(text: str) -> list[float]:
    """Depths from 0 to 1, in order, each once. Raises InvalidParameterError."""
    try:
        percents = {float(part) for part in text.split(",")}
    except ValueError:
        percents = {-1.0}
    if not all(0 <= percent <= 100 for percent in percents):
        raise InvalidParameterError(f"--depths {text}: write percents with commas, as in 0,50,100")
    return [percent / 100 for percent in sorted(percents)]


def as_object(model: str, probes: Sequence[Probe]) -> dict[str, Any]:
    """What `--json` prints: all probes, and their averages by length and depth (null: the fact is not in the text)."""
    from dataclasses import asdict

    from tinyllm.experiments.middle import cell, verdict

    places = dict.fromkeys((probe.length, probe.depth) for probe in probes)
    return {
        "experiment": "middle",
        "model": model,
        "cells": [{"length": n, "depth": depth, **asdict(cell(probes, n, depth))} for n, depth in places],
        "probes": [asdict(probe) for probe in probes],
        "verdict": verdict(probes),
    }


def _print(probes: Sequence[Probe]) -> None:
    from tinyllm.experiments.middle import cell, verdict

    lengths = list(dict.fromkeys(probe.length for probe in probes))
    depths = list(dict.fromkeys(probe.depth for probe in probes))
    headers = ["TOKENS", *("absent" if depth is None else f"{100 * depth:g} %" for depth in depths)]

    def show(title: str, text: Callable[[Cell], str]) -> None:
        render.out().print(title, style="dim")
        rows = [[str(n), *(text(cell(probes, n, depth)) for depth in depths)] for n in lengths]
        render.table(headers, rows, right=range(len(headers)))

    show("replies with the right word, by the depth of the fact", lambda c: f"{round(c.found * c.n)}/{c.n}")
    show("\nlog-probability of the word (nats)", lambda c: f"{c.log_prob:.2f}")
    show("\nrank of the word (median)", lambda c: f"{c.rank:g}")
    say(verdict(probes))
