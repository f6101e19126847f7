"""A reply on stdout as it comes: steps of text go in, and what may be shown of them is written and flushed."""

from __future__ import annotations

import sys

from tinyllm_cli import render
from tinyllm_cli.text import harmless
from tinyllm_cli.thinking import Part, ThinkingSplitter

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


class PlainReply:
    """Writes text as it is; on a terminal, control characters become visible and thinking is dim.

    `opened`: the closing tag of a thinking block that the prompt has opened. `stream`: write at once, not at the end.
    """

    def __init__(self, opened: str | None = None, hide_thinking: bool = False, stream: bool = True) -> None:
        self._splitter = ThinkingSplitter(opened, hide_thinking)
        self._stream = stream
        self._waiting: list[Part] = []
        self._end = "\n"
        self._dim = False

    def show(self, text: str) -> None:
        """Takes the text of a step."""
        self._take(self._splitter.push(text))

    def finish(self) -> None:
        """Writes what is left, and a line break behind text that has none."""
        self._take(self._splitter.flush())
        for part in self._waiting:
            self._write(part)
        self._set_dim(False)
        if self._end != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _take(self, parts: list[Part]) -> None:
        if not self._stream:
            self._waiting += parts
            return
        for part in parts:
            self._write(part)
        if parts:
            sys.stdout.flush()

    def _write(self, part: Part) -> None:
        self._set_dim(part.thinking)
        sys.stdout.write(harmless(part.text) if sys.stdout.isatty() else part.text)
        self._end = part.text[-1:]

    def _set_dim(self, dim: bool) -> None:
        if dim != self._dim and not render.is_plain(sys.stdout):
            sys.stdout.write(DIM if dim else NOT_DIM)
        self._dim = dim
