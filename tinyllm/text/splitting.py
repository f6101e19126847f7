"""Cutting text into the pieces that merges never reach across: text and a pre-tokenizer flow in, its pieces flow out.
Each step of a pre-tokenizer cuts the pieces of the steps before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tinyllm.text.characters import classes, plain_spaces

UNDERLINE = "\u2581"
"""What vocabularies of SentencePiece's kind write for a space."""

_SHORT = 512

Finder = Callable[[str, int, int], Iterator[re.Match[str]]]


@dataclass(frozen=True)
class Pattern:
    """A step that makes a piece of each match, and one of whatever lies between two matches."""

    expression: str
    by_class: bool = True
    """Whether it is matched against `classes(text)`; else against the text itself, all its white space made plain."""

    @cached_property
    def _find(self) -> Finder:
        return re.compile(self.expression).finditer

    def cut(self, view: str, ends: list[int]) -> list[int]:
        """Cut the pieces that end at `ends`; returns where all pieces end, in order."""
        finer: list[int] = []
        start = 0
        for end in ends:
            done = start
            for match in self._find(view, start, end):
                first, last = match.span()
                if first > done:
                    finer.append(first)
                finer.append(last)
                done = last
            if done < end:
                finer.append(end)
            start = end
        return finer


@dataclass(frozen=True)
class DigitGroups:
    """A step that cuts each run of digits into threes counted from its end.

    With `keep_text` the first group of a run stays one piece with the text before it and a later step parts them, so
    that this step still sees a digit behind the white space there.
    """

    digits: str
    """What stands inside the brackets of an expression over `classes(text)`."""
    keep_text: bool
    by_class: bool = True

    @cached_property
    def _find(self) -> Finder:
        return re.compile(f"[{self.digits}]+").finditer

    def cut(self, view: str, ends: list[int]) -> list[int]:
        """Cut the pieces that end at `ends`; returns where all pieces end, in order."""
        finer: list[int] = []
        start = 0
        for end in ends:
            for match in self._find(view, start, end):
                first, last = match.span()
                cuts = range(last - (last - first) // 3 * 3, last, 3)
                lowest = first if self.keep_text else start
                finer.extend(cuts if cuts and cuts[0] > lowest else cuts[1:])
                if self.keep_text and last < end:
                    finer.append(last)
            finer.append(end)
            start = end
        return finer


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut for a byte-pair vocabulary, and what else is known of such a vocabulary by its name alone."""

    steps: tuple[Pattern | DigitGroups, ...]
    whole_words: bool = False
    """A piece that is a token is not merged from its parts (`ignore_merges` of Hugging Face)."""
    whole_newlines: bool = False
    """The same, but only for a run of newlines."""
    byte_level: bool = True
    """Tokens are written in the byte alphabet of GPT-2; else in plain text, and single bytes as `<0xNN>`."""
    drops_spaces: bool = False
    """White space parts words and is no part of the text; capitals may be lowered."""
    underlined_spaces: bool = False
    """Tokens are written with U+2581 for each space."""
    clean_spaces: bool = False
    """Decoding drops spaces before punctuation."""
    add_bos: bool = False
    always_bos: bool = False
    """BOS is added whatever the file says."""
    add_sep: bool = False
    default_bos: bool = True
    """Token 11 is BOS if the file names none."""

    def split(self, text: str) -> list[str]:
        """The pieces of `text` in order: joined they are `text` again."""
        ends = [len(text)] if text else []
        views: dict[bool, str] = {}
        for step in self.steps:
            if step.by_class not in views:
                views[step.by_class] = classes(text) if step.by_class else plain_spaces(text)
            ends = step.cut(views[step.by_class], ends)
        return [text[start:end] for start, end in pairwise((0, *ends))]


class WordCutter:
    """Cuts long texts before each underlined space that no token reaches across. What is made of a text does not change
    by that, but its words can be looked up when they come again."""

    def __init__(self, *vocabularies: Iterable[str]):
        """`vocabularies` are tokens or merges."""
        self._vocabularies = vocabularies

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        crossed = re.compile(f"([^{UNDERLINE}\0]) ?{UNDERLINE}")
        chars = {char for entries in self._vocabularies for char in crossed.findall("\0".join(entries))}
        # An underline behind an underline may always be one token with it.
        return re.compile(f"(?<=[^{re.escape(''.join(sorted(chars)))}{UNDERLINE}])(?={UNDERLINE})")

    def words(self, text: str) -> list[str]:
        return [text] if len(text) < _SHORT else self._cut.split(text)
