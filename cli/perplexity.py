"""`tinyllm perplexity`: a text and models go in, how well each predicts it comes out, side by side."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm_cli import render
from tinyllm_cli.experiment_output import SvgFile, progress, write_picture
from tinyllm_cli.loading import load_model, tell_trained, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL, ModelOptions
from tinyllm_cli.text import size
from tinyllm_cli.usage import refuse

if TYPE_CHECKING:
    from tinyllm.model import Model
    from tinyllm.perplexity import Score

MOST_TOKENS = 2**17


def perplexity(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="The text, a file.", show_default=False)],
    model: Annotated[
        list[str],
        typer.Option(
            "--model", "-m", help="A model (repeatable: the others are compared with the first).", metavar="MODEL"
        ),
    ] = [DEFAULT_MODEL],  # noqa: B006 (Typer copies it)
    window: Annotated[
        int, typer.Option("--window", "-w", help="Tokens per window, whose second half is scored.", metavar="N", min=4)
    ] = 512,
    full: Annotated[bool, typer.Option("--full", help="One window over the whole text, all of it scored.")] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", help="Threads (default: what the machine gives).", metavar="N", min=1),
    ] = None,
    cache_type: Annotated[
        str, typer.Option("--cache-type", help="Numbers of the KV cache: f32, f16 or q8_0.", metavar="TYPE")
    ] = "f16",
    svg: SvgFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """Measure how well models predict a text.

    The protocol is that of llama-perplexity: windows without overlap, each from an empty cache, whose second half is
    scored. Models of one vocabulary, as quantizations of one model are, are also compared with the first: the change of
    the perplexity, the KL divergence from its distributions (mean, and what one token in a hundred is beyond), and how
    often both prefer the same token. Bits per byte can be compared between vocabularies.
    """
    if full:
        refuse(ctx, "with --full, which has one window", "window")
    from tinyllm.perplexity import measure

    text = file.read_bytes()
    # No text has more tokens than bytes, but for those that a tokenizer puts around it.
    n_ctx = min(len(text) + 8, MOST_TOKENS) if full else window
    options = ModelOptions(threads=threads, cache_type=cache_type, ctx_size=n_ctx)
    models = [load_model(replace(options, model=name)) for name in model]
    with usage_errors(), progress() as tell:
        scores = measure(
            models, text, None if full else window, lambda done, total: tell(f"window {done + 1} of {total}")
        )
    for m, score in zip(models, scores, strict=True):
        tell_trained(m.path.stem, score.n_scored + 1 if full else window, m.config.n_ctx_train)
    rows = [as_object(m, s) for m, s in zip(models, scores, strict=True)]
    write_picture(svg, lambda: _picture(rows, file.name))
    if as_json:
        print(json.dumps(rows))
        return
    _print_table(rows)
    if others := [row["model"] for row in rows[1:] if not row["same_vocabulary"]]:
        render.note(
            f"KL is not defined between vocabularies: {', '.join(others)} and {rows[0]['model']} can be compared by "
            "bits per byte"
        )


def as_object(model: Model, score: Score) -> dict[str, Any]:
    """What `--json` prints for one model; null where there is no first model of the same vocabulary to compare with."""
    from tinyllm.model_info import describe

    info = describe(model.file)
    ratio, ratio_error = score.log_ratio or (None, None)
    return {
        "model": model.path.name,
        "size": os.path.getsize(model.path),
        "bits_per_weight": round(8 * info.weight_bytes / info.parameters, 3),
        "perplexity": round(score.perplexity, 5),
        "error": round(score.error, 5),
        "bits_per_byte": round(score.bits_per_byte, 5),
        "scored": score.n_scored,
        "same_vocabulary": score.first is not None,
        "log_ratio": ratio,
        "log_ratio_error": ratio_error,
        "mean_kl": score.mean_kl,
        "kl_99": score.kl_99,
        "agreement": score.agreement,
        "tok_s": round(score.n_computed / score.seconds, 2),
    }


def _picture(rows: Sequence[dict[str, Any]], text: str) -> str:
    from tinyllm.experiments.quantizations import Point, picture

    one_vocabulary = all(row["same_vocabulary"] for row in rows[1:])
    measure = "perplexity" if one_vocabulary else "bits_per_byte"
    return picture([Point(Path(row["model"]).stem, row["size"], row[measure]) for row in rows], one_vocabulary, text)


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    headers = ["model", "size", "bits/weight", "perplexity", "±", "bits/byte", "tok/s"]
    compared = any(row["same_vocabulary"] for row in rows)
    headers += ["change", "±", "KL", "KL 99 %", "same first"] * compared
    lines = []
    for row in rows:
        cells = [row["model"], size(row["size"]), f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.4f}"]
        cells += [f"{row['error']:.3f}", f"{row['bits_per_byte']:.4f}", f"{row['tok_s']:.0f}"]
        if row["same_vocabulary"]:
            # For small changes, the logarithm of a ratio is the change in hundreds of percents.
            cells += [f"{100 * math.expm1(row['log_ratio']):+.2f} %", f"{100 * row['log_ratio_error']:.2f}"]
            cells += [f"{row['mean_kl']:.5f}", f"{row['kl_99']:.4f}", f"{100 * row['agreement']:.1f} %"]
        lines.append(cells + [""] * (len(headers) - len(cells)))
    render.table(headers, lines, right=range(1, len(headers)))
