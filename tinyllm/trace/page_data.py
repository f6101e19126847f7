"""What a page knows: a trace goes in, texts for its JSON and packed numbers by element id come out."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

import tinyllm
from tinyllm.sampling.candidates import largest
from tinyllm.trace.packing import coarse, thumbnails
from tinyllm.trace.summary import check, funnel, neuron_ids, sentence, sources
from tinyllm.trace.texts import page_texts, say

if TYPE_CHECKING:
    from tinyllm.trace.attention import LayerAttention
    from tinyllm.trace.record import Trace

N_WHAT_IF = 256
_BINS = 64


def numbers(trace: Trace, pool: ThreadPoolExecutor) -> dict[str, np.ndarray]:
    """Arrays that the page reads, by element id; fractions are stored as whole numbers."""
    lens = trace.lens
    found = {
        "lens-ids": lens.top_ids,
        "lens-probs": _fixed(lens.top_probs, 65535),
        "lens-ranks": lens.ranks,
        "lens-answer": _fixed(lens.answer_probs, 65535),
        "lens-entropy": _fixed(lens.entropy, 2000),
        "lens-kl": _fixed(lens.kl, 1000),
        "norms": coarse(trace.norms),
        "writes": coarse(trace.write_norms),
    }
    if present := [layer for layer in trace.attention if layer is not None]:
        found["thumbs"] = np.concatenate(list(pool.map(lambda layer: thumbnails(layer).ravel(), present)))
        if all(layer.value_norms is not None for layer in present):
            norms = [layer.value_norms / max(1e-30, float(layer.value_norms.max())) for layer in present]
            found["value-norms"] = np.concatenate([_fixed(v, 65535).ravel() for v in norms])
        # Queries that chose a token are kept finely.
        first = max(layer.first_query for layer in present)
        for i, position in enumerate(trace.positions):
            if position < first:
                continue
            rows = [np.sqrt(layer.probs[:, position - layer.first_query, : position + 1]) for layer in present]
            found[f"row-{i}"] = np.concatenate([np.rint(row * 255).astype(np.uint8).ravel() for row in rows])
    if trace.activations:
        found["active"] = np.stack([_fixed(a.active, 65535) for a in trace.activations.values()])
    stages = [s for s in trace.stages.values() if len(s.norm) == trace.n_tokens]
    found["stages"] = coarse(np.stack([np.stack((s.norm, s.low, s.high)) for s in stages]))
    for layer, router in trace.routers.items():
        found[f"router-{layer}"] = _fixed(router.probs, 65535)
    return found


def _fixed(values: np.ndarray, scale: int) -> np.ndarray:
    """Non-negative numbers as uint16, NaN as 0."""
    return np.rint(np.minimum(np.nan_to_num(values) * scale, 65535)).astype(np.uint16)


def shapes(trace: Trace) -> dict[str, Any]:
    """Which stages and layers the packed arrays hold, in their order."""
    return {
        "stages": [
            [stage, layer, s.width, round(1000 * s.seconds, 3), s.histogram.tolist()]
            for (stage, layer), s in trace.stages.items()
            if len(s.norm) == trace.n_tokens
        ],
        "active": list(trace.activations),
        "routers": {str(i): [r.probs.shape[1], r.ids.tolist(), _floats(r.weights)] for i, r in trace.routers.items()},
    }


def texts(trace: Trace, language: str, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Everything that is no packed array."""
    sinks = trace.sinks
    attention = pool.map(lambda layer: layer and _about_attention(trace, layer, sinks), trace.attention)
    p = trace.params
    params = {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p}
    data = {
        "texts": page_texts(language),
        "language": language,
        "model": trace.model_name,
        "architecture": trace.architecture,
        "quantization": trace.quantization,
        "version": tinyllm.__version__,
        "seed": trace.seed,
        "settings": say(language, "settings", **params),
        "params": params,
        "n_layers": trace.n_layers,
        "n_tokens": trace.n_tokens,
        "n_prompt": trace.n_prompt,
        "n_vocab": trace.logits.shape[1],
        "tied": trace.tied,
        "sinks": list(trace.sinks),
        "tokens": [
            {
                "id": token.id,
                "text": token.text,
                "hex": token.data.hex(" "),
                "kind": "control" if token.control else "template" if token.template else "",
                "group": token.group,
                "bits": None if i == 0 else _bits(trace.lens.log_probs[i - 1]),
                "near": [[t, round(c, 3)] for t, c in trace.neighbours.get(token.id, ())],
            }
            for i, token in enumerate(trace.tokens)
        ],
        "attention": list(attention),
        "answers": trace.lens.answer.tolist(),
        "steps": [_step(trace, i, language) for i in range(len(trace.positions))],
        "checks": [
            say(language, "page_attention_check", error=trace.attention_error),
            *(
                say(language, "page_step_check", n=i + 1, check=check(trace, i, language))
                for i in range(len(trace.contributions))
            ),
        ],
        "notes": [note.text(language) for note in trace.notes],
    }
    data["pieces"] = {str(token): trace.piece[token] for token in sorted(_mentioned(trace, data))}
    return data


def _step(trace: Trace, i: int, language: str) -> dict[str, Any]:
    position, c = trace.positions[i], trace.contributions[i]
    leaders = trace.lens.leaders.get(position)
    found: dict[str, Any] = {
        "position": position,
        "token": c.token,
        "sentence": sentence(trace, i, language),
        "parts": _floats(c.parts if c.centred is None else c.centred),
        "centred": c.centred is not None,
        "check": check(trace, i, language),
        "looks": [
            [[t, round(share, 5)] for t, share in sources(trace, layer, position)] for layer in range(trace.n_layers)
        ],
        "neurons": {str(layer): neuron_ids(trace, layer, i) for layer in trace.neurons},
        "carriers": {str(layer): a.carriers[position].tolist() for layer, a in trace.activations.items()},
        "what_if": _what_if(trace.logits[i]),
    }
    if leaders is not None:
        found["leaders"] = {
            "ids": leaders.ids.tolist(),
            "ranks": leaders.ranks.T.tolist(),
            "probs": [_floats(row) for row in leaders.probs.T],
        }
    if trace.steps:
        step = trace.steps[i]
        found["probability"] = math.exp(step.logprob)
        found["alternatives"] = [[t, round(math.exp(p), 5)] for t, p in step.top_logprobs]
        found["funnel"] = funnel(trace, i, 24)
    return found


def _what_if(logits: np.ndarray) -> dict[str, Any]:
    """What sliders need: the best logits, and a histogram of the rest."""
    best = largest(logits, N_WHAT_IF)
    rest = np.delete(logits, best)
    if not len(rest):
        return {"ids": best.tolist(), "logits": _floats(logits[best]), "low": 0, "high": 0, "bins": []}
    bins, edges = np.histogram(rest[np.isfinite(rest)], _BINS)
    return {
        "ids": best.tolist(),
        "logits": _floats(logits[best]),
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "bins": bins.tolist(),
    }


def _about_attention(trace: Trace, layer: LayerAttention, sinks: tuple[int, ...]) -> dict[str, Any]:
    """How one layer attends, and what each of its heads is like: means over the queries that see more than one key.

    Sinks count as sinks only.
    """
    about = {"heads": layer.n_heads, "kv": layer.n_kv_heads, "window": layer.window, "first": layer.first_query}
    start = 0 if layer.first_query else 1
    probs = layer.probs[:, start:]
    n_queries, n_tokens = probs.shape[1:]
    if not n_queries:
        return about
    queries = layer.first_query + start + np.arange(n_queries)
    distance = np.maximum(queries[:, None] - np.arange(n_tokens), 0).astype(np.float32)
    to_sinks = probs[:, :, sinks]
    rest = np.maximum(probs.sum(axis=2) - to_sinks.sum(axis=2), 1e-9)
    far = np.einsum("hqt,qt->hq", probs, distance) - np.einsum("hqs,qs->hq", to_sinks, distance[:, sinks])
    ids = np.array([token.id for token in trace.tokens[:n_tokens]])
    # Induction (Olsson et al. 2022): a query looks at what followed an earlier occurrence of its own token.
    earlier = (ids[queries][:, None] == np.roll(ids, 1)[None, :]) & (distance > 0)
    earlier[:, 0] = False
    repeats = earlier.any(axis=1)
    induction = np.einsum("hqt,qt->h", probs[:, repeats], earlier[repeats].astype(np.float32))
    return about | {
        "entropy": _floats(np.nan_to_num(np.nanmean(_quiet(layer.entropy(sinks)[:, start:]), axis=1))),
        "sink": _floats(to_sinks.sum(axis=2).mean(axis=1)),
        "distance": _floats((far / rest).mean(axis=1)),
        "previous": _floats(probs[:, np.arange(n_queries), queries - 1].mean(axis=1)),
        "induction": _floats(induction / max(1, np.count_nonzero(repeats))),
    }


def _quiet(values: np.ndarray) -> np.ndarray:
    """Rows of NaN only (a head whose queries see nothing but sinks) count as 0."""
    return np.where(np.isnan(values).all(axis=1, keepdims=True), 0, values)


def _mentioned(trace: Trace, data: dict[str, Any]) -> set[int]:
    """Tokens whose pieces the page shows."""
    ids = set(np.unique(trace.lens.top_ids).tolist()) | set(trace.lens.answer.tolist())
    for token in data["tokens"]:
        ids.update(t for t, _ in token["near"])
    for step in data["steps"]:
        ids.add(step["token"])
        ids.update(step["what_if"]["ids"])
        ids.update(step.get("leaders", {}).get("ids", ()))
        ids.update(t for rows in step["neurons"].values() for row in rows for t in row[3] + row[4])
        ids.update(t for t, _ in step.get("alternatives", ()))
        for stage in step.get("funnel", {}).get("stages", ()):
            ids.update(c["id"] for c in stage["candidates"])
    return {int(t) for t in ids if t >= 0}


def _bits(log_prob: float) -> float | None:
    return None if math.isnan(log_prob) else round(-log_prob / math.log(2), 3)


def _floats(values: Any) -> list[float]:
    return [float(f"{float(v):.4g}") for v in values] if np.ndim(values) == 1 else [_floats(row) for row in values]
