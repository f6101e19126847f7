"""Files that a command will write when its work is done: their paths are looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from tinyllm.errors import TinyLLMError


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
