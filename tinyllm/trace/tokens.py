"""The tokens that really ran, for display: ids flow in, pieces, bytes, kinds and groups flow out."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyllm.text.traced_text import TracedText, scaffold_of

if TYPE_CHECKING:
    from tinyllm.tokenizer import Tokenizer

_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True, slots=True)
class TraceToken:
    """One token of a run.

    `text`: its piece, with bytes that are no character by themselves as `⟨e6 ad⟩` and control characters visible.
    `template`: written by the chat template, not by the user. `group`: a number shared by neighbours that form one
    character together, or None.
    """

    id: int
    text: str
    data: bytes
    control: bool = False
    template: bool = False
    generated: bool = False
    group: int | None = None


def display(data: bytes) -> str:
    """A token's bytes as one visible line: `·` space, `⏎` line break, `⟨e6⟩` bytes of an unfinished character."""
    text = data.decode("utf-8", "surrogateescape")
    if text.isascii() and text.isprintable():
        return text.replace(" ", "·")
    pieces = re.split("([\udc80-\udcff]+)", text)
    return "".join(
        f"⟨{' '.join(f'{ord(char) & 0xFF:02x}' for char in piece)}⟩" if i % 2 else "".join(map(_visible, piece))
        for i, piece in enumerate(pieces)
    )


def _visible(char: str) -> str:
    if char in _VISIBLE:
        return _VISIBLE[char]
    # Controls, bidirectional marks, lone surrogates, private and unassigned characters, and other spaces.
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"):
        return f"⟨U+{ord(char):04X}⟩"
    return char


def describe_tokens(
    tokenizer: Tokenizer, prompt: Sequence[int], generated: Sequence[int], traced: TracedText | None
) -> list[TraceToken]:
    """Tokens of a prompt and of what was generated; `traced`: the prompt's text as its chat template wrote it."""
    ids = [*prompt, *generated]
    pieces = [tokenizer.token_bytes(token) for token in ids]
    template = _written_by_template(pieces[: len(prompt)], traced)
    template += [False] * len(generated)
    groups = _groups(pieces)
    return [
        TraceToken(token, display(data), data, tokenizer.is_control(token), template[i], i >= len(prompt), groups[i])
        for i, (token, data) in enumerate(zip(ids, pieces, strict=True))
    ]


def _written_by_template(pieces: list[bytes], traced: TracedText | None) -> list[bool]:
    """Which tokens hold nothing but scaffold. All False where the tokens do not spell the text."""
    if traced is None:
        return [False] * len(pieces)
    scaffold = b"".join(
        bytes([mark]) * len(char.encode("utf-8", "surrogateescape"))
        for char, mark in zip(traced.plain(), scaffold_of(traced), strict=True)
    )
    text, spelled = traced.plain().encode("utf-8", "surrogateescape"), b"".join(pieces)
    if not spelled.endswith(text):
        return [False] * len(pieces)
    # What stands before the text (BOS, a space of the vocabulary) is no user's either.
    scaffold = b"\1" * (len(spelled) - len(text)) + scaffold
    marks, at = [], 0
    for piece in pieces:
        marks.append(all(scaffold[at : at + len(piece)]))
        at += len(piece)
    return marks


def _groups(pieces: list[bytes]) -> list[int | None]:
    """Numbers of groups of neighbouring tokens that share a character."""
    groups: list[int | None] = [None] * len(pieces)
    missing, number = 0, -1  # continuation bytes that the open character still waits for
    for i, piece in enumerate(pieces):
        joined = missing > 0
        for byte in piece:
            if byte >= 0xC0:
                missing = 1 + (byte >= 0xE0) + (byte >= 0xF0)
            elif 0x80 <= byte < 0xC0:
                missing = max(0, missing - 1)
            else:
                missing = 0
        if joined:
            groups[i] = groups[i - 1] = number
        if missing > 0 and not joined:
            number += 1
    return groups
