"""`tinyllm trace`: a prompt goes in, what every layer makes of it comes out as rows, JSON, arrays or one HTML page."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.loading import load_model, load_template, tell_full, tell_trained, usage_errors
from tinyllm_cli.option_groups import option_groups
from tinyllm_cli.options import ModelOptions, SamplingOptions
from tinyllm_cli.outputs import writable, written
from tinyllm_cli.prompt_input import clean, need_text, unescape
from tinyllm_cli.usage import refuse

LANGUAGES = ("en", "zh")
LENS_BUDGET_S = 1.5


@option_groups
def trace(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[str], typer.Option("--file", "-f", help="Put this file's text before the prompt (repeatable).")
    ] = [],  # noqa: B006 (Typer copies it)
    raw: Annotated[
        bool, typer.Option("--raw", "--no-chat", help="Continue the text as it is, without a chat template.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--predict", "-n", help="Tokens to generate.", metavar="N", min=0)
    ] = 8,
    system: Annotated[str | None, typer.Option("--system", help="The system message.", metavar="TEXT")] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="Another chat template than the model's.", metavar="NAME|FILE")
    ] = None,
    escape: Annotated[bool, typer.Option("--escape", "-e", help=r"Read \n, \t, \\ in the prompt as escapes.")] = False,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers to show and save: 0-5,20- or all.", metavar="LIST")
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", help="Heads to look through (default: all).", metavar="LIST")
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option("--stages", help="Stages to list and save: q,k,ffn_act or all.", metavar="LIST"),
    ] = None,
    token: Annotated[
        int | None,
        typer.Option("--token", help="The position to look at (default: where the first token was chosen).", min=0),
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", help="Write one page to look around in.", metavar="FILE", callback=writable)
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", help="Write the arrays of all stages (NumPy archive).", metavar="FILE.npz", callback=writable
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    language: Annotated[
        str, typer.Option("--lang", help=f"Language of page and rows: {' or '.join(LANGUAGES)}.", metavar="NAME")
    ] = LANGUAGES[0],
    *,
    sampling: SamplingOptions,
    engine: ModelOptions,
) -> None:
    """Look inside: what each stage makes of a prompt, and how the next tokens are chosen.

    Rows are layers: the size of the residual stream, what attention and feed-forward added, where attention looks, and
    what the model would say if it ended there. A chat model gets the prompt in its chat template.
    """
    from tinyllm.trace import trace as run_trace
    from tinyllm.trace.observation import STAGES
    from tinyllm.trace.page import write_page
    from tinyllm.trace.summary import as_dict
    from tinyllm.trace.texts import say

    if as_json and html is None:
        refuse(ctx, "with --json", "language")
    with usage_errors():
        params = sampling.params()
        argument = None if prompt is None else unescape(prompt) if escape else clean(prompt)
        question = need_text(argument, file, empty=raw)
        if raw and (system is not None or chat_template is not None):
            raise InvalidParameterError("--raw uses no chat template: --system and --chat-template have no place in it")
        if language not in LANGUAGES:
            raise InvalidParameterError(f"--lang {language}: choose from {', '.join(LANGUAGES)}")
        chosen_stages = parse_names("--stages", stages, STAGES)
    model = load_model(engine)
    tell_trained(model.path.stem, engine.ctx_size, model.config.n_ctx_train)
    template = None if raw else load_template(chat_template, model)
    if template is None and system is not None:
        raise InvalidParameterError("this model has no place for a system message: --chat-template names a template")
    with usage_errors():
        chosen_layers = parse_numbers("--layers", layers, model.config.n_layers)
        chosen_heads = parse_numbers("--heads", heads, min(layer.n_heads for layer in model.config.layers))
    found = run_trace(
        model,
        question if template is None else _messages(system, question),
        max_tokens=max_tokens,
        params=params,
        stages=chosen_stages,
        layers=chosen_layers,
        lens_budget_s=LENS_BUDGET_S,
        template=template,
    )
    if len(found.steps) < max_tokens and found.n_tokens >= model.n_ctx:
        tell_full(model.n_ctx)
    position = found.positions[0] if token is None else token
    if position >= found.n_tokens:
        raise InvalidParameterError(f"--token {position}: the positions that ran are 0 to {found.n_tokens - 1}")
    shown = {"language": language, "layers": chosen_layers, "heads": chosen_heads, "selected": position}
    if html is not None:
        with written(html):
            write_page(found, html, shlex.join(["tinyllm", *sys.argv[1:]]), **shown)
    if save is not None:
        with written(save):
            found.save(save)
    if as_json:
        print(json.dumps(as_dict(found, position, chosen_layers, chosen_heads, chosen_stages), ensure_ascii=False))
        return
    from tinyllm_cli import trace_view

    trace_view.show(found, position, layers, chosen_layers, chosen_heads, chosen_stages, language)
    if html is None and save is None:
        render.note(say(language, "view_hint"))


def _messages(system: str | None, question: str) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": clean(system)}]
    return [*messages, {"role": "user", "content": question}]


def parse_numbers(option: str, text: str | None, n: int) -> list[int] | None:
    """Numbers below n from `0-5,20-`; None for all. Raises InvalidParameterError."""
    if text is None or text == "all":
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(-)?\s*(\d+)?\s*", part)
        if match is None or (match[3] and not match[2]):
            raise InvalidParameterError(f"{option} {text}: write numbers and ranges, as in 0-5,20-")
        first = int(match[1])
        last = int(match[3]) if match[3] else n - 1 if match[2] else first
        if not first <= last < n:
            raise InvalidParameterError(f"{option} {text}: they go from 0 to {n - 1}")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def parse_names(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Names from a list with commas, `all` for every one. Raises InvalidParameterError."""
    if text is None:
        return []
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise InvalidParameterError(f"{option}: there is no stage {name!r}: choose from {', '.join(known)}")
    return names
