"""Strings that remember which of their characters a chat template wrote and which came in as data.

A template's own literals enter as scaffold; what string operations make of them keeps the memory, and every operation
that is not followed yields a plain `str`, which counts as data: forgetting is always safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex


class TracedText(str):
    """Text with one byte of memory per character: 1 for scaffold, 0 for data.

    Behaves as the `str` it is in every other respect, so that a template cannot tell the difference.
    """

    __slots__ = ("_scaffold",)  # the underscore keeps it out of a sandboxed template's reach
    _scaffold: bytes

    def __new__(cls, text: str = "", scaffold: bytes | None = None) -> TracedText:
        self = super().__new__(cls, text)
        self._scaffold = bytes(len(text)) if scaffold is None else scaffold
        return self

    def __str__(self) -> TracedText:
        return self

    def plain(self) -> str:
        """The same characters as an ordinary `str`."""
        return str.__str__(self)

    def __add__(self, other: str) -> TracedText:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented  # Markup has its own rules for the sum
        return TracedText(str.__add__(self, other), self._scaffold + scaffold_of(other))

    def __radd__(self, other: str) -> TracedText:
        if not isinstance(other, str):
            return NotImplemented
        return TracedText(str.__add__(other, self), scaffold_of(other) + self._scaffold)

    def __mul__(self, times: SupportsIndex) -> TracedText:
        return TracedText(str.__mul__(self, times), self._scaffold * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = str.__mod__(self, values)
        pieces = self.split("%s")
        values = values if isinstance(values, tuple) else (values,)
        if not self.count("%") == len(pieces) - 1 == len(values):
            return text  # other conversions than a plain %s
        filled = [pieces[0]]
        for value, piece in zip(values, pieces[1:], strict=True):
            filled += [str(value), piece]
        return _EMPTY.join(filled)

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        scaffold = self._scaffold[key] if isinstance(key, slice) else bytes([self._scaffold[key]])
        return TracedText(str.__getitem__(self, key), scaffold)

    def join(self, items: Iterable[str]) -> TracedText:
        items = list(items)
        return TracedText(str.join(self, items), self._scaffold.join(map(scaffold_of, items)))

    def lstrip(self, chars: str | None = None) -> TracedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> TracedText:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> TracedText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> TracedText:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedText]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedText]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, pieces: list[str], sep: str | None) -> list[TracedText]:
        located, at = [], 0
        for piece in pieces:
            if sep is None:
                at = self.find(piece, at)
            located.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return located

    def partition(self, sep: str) -> tuple[TracedText, TracedText, TracedText]:
        head, middle, _ = str.partition(self, sep)
        return self._cut(len(head), len(middle))

    def rpartition(self, sep: str) -> tuple[TracedText, TracedText, TracedText]:
        head, middle, _ = str.rpartition(self, sep)
        return self._cut(len(head), len(middle))

    def _cut(self, head: int, middle: int) -> tuple[TracedText, TracedText, TracedText]:
        return self[:head], self[head : head + middle], self[head + middle :]

    def splitlines(self, keepends: bool = False) -> list[TracedText]:
        lines, at = [], 0
        for whole, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            lines.append(self[at : at + len(line)])
            at += len(whole)
        return lines

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return TracedText(new, scaffold_of(new)).join(self.split(old, count))

    def upper(self) -> TracedText:
        return self._recased(str.upper(self))

    def lower(self) -> TracedText:
        return self._recased(str.lower(self))

    def title(self) -> TracedText:
        return self._recased(str.title(self))

    def capitalize(self) -> TracedText:
        return self._recased(str.capitalize(self))

    def _recased(self, text: str) -> TracedText:
        return TracedText(text, self._scaffold if len(text) == len(self) else None)


def scaffold(text: str) -> TracedText:
    """`text` as written by the template."""
    return TracedText(text, b"\1" * len(text))


def scaffold_of(text: str) -> bytes:
    """One byte per character of `text`: 1 where the template wrote it, 0 where it is data."""
    return text._scaffold if isinstance(text, TracedText) else bytes(len(text))


_EMPTY = TracedText("")
