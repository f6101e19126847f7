"""From a rendered conversation to ids: a traced text flows in, ids flow out whose control tokens are all scaffold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tinyllm.text.traced_text import TracedText, scaffold_of

if TYPE_CHECKING:
    from tinyllm.tokenizer import Tokenizer

Span = tuple[int, int]


def encode_traced(text: TracedText, tokenizer: Tokenizer) -> list[int]:
    """Ids of `text`, without the tokenizer's own BOS or EOS.

    They are those of the whole text with special tokens on, except where data spells out (or completes) a control
    token: the stretch around it, from one control token of the scaffold to the next, is tokenized with them off.
    """
    plain = text.plain()
    ids = tokenizer.encode(plain, add_special=False, parse_special=True)
    controls = {token for token in set(ids) if tokenizer.is_control(token) or token == tokenizer.unk_id}
    written: list[Span] = []
    forged: list[Span] = []
    for token in controls:
        for start, end in _occurrences(plain, tokenizer.token_bytes(token).decode("utf-8", "surrogateescape")):
            (written if all(scaffold_of(text)[start:end]) else forged).append((start, end))
    if not forged:
        return ids

    ids, done = [], 0
    for before, stretch, after in _stretches(written, forged, len(plain)):
        start, end = stretch
        ids += encode_traced(text[done:start], tokenizer)
        middle = _bare(plain[slice(*before)], plain[start:end], plain[slice(*after)], tokenizer)
        ids += tokenizer.encode(middle, add_special=False, parse_special=False)
        done = end
    return ids + encode_traced(text[done:], tokenizer)


def _occurrences(text: str, part: str) -> Iterator[Span]:
    """All places of `part` in `text`, overlapping ones too."""
    at = text.find(part) if part else -1
    while at >= 0:
        yield at, at + len(part)
        at = text.find(part, at + 1)


def _stretches(written: list[Span], forged: list[Span], length: int) -> Iterator[tuple[Span, Span, Span]]:
    """The gaps between written control tokens that a forged one touches, each between its two neighbours."""
    gaps: list[tuple[Span, Span, Span]] = []
    before = (0, 0)
    for token in [*sorted(written, key=lambda span: (span[0], -span[1])), (length, length)]:
        if token[0] >= before[1]:  # else it overlaps the one before
            gaps.append((before, (before[1], token[0]), token))
            before = token
    for gap in gaps:
        start, end = gap[1]
        if any(first < end and start < last for first, last in forged):
            yield gap


def _bare(before: str, text: str, after: str, tokenizer: Tokenizer) -> str:
    """`text` without the white space that its neighbours, control tokens, take away in some vocabularies."""
    left = text[: len(text) - len(text.lstrip())]
    if left and before and _special(before + left, tokenizer) == _special(before, tokenizer):
        text = text[len(left) :]
    right = text[len(text.rstrip()) :]
    if right and after and _special(right + after, tokenizer) == _special(after, tokenizer):
        text = text[: len(text) - len(right)]
    return text


def _special(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=True)
