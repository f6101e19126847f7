"""The stages of the sampling chain, each a function from candidates to candidates, as llama.cpp defines them."""

from __future__ import annotations

import math

import numpy as np

from tinyllm.sampling.candidates import Candidates, largest_unordered, reach

_GUESSES = (512, 8192)
"""How many of the best are tried before the whole vocabulary is sorted: real distributions are satisfied early."""


def allowed(candidates: Candidates, mask: np.ndarray) -> Candidates:
    """Keep the tokens whose entry in `mask` (bool [n_vocab]) is true."""
    return candidates.pick(np.flatnonzero(mask))


def bias(candidates: Candidates, tokens: np.ndarray, amounts: np.ndarray) -> Candidates:
    """Add `amounts` (float32) to the logits of `tokens`."""
    at, inside = candidates.locate(tokens)
    logits = candidates.logits.copy()
    logits[at] += amounts[inside]
    return candidates.replace(logits)


def penalties(
    candidates: Candidates, tokens: np.ndarray, counts: np.ndarray, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Make `tokens`, which occurred `counts` times, less likely.

    A logit above 0 is divided by `repeat`, another one multiplied (Keskar et al. 2019, CTRL, with the sign minded);
    `frequency` is subtracted for each occurrence and `presence` once.
    """
    at, inside = candidates.locate(tokens)
    logits = candidates.logits.copy()
    found = logits[at]
    found = np.where(found > 0, found / np.float32(repeat), found * np.float32(repeat))
    logits[at] = found - (counts[inside] * np.float32(frequency) + np.float32(presence))
    return candidates.replace(logits)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep logits within `n` standard deviations (of all logits) of the best (Tang et al. 2024, Top-nσ)."""
    finite = candidates.logits[np.isfinite(candidates.logits)]
    spread = float(finite.std(dtype=np.float64))
    return candidates.pick(np.flatnonzero(candidates.logits >= candidates.max - n * spread))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the `k` best."""
    return candidates.best(k)


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep the tokens whose surprise is nearest to the entropy, until their probabilities exceed `p`.

    Locally typical sampling (Meister et al. 2022). The result is ordered by id.
    """
    probs = candidates.probs
    nearness = -np.abs(candidates.log_total - candidates.logits - entropy(probs))
    for k in (*_GUESSES, len(candidates)):
        nearest = largest_unordered(nearness, k)
        if k >= len(candidates) or probs[nearest].sum() > p:
            break
    nearest = nearest[np.argsort(-nearness[nearest], kind="stable")]
    kept = nearest[: reach(probs[nearest], p, beyond=True) + 1]
    return candidates.pick(np.sort(kept))


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the fewest of the best whose probabilities add up to at least `p` (Holtzman et al. 2020, nucleus)."""
    target = p * candidates.total
    if candidates.ordered:
        return candidates.pick(slice(reach(candidates.weights, target) + 1))
    for k in _GUESSES:
        some = candidates.pick(largest_unordered(candidates.logits, k))
        if some.weights.sum() >= target:  # comparable: both sets hold the best token, which sets the scale
            best = some.best(k)
            return best.pick(slice(reach(best.weights, target) + 1))
    kept = reach(np.sort(candidates.weights)[::-1], target) + 1
    return candidates.pick(largest_unordered(candidates.logits, kept))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens at least `p` times as probable as the best (Nguyen et al. 2024)."""
    return candidates.pick(np.flatnonzero(candidates.logits >= candidates.max + math.log(p)))


def xtc(candidates: Candidates, threshold: float) -> Candidates:
    """Drop all tokens of at least this probability but the least probable of them ("exclude top choices")."""
    top = np.flatnonzero(candidates.probs >= max(threshold, np.finfo(np.float64).tiny))
    if len(top) < 2:
        return candidates
    top = top[np.argsort(-candidates.logits[top], kind="stable")]
    return candidates.pick(np.delete(np.arange(len(candidates)), top[:-1]))


def temperature(candidates: Candidates, value: float) -> Candidates:
    """Divide the logits by a positive temperature."""
    return candidates.scale(1 / max(value, _COLDEST))


def dynamic_temperature(candidates: Candidates, middle: float, spread: float, exponent: float) -> Candidates:
    """A temperature from `middle - spread` to `middle + spread`: the higher, the nearer the entropy to its maximum."""
    if len(candidates) < 2:
        return candidates
    low = max(0.0, middle - spread)
    evenness = entropy(candidates.probs) / math.log(len(candidates))
    return temperature(candidates, low + (middle + spread - low) * evenness**exponent)


def mirostat_1(candidates: Candidates, mu: float, n_vocab: int) -> Candidates:
    """Keep as many of the best as a Zipf law with the surprise `mu` asks for (Basu et al. 2021, Mirostat 1)."""
    probs = candidates.best(_ZIPF_SAMPLE).probs
    probs = probs[probs > 0]
    ranks = np.log1p(1 / np.arange(1, len(probs)))
    slopes = np.log(probs[:-1] / probs[1:])
    exponent = float(ranks @ slopes / (ranks @ ranks)) if len(probs) > 1 else 1.0
    excess = exponent - 1
    if abs(excess) < 1e-6 or exponent <= 0:
        excess = math.copysign(1e-6, excess)
        exponent = 1 + excess
    k = (excess * 2.0**mu / (1 - n_vocab**-excess)) ** (1 / exponent)
    return candidates.best(max(1, int(min(k, n_vocab))))


def mirostat_2(candidates: Candidates, mu: float) -> Candidates:
    """Keep tokens with a surprise of at most `mu` bits, or the best one (Basu et al. 2021, Mirostat 2)."""
    least = candidates.log_total - mu * math.log(2)
    kept = np.flatnonzero(candidates.logits >= least)
    return candidates.pick(kept) if len(kept) else candidates.best(1)


def draw(candidates: Candidates, u: float) -> int:
    """The position of the candidate at which the running sum of probabilities goes beyond `u` in [0, 1)."""
    return reach(candidates.weights, u * candidates.total, beyond=True)


def entropy(probs: np.ndarray) -> float:
    """Of probabilities (float64 [n]) that add up to 1, in nats."""
    probs = probs[probs > 0]
    return float(-(probs @ np.log(probs)))


_COLDEST = 1e-6  # colder changes nothing that float32 logits can tell apart
_ZIPF_SAMPLE = 100
