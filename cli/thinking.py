"""The thinking of a reasoning model: streamed text goes in, parts marked as thinking or answer come out."""

from __future__ import annotations

from typing import NamedTuple

from tinyllm.chat_format import REASONING_TAGS


class Part(NamedTuple):
    """A piece of a reply; the tags belong to the thinking."""

    text: str
    thinking: bool


class ThinkingSplitter:
    """Finds the block between thinking tags that a reply may begin with.

    `opened`: the closing tag of a block that the prompt has opened already. `hide`: keep the block back, and the space
    behind it; a block that never closes comes out at the end after all, or there would be no answer.
    """

    def __init__(self, opened: str | None = None, hide: bool = False) -> None:
        self.hidden = ""
        self._hide = hide
        self._trim = False
        self._closing = opened
        self._held = ""
        self._answering = False

    def push(self, text: str) -> list[Part]:
        """Takes more of the reply; returns what is sure by now."""
        parts: list[Part] = []
        self._held += text
        if self._closing is None and not self._answering:
            self._look_for_opening()
        if self._closing is not None:
            end = self._held.find(self._closing)
            if end < 0:
                sure = len(self._held) - len(self._closing) + 1  # the rest may be a part of the closing tag
                self._think(parts, max(sure, 0))
            else:
                self._think(parts, end + len(self._closing))
                self._closing, self._answering, self._trim = None, True, self._hide
        if self._answering:
            text = self._held.lstrip() if self._trim else self._held
            if text:
                parts.append(Part(text, thinking=False))
                self._trim = False
            self._held = ""
        return parts

    def flush(self) -> list[Part]:
        """The rest, when the reply is over."""
        unclosed = self._closing is not None
        text = (self.hidden if unclosed else "") + self._held
        self.hidden, self._held = "" if unclosed else self.hidden, ""
        return [Part(text, thinking=unclosed)] if text else []

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        for opening, closing in REASONING_TAGS:
            if begun.startswith(opening):
                self._closing = closing
                return
        self._answering = bool(begun) and not any(opening.startswith(begun) for opening, _ in REASONING_TAGS)

    def _think(self, parts: list[Part], length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if self._hide:
            self.hidden += text
        elif text:
            parts.append(Part(text, thinking=True))


def opened_by(prompt_end: str) -> str | None:
    """The closing tag to wait for when a prompt ends with an opening one (templates that make the model think)."""
    return next((closing for opening, closing in REASONING_TAGS if prompt_end.rstrip().endswith(opening)), None)
