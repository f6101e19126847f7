"""Files that a command writes: their paths are looked at before it begins, and trouble with them is told by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from tinyllm.errors import TinyLLMError

OUTPUTS = ("html", "save", "svg", "trace")
INPUTS = ("file", "model", "compare", "chat_template")
"""The names of parameters that hold files. A value among the inputs can also be a name, or `LANG=FILE`."""


def writable(given: str | Path | None) -> str | Path | None:
    """The path of an option, if a file can be written there. Raises TinyLLMError before any time was spent."""
    if given is None:
        return None
    path = Path(given)
    if path.is_dir():
        raise TinyLLMError(f"{path} is a directory: name a file to write")
    if not path.parent.is_dir():
        raise TinyLLMError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TinyLLMError(f"{path} cannot be written: permission denied")
    return given


def keep_apart(ctx: typer.Context) -> None:
    """Raises BadParameter when a command's outputs are one file, or one of them is a file that it reads."""
    params, taken = ctx.params, {}
    for name in INPUTS:
        values = params.get(name) or []
        for value in [values] if isinstance(values, str | Path) else values:
            for path in (value, str(value).partition("=")[2]):
                if os.path.isfile(path):
                    taken[os.path.realpath(path)] = "a file that is read"
    for name in OUTPUTS:
        if isinstance(path := params.get(name), str | Path) and not _is_device(path):
            if other := taken.get(os.path.realpath(path)):
                raise typer.BadParameter(f"--{name} {path} would overwrite {other}", ctx)
            taken[os.path.realpath(path)] = f"--{name}"


def _is_device(path: str | Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)  # as /dev/null, which takes everything


@contextmanager
def written(path: str | Path | None) -> Iterator[None]:
    """While a file is written: the error when it cannot be (a full disk, for one) names it. Raises TinyLLMError."""
    try:
        yield
    except OSError as error:
        raise TinyLLMError(f"{path}: {error.strerror or error}") from None
