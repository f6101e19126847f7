"""`tinyllm experiment languages`: models go in, what the same text costs them in several languages comes out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.experiment_output import AsJson, ModelNames, SvgFile, print_json, write_picture
from tinyllm_cli.loading import find_file, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL
from tinyllm_cli.prompt_input import clean, read_text

if TYPE_CHECKING:
    from tinyllm.experiments.languages import Cost, ParallelText
    from tinyllm.tokenizer import Tokenizer


def languages(
    model: ModelNames = [DEFAULT_MODEL],  # noqa: B006 (Typer copies it)
    file: Annotated[
        list[str],
        typer.Option(
            "--file",
            "-f",
            help="A text of your own instead of the built-in one (repeatable; the first is the measure).",
            metavar="LANG=FILE",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Count what the same text costs in several languages, for one tokenizer or several.

    The text is Article 1 of the Universal Declaration of Human Rights in 14 languages. Only the vocabulary of a file is
    read. A model pays for tokens with time and with room in its context, so a ratio of 3 leaves a third of both.
    """
    from tinyllm.experiments.languages import article_1, cost_of, picture
    from tinyllm.tokenizer import load_tokenizer

    with usage_errors():
        texts = [_own_text(argument) for argument in file] or article_1()
    paths = [find_file(name) for name in model]
    tokenizers = [load_tokenizer(path) for path in paths]
    costs = [[cost_of(tokenizer, text.text) for text in texts] for tokenizer in tokenizers]
    names = [path.stem for path in paths]
    write_picture(svg, lambda: picture(names, texts, costs))
    if as_json:
        print_json(as_object(names, tokenizers, texts, costs))
    else:
        _print(names, tokenizers, texts, costs)


def _own_text(argument: str) -> ParallelText:
    from tinyllm.experiments.languages import ParallelText

    language, equals, name = argument.partition("=")
    if not (language and equals and name):
        raise InvalidParameterError(f"--file {argument}: write a language and a file, as in de=text.txt")
    text = read_text(Path(name))
    if not text:
        raise InvalidParameterError(f"--file {argument}: the file is empty")
    return ParallelText(clean(language), clean(language), "", text)


def as_object(
    names: Sequence[str],
    tokenizers: Sequence[Tokenizer],
    texts: Sequence[ParallelText],
    costs: Sequence[Sequence[Cost]],
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "experiment": "languages",
        "texts": [
            {
                "language": text.language,
                "name": text.name,
                "script": text.script,
                "characters": cost.n_characters,
                "bytes": cost.n_bytes,
            }
            for text, cost in zip(texts, costs[0], strict=True)
        ],
        "models": [
            {
                "model": name,
                "tokenizer": tokenizer.kind,
                "n_vocab": tokenizer.n_vocab,
                "costs": [
                    {
                        "language": text.language,
                        "tokens": cost.n_tokens,
                        "unknown": cost.n_unknown,
                        "per_character": cost.per_character,
                        "per_byte": cost.per_byte,
                        "ratio": cost.n_tokens / row[0].n_tokens,
                    }
                    for text, cost in zip(texts, row, strict=True)
                ],
            }
            for name, tokenizer, row in zip(names, tokenizers, costs, strict=True)
        ],
    }


def _print(
    names: Sequence[str],
    tokenizers: Sequence[Tokenizer],
    texts: Sequence[ParallelText],
    costs: Sequence[Sequence[Cost]],
) -> None:
    letters = [_letter(i) for i in range(len(names))] if len(names) > 1 else [""]
    for letter, name, tokenizer in zip(letters, names, tokenizers, strict=True):
        print(f"{letter}{name}: {tokenizer.kind}, {tokenizer.n_vocab} tokens")
    headers = ["LANGUAGE", "SCRIPT", "CHARS", "BYTES"]
    for letter, row in zip(letters, costs, strict=True):
        headers += [f"{letter}TOKENS", "/CHAR", "/BYTE", f"× {texts[0].language}"]
        headers += ["UNKNOWN"] * any(cost.n_unknown for cost in row)
    rows = []
    for at, text in enumerate(texts):
        cells = [text.name, text.script, str(costs[0][at].n_characters), str(costs[0][at].n_bytes)]
        for row in costs:
            cost = row[at]
            cells += [str(cost.n_tokens), f"{cost.per_character:.2f}", f"{cost.per_byte:.2f}"]
            cells.append(f"{cost.n_tokens / row[0].n_tokens:.2f}")
            cells += [str(cost.n_unknown)] * any(other.n_unknown for other in row)
        rows.append(cells)
    render.table(headers, rows, right=range(2, len(headers)))


def _letter(index: int) -> str:
    return f"{ascii_uppercase[index]} " if index < len(ascii_uppercase) else f"{index + 1} "
