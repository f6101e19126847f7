"""DRY ("don't repeat yourself"): a history of tokens flows in, penalties for tokens that would repeat it flow out.

A token that would continue a repetition of earlier text is penalised the more, the longer the repetition already is
(p-e-w, text-generation-webui PR 5677; details as in llama.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tinyllm.tokenizer import Tokenizer

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Token sequences that end a repetition: by their first token, what follows it."""

_MAX_BREAKER_BYTES = 40
_MAX_BREAKER_TOKENS = 20
_LARGEST_LOG = 88.7  # log of the largest float32


def dry_penalties(
    history: np.ndarray, breakers: Breakers, multiplier: float, base: float, allowed_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (int64, ascending) and what is to be subtracted from their logits (float32).

    A token that would continue a repetition of n tokens costs `multiplier * base ** (n - allowed_length)`, for n of at
    least `allowed_length`. `history`: int64, oldest first, as far back as DRY shall look.
    """
    unbroken = _unbroken_length(history, breakers)
    if len(history) <= allowed_length or unbroken < allowed_length:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    largest_power = int(_LARGEST_LOG / math.log(base)) if base > 1.000001 else len(history)
    lengths = _repetitions(history, min(unbroken, allowed_length + largest_power))
    continued = np.flatnonzero(lengths >= allowed_length)
    tokens, which = np.unique(history[continued + 1], return_inverse=True)
    longest = np.zeros(len(tokens))
    np.maximum.at(longest, which, lengths[continued])
    costs = multiplier * base ** (longest - allowed_length)
    return tokens, np.minimum(costs, np.finfo(np.float32).max).astype(np.float32)


def _repetitions(history: np.ndarray, limit: int) -> np.ndarray:
    """For each position but the last: how many tokens up to it equal the last tokens of all, at most `limit`."""
    lengths = np.zeros(len(history) - 1, np.int64)
    ends = np.arange(len(history) - 1)
    for depth in range(limit):
        ends = ends[ends >= depth]
        ends = ends[history[ends - depth] == history[len(history) - 1 - depth]]
        if not len(ends):
            break
        lengths[ends] = depth + 1
    return lengths


def _unbroken_length(history: np.ndarray, breakers: Breakers) -> int:
    """How many of the last tokens stand behind the last breaker."""
    tokens = history.tolist() if breakers else []
    for back, first in enumerate(reversed(tokens)):
        if first not in breakers:
            continue
        start = len(tokens) - back
        lengths = [len(tail) for tail in breakers[first] if list(tail) == tokens[start : start + len(tail)]]
        if lengths:
            return back - max(lengths)
    return len(history)


def dry_breakers(tokenizer: Tokenizer, texts: Iterable[str]) -> Breakers:
    """The token sequences that can spell one of `texts`, whatever stands around it.

    A token that contains the text breaks by itself; one that ends with the text's beginning does with the tokens of
    the remainder behind it.
    """
    breakers: dict[int, set[tuple[int, ...]]] = {}
    wanted = [text.encode()[:_MAX_BREAKER_BYTES] for text in texts]
    for token in range(tokenizer.n_vocab):
        piece = tokenizer.token_bytes(token)
        for text in wanted:
            tails = {()} if text in piece else set()
            for known in range(1, len(text)):
                if piece.endswith(text[:known]):
                    rest = tokenizer.encode(text[known:], add_special=False, parse_special=False)
                    tails.add(tuple(rest[:_MAX_BREAKER_TOKENS]))
            if tails:
                breakers.setdefault(token, set()).update(tails)
    return {token: sorted(tails) for token, tails in breakers.items()}
