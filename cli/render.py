"""The terminal: what is drawn with rich, and when. The answer goes to stdout, everything else to stderr.

No escape code reaches a stream that is no terminal, nor any with NO_COLOR or TERM=dumb.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TextIO

from tinyllm_cli import text

if TYPE_CHECKING:
    from rich.console import Console

    from tinyllm.store.files import Progress, ProgressCallback


def is_plain(stream: TextIO) -> bool:
    """Whether `stream` must not get escape codes."""
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return dumb or bool(os.environ.get("NO_COLOR")) or not stream.isatty()


def out() -> Console:
    """The console on stdout, for answers."""
    return _console(stderr=False, plain=is_plain(sys.stdout))


def err() -> Console:
    """The console on stderr, for everything that is not the answer."""
    return _console(stderr=True, plain=is_plain(sys.stderr))


@cache
def _console(stderr: bool, plain: bool) -> Console:
    """A console that takes text literally: brackets, colons and numbers in it are what a model or a user wrote.

    It writes to what `sys.stdout` or `sys.stderr` is at the time of writing.
    """
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with a failure; a reader that has enough is none

    return PipeConsole(
        stderr=stderr,
        force_terminal=not plain,
        color_system=None if plain else "auto",
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


def note(message: str) -> None:
    """Tell the user something that is not the answer: one dim line on stderr."""
    if is_plain(sys.stderr):
        print(text.one_line(message), file=sys.stderr)
    else:
        err().print(text.one_line(message), style="dim")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print aligned columns to stdout, whole even in a narrow pipe.

    Args:
        headers: one per column; all empty: no line of headers.
        rows: texts, as many per row as there are headers.
        right: the numbers of the columns that are flush right.
    """
    from rich.cells import cell_len
    from rich.text import Text

    lines = [list(map(text.one_line, row)) for row in ([headers] if any(headers) else []) + [list(row) for row in rows]]
    widths = [max(cell_len(line[i]) for line in lines) if lines else 0 for i in range(len(headers))]
    for number, line in enumerate(lines):
        cells = []
        for i, cell in enumerate(line):
            gap = " " * (widths[i] - cell_len(cell))
            cells.append(gap + cell if i in right else cell + gap)
        out().print(Text("  ".join(cells).rstrip(), style="bold" if number == 0 and any(headers) else ""))


def show_log() -> None:
    """Show what the engine logs (notes about what takes time, warnings and worse) on stderr, one line each."""
    logger = logging.getLogger("tinyllm")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            note(record.getMessage())
            return
        print(f"tinyllm: {record.levelname.lower()}: {text.one_line(record.getMessage())}", file=sys.stderr)


@contextmanager
def download_progress() -> Iterator[ProgressCallback]:
    """Show a download on stderr: a bar on a terminal, else a line when it starts.

    Yields the callback for `hub.resolve` and `hub.pull`. Nothing is shown as long as it is not called.
    """
    shown = _LineProgress() if is_plain(sys.stderr) else _BarProgress()
    try:
        yield shown
    finally:
        shown.close()


class _LineProgress:
    """One line per thing that begins."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            if (progress.name, progress.note) in self._told:
                return
            self._told.add((progress.name, progress.note))
        how_much = f" ({text.size(progress.total)})" if progress.total else ""
        if progress.note:
            note(f"{progress.name}: {progress.note}")
        else:
            note(f"fetching {progress.name}{how_much}")

    def close(self) -> None:
        pass


class _BarProgress:
    """A bar with speed and remaining time, gone when the download is complete."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Bars(*columns, console=err(), transient=True)
        self._tasks: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            key = (progress.name, progress.note)
            if key not in self._tasks:
                for task in self._tasks.values():
                    self._bars.update(task, visible=False)
                description = progress.name + (f": {progress.note}" if progress.note else "")
                self._bars.start()
                self._tasks[key] = self._bars.add_task(text.one_line(description), total=progress.total or None)
            self._bars.update(self._tasks[key], completed=progress.done, visible=True)

    def close(self) -> None:
        self._bars.stop()
