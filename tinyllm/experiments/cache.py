"""Generation with a KV cache and without one: a model and a prompt go in, times of both ways by position come out.

Without a cache every token means to compute all tokens before it again. Both ways are greedy, so they must write the
same; that they do is compared, logits included.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import InvalidParameterError
from ..model import Model

_NEIGHBOURS = 8


@dataclass(frozen=True)
class Token:
    """A token that was written, the seconds that it took from the one before, and a checksum of its logits."""

    id: int
    seconds: float
    checksum: int


@dataclass(frozen=True)
class Row:
    """What it takes to write the token behind `position` tokens, and all tokens up to it.

    `cached_ms`, `recomputed_ms`: of one token, the median of the last eight. `cached_s`, `recomputed_s`: of all, the
    prompt with them. `cached_tokens`, `recomputed_tokens`: tokens that went through the network, n and Σ k over the
    lengths k. `same_tokens`, `same_logits`: whether both ways agree so far, logits bit for bit.
    """

    position: int
    cached_ms: float
    recomputed_ms: float
    cached_s: float
    recomputed_s: float
    cached_tokens: int
    recomputed_tokens: int
    same_tokens: bool
    same_logits: bool

    @property
    def speedup(self) -> float:
        """Of one token at this position."""
        return self.recomputed_ms / self.cached_ms

    @property
    def total_speedup(self) -> float:
        """Of all tokens up to this position."""
        return self.recomputed_s / self.cached_s


def with_cache(model: Model, prompt: Sequence[int], last: int) -> Iterator[Token]:
    """Greedy tokens behind a prompt, up to the one behind `last` tokens; each step computes only what is new."""
    sequence = model.new_sequence()
    try:
        new = list(prompt)
        while len(sequence) < last:
            yield (token := _next(sequence, new))
            new = [token.id]
    finally:
        sequence.release()


def without_cache(model: Model, prompt: Sequence[int], last: int) -> Iterator[Token]:
    """The same tokens; each step computes the whole text in an empty sequence."""
    tokens = list(prompt)
    while len(tokens) <= last:
        sequence = model.new_sequence()
        try:
            yield (token := _next(sequence, tokens))
        finally:
            sequence.release()
        tokens.append(token.id)


def _next(sequence, new: Sequence[int]) -> Token:
    started = time.perf_counter()
    logits = sequence.evaluate(new)[0]
    token = int(logits.argmax())
    return Token(token, time.perf_counter() - started, zlib.crc32(logits))


def compare(
    model: Model,
    prompt: Sequence[int],
    positions: Sequence[int],
    on_token: Callable[[int], None] = lambda position: None,
) -> Iterator[Row]:
    """Write up to the last position in both ways; a row comes out at each position.

    `on_token` is told the position before each token that is computed without the cache, which is what takes long.

    Raises InvalidParameterError for an empty prompt or positions in it, ContextFullError for positions behind the
    context.
    """
    positions = sorted(set(positions))
    if not prompt or not positions or positions[0] < len(prompt):
        raise InvalidParameterError(
            f"positions count from the beginning of the text, and the prompt alone has {len(prompt)} tokens"
        )
    _warm_up(model, prompt, positions[-1])
    cached = list(with_cache(model, prompt, positions[-1]))
    recomputed: list[Token] = []
    tokens = without_cache(model, prompt, positions[-1])
    for position in range(len(prompt), positions[-1] + 1):
        on_token(position)
        recomputed.append(next(tokens))
        if position in positions:
            yield _row(position, len(prompt), cached[: len(recomputed)], recomputed)


def _warm_up(model: Model, prompt: Sequence[int], last: int) -> None:
    """Touch code, weights and buffers of short and long steps, untimed."""
    for _ in with_cache(model, prompt, min(len(prompt) + 2, last)):
        pass
    sequence = model.new_sequence()
    sequence.evaluate([*prompt, *[prompt[-1]] * (last - len(prompt))], want="none")
    sequence.release()


def _row(position: int, n_prompt: int, cached: Sequence[Token], recomputed: Sequence[Token]) -> Row:
    def ms(tokens: Sequence[Token]) -> float:
        return 1e3 * statistics.median(token.seconds for token in tokens[-_NEIGHBOURS:])

    return Row(
        position,
        ms(cached),
        ms(recomputed),
        sum(token.seconds for token in cached),
        sum(token.seconds for token in recomputed),
        position,
        sum(range(n_prompt, position + 1)),
        [token.id for token in cached] == [token.id for token in recomputed],
        [token.checksum for token in cached] == [token.checksum for token in recomputed],
    )


@dataclass(frozen=True)
class Growth:
    """How the totals grow between two positions: as the position to the power of these. In theory 1 and 2."""

    start: int
    end: int
    cached: float
    recomputed: float


def growth(rows: Sequence[Row]) -> list[Growth]:
    """The growth from each row to the next."""
    return [
        Growth(
            a.position,
            b.position,
            math.log(b.cached_s / a.cached_s) / math.log(b.position / a.position),
            math.log(b.recomputed_s / a.recomputed_s) / math.log(b.position / a.position),
        )
        for a, b in pairwise(rows)
    ]
