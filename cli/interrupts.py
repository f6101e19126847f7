"""Ctrl-C while an answer comes: a generation goes in, its steps come out until the first Ctrl-C.

The engine is made to be interrupted and stops within an op; what draws on the terminal is not, and is left in peace.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.generate import Generation, Step


class StopOnCtrlC:
    """A context in which the first Ctrl-C ends `steps`; the second one raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self._stopped = False
        self._computing = False
        self._before: Any = None

    def steps(self, generation: Generation) -> Iterator[Step]:
        """The steps of the generation as far as they come."""
        while not self._stopped:
            try:
                self._computing = True
                step = next(generation, None)
            except KeyboardInterrupt:
                return
            finally:
                self._computing = False
            if step is None:
                return
            yield step

    def __enter__(self) -> StopOnCtrlC:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as it is in a job that a script runs in the background
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        second, self._stopped = self._stopped, True
        if second or self._computing:
            raise KeyboardInterrupt
