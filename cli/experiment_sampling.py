"""`tinyllm experiment sampling`: a prompt goes in, what temperature and cuts make of the next token comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.experiment_output import AsJson, ModelName, SvgFile, Threads, print_json, say, write_picture
from tinyllm_cli.loading import load_model, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL, ModelOptions
from tinyllm_cli.prompt_input import clean, need_text

if TYPE_CHECKING:
    from tinyllm.experiments.sampling import Spread, Study
    from tinyllm.tokenizer import Tokenizer


def sampling(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    model: ModelName = DEFAULT_MODEL,
    raw: Annotated[
        bool, typer.Option("--raw", "--no-chat", help="Continue the text as it is, without a chat template.")
    ] = False,
    temperatures: Annotated[str, typer.Option("--temps", help="Temperatures.", metavar="LIST")] = "0.5,0.8,1,1.5,2",
    top_k: Annotated[str, typer.Option("--top-k", help="Numbers of tokens for top-k.", metavar="LIST")] = "40",
    top_p: Annotated[str, typer.Option("--top-p", help="Probabilities for top-p.", metavar="LIST")] = "0.9,0.95",
    min_p: Annotated[str, typer.Option("--min-p", help="Shares for min-p.", metavar="LIST")] = "0.05,0.1",
    top: Annotated[int, typer.Option("--top", help="Likeliest tokens to show.", metavar="N", min=1)] = 5,
    threads: Threads = None,
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what temperature, top-k, top-p and min-p make of the distribution of the next token.

    Cuts are shown in both orders: before the temperature, as llama.cpp and tinyllm sample, and behind it, as others do.
    """
    from tinyllm.experiments.sampling import Cut, next_logits, picture, study

    with usage_errors():
        question = need_text(None if prompt is None else clean(prompt), files=None)
        values = _numbers("--temps", temperatures)
        if not values:
            raise InvalidParameterError("--temps: give at least one temperature")
        lists = {"top-k": top_k, "top-p": top_p, "min-p": min_p}
        cuts = [Cut(kind, value) for kind, text in lists.items() for value in _numbers(f"--{kind}", text)]
    loaded = load_model(ModelOptions(model=model, threads=threads))
    logits = next_logits(loaded, question, raw)
    with usage_errors():
        found = study(logits, values, cuts, top)
    write_picture(svg, lambda: picture(logits, values, cuts, question))
    if as_json:
        print_json(
            {
                "experiment": "sampling",
                "model": loaded.path.name,
                "prompt": question,
                **as_object(loaded.tokenizer, found),
            }
        )
    else:
        _print(loaded.tokenizer, found)


def _numbers(option: str, text: str) -> list[float]:
    """The numbers of a list with commas, each once; an empty list is one. Raises InvalidParameterError."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [math.nan]
    if any(map(math.isnan, found)):
        raise InvalidParameterError(f"{option} {text}: write numbers with commas, as in 0.5,1,2")
    return list(dict.fromkeys(found))


def as_object(tokenizer: Tokenizer, found: Study) -> dict[str, Any]:
    """What `--json` prints of a study."""

    def spread(spread: Spread) -> dict[str, Any]:
        return {"n": spread.n, "entropy_bits": spread.entropy, "effective": spread.effective}

    return {
        "temperatures": [
            {
                "temperature": value,
                **spread(state),
                "top": [
                    {"id": token, "text": tokenizer.token_text(token), "probability": prob} for token, prob in state.top
                ],
            }
            for value, state in found.temperatures.items()
        ],
        "cuts": [
            {
                "kind": row.cut.kind,
                "value": row.cut.value,
                "temperature": row.temperature,
                "cut_first": {"mass": row.cut_first.mass, **spread(row.cut_first.spread)},
                "temperature_first": {"mass": row.temperature_first.mass, **spread(row.temperature_first.spread)},
                "stray": row.stray,
            }
            for rows in found.orders.values()
            for row in rows
        ],
    }


def _print(tokenizer: Tokenizer, found: Study) -> None:
    from tinyllm.trace.tokens import display

    n_top = max(len(state.top) for state in found.temperatures.values())
    rows = []
    for value, state in found.temperatures.items():
        tokens = [f"{display(tokenizer.token_bytes(token))} {prob:.1%}" for token, prob in state.top]
        rows.append([f"{value:g}", f"{state.entropy:.2f}", _count(state.effective), *tokens])
    render.table(["TEMP", "ENTROPY", "EFFECTIVE", "LIKELIEST", *[""] * (n_top - 1)], rows, right=[0, 1, 2])
    if not found.orders:
        return
    temperatures = [f"T={value:g}" for value in found.temperatures]
    _print_section("cut first, then temperature (llama.cpp's order): effective number of tokens by temperature")
    render.table(
        ["", "KEEPS", "MASS", *temperatures],
        [
            [
                cut.name,
                str(rows[0].cut_first.spread.n),
                f"{rows[0].cut_first.mass:.1%}",
                *(_count(row.cut_first.spread.effective) for row in rows),
            ]
            for cut, rows in found.orders.items()
        ],
        right=range(1, 3 + len(temperatures)),
    )
    _print_section("temperature first, then cut: tokens kept, and their mass in the heated distribution")
    _print_pairs(found, temperatures, lambda row: (str(row.temperature_first.spread.n), row.temperature_first.mass))
    _print_section("temperature first: effective number, and the probability of a token that cutting first excludes")
    _print_pairs(found, temperatures, lambda row: (_count(row.temperature_first.spread.effective), row.stray))
    worst = max((row for rows in found.orders.values() for row in rows), key=lambda row: row.stray)
    if worst.stray:
        many, few = worst.temperature_first.spread.n, worst.cut_first.spread.n
        what = f"behind a temperature of {worst.temperature:g}, {worst.cut.name} keeps {many} tokens instead of {few}"
        say([f"{what}, and {worst.stray:.0%} of the draws are one of the others"])


def _print_section(title: str) -> None:
    render.out().print(f"\n{title}", style="dim")


def _print_pairs(found: Study, temperatures: Sequence[str], cells: Any) -> None:
    """A row per cut; for each temperature a number and a share."""
    rows = []
    for cut, orders in found.orders.items():
        pairs = [cells(row) for row in orders]
        rows.append([cut.name, *(cell for amount, share in pairs for cell in (amount, f"{share:.1%}"))])
    headers = ["", *(cell for name in temperatures for cell in (name, ""))]
    render.table(headers, rows, right=range(1, len(headers)))


def _count(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
