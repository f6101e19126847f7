"""Temperature and cuts on one real distribution: logits for the next token go in, out come entropies, likeliest tokens,
and what each cut keeps when it comes before the temperature and behind it. All stages are the sampler's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.errors import InvalidParameterError
from tinyllm.sampling import stages
from tinyllm.sampling.candidates import Candidates

from .axes import Axis, number
from .chart import Series, line_chart

if TYPE_CHECKING:
    from tinyllm.model import Model

_BITS = 1 / math.log(2)
_CURVE_POINTS = 24


@dataclass(frozen=True)
class Cut:
    """A stage that drops tokens: `kind` is "top-k" (a whole `value` of at least 1), "top-p" or "min-p" (0 < value ≤ 1).

    Raises InvalidParameterError for a value that cannot be.
    """

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind == "top-k":
            if self.value < 1 or self.value != int(self.value):
                raise InvalidParameterError(f"top-k keeps a whole number of tokens, not {self.value:g}")
        elif not 0 < self.value <= 1:
            raise InvalidParameterError(f"{self.kind} is above 0 and at most 1, not {self.value:g}")

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"

    @property
    def apply(self) -> Callable[[Candidates], Candidates]:
        """The sampler's stage."""
        if self.kind == "top-k":
            return partial(stages.top_k, k=int(self.value))
        return partial({"top-p": stages.top_p, "min-p": stages.min_p}[self.kind], p=self.value)


@dataclass(frozen=True)
class Spread:
    """How wide a distribution over `n` tokens is: its entropy in bits, and the likeliest tokens (id, probability).

    `effective`: 2 to the power of the entropy, the number of equally likely tokens of the same entropy.
    """

    n: int
    entropy: float
    top: tuple[tuple[int, float], ...] = ()

    @property
    def effective(self) -> float:
        return 2.0**self.entropy


@dataclass(frozen=True)
class Kept:
    """What a cut kept: `mass` of the probability in front of it, and the final distribution's spread."""

    mass: float
    spread: Spread


@dataclass(frozen=True)
class Orders:
    """One cut and one temperature in both orders.

    `stray`: with the temperature first, the probability of a token that the cut drops when it comes first.
    """

    cut: Cut
    temperature: float
    cut_first: Kept
    temperature_first: Kept
    stray: float


@dataclass(frozen=True)
class Study:
    """Everything about one step: spreads by temperature, and the two orders for each cut at each temperature."""

    temperatures: dict[float, Spread]
    orders: dict[Cut, list[Orders]]


def next_logits(model: Model, prompt: str, raw: bool = False) -> np.ndarray:
    """Logits of what follows a prompt (float32 [n_vocab]), which is a question in the chat template unless `raw`."""
    from tinyllm.generate import prepare_conversation

    if raw or model.chat_template is None:
        ids = model.tokenizer.encode(prompt)
    else:
        ids = prepare_conversation(model, [{"role": "user", "content": prompt}]).ids
    sequence = model.new_sequence()
    try:
        return sequence.evaluate(ids, want="last")[0]
    finally:
        sequence.release()


def study(logits: np.ndarray, temperatures: Sequence[float], cuts: Sequence[Cut], n_top: int = 5) -> Study:
    """Look at logits (float32 [n_vocab]) by temperature, and at cuts before and behind each temperature.

    Raises InvalidParameterError for a temperature that is negative or no number.
    """
    for value in temperatures:
        if not 0 <= value < math.inf:
            raise InvalidParameterError(f"a temperature is a number from 0 on, not {value:g}")
    everything = Candidates(None, logits)
    heated = {value: stages.temperature(everything, value) for value in temperatures}
    return Study(
        temperatures={value: _spread(candidates, n_top) for value, candidates in heated.items()},
        orders={cut: [_orders(everything, heated[value], cut, value) for value in temperatures] for cut in cuts},
    )


def _orders(everything: Candidates, heated: Candidates, cut: Cut, temperature: float) -> Orders:
    few = cut.apply(everything)
    rest = cut.apply(heated)
    allowed = np.zeros(len(everything), bool)
    allowed[_ids(few)] = True
    return Orders(
        cut,
        temperature,
        cut_first=Kept(_mass(everything, few), _spread(stages.temperature(few, temperature))),
        temperature_first=Kept(_mass(heated, rest), _spread(rest)),
        stray=float(rest.probs[~allowed[_ids(rest)]].sum()),
    )


def _ids(candidates: Candidates) -> np.ndarray:
    return np.arange(len(candidates)) if candidates.ids is None else candidates.ids


def _mass(before: Candidates, after: Candidates) -> float:
    """The share of the probability before that belongs to what is there after a cut."""
    return min(1.0, math.exp(after.log_total - before.log_total))


def _spread(candidates: Candidates, n_top: int = 0) -> Spread:
    probs = candidates.probs
    entropy = max(0.0, stages.entropy(probs)) * _BITS
    top: list[tuple[int, float]] = []
    if n_top:
        best = candidates.best(n_top)
        shares = np.exp(best.logits - candidates.log_total, dtype=np.float64)
        top = list(zip(best.ids.tolist(), shares.tolist(), strict=True))
    return Spread(len(candidates), entropy, tuple(top))


def picture(logits: np.ndarray, temperatures: Sequence[float], cuts: Sequence[Cut], prompt: str) -> str:
    """An SVG of how many tokens a cut keeps behind each temperature, up to the highest of `temperatures`."""
    hottest = max([*temperatures, 1.0])
    everything = Candidates(None, logits)
    # Half of the points lie up to 1, so that there is one at 1: what a cut keeps that comes before the temperature.
    values = [*np.linspace(0.1, 1, _CURVE_POINTS // 2), *np.linspace(1, hottest, _CURVE_POINTS // 2)[1:]]
    heated = {value: stages.temperature(everything, value) for value in map(float, values)}
    series = [
        Series(cut.name, [(value, len(cut.apply(candidates))) for value, candidates in heated.items()]) for cut in cuts
    ]
    effective = [(value, _spread(candidates).effective) for value, candidates in heated.items()]
    said = "; ".join(
        f"{line.name} keeps {line.points[_CURVE_POINTS // 2 - 1][1]} at temperature 1 and {number(line.points[-1][1])} "
        f"at {hottest:g}"
        for line in series
    )
    return line_chart(
        f"Tokens that a cut keeps behind a temperature: {shorten(prompt, 60, placeholder='…')}",
        [Series("effective number, no cut", effective, theory=True), *series],
        Axis("temperature"),
        Axis("tokens", base=10),
        f"{said}. In front of the temperature a cut keeps at every temperature what it keeps at 1.",
    )
