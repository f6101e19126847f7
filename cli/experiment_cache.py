"""`tinyllm experiment cache`: a model and a prompt go in, times of generation with a KV cache and without come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import TinyLLMError
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
    from tinyllm.experiments.cache import Row


def cache(
    model: ModelName = DEFAULT_MODEL,
    positions: Annotated[
        list[str],
        typer.Option("--positions", "-p", help="Tokens in the text at which to look.", metavar="LIST"),
    ] = ["16,32,64,128,256"],  # noqa: B006 (Typer copies it)
    prompt: Annotated[str, typer.Option("--prompt", help="The text that is continued.", metavar="TEXT")] = (
        "Once upon a time"
    ),
    threads: Threads = None,
    cache_type: CacheType = "f16",
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Generate the same text with a KV cache and without, and compare the times.

    Without a cache each token means to compute the whole text before it again: n tokens cost n steps of one token with
    a cache, and 1 + 2 + … + n tokens without.
    """
    from tinyllm.experiments.cache import compare

    with usage_errors():
        at = numbers_of("--positions", positions)
    loaded = load_model(ModelOptions(model=model, threads=threads, ctx_size=max(at) + 1, cache_type=cache_type))
    tell_trained(loaded.path.stem, max(at), loaded.config.n_ctx_train)
    rows: list[Row] = []
    try:
        with usage_errors(), progress() as tell:
            ids = loaded.tokenizer.encode(prompt)
            for row in compare(loaded, ids, at, lambda n: tell(f"without the cache: {n} of {at[-1]} tokens")):
                rows.append(row)
    finally:
        # A run that is ended early still shows what it has found out.
        if rows:
            about = {"model": loaded.path.name, "threads": loaded.n_threads, "prompt_tokens": len(ids)}
            if as_json:
                print_json(as_object(about, rows))
            else:
                _print_table(rows)
    write_picture(svg, lambda: picture(loaded.path.stem, rows))
    if not rows[-1].same_tokens:
        raise TinyLLMError("the two ways wrote different tokens: the cache does not hold what it should")


def as_object(about: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What `--json` prints."""
    from tinyllm.experiments.cache import growth

    return {
        "experiment": "cache",
        **about,
        "same_tokens": rows[-1].same_tokens,
        "same_logits": rows[-1].same_logits,
        "rows": [asdict(row) | {"speedup": row.speedup, "total_speedup": row.total_speedup} for row in rows],
        "growth": list(map(asdict, growth(rows))),
    }


def _print_table(rows: Sequence[Row]) -> None:
    headers = ["tokens", "cached ms/token", "recomputed ms/token", "speed-up"]
    headers += ["cached total s", "recomputed total s", "speed-up", "tokens computed"]
    cells = [
        [
            str(row.position),
            f"{row.cached_ms:.2f}",
            f"{row.recomputed_ms:.2f}",
            f"{row.speedup:.1f} ×",
            f"{row.cached_s:.3f}",
            f"{row.recomputed_s:.3f}",
            f"{row.total_speedup:.1f} ×",
            f"{row.cached_tokens} / {row.recomputed_tokens}",
        ]
        for row in rows
    ]
    render.table(headers, cells, right=range(len(headers)))
    say(_findings(rows))


def _findings(rows: Sequence[Row]) -> list[str]:
    from tinyllm.experiments.cache import growth

    last = rows[-1]
    if last.same_tokens:
        logits = "the same logits bit for bit" if last.same_logits else "logits that differ in rounding"
        lines = [f"both ways wrote the same tokens, from {logits}"]
    else:
        lines = ["the two ways wrote different tokens"]
    for step in growth(rows)[-1:]:
        lines.append(
            f"from {step.start} to {step.end} tokens the total grows like n^{step.cached:.2f} with the cache "
            f"(theory: n) and n^{step.recomputed:.2f} without (theory: n²)"
        )
    return lines


def picture(model: str, rows: Sequence[Row]) -> str:
    """Total time by length on logarithmic axes, and beside it what theory says from the last measured point back."""
    from tinyllm.experiments.axes import Axis
    from tinyllm.experiments.chart import Series, line_chart

    first, last = rows[0], rows[-1]

    def theory(name: str, total: float, power: int) -> Series:
        ends = (first.position, last.position)
        return Series(name, [(n, total * (n / last.position) ** power) for n in ends], theory=True)

    series = [
        Series("with cache", [(row.position, row.cached_s) for row in rows]),
        theory("O(n)", last.cached_s, 1),
        Series("recomputed", [(row.position, row.recomputed_s) for row in rows]),
        theory("O(n²)", last.recomputed_s, 2),
    ]
    description = (
        f"For {last.position} tokens {last.cached_s:.3g} s with the cache and {last.recomputed_s:.3g} s without, "
        f"{last.total_speedup:.3g} times as long; the first grows about linearly, the second about with the square."
    )
    return line_chart(
        f"{model}: time to write a text of n tokens",
        series,
        Axis("length of the text (tokens)", base=2),
        Axis("total time (s)", base=10),
        description,
    )
