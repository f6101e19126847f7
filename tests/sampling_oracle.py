"""The sampling chain once more, slow and obvious: lists of (token, logit) pairs, after llama.cpp's definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from tinyllm.sampling.params import SamplingParams

Pairs = list[tuple[int, float]]


def softmax(pairs: Pairs) -> list[float]:
    top = max(logit for _, logit in pairs)
    weights = [math.exp(logit - top) for _, logit in pairs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def by_logit(pairs: Pairs) -> Pairs:
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def penalties(pairs: Pairs, history: Sequence[int], p: SamplingParams) -> Pairs:
    window = history if p.repeat_last_n < 0 else history[max(0, len(history) - p.repeat_last_n) :]
    counts = Counter(window)
    result = []
    for token, logit in pairs:
        if token in counts:
            logit = logit * p.repeat_penalty if logit <= 0 else logit / p.repeat_penalty
            logit -= counts[token] * p.frequency_penalty + p.presence_penalty
        result.append((token, logit))
    return result


def dry(pairs: Pairs, history: Sequence[int], p: SamplingParams, breakers: Sequence[Sequence[int]]) -> Pairs:
    window = list(history if p.dry_penalty_last_n < 0 else history[max(0, len(history) - p.dry_penalty_last_n) :])
    unbroken = len(window)
    for start in range(len(window) - 1, -1, -1):
        ends = [start + len(b) for b in breakers if b and window[start : start + len(b)] == list(b)]
        if ends:
            unbroken = len(window) - max(ends)
            break
    if len(window) <= p.dry_allowed_length or unbroken < p.dry_allowed_length:
        return pairs
    longest: dict[int, int] = {}
    for end in range(len(window) - 1):
        n = 0
        while n <= end and n < unbroken and window[end - n] == window[-1 - n]:
            n += 1
        if n >= p.dry_allowed_length:
            token = window[end + 1]
            longest[token] = max(n, longest.get(token, 0))
    return [
        (token, logit - p.dry_multiplier * p.dry_base ** (longest[token] - p.dry_allowed_length))
        if token in longest
        else (token, logit)
        for token, logit in pairs
    ]


def top_n_sigma(pairs: Pairs, n: float) -> Pairs:
    logits = [logit for _, logit in pairs if logit > -math.inf]
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in logits) / len(logits))
    least = max(logits) - n * sigma
    return [pair for pair in pairs if pair[1] >= least]


def typical(pairs: Pairs, p: float) -> Pairs:
    probs = softmax(pairs)
    entropy = -math.fsum(q * math.log(q) for q in probs if q > 0)
    order = sorted(range(len(pairs)), key=lambda i: abs(-math.log(probs[i]) - entropy) if probs[i] else math.inf)
    kept, mass = [], 0.0
    for i in order:
        kept.append(pairs[i])
        mass += probs[i]
        if mass > p:
            break
    return kept


def top_p(pairs: Pairs, p: float) -> Pairs:
    pairs = by_logit(pairs)
    kept, mass = [], 0.0
    for pair, prob in zip(pairs, softmax(pairs), strict=True):
        kept.append(pair)
        mass += prob
        if mass >= p:
            break
    return kept


def min_p(pairs: Pairs, p: float) -> Pairs:
    top = max(logit for _, logit in pairs)
    return [pair for pair in pairs if pair[1] >= top + math.log(p)]


def xtc(pairs: Pairs, threshold: float) -> Pairs:
    pairs = by_logit(pairs)
    n = sum(prob >= threshold and prob > 0 for prob in softmax(pairs))
    return pairs[max(n - 1, 0) :]


def dynamic_temperature(pairs: Pairs, p: SamplingParams) -> Pairs:
    if len(pairs) < 2:
        return pairs
    entropy = -math.fsum(q * math.log(q) for q in softmax(pairs) if q > 0)
    low, high = max(0.0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
    t = low + (high - low) * (entropy / math.log(len(pairs))) ** p.dynatemp_exponent
    return [(token, logit / max(t, 1e-6)) for token, logit in pairs]


def distribution(
    logits: Sequence[float],
    p: SamplingParams,
    history: Sequence[int] = (),
    mask: Sequence[bool] | None = None,
    breakers: Sequence[Sequence[int]] = (),
    excluded: bool = True,
) -> Mapping[int, float]:
    """The probability of each token that can be drawn; `excluded`: whether XTC strikes, if it is on."""
    pairs = [(token, float(logit)) for token, logit in enumerate(logits) if mask is None or mask[token]]
    pairs = [(token, logit + p.logit_bias.get(token, 0.0)) for token, logit in pairs]
    if p.repeat_last_n:
        pairs = penalties(pairs, history, p)
    if p.dry_multiplier and p.dry_penalty_last_n:
        pairs = dry(pairs, history, p, breakers)
    if p.top_n_sigma > 0:
        pairs = top_n_sigma(pairs, p.top_n_sigma)
    if p.top_k > 0:
        pairs = by_logit(pairs)[: p.top_k]
    if p.typical_p < 1:
        pairs = typical(pairs, p.typical_p)
    if p.top_p < 1:
        pairs = top_p(pairs, p.top_p)
    if p.min_p > 0:
        pairs = min_p(pairs, p.min_p)
    if p.xtc_probability > 0 and p.xtc_threshold <= 0.5 and excluded:
        pairs = xtc(pairs, p.xtc_threshold)
    if p.temperature <= 0:
        return {by_logit(pairs)[0][0]: 1.0}
    if p.dynatemp_range > 0:
        pairs = dynamic_temperature(pairs, p)
    else:
        pairs = [(token, logit / p.temperature) for token, logit in pairs]
    return {token: prob for (token, _), prob in zip(pairs, softmax(pairs), strict=True) if prob > 0}
