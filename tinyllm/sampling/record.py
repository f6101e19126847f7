"""What happened to the candidates on their way to a token: stages flow in, records for display flow out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tinyllm.sampling.candidates import Candidates


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage, as the most probable candidates in front of it saw it, best first.

    A candidate that it dropped has logit -inf and probability 0 behind it.
    """

    name: str
    ids: np.ndarray  # int64 [m]
    logits_before: np.ndarray  # float32 [m]
    logits_after: np.ndarray  # float32 [m]
    probs_before: np.ndarray  # float64 [m]
    probs_after: np.ndarray  # float64 [m]
    n_before: int
    n_after: int
    kept_mass: float
    """How much of the probability in front of the stage belonged to what it kept."""


@dataclass(frozen=True, slots=True)
class DrawRecord:
    """The last step: a random number falls on the running sum of probabilities.

    `ids` and `probs` are the first candidates in the order in which they were summed; the token chosen covers
    `below` up to `below + prob` of [0, 1).
    """

    ids: np.ndarray  # int64 [m]
    probs: np.ndarray  # float64 [m]
    n: int
    token: int
    prob: float
    below: float
    u: float | None
    """None: the most probable token was taken without a draw."""


@dataclass(slots=True)
class TokenRecord:
    """All that led to one token."""

    stages: list[StageRecord] = field(default_factory=list)
    draw: DrawRecord | None = None


class Recorder:
    """Collects a TokenRecord for each sampled token, with the `limit` most probable candidates of each stage."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self.tokens: list[TokenRecord] = []
        self._open = TokenRecord()

    def add_stage(self, name: str, before: Candidates, after: Candidates) -> None:
        shown = before.best(self.limit)
        at, inside = _by_id(after).locate(shown.ids)
        logits = np.full(len(shown), -np.inf, np.float32)
        logits[inside] = _by_id(after).logits[at]
        dropped = len(after) < len(before)
        self._open.stages.append(
            StageRecord(
                name=name,
                ids=shown.ids,
                logits_before=shown.logits,
                logits_after=logits,
                probs_before=np.exp(shown.logits - before.log_total, dtype=np.float64),
                probs_after=np.exp(logits - after.log_total, dtype=np.float64),
                n_before=len(before),
                n_after=len(after),
                kept_mass=float(np.exp(after.log_total - before.log_total)) if dropped else 1.0,
            )
        )

    def add_draw(self, candidates: Candidates, at: int, u: float | None) -> None:
        first = candidates.pick(slice(self.limit))
        probs = candidates.probs
        self._open.draw = DrawRecord(
            ids=first.ids,
            probs=probs[: self.limit],
            n=len(candidates),
            token=candidates.token(at),
            prob=float(probs[at]),
            below=float(probs[:at].sum()),
            u=u,
        )
        self.tokens.append(self._open)
        self._open = TokenRecord()


def _by_id(candidates: Candidates) -> Candidates:
    if candidates.ids is None or not candidates.ordered:
        return candidates
    return candidates.pick(np.argsort(candidates.ids), ordered=False)
