"""What experiments share: their options as annotations, and how results are printed and pictures written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.outputs import writable, written
from tinyllm_cli.text import one_line

_NUMBER = re.compile(r"(\d{1,9})(k?)", re.ASCII | re.IGNORECASE)

ModelName = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A GGUF file, a catalogue name, or user/repo[:QUANT] on the hub.", metavar="MODEL"
    ),
]
ModelNames = Annotated[
    list[str], typer.Option("--model", "-m", help="A model (repeatable: side by side).", metavar="MODEL")
]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", help="Threads (default: what the machine gives).", metavar="N", min=1)
]
CacheType = Annotated[
    str, typer.Option("--cache-type", help="Numbers of the KV cache: f32, f16 or q8_0.", metavar="TYPE")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SvgFile = Annotated[
    Path | None,
    typer.Option(
        "--svg", help="Write a picture of the results.", metavar="FILE", show_default=False, callback=writable
    ),
]


def numbers_of(option: str, texts: Sequence[str]) -> list[int]:
    """The numbers of an option's lists, in order and each once; `4k` is 4096.

    Raises InvalidParameterError, which names the option.
    """
    found = set()
    for part in (part.strip() for text in texts for part in text.split(",")):
        match = _NUMBER.fullmatch(part)
        if match is None:
            raise InvalidParameterError(f"{option} {part!r} is no number of tokens like 4096 or 4k")
        found.add(int(match[1]) * (1024 if match[2] else 1))
    return sorted(found)


def print_json(answer: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def say(lines: Sequence[str]) -> None:
    """What a table shows, in words: dim lines below it on stdout."""
    render.out().print()
    for line in lines:
        render.out().print(one_line(line), style="dim")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields what tells on a terminal's stderr how far a long run is, in a line that is gone afterwards."""
    if render.is_plain(sys.stderr):
        yield lambda text: None
        return

    def draw(text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{one_line(text)}")
        sys.stderr.flush()

    try:
        yield draw
    finally:
        draw("")


def write_picture(path: Path | None, picture: Callable[[], str]) -> None:
    """Write what `picture` makes, if a file was asked for, and say so on stderr. Raises TinyLLMError."""
    if path is not None:
        drawn = picture()
        with written(path):
            path.write_text(drawn, encoding="utf-8")
        render.note(f"wrote {path}")
