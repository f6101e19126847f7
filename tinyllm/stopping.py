"""Stop strings: the text of a generation goes in piece by piece, what is sure to come before any of them comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyllm.tokenizer import Tokenizer


class StopFilter:
    """Lets text through until one of the stop strings has come; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text; returns what is safe to show, and whether a stop string ended it."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def flush(self) -> str:
        """What was held back, when nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _begun(self, stop: str) -> int:
        """How many characters at the end of the text are a beginning of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


def control_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> set[int]:
    """Control tokens given as stop strings (`<|im_end|>`): they have no text that the filter could meet."""
    encoded = (tokenizer.encode(stop, add_special=False, parse_special=True) for stop in stops)
    return {ids[0] for ids in encoded if len(ids) == 1 and tokenizer.is_control(ids[0])}
