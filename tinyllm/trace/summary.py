"""A trace in rows and words: what the terminal prints, `--json` writes and the page says, made in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyllm.trace.texts import DEFAULT, percent, say

if TYPE_CHECKING:
    from tinyllm.trace.record import Trace

N_SOURCES = 5


def sentence(trace: Trace, step: int = 0, language: str = DEFAULT) -> str:
    """One step in words: what was said, how sure the model was, since when it led, and who wrote it."""
    position, lens = trace.positions[step], trace.lens
    choice = trace.contributions[step]
    rank = int(lens.ranks[-1, position])
    others = zip(lens.top_ids[-1, position].tolist(), lens.top_probs[-1, position].tolist(), strict=True)
    other, other_p = next((trace.piece[t], p) for t, p in others if t != choice.token)
    words = say(
        language, "said" if trace.steps else "would_say", n=position + 1, token=trace.piece[choice.token]
    ) + say(
        language,
        "next_was" if rank == 0 else "first_was",
        p=percent(float(lens.answer_probs[-1, position]), language),
        other=other,
        q=percent(other_p, language),
    )
    leads = lens.leads_from(position)
    if rank > 0:
        words += say(language, "drawn_all_the_same", n=rank + 1)
    elif leads is not None:
        words += say(language, "leads_at_once" if leads == 0 else "leads_from", state=half_layer(leads))
    parts = choice.parts if choice.centred is None else choice.centred
    best = [int(s) for s in np.argsort(-parts) if s > 0][:2]
    if len(best) == 2 and parts[best[0]] > 0:
        two = parts[best[1]] > 0.2 * parts[best[0]]
        words += say(language, "written_by_two" if two else "written_by", a=half_layer(best[0]), b=half_layer(best[1]))
    return words


def half_layer(state: int) -> str:
    """The name of what wrote a state: `embed`, `attn 3`, `ffn 3`."""
    return "embed" if state == 0 else f"{'ffn' if state % 2 == 0 else 'attn'} {(state - 1) // 2}"


def layer_rows(
    trace: Trace, position: int, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """One row for the embedding and each layer at a position: norms, attention with sinks apart, lens, contribution.

    The embedding has its nearest tokens, where they were searched for.

    `looks_at` and `sink` are means over the heads (or the given ones); `sink` is None where the position sees none.
    `contribution` is to the logit of the token chosen at this position, and None elsewhere.
    """
    wanted = range(trace.n_layers) if layers is None else layers
    chosen = next((c for c in trace.contributions if c.position == position), None)
    parts = None if chosen is None else chosen.parts if chosen.centred is None else chosen.centred
    near = trace.neighbours.get(trace.tokens[position].id, ())
    embedding = {
        "layer": "embed",
        "norm": float(trace.norms[0, position]),
        "nearest": [{"token": trace.piece[token], "cosine": _rounded(cosine)} for token, cosine in near],
    }
    rows = [_lens_row(trace, 0, position) | embedding]
    if parts is not None:
        rows[0]["contribution"] = {"embed": float(parts[0])}
    for layer in wanted:
        state = 2 * layer + 2
        row: dict[str, Any] = {
            "layer": layer,
            "norm": float(trace.norms[state, position]),
            "attn_write": float(trace.write_norms[state - 2, position]),
            "ffn_write": float(trace.write_norms[state - 1, position]),
            "window": trace.windows[layer] or None,
            **attention_row(trace, layer, position, heads),
            **_lens_row(trace, state, position),
        }
        if parts is not None:
            row["contribution"] = {"attn": float(parts[state - 1]), "ffn": float(parts[state])}
        if layer in trace.activations:
            row["active_neurons"] = float(trace.activations[layer].active[position])
        if trace.neurons.get(layer) and position in trace.positions:
            row["neurons"] = neuron_rows(trace, layer, trace.positions.index(position))
        if layer in trace.routers:
            router = trace.routers[layer]
            row["experts"] = [
                {"expert": int(e), "probability": _rounded(router.probs[position, e]), "weight": _rounded(w)}
                for e, w in zip(router.ids[position], router.weights[position], strict=True)
            ]
        row["ms"] = round(1000 * sum(s.seconds for (_, at), s in trace.stages.items() if at == layer), 3)
        rows.append(row)
    return rows


def neuron_rows(trace: Trace, layer: int, step: int) -> list[dict[str, Any]]:
    """The neurons that wrote most at a step, and what their output vectors point to."""
    found = trace.neurons[layer][step]
    return [
        {
            "neuron": int(index),
            "activation": _rounded(value),
            "strength": _rounded(strength),
            "promotes": [trace.piece[int(t)] for t in up],
            "suppresses": [trace.piece[int(t)] for t in down],
        }
        for index, value, strength, up, down in zip(
            found.index, found.activation, found.strength, found.promoted, found.suppressed, strict=True
        )
    ]


def neuron_ids(trace: Trace, layer: int, step: int) -> list[list[Any]]:
    """The same with token ids: [neuron, activation, strength, [promoted], [suppressed]] each."""
    found = trace.neurons[layer][step]
    columns = (found.index, found.activation, found.strength, found.promoted, found.suppressed)
    return [
        [int(index), _rounded(value), _rounded(strength), up.tolist(), down.tolist()]
        for index, value, strength, up, down in zip(*columns, strict=True)
    ]


def attention_row(trace: Trace, layer: int, position: int, heads: Sequence[int] | None) -> dict[str, Any]:
    """Where one layer looks from a position: entropies by head, share of sinks, and the best sources."""
    attention = trace.attention[layer]
    if attention is None or position < attention.first_query:
        return {"entropy": None, "entropy_without_sinks": None, "sink": None, "looks_at": []}
    chosen = list(range(attention.n_heads)) if heads is None else list(heads)
    query = position - attention.first_query
    sink = sink_share(trace, layer, position, chosen)
    one = replace(attention, probs=attention.probs[chosen, query : query + 1], first_query=position)
    return {
        "heads": chosen,
        "kv_heads": attention.n_kv_heads,
        "entropy": [_number(v) for v in one.entropy()[:, 0]],
        "entropy_without_sinks": [_number(v) for v in one.entropy(_sinks_seen(trace, layer, position))[:, 0]],
        "sink": None if sink is None else _rounded(sink),
        "looks_at": [
            {"position": t, "token": trace.tokens[t].text, "share": _rounded(share)}
            for t, share in sources(trace, layer, position, chosen)
        ],
    }


def sources(
    trace: Trace, layer: int, position: int, heads: Sequence[int] | slice = slice(None)
) -> list[tuple[int, float]]:
    """The positions that a layer looks at most from a position, sinks apart, with their mean shares, best first."""
    attention = trace.attention[layer]
    if attention is None or position < attention.first_query:
        return []
    shares = attention.probs[heads, position - attention.first_query, : position + 1].mean(axis=0)
    others = shares.copy()
    others[list(_sinks_seen(trace, layer, position))] = -1
    best = np.argsort(-others, kind="stable")[:N_SOURCES]
    return [(int(t), float(shares[t])) for t in best if others[t] > 0]


def sink_share(trace: Trace, layer: int, position: int, heads: Sequence[int]) -> float | None:
    """What the mean of the heads gives to sinks that are tokens, and to learned ones; None where there are none."""
    attention = trace.attention[layer]
    query, sinks = position - attention.first_query, _sinks_seen(trace, layer, position)
    share = float(attention.probs[heads, query][:, list(sinks)].sum(axis=1).mean()) if sinks else None
    if attention.sink_mass is not None:
        share = (share or 0.0) + float(attention.sink_mass[heads, query].mean())
    return share


def _sinks_seen(trace: Trace, layer: int, position: int) -> tuple[int, ...]:
    """Sinks that a position sees in a layer, itself apart."""
    first, end = trace.attention[layer].visible(position)
    return tuple(t for t in trace.sinks if first <= t < end and t != position)


def _lens_row(trace: Trace, state: int, position: int) -> dict[str, Any]:
    lens = trace.lens
    if not lens.read[state, position]:
        return {"lens": None, "rank": None, "entropy_bits": None}
    return {
        "lens": [
            {"id": int(token), "token": trace.piece[int(token)], "probability": _rounded(p)}
            for token, p in zip(lens.top_ids[state, position], lens.top_probs[state, position], strict=True)
        ],
        "rank": int(lens.ranks[state, position]),
        "answer_probability": _rounded(lens.answer_probs[state, position]),
        "entropy_bits": _rounded(lens.entropy[state, position]),
        "kl_bits": _rounded(lens.kl[state, position]),
    }


def funnel(trace: Trace, step: int, n: int = 20) -> dict[str, Any]:
    """The sampling of one step, stage by stage in its real order, to the draw; `n` candidates of each stage."""
    record = trace.choices[step]
    stages = []
    for stage in record.stages:
        stages.append(
            {
                "stage": stage.name,
                "setting": _setting(trace, stage.name),
                "before": stage.n_before,
                "after": stage.n_after,
                "kept": _rounded(stage.kept_mass),
                "candidates": [
                    {"id": int(t), "token": trace.piece[int(t)], "before": _rounded(a), "after": _rounded(b)}
                    for t, a, b in zip(stage.ids[:n], stage.probs_before[:n], stage.probs_after[:n], strict=True)
                ],
            }
        )
    draw = record.draw
    return {
        "stages": stages,
        "draw": {
            "candidates": [
                {"id": int(t), "token": trace.piece[int(t)], "probability": _rounded(p)}
                for t, p in zip(draw.ids[:n], draw.probs[:n], strict=True)
            ],
            "n": draw.n,
            "u": draw.u,
            "token": draw.token,
            "probability": draw.prob,
            "below": draw.below,
        },
    }


_SETTINGS = {
    "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typ_p": "typical_p", "temperature": "temperature",
    "top_n_sigma": "top_n_sigma", "xtc": "xtc_threshold", "penalties": "repeat_penalty", "dry": "dry_multiplier",
    "mirostat": "mirostat_tau",
}  # fmt: skip


def _setting(trace: Trace, stage: str) -> float | None:
    name = _SETTINGS.get(stage)
    return None if name is None else float(getattr(trace.params, name))


def check(trace: Trace, step: int = 0, language: str = DEFAULT) -> str:
    """That the parts of a logit add up to it, in figures."""
    c = trace.contributions[step]
    if c.centred is None:
        return say(language, "check", sum=c.sum, logit=c.logit, rounding=c.rounding)
    total = c.centred.sum()
    return say(language, "check_centred", sum=total, logit=c.logit, mean=c.vocabulary_mean, rounding=c.rounding)


def stage_rows(trace: Trace, position: int, stages: Sequence[str], layers: Sequence[int]) -> list[dict[str, Any]]:
    """Width, norm, range of each stage at a position; stages that only computed the wanted rows have those alone."""
    rows = []
    for (stage, layer), found in trace.stages.items():
        if stage not in stages or (layer is not None and layer not in layers):
            continue
        at = position if len(found.norm) > position else None
        if len(found.norm) < trace.n_tokens:  # final_norm and logits: only where a token was chosen
            at = trace.positions.index(position) if position in trace.positions else None
        if at is not None and at < len(found.norm):
            rows.append(
                {
                    "stage": stage,
                    "layer": layer,
                    "width": found.width,
                    "norm": float(found.norm[at]),
                    "min": float(found.low[at]),
                    "max": float(found.high[at]),
                    "ms": round(1000 * found.seconds, 3),
                }
            )
    return rows


def as_dict(
    trace: Trace, position: int, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None,
    stages: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Everything in rows, for JSON: no NaN, no arrays."""
    shown = list(range(trace.n_layers)) if layers is None else list(layers)
    return {
        "model": trace.model_name,
        "architecture": trace.architecture,
        "quantization": trace.quantization,
        "n_layers": trace.n_layers,
        "seed": trace.seed,
        "tokens": [
            {
                "id": token.id,
                "text": token.text,
                "bytes": token.data.hex(),
                "control": token.control,
                "template": token.template,
                "generated": token.generated,
                "logprob": _number(trace.lens.log_probs[i - 1]) if i else None,
            }
            for i, token in enumerate(trace.tokens)
        ],
        "n_prompt": trace.n_prompt,
        "sinks": list(trace.sinks),
        "sentence": sentence(trace),
        "position": position,
        "rows": layer_rows(trace, position, layers, heads),
        "stages": stage_rows(trace, position, stages, shown),
        "steps": [
            {
                "position": trace.positions[i],
                "token": step.token,
                "text": trace.piece[step.token],
                "logprob": step.logprob,
                "alternatives": [
                    {"id": t, "token": trace.piece[t], "logprob": _rounded(p)} for t, p in step.top_logprobs
                ],
                "sampling": funnel(trace, i),
                "contributions": _contributions(trace, i),
            }
            for i, step in enumerate(trace.steps)
        ],
        "neighbours": {
            str(token): [{"id": t, "token": trace.piece[t], "cosine": _rounded(c)} for t, c in near]
            for token, near in trace.neighbours.items()
        },
        "checks": {"attention_error": trace.attention_error, "lens_complete": trace.lens.complete},
        "notes": [str(note) for note in trace.notes],
        "seconds": {name: round(value, 4) for name, value in trace.seconds.items()},
    }


def _contributions(trace: Trace, step: int) -> dict[str, Any]:
    c = trace.contributions[step]
    return {
        "parts": [_rounded(p) for p in c.parts],
        "centred": None if c.centred is None else [_rounded(p) for p in c.centred],
        "constant": c.constant,
        "sum": c.sum,
        "logit": c.logit,
        "rounding": c.rounding,
        "vocabulary_mean": c.vocabulary_mean,
    }


def _rounded(value: float) -> float:
    return float(f"{float(value):.5g}")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else _rounded(value)
