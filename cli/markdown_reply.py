"""A reply as Markdown on a terminal: text goes in step by step, whole blocks are printed, the last one is redrawn."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from tinyllm_cli.text import harmless
from tinyllm_cli.thinking import Part, ThinkingSplitter

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_S = 0.08
MOST_OF_TIME = 10  # redrawing may take a tenth of the time: the model computes on the same cores


class MarkdownReply:
    """Takes text step by step; thinking comes out dim and as it is, the answer as Markdown."""

    def __init__(self, console: Console, opened: str | None = None, hide_thinking: bool = False) -> None:
        from markdown_it import MarkdownIt

        self._console = console
        self._splitter = ThinkingSplitter(opened, hide_thinking)
        self._parser = MarkdownIt().enable("strikethrough").enable("table")  # as rich sets it up
        self._tail = ""  # the block that is still being written
        self._printed_blocks = False
        self._drawn_lines = 0
        self._next_draw = 0.0
        self._thinking = False

    def show(self, text: str) -> None:
        """Takes the text of a step."""
        self._take(self._splitter.push(text))
        if self._tail and perf_counter() >= self._next_draw:
            started = perf_counter()
            self._print_complete_blocks()
            self._draw_tail()
            ended = perf_counter()
            self._next_draw = ended + max(REDRAW_S, MOST_OF_TIME * (ended - started))

    def finish(self) -> None:
        """Prints what is left."""
        self._take(self._splitter.flush())
        self._end_thinking()
        self._erase_tail()
        self._print_block(self._tail)
        self._tail = ""

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            if part.thinking:
                self._thinking = True
                self._console.print(harmless(part.text), style="dim", end="", soft_wrap=True)
            else:
                self._end_thinking()
                self._tail += harmless(part.text)

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            self._printed_blocks = True
            self._console.print()

    def _print_complete_blocks(self) -> None:
        starts = [t.map[0] for t in self._parser.parse(self._tail) if t.level == 0 and t.nesting >= 0 and t.map]
        if len(starts) < 2:
            return
        lines = self._tail.splitlines(keepends=True)
        self._erase_tail()
        self._print_block("".join(lines[: starts[-1]]))
        self._tail = "".join(lines[starts[-1] :])

    def _print_block(self, source: str) -> None:
        if not source.strip():
            return
        if self._printed_blocks:
            self._console.print()
        self._printed_blocks = True
        self._console.print(self._markdown(source), soft_wrap=False)

    def _markdown(self, source: str) -> object:
        from rich.markdown import Markdown

        return Markdown(source, code_theme="ansi_dark", hyperlinks=False)

    def _draw_tail(self) -> None:
        """Draws the unfinished block, as many of its last lines as can be erased again."""
        with self._console.capture() as capture:
            if self._printed_blocks:
                self._console.print()
            self._console.print(self._markdown(self._tail), soft_wrap=False)
        lines = capture.get().splitlines(keepends=True)[-(self._console.size.height - 1) :]
        self._erase_tail()
        self._console.file.write("".join(lines))
        self._console.file.flush()
        self._drawn_lines = len(lines)

    def _erase_tail(self) -> None:
        if self._drawn_lines:
            self._console.file.write(f"\r\x1b[{self._drawn_lines}A\x1b[J")
            self._drawn_lines = 0
