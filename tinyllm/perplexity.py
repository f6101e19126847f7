"""How well models predict a text: a text goes in, the surprise of each scored token comes out, and how far the
distributions of several models are apart.

The windowed protocol is that of llama-perplexity: windows without overlap, of which the second half is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.errors import InvalidParameterError

if TYPE_CHECKING:
    from tinyllm.model import Model

_ROWS = 64  # rows of logits that are held at a time


@dataclass(eq=False)
class Score:
    """One model's result: `nll` float64 [n_scored] in nats, in the order of the text; `n_bytes` of the scored tokens.

    `kl`: KL(first model ‖ this one) in nats per scored token, and `same_first`: whether both have the same likeliest
    token. `first` is the first model's score where these are there: they are not defined for the first model itself,
    and where vocabularies differ. `seconds` counts the model's own work.
    """

    nll: list[np.ndarray] = field(default_factory=list)
    kl: list[np.ndarray] = field(default_factory=list)
    same_first: list[np.ndarray] = field(default_factory=list)
    n_bytes: int = 0
    n_computed: int = 0
    seconds: float = 0.0
    first: Score | None = None

    @property
    def n_scored(self) -> int:
        return sum(map(len, self.nll))

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(float(np.concatenate(self.nll).mean()))

    @property
    def error(self) -> float:
        """Standard error of the perplexity, as if tokens were independent."""
        nll = np.concatenate(self.nll)
        return self.perplexity * float(nll.std(ddof=1)) / math.sqrt(len(nll)) if len(nll) > 1 else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, unlike perplexity."""
        return float(np.concatenate(self.nll).sum()) / math.log(2) / max(1, self.n_bytes)

    @property
    def mean_kl(self) -> float | None:
        return float(np.concatenate(self.kl).mean()) if self.kl else None

    @property
    def kl_99(self) -> float | None:
        """The divergence that one token in a hundred is beyond: how bad the bad ones are."""
        return float(np.quantile(np.concatenate(self.kl), 0.99)) if self.kl else None

    @property
    def log_ratio(self) -> tuple[float, float] | None:
        """ln(perplexity / the first model's) and its standard error, which is small: both see the same tokens."""
        if self.first is None:
            return None
        change = np.concatenate(self.nll) - np.concatenate(self.first.nll)
        error = float(change.std(ddof=1)) / math.sqrt(len(change)) if len(change) > 1 else math.nan
        return float(change.mean()), error

    @property
    def agreement(self) -> float | None:
        """Share of scored tokens whose likeliest token is the first model's."""
        return float(np.concatenate(self.same_first).mean()) if self.same_first else None


def encode_text(model: Model, text: str | bytes) -> list[int]:
    """Ids of a text as perplexity is measured: BOS or EOS as the vocabulary says, nothing in it read as special."""
    return model.tokenizer.encode(text, add_special=True, parse_special=False)


def windows_of(ids: Sequence[int], window: int, bos: int | None) -> Iterator[list[int]]:
    """Windows of ids without overlap, the incomplete tail dropped; the first id of each becomes BOS if one is given."""
    for start in range(0, len(ids) - window + 1, window):
        part = list(ids[start : start + window])
        yield part if bos is None else [bos, *part[1:]]


def measure(
    models: Sequence[Model],
    text: str | bytes,
    window: int | None = 512,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Score a text with each model.

    `window`: ids per window, of which those from window / 2 + 1 on are scored; None: one window over everything, all
    ids but the first scored. `progress` is told windows done and windows in all.

    Raises InvalidParameterError for a text that is too short, or a window that is longer than a context.
    """
    ids = [encode_text(model, text) for model in models]
    scores = [Score() for _ in models]
    same_vocabulary = [own == ids[0] and model.config.n_vocab == models[0].config.n_vocab
                       for own, model in zip(ids, models, strict=True)]  # fmt: skip
    for score, same in zip(scores[1:], same_vocabulary[1:], strict=True):
        score.first = scores[0] if same else None
    plans = [_plan(model, own, window) for model, own in zip(models, ids, strict=True)]
    n_windows = max(map(len, plans))
    for number in range(n_windows):
        if progress is not None:
            progress(number, n_windows)
        first: list[np.ndarray] = []
        for i, (model, plan, score) in enumerate(zip(models, plans, scores, strict=True)):
            if number < len(plan):
                compared = iter(first) if i and same_vocabulary[i] else None
                keep = first if i == 0 and any(same_vocabulary[1:]) else None
                _score_window(model, plan[number], score, 1 if window is None else window // 2 + 1, keep, compared)
    return scores


def _plan(model: Model, ids: list[int], window: int | None) -> list[list[int]]:
    size = len(ids) if window is None else window
    if size > model.n_ctx:
        raise InvalidParameterError(f"a window of {size} tokens does not fit into the context of {model.n_ctx}")
    if size < 4 or len(ids) < size:
        raise InvalidParameterError(f"the text has {len(ids)} tokens, too few for a window of {max(4, size)}")
    bos = model.tokenizer.bos_id if model.tokenizer.add_bos and window is not None else None
    return list(windows_of(ids, size, bos))


def _score_window(
    model: Model,
    ids: list[int],
    score: Score,
    first_scored: int,
    keep: list[np.ndarray] | None,
    compared: Iterator[np.ndarray] | None,
) -> None:
    """Score `ids` from number `first_scored` on. `keep` gathers log-probabilities, `compared` hands out another's."""
    sequence = model.new_sequence()
    try:
        started = perf_counter()
        if first_scored > 1:
            sequence.evaluate(ids[: first_scored - 1], want="none")
        score.seconds += perf_counter() - started
        for at in range(first_scored - 1, len(ids) - 1, _ROWS):
            part = ids[at : min(at + _ROWS, len(ids) - 1)]
            started = perf_counter()
            logits = sequence.evaluate(part, want="all")
            score.seconds += perf_counter() - started
            log_probs = _log_softmax(logits)
            following = ids[at + 1 : at + 1 + len(part)]
            score.nll.append(-log_probs[np.arange(len(part)), following].astype(np.float64))
            score.n_bytes += sum(len(model.tokenizer.token_bytes(token)) for token in following)
            if keep is not None:
                keep.append(log_probs)
            if compared is not None:
                other = next(compared)
                score.kl.append(np.einsum("ij,ij->i", np.exp(other), other - log_probs, dtype=np.float64))
                score.same_first.append(other.argmax(axis=1) == log_probs.argmax(axis=1))
        score.n_computed += len(ids) - 1
    finally:
        sequence.release()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 [n, n_vocab]; the sums are taken in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return shifted - np.log(total).astype(np.float32)
