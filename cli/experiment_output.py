"""What experiments share: their options as annotations, and how results are printed and pictures written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tinyllm_cli import render

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
    Path | None, typer.Option("--svg", help="Write a picture of the results.", metavar="FILE", show_default=False)
]


def print_json(answer: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def write_picture(path: Path | None, picture: Callable[[], str]) -> None:
    """Write what `picture` makes, if a file was asked for, and say so on stderr. Raises OSError."""
    if path is not None:
        path.write_text(picture(), encoding="utf-8")
        render.note(f"wrote {path}")
