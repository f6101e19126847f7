"""The parameters of sampling, with llama.cpp's names, defaults and off-values, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from tinyllm.errors import InvalidParameterError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Raises InvalidParameterError, naming the field, for a value that cannot be.

    `seed` None (or -1): one is picked, and `Sampler.seed` tells which.
    """

    temperature: float = 0.8  # 0 or less: always the most probable token
    top_k: int = 40  # 0 or less: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    top_n_sigma: float = -1.0  # 0 or less: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens that the three penalties look back on, the prompt's too; 0: off, -1: all
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # 0: off, -1: all
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0  # 0: off; 1 and 2 take the place of all stages but bias and temperature
    mirostat_tau: float = 5.0  # the surprise aimed at, in bits
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to a token's logit; -inf bans it
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            _check(name, getattr(self, name), low, high)
        for name in _INTEGERS:
            value = getattr(self, name)
            if not isinstance(value, Integral) and not (name == "seed" and value is None):
                raise InvalidParameterError(f"{name} must be a whole number, not {value!r}")
        if self.seed is not None:
            _check("seed", self.seed, -1, 2**64 - 1)
        if not all(isinstance(text, str) and text for text in self.dry_sequence_breakers):
            raise InvalidParameterError("dry_sequence_breakers must be texts that are not empty")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameterError("logit_bias must map token ids to numbers, as in {42: 1.5}")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, Integral) or token < 0:
                raise InvalidParameterError(f"logit_bias: {token!r} is not a token id")
            if not isinstance(bias, Real) or math.isnan(bias) or bias == math.inf:
                raise InvalidParameterError(f"logit_bias of token {token} must be a number or -inf, not {bias}")


_LARGE = 1e6  # beyond any sensible logit, temperature or penalty, and far from float32's limits

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (-_LARGE, _LARGE),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-_LARGE, _LARGE),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, _LARGE),
    "dynatemp_exponent": (0, _LARGE),
    "repeat_penalty": (1 / _LARGE, _LARGE),
    "repeat_last_n": (-1, math.inf),
    "presence_penalty": (-_LARGE, _LARGE),
    "frequency_penalty": (-_LARGE, _LARGE),
    "dry_multiplier": (0, _LARGE),
    "dry_base": (0, _LARGE),
    "dry_allowed_length": (0, math.inf),
    "dry_penalty_last_n": (-1, math.inf),
    "mirostat": (0, 2),
    "mirostat_tau": (0, _LARGE),
    "mirostat_eta": (0, _LARGE),
}
_INTEGERS = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "seed")


def _check(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, Real) or not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise InvalidParameterError(f"{name} must be {limits}, not {value!r}")
