"""Attention probabilities, recomputed from the stored queries and cache pages, since the kernel keeps none.

Out come a map per head, what each source would add to the stream (value weighting), and the distance to the kernel's
own result, which says how far the recomputation can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyllm.kernels.abi import PAGE
from tinyllm.kernels.dequantize import decode
from tinyllm.trace.live_memory import matrix_at, memory_at

if TYPE_CHECKING:
    from tinyllm.kv_cache import LayerPool
    from tinyllm.model import Model, Sequence
    from tinyllm.plan import Op

MAP_BYTES = 384 << 20
"""Most memory that maps may take; of longer prompts the last queries are kept."""
_NO_WINDOW = 1 << 29
_TINY = np.finfo(np.float32).tiny


@dataclass(eq=False)
class LayerAttention:
    """Attention of one layer over T positions.

    `probs`: float32 [n_heads, Q, T], the rows of queries `first_query` and on; zero where a query cannot look.
    `value_norms`: float32 [n_heads, T], ‖W_O v‖ of each source as each head would add it to the stream, or None.
    `window`: how far back a query sees, itself included; 0: everything. `error`: RMS of Σ probs · v minus the kernel's
    output, relative to that. `sink_mass`: float32 [n_heads, Q], what went to a learned sink that is no token.
    """

    n_kv_heads: int
    window: int
    first_query: int
    probs: np.ndarray
    value_norms: np.ndarray | None
    error: float
    sink_mass: np.ndarray | None = None

    @property
    def n_heads(self) -> int:
        return self.probs.shape[0]

    def visible(self, query: int) -> tuple[int, int]:
        """First position that a query sees, and the first behind those it sees."""
        return max(0, query + 1 - self.window) if self.window else 0, query + 1

    def entropy(self, without: tuple[int, ...] = ()) -> np.ndarray:
        """Entropy of each head's row, as a share of the largest possible: float32 [n_heads, Q], NaN for lone keys.

        `without`: positions that are left out, the others renormalised.
        """
        probs = self.probs
        if without:
            probs = probs.copy()
            probs[:, :, list(without)] = 0
        total = probs.sum(axis=2)
        # −Σ (p/t) log (p/t) = log t − Σ p log p / t; the smallest number makes 0 · log 0 a zero.
        summands = np.log(np.maximum(probs, _TINY))
        summands *= probs
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = np.where(total > 0, np.log(total) - summands.sum(axis=2) / total, 0)
            queries = self.first_query + np.arange(probs.shape[1])
            spans = np.array([self.visible(q) for q in queries])
            visible = spans[:, 1] - spans[:, 0] - sum((spans[:, 0] <= t) & (t < spans[:, 1]) for t in without)
            return np.where(visible > 1, np.maximum(entropy, 0) / np.log(visible), np.nan)

    def weighted(self, query: int) -> np.ndarray | None:
        """What each source gives to a query, by size: probs · ‖W_O v‖, renormalised: float32 [n_heads, T]."""
        if self.value_norms is None:
            return None
        given = self.probs[:, query - self.first_query] * self.value_norms
        return given / np.maximum(given.sum(axis=1, keepdims=True), 1e-30)


@dataclass(eq=False)
class _Taken:
    """Queries and results of one layer's steps, up to the position `end`."""

    op: Op
    queries: list[np.ndarray] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)
    end: int = 0


class AttentionReader:
    """Keeps queries and results of attention ops while a sequence runs, and makes maps of them in the end.

    `n_tokens`: how many positions there will be at most, which decides how many queries can have a map.
    """

    def __init__(self, model: Model, sequence: Sequence, n_tokens: int):
        self.model, self.sequence = model, sequence
        n_heads = sum(layer.n_heads for layer in model.config.layers)
        self.max_queries = max(1, MAP_BYTES // (4 * max(1, n_heads) * max(1, n_tokens)))
        self._taken: dict[int, _Taken] = {}

    def take(self, op: Op, position: int, n_rows: int) -> None:
        """Copy the queries of an op that has just run on rows from a position on, and what the kernel made of them."""
        a = op.values
        taken = self._taken.setdefault(op.layer, _Taken(op))
        skipped = max(0, n_rows - self.max_queries)
        queries = matrix_at(a["q"], a["q_stride"], n_rows, a["n_heads"] * a["head_dim"])
        taken.queries.append(queries[skipped:].copy())
        taken.results.append(op.output.array[skipped:n_rows].copy())
        taken.end = position + n_rows
        while sum(map(len, taken.queries[1:])) >= self.max_queries:
            del taken.queries[0], taken.results[0]

    def layers(self) -> list[LayerAttention | None]:
        """Maps of all layers; None where a layer has no attention. The sequence must still have its pages."""
        return [
            self._layer(self._taken[index]) if index in self._taken else None
            for index in range(self.model.config.n_layers)
        ]

    def _layer(self, taken: _Taken) -> LayerAttention:
        op, a = taken.op, taken.op.values
        n_heads, n_kv_heads, left = a["n_heads"], a["n_kv_heads"], a["window_left"]
        queries = np.concatenate(taken.queries)[-self.max_queries :].reshape(-1, n_heads, a["head_dim"])
        results = np.concatenate(taken.results)[-self.max_queries :]
        first = taken.end - len(queries)
        keys, values = self._cached(op, taken.end)
        probs, sink_mass = _probabilities(a, queries, keys, first)
        # Heads that share keys and values lie behind each other: one product for all of them.
        mixed = probs.reshape(n_kv_heads, -1, taken.end) @ values
        mixed = mixed.reshape(n_heads, len(queries), -1).transpose(1, 0, 2).reshape(results.shape)
        spread = float(np.sqrt(np.mean(np.square(results), dtype=np.float64))) or 1.0
        mixed -= results
        return LayerAttention(
            n_kv_heads=n_kv_heads,
            window=left + 1 if left < _NO_WINDOW else 0,
            first_query=first,
            probs=probs,
            value_norms=self._value_norms(op, values),
            error=float(np.sqrt(np.mean(np.square(mixed), dtype=np.float64))) / spread,
            sink_mass=sink_mass,
        )

    def _cached(self, op: Op, n_keys: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys [n_kv_heads, head_dim, n] and values [n_kv_heads, n, v_dim] of a sequence's first positions, float32."""
        a, pool = op.values, self.model.cache.layers[op.layer]
        n_pages, head_dim, v_dim = -(-n_keys // PAGE), a["head_dim"], a["v_dim"]
        pages = _pages(pool, self.sequence.pages.numbers(pool.group)[:n_pages], a["n_kv_heads"])
        keys = _floats(pages[:, :, : pool.v_offset], self.model.kv_type, (-1, PAGE), axis=-2)
        keys = keys.transpose(1, 2, 0, 3).reshape(a["n_kv_heads"], -1, n_pages * PAGE)[:, :head_dim, :n_keys]
        if op.one.endswith("-latent"):  # values are the first part of the keys
            return keys, np.ascontiguousarray(keys[:, :v_dim].transpose(0, 2, 1))
        values = _floats(pages[:, :, pool.v_offset :], self.model.kv_type, (PAGE, -1), axis=-1)
        values = values.transpose(1, 0, 2, 3).reshape(a["n_kv_heads"], n_pages * PAGE, -1)
        return keys, np.ascontiguousarray(values[:, :n_keys, :v_dim])

    def _value_norms(self, op: Op, values: np.ndarray) -> np.ndarray | None:
        """‖W_O v‖ for each head and position, where the output matrix takes the heads' values as they are."""
        a = op.values
        tensor = self.model.file.tensors.get(f"blk.{op.layer}.attn_output.weight")
        width = a["n_heads"] * a["v_dim"]
        if tensor is None or tensor.shape[-1] != width or op.one.endswith("-latent"):
            return None
        output = decode(tensor.type.name, tensor.data.reshape(tensor.shape[0], -1), width)
        tensor.release()
        # ‖W v‖² = v · (Wᵀ W) v, which is one small matrix for each head.
        by_head = output.reshape(-1, a["n_heads"], a["v_dim"]).transpose(1, 0, 2)
        squares = by_head.transpose(0, 2, 1) @ by_head
        values = np.repeat(values, a["n_heads"] // a["n_kv_heads"], axis=0)
        return np.sqrt(np.maximum(np.einsum("htd,htd->ht", values @ squares, values), 0))


def _probabilities(
    a: dict[str, Any], queries: np.ndarray, keys: np.ndarray, first: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Softmax of the scores of queries [Q, n_heads, head_dim], the first of them at a position, and of learned sinks:
    float32 [n_heads, Q, T], and [n_heads, Q] or None."""
    n_heads, n_kv_heads, n_keys = a["n_heads"], a["n_kv_heads"], keys.shape[2]
    n = len(queries)
    by_group = (queries * np.float32(a["scale"])).transpose(1, 0, 2).reshape(n_kv_heads, -1, a["head_dim"])
    scores = (by_group @ keys).reshape(n_heads, n, n_keys)
    if a["softcap"]:
        scores = np.float32(a["softcap"]) * np.tanh(scores / np.float32(a["softcap"]))
    positions = np.arange(first, first + n)
    distance = np.arange(n_keys) - positions[:, None]  # of a key from its query, negative behind it
    if a["slopes"]:
        scores += memory_at(a["slopes"], np.float32, n_heads)[:, None, None] * distance.astype(np.float32)
    masked = distance < -a["window_left"]
    masked |= distance > (0 if a["causal"] else a["window_right"])
    scores[:, masked] = -np.inf
    top = scores.max(axis=2, keepdims=True)
    if a["sinks"]:
        sink = np.broadcast_to(memory_at(a["sinks"], np.float32, n_heads)[:, None, None], top.shape)
        top = np.maximum(top, sink)
    scores -= top
    probs = np.exp(scores, out=scores)
    total = probs.sum(axis=2, keepdims=True)
    sink_mass = None
    if a["sinks"]:
        sink = np.exp(sink - top)
        total += sink
        sink_mass = (sink / total)[:, :, 0]
    probs /= total
    return probs, sink_mass


def _pages(pool: LayerPool, numbers: list[int], n_kv_heads: int) -> np.ndarray:
    """Copies of pages: uint8 [n_pages, n_kv_heads, head_bytes]."""
    start = pool.address - pool.memory.ctypes.data
    whole = (len(pool.memory) - start) // pool.page_bytes
    pages = pool.memory[start : start + whole * pool.page_bytes].reshape(whole, n_kv_heads, pool.head_bytes)
    return pages[numbers]


def _floats(pages: np.ndarray, kv_type: str, shape: tuple[int, int], axis: int) -> np.ndarray:
    """Keys or values of pages (uint8 [..., n_bytes]) as float32 [..., *shape]; blocks of q8_0 lie along `axis`."""
    lead = pages.shape[:-1]
    if kv_type != "q8_0":
        return pages.view(np.float16 if kv_type == "f16" else np.float32).astype(np.float32).reshape(*lead, *shape)
    n = pages.shape[-1] * 32 // 34
    codes = pages[..., :n].view(np.int8).astype(np.float32).reshape(*lead, *shape)
    scales = np.ascontiguousarray(pages[..., n:]).view(np.float16).astype(np.float32).reshape(*lead, *shape)
    return codes * np.repeat(scales, 32, axis=axis)
