"""Choosing the next token: logits, the tokens so far and a seed flow in, one token flows out.

The chain and its order are llama.cpp's: bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC,
temperature, draw; or Mirostat. Nothing else has an influence, so the same seed gives the same tokens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.errors import InvalidParameterError, SamplingError
from tinyllm.sampling import stages as stages
from tinyllm.sampling.candidates import Candidates
from tinyllm.sampling.dry import Breakers, dry_breakers, dry_penalties
from tinyllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tinyllm.sampling.record import Recorder
    from tinyllm.tokenizer import Tokenizer

__all__ = ["Choice", "Sampler", "SamplingParams"]

Stage = Callable[[Candidates], Candidates]


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, with the natural logarithm of its probability before any stage."""

    token: int
    logprob: float


class Sampler:
    """Chooses tokens by `params` from a vocabulary of `n_vocab`; holds the history and the random generator.

    `tokenizer` is needed for DRY only, whose sequence breakers are texts. `recorder` is shown every stage.
    Raises InvalidParameterError for a bias of a token that does not exist, or for DRY without a tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        tokenizer: Tokenizer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.params = params
        self.n_vocab = n_vocab
        self.recorder = recorder
        self.seed = params.seed if params.seed is not None and params.seed >= 0 else secrets.randbits(32)
        self._breakers = self._find_breakers(tokenizer)
        self._chain = list(self._stages())
        self._last: Candidates | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and start again from the seed."""
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._mu = 2 * self.params.mirostat_tau
        self._tokens = np.empty(256, np.int64)
        self._n_tokens = 0

    def accept(self, token: int) -> None:
        """Add a token, of the prompt or chosen, to the history that penalties look at."""
        if self._n_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._n_tokens] = token
        self._n_tokens += 1

    def sample(self, logits: np.ndarray, mask: np.ndarray | None = None) -> Choice:
        """Choose a token by `logits` (float32 [n_vocab]), which are only read.

        `mask` (bool [n_vocab]): the tokens that are allowed. Does not `accept` the token. Raises SamplingError for
        logits that are no numbers, and where no token is left.
        """
        everything = Candidates(None, np.asarray(logits, np.float32).reshape(-1))
        if len(everything) != self.n_vocab:
            raise SamplingError(f"{len(everything)} logits for a vocabulary of {self.n_vocab} tokens")
        if not -np.inf < everything.max < np.inf:
            raise SamplingError(f"the model's logits are broken: the largest is {everything.max}")
        candidates = everything
        chain = self._chain if mask is None else [("mask", partial(stages.allowed, mask=mask)), *self._chain]
        for name, stage in chain:
            before, candidates = candidates, stage(candidates)
            if not len(candidates) or candidates.max == -np.inf:
                raise SamplingError("no token can follow here: the constraint, or biases of -inf, exclude them all")
            if self.recorder is not None:
                self.recorder.add_stage(name, before, candidates)
        token = self._pick(candidates)
        self._last = everything
        return Choice(token, float(everything.logits[token]) - everything.log_total)

    def top_logprobs(self, n: int) -> list[tuple[int, float]]:
        """The `n` most probable tokens of the last `sample`, before any stage; call it before its logits are reused."""
        if self._last is None or n <= 0:
            return []
        best = self._last.best(n)
        return list(zip(best.ids.tolist(), (best.logits - self._last.log_total).tolist(), strict=True))

    def _pick(self, candidates: Candidates) -> int:
        if self.params.temperature <= 0:
            at, u = int(candidates.logits.argmax()), None
        else:
            u = self._random.random()
            at = stages.draw(candidates, u)
        if self.params.mirostat:
            surprise = (candidates.log_total - float(candidates.logits[at])) / math.log(2)
            self._mu -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        if self.recorder is not None:
            self.recorder.add_draw(candidates, at, u)
        return candidates.token(at)

    def _stages(self) -> Iterator[tuple[str, Stage]]:
        """The stages that do something with these parameters, by llama.cpp's names."""
        p = self.params
        greedy = p.temperature <= 0
        if p.logit_bias:
            yield "logit_bias", self._bias_stage()
        if p.mirostat:
            if not greedy:
                yield "temperature", partial(stages.temperature, value=p.temperature)
                yield "mirostat", self._mirostat
            return
        if p.repeat_last_n and (p.repeat_penalty != 1 or p.presence_penalty or p.frequency_penalty):
            yield "penalties", self._penalties
        if p.dry_multiplier and p.dry_penalty_last_n:
            yield "dry", self._dry
        use_xtc = p.xtc_probability > 0 and p.xtc_threshold <= 0.5
        if not greedy or use_xtc or p.typical_p < 1:  # the other stages always keep the best token
            if p.top_n_sigma > 0:
                yield "top_n_sigma", partial(stages.top_n_sigma, n=p.top_n_sigma)
            if 0 < p.top_k < self.n_vocab:
                yield "top_k", partial(stages.top_k, k=p.top_k)
            if p.typical_p < 1:
                yield "typ_p", partial(stages.typical, p=p.typical_p)
            if p.top_p < 1:
                yield "top_p", partial(stages.top_p, p=p.top_p)
            if p.min_p > 0:
                yield "min_p", partial(stages.min_p, p=p.min_p)
            if use_xtc:
                yield "xtc", self._xtc
        if greedy:
            return
        if p.dynatemp_range > 0:
            yield (
                "temperature",
                partial(
                    stages.dynamic_temperature,
                    middle=p.temperature,
                    spread=p.dynatemp_range,
                    exponent=p.dynatemp_exponent,
                ),
            )
        elif p.temperature != 1:
            yield "temperature", partial(stages.temperature, value=p.temperature)

    def _history(self, last_n: int) -> np.ndarray:
        start = 0 if last_n < 0 else max(0, self._n_tokens - last_n)
        return self._tokens[start : self._n_tokens]

    def _penalties(self, candidates: Candidates) -> Candidates:
        p = self.params
        tokens, counts = np.unique(self._history(p.repeat_last_n), return_counts=True)
        return stages.penalties(candidates, tokens, counts, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)

    def _dry(self, candidates: Candidates) -> Candidates:
        p = self.params
        history = self._history(p.dry_penalty_last_n)
        tokens, costs = dry_penalties(history, self._breakers, p.dry_multiplier, p.dry_base, p.dry_allowed_length)
        return stages.bias(candidates, tokens, -costs)

    def _xtc(self, candidates: Candidates) -> Candidates:
        if self._random.random() >= self.params.xtc_probability:
            return candidates
        return stages.xtc(candidates, self.params.xtc_threshold)

    def _mirostat(self, candidates: Candidates) -> Candidates:
        if self.params.mirostat == 1:
            return stages.mirostat_1(candidates, self._mu, self.n_vocab)
        return stages.mirostat_2(candidates, self._mu)

    def _bias_stage(self) -> Stage:
        tokens = np.array(sorted(self.params.logit_bias), np.int64)
        if tokens[-1] >= self.n_vocab:
            raise InvalidParameterError(f"logit_bias: the vocabulary ends at {self.n_vocab - 1}, before {tokens[-1]}")
        amounts = np.array([self.params.logit_bias[token] for token in tokens.tolist()], np.float32)
        return partial(stages.bias, tokens=tokens, amounts=amounts)

    def _find_breakers(self, tokenizer: Tokenizer | None) -> Breakers:
        p = self.params
        if not (p.dry_multiplier and p.dry_penalty_last_n and p.dry_sequence_breakers):
            return {}
        if tokenizer is None:
            raise InvalidParameterError("DRY needs the tokenizer for its sequence breakers")
        return dry_breakers(tokenizer, p.dry_sequence_breakers)
