"""`tinyllm perplexity`: a text and models go in, how well each predicts it comes out, side by side."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm_cli import render
from tinyllm_cli.loading import load_model, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL, ModelOptions
from tinyllm_cli.text import size

if TYPE_CHECKING:
    from tinyllm.model import Model
    from tinyllm.perplexity import Score

MOST_TOKENS = 2**17


def perplexity(
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
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """Measure how well models predict a text.

    The protocol is that of llama-perplexity: windows without overlap, each from an empty cache, whose second half is
    scored. With several models of one vocabulary there are also the mean KL divergence from the first one's
    distributions and how often both prefer the same token. Bits per byte can be compared between tokenizers.
    """
    from tinyllm.perplexity import measure

    text = file.read_bytes()
    # No text has more tokens than bytes, but for those that a tokenizer puts around it.
    n_ctx = min(len(text) + 8, MOST_TOKENS) if full else window
    options = ModelOptions(threads=threads, cache_type=cache_type, ctx_size=n_ctx)
    models = [load_model(replace(options, model=name)) for name in model]
    with usage_errors():
        scores = measure(models, text, None if full else window, _progress)
    if as_json:
        print(json.dumps([as_object(m, s) for m, s in zip(models, scores, strict=True)]))
        return
    _print_table(models, scores)


def _progress(done: int, total: int) -> None:
    if total > 1 and not done:
        render.note(f"{total} windows")


def as_object(model: Model, score: Score) -> dict[str, Any]:
    """What `--json` prints for one model."""
    return {
        "model": model.path.name,
        "size": os.path.getsize(model.path),
        "perplexity": round(score.perplexity, 5),
        "error": round(score.error, 5),
        "bits_per_byte": round(score.bits_per_byte, 5),
        "scored": score.n_scored,
        "mean_kl": score.mean_kl,
        "agreement": score.agreement,
        "tok_s": round(score.n_computed / score.seconds, 2),
    }


def _print_table(models: list[Model], scores: list[Score]) -> None:
    compared = any(score.mean_kl is not None for score in scores)
    headers = ["model", "size", "perplexity", "±", "bits/byte", "tok/s"] + ["KL", "same first"] * compared
    rows = []
    for row in (as_object(m, s) for m, s in zip(models, scores, strict=True)):
        cells = [row["model"], size(row["size"]), f"{row['perplexity']:.4f}", f"{row['error']:.3f}"]
        cells += [f"{row['bits_per_byte']:.4f}", f"{row['tok_s']:.0f}"]
        if compared:
            known = row["mean_kl"] is not None
            cells += [f"{row['mean_kl']:.5f}", f"{100 * row['agreement']:.1f} %"] if known else ["", ""]
        rows.append(cells)
    render.table(headers, rows, right=range(1, len(headers)))
