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
        self._above = ""  # the complete block above it
        self._n_above = 0  # the lines that this took
        self._n_drawn = 0  # the lines that the tail takes on the screen
        self._next_draw = 0.0
        self._thinking = False

    def show(self, text: str) -> None:
        """Takes the text of a step."""
        self._take(self._splitter.push(text))
        if self._tail.strip() and perf_counter() >= self._next_draw:
            started = perf_counter()
            self._print_complete_blocks()
            self._draw_tail()
            ended = perf_counter()
            self._next_draw = ended + max(REDRAW_S, MOST_OF_TIME * (ended - started))

    def finish(self) -> None:
        """Prints what is left."""
        self._take(self._splitter.flush())
        self._end_thinking()
        if self._tail.strip():
            self._print(self._tail)
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
            self._console.print("\n")

    def _print_complete_blocks(self) -> None:
        """Prints all blocks but the last, to which the next words may still belong."""
        starts = [t.map[0] for t in self._parser.parse(self._tail) if t.level == 0 and t.nesting >= 0 and t.map]
        if len(starts) < 2:
            return
        lines = self._tail.splitlines(keepends=True)
        done, last_done = "".join(lines[: starts[-1]]), "".join(lines[starts[-2] : starts[-1]])
        self._print(done)
        self._above, self._n_above = last_done, len(self._render(last_done))
        self._tail = "".join(lines[starts[-1] :])

    def _print(self, source: str) -> None:
        """Prints Markdown for good, where the unfinished block was drawn."""
        lines = self._lines_below(source)
        self._erase()
        self._console.file.write("".join(lines))
        self._console.file.flush()

    def _draw_tail(self) -> None:
        """Draws the unfinished block: as many of its last lines as can be erased again."""
        lines = self._lines_below(self._tail)[-(self._console.size.height - 1) :]
        self._erase()
        self._console.file.write("".join(lines))
        self._console.file.flush()
        self._n_drawn = len(lines)

    def _erase(self) -> None:
        if self._n_drawn:
            self._console.file.write(f"\r\x1b[{self._n_drawn}A\x1b[J")
            self._n_drawn = 0

    def _lines_below(self, source: str) -> list[str]:
        """The lines of Markdown below the block that was printed last: that one decides about the space between."""
        return self._render(self._above + source)[self._n_above :]

    def _render(self, source: str) -> list[str]:
        from rich.markdown import Markdown

        with self._console.capture() as capture:
            self._console.print(Markdown(source, code_theme="ansi_dark", hyperlinks=False), soft_wrap=False)
        return capture.get().splitlines(keepends=True)
