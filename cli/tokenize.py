"""`tinyllm tokenize`: a text goes in, its tokens come out as pieces, ids and bytes; for two models, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm_cli import render
from tinyllm_cli.loading import find_file, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL
from tinyllm_cli.prompt_input import clean, need_text, unescape
from tinyllm_cli.text import counted, one_line
from tinyllm_cli.usage import refuse

if TYPE_CHECKING:
    from tinyllm.tokenizer import Tokenizer

PIECE_COLOURS = (24, 94, 22, 53, 58)  # backgrounds that white text can be read on; neighbours differ


@dataclass(frozen=True)
class Token:
    """One token of a text. `text` is what can be shown of it; single bytes of a character are shown as U+FFFD."""

    id: int
    text: str
    data: bytes
    control: bool


def tokenize(
    ctx: typer.Context,
    text: Annotated[
        str | None, typer.Argument(help="The text; - reads it from standard input.", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A GGUF file, a catalogue name, or user/repo[:QUANT] on the hub.")
    ] = DEFAULT_MODEL,
    compare: Annotated[
        tuple[str, str] | None, typer.Option("--compare", help="Two models, side by side.", metavar="A B")
    ] = None,
    file: Annotated[list[str], typer.Option("--file", "-f", help="Put this file's text first (repeatable).")] = [],  # noqa: B006 (Typer copies it)
    no_special: Annotated[
        bool, typer.Option("--no-special", "--no-bos", help="Add no begin or end tokens to the text.")
    ] = False,
    no_parse_special: Annotated[
        bool, typer.Option("--no-parse-special", help="Take <|im_start|> and the like in the text as plain text.")
    ] = False,
    escape: Annotated[bool, typer.Option("--escape", "-e", help=r"Read \n, \t, \\ in the text as escapes.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, as a list.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the tokens of a text: pieces, ids, bytes and counts."""
    if compare:
        refuse(ctx, "with --compare, which names two models", "model")
    if as_json:
        refuse(ctx, "with --json, which has the ids", "ids")
    with usage_errors():
        argument = None if text is None else unescape(text) if escape else clean(text)
        source = need_text(argument, file, "text", empty=True)
    names = compare or (model,)
    found = [split(load(name), source, not no_special, not no_parse_special) for name in names]
    if as_json:
        objects = [as_object(name, source, tokens) for name, tokens in zip(names, found, strict=True)]
        print(json.dumps(objects if compare else objects[0], ensure_ascii=False))
    elif ids:
        for tokens in found:
            print([token.id for token in tokens])
    elif compare:
        _print_comparison(source, compare, *found)
    else:
        _print_tokens(source, *found)


def load(name: str) -> Tokenizer:
    """The tokenizer of the model that `name` means, which is fetched first if need be."""
    from tinyllm.tokenizer import load_tokenizer

    return load_tokenizer(find_file(name))


def split(tokenizer: Tokenizer, text: str, add_special: bool = True, parse_special: bool = True) -> list[Token]:
    """The tokens of a text."""
    ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
    return [Token(i, tokenizer.token_text(i), tokenizer.token_bytes(i), tokenizer.is_control(i)) for i in ids]


def as_object(name: str, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
    """What `--json` prints for a model."""
    return {
        "model": name,
        "n_tokens": len(tokens),
        "n_characters": len(text),
        "n_bytes": len(text.encode()),
        "ids": [token.id for token in tokens],
        "tokens": [{"id": t.id, "text": t.text, "bytes": list(t.data), "control": t.control} for t in tokens],
    }


def segments(text: str, a: Sequence[Token], b: Sequence[Token]) -> list[tuple[Sequence[Token], Sequence[Token]]]:
    """The two token lists of a text, cut wherever both have a boundary."""
    ends_a, ends_b = _ends(text, a), _ends(text, b)
    common = sorted(ends_a.keys() & ends_b.keys())
    cuts = [(0, 0), *((ends_a[at], ends_b[at]) for at in common)]
    if cuts[-1] != (len(a), len(b)):
        cuts.append((len(a), len(b)))
    return [(a[a0:a1], b[b0:b1]) for (a0, b0), (a1, b1) in pairwise(cuts)]


def _ends(text: str, tokens: Sequence[Token]) -> dict[int, int]:
    """How many bytes of the text end with a token -> the number of tokens until there."""
    written = [0 if token.control else len(token.data) for token in tokens]
    at = -1 if sum(written) == len(text.encode()) + 1 else 0  # the space that SentencePiece puts in front
    ends = {}
    for index, n_bytes in enumerate(written):
        at += n_bytes
        ends[max(at, 0)] = index + 1
    return ends


def _print_tokens(text: str, tokens: Sequence[Token]) -> None:
    if not render.is_plain(sys.stdout):
        print(coloured(tokens))
    width = max((len(str(token.id)) for token in tokens), default=1)
    for index, token in enumerate(tokens):
        print(f"{index:5}  {token.id:>{width}}  {_piece(token):<24}  {token.data.hex(' ')}".rstrip())
    print(summary(text, tokens))


def coloured(tokens: Sequence[Token]) -> str:
    """The pieces on backgrounds that tell them apart; line breaks are shown as a sign and kept."""
    shown = []
    for index, token in enumerate(tokens):
        style = f"\x1b[97;48;5;{PIECE_COLOURS[index % len(PIECE_COLOURS)]}m"
        lines = [one_line(line) for line in token.text.replace("\n", "⏎\n").split("\n")]
        shown.append("\n".join(f"{style}{line}\x1b[0m" for line in lines))
    return "".join(shown)


def summary(text: str, tokens: Sequence[Token]) -> str:
    """The line of counts."""
    n_bytes = len(text.encode())
    rate = f", {n_bytes / len(tokens):.2f} bytes per token" if tokens else ""
    counts = ((len(tokens), "token"), (len(text), "character"), (n_bytes, "byte"))
    return ", ".join(counted(n, unit) for n, unit in counts) + rate


def _print_comparison(text: str, names: tuple[str, str], a: Sequence[Token], b: Sequence[Token]) -> None:
    rows = []
    for in_a, in_b in segments(text, a, b):
        more = f"{len(in_b) - len(in_a):+d}" if len(in_a) != len(in_b) else ""
        rows.append([" ".join(map(_piece, in_a)), " ".join(map(_piece, in_b)), more])
    short = [Path(name).name for name in names]
    render.table([*short, "MORE"], rows, right=[2])
    for name, tokens in zip(short, (a, b), strict=True):
        print(f"{name}: {summary(text, tokens)}")


def _piece(token: Token) -> str:
    return one_line(token.text) if token.control else one_line(repr(token.text))
