"""Attention probabilities, recomputed from the stored queries and cache pages, since the kernel keeps none.

Out come a map per head, what each source would add to the stream (value weighting), and the distance to the kernel's
own result, which says how far the recomputation can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        """Entropy of each head's row, as a share of the largest possible: float64 [n_heads, Q], NaN for lone keys.

        `without`: positions that are left out, the others renormalised.
        """
        probs = self.probs.astype(np.float64)
        if without:
            probs[:, :, list(without)] = 0
        total = probs.sum(axis=2, keepdims=True)
        probs = np.divide(probs, total, out=np.zeros_like(probs), where=total > 0)
        logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0)
        entropy = -np.einsum("hqt,hqt->hq", probs, logs)
        queries = self.first_query + np.arange(probs.shape[1])
        spans = np.array([self.visible(q) for q in queries])
        visible = spans[:, 1] - spans[:, 0] - sum((spans[:, 0] <= t) & (t < spans[:, 1]) for t in without)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(visible > 1, entropy / np.log(visible), np.nan)

    def weighted(self, query: int) -> np.ndarray | None:
        """What each source gives to a query, by size: probs · ‖W_O v‖, renormalised: float32 [n_heads, T]."""
        if self.value_norms is None:
            return None
        given = self.probs[:, query - self.first_query] * self.value_norms
        return given / np.maximum(given.sum(axis=1, keepdims=True), 1e-30)


class AttentionReader:
    """Reads maps behind each attention op of a sequence's steps."""

    def __init__(self, model: Model, sequence: Sequence, n_tokens: int):
        self.model, self.sequence = model, sequence
        n_heads = sum(layer.n_heads for layer in model.config.layers)
        self.max_queries = max(1, MAP_BYTES // (4 * max(1, n_heads) * max(1, n_tokens)))
        self._ops: dict[int, Op] = {}
        self._pieces: dict[int, list[tuple[int, np.ndarray, np.ndarray | None]]] = {}
        self._errors: dict[int, list[float]] = {}

    def read(self, op: Op, n_rows: int, out: np.ndarray) -> None:
        """Recompute the rows of this step; `out`: what the kernel made of them, float32 [n_rows, n_heads · v_dim]."""
        a = op.values
        self._ops[op.layer] = op
        n_heads, n_kv_heads, head_dim = a["n_heads"], a["n_kv_heads"], a["head_dim"]
        first = int(self.model.network.inputs.rows[0, 0])
        n_keys = first + n_rows
        skipped = max(0, n_rows - self.max_queries)
        positions = np.arange(first + skipped, n_keys)
        q = matrix_at(a["q"], a["q_stride"], n_rows, n_heads * head_dim)[skipped:].reshape(-1, n_heads, head_dim)
        keys, values = self._cached(op, n_keys)
        group = n_heads // n_kv_heads
        n = len(positions)
        queries = (q * np.float32(a["scale"])).reshape(n, n_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        scores = queries.reshape(n_kv_heads, group * n, head_dim) @ keys
        scores = scores.reshape(n_heads, n, n_keys)
        if a["softcap"]:
            scores = np.float32(a["softcap"]) * np.tanh(scores / np.float32(a["softcap"]))
        distance = np.arange(n_keys) - positions[:, None]  # of a key from its query, negative behind it
        if a["slopes"]:
            scores = scores + memory_at(a["slopes"], np.float32, n_heads)[:, None, None] * distance.astype(np.float32)
        masked = distance < -a["window_left"]
        masked |= distance > (0 if a["causal"] else a["window_right"])
        scores[:, masked] = -np.inf
        top = scores.max(axis=2, keepdims=True)
        sink = None
        if a["sinks"]:
            sink = np.broadcast_to(memory_at(a["sinks"], np.float32, n_heads)[:, None, None], top.shape)
            top = np.maximum(top, sink)
        probs = np.exp(scores - top)
        total = probs.sum(axis=2, keepdims=True)
        if sink is not None:
            sink = np.exp(sink - top)
            total = total + sink
            sink = (sink / total)[:, :, 0]
        probs /= total
        self._compare(op.layer, probs, values, group, out[skipped:])
        self._pieces.setdefault(op.layer, []).append((first + skipped, probs, sink))

    def layers(self) -> list[LayerAttention | None]:
        """Maps of all layers; None where a layer has no attention."""
        return [self._layer(index) if index in self._pieces else None for index in range(self.model.config.n_layers)]

    def _layer(self, index: int) -> LayerAttention:
        pieces, op = self._pieces[index], self._ops[index]
        first, last = pieces[0][0], pieces[-1][0] + pieces[-1][1].shape[1]
        probs = np.zeros((op.values["n_heads"], last - first, last), np.float32)
        sinks = None if pieces[0][2] is None else np.concatenate([sink for _, _, sink in pieces], axis=1)
        for start, piece, _ in pieces:
            probs[:, start - first : start - first + piece.shape[1], : piece.shape[2]] = piece
        left = op.values["window_left"]
        return LayerAttention(
            n_kv_heads=op.values["n_kv_heads"],
            window=left + 1 if left < _NO_WINDOW else 0,
            first_query=first,
            probs=probs,
            value_norms=self._value_norms(index, op, last),
            error=float(np.sqrt(np.mean(np.square(self._errors[index])))),
            sink_mass=sinks,
        )

    def _compare(self, layer: int, probs: np.ndarray, values: np.ndarray, group: int, out: np.ndarray) -> None:
        n_heads, n, n_keys = probs.shape
        mixed = probs.reshape(n_heads // group, group * n, n_keys) @ values
        mixed = mixed.reshape(n_heads, n, -1).transpose(1, 0, 2).reshape(n, -1)
        spread = float(np.sqrt(np.mean(np.square(out, dtype=np.float64)))) or 1.0
        self._errors.setdefault(layer, []).append(
            float(np.sqrt(np.mean(np.square(mixed - out, dtype=np.float64)))) / spread
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

    def _value_norms(self, index: int, op: Op, n: int) -> np.ndarray | None:
        """‖W_O v‖ for each head and position, where the output matrix takes the heads' values as they are."""
        a = op.values
        tensor = self.model.file.tensors.get(f"blk.{index}.attn_output.weight")
        width = a["n_heads"] * a["v_dim"]
        if tensor is None or tensor.shape[-1] != width or op.one.endswith("-latent"):
            return None
        output = decode(tensor.type.name, tensor.data.reshape(tensor.shape[0], -1), width)
        tensor.release()
        values = self._cached(op, n)[1]
        group = a["n_heads"] // a["n_kv_heads"]
        norms = np.empty((a["n_heads"], n), np.float32)
        # One product for all heads that share values: [n, v_dim] x [v_dim, group · n_embd].
        by_head = output.reshape(-1, a["n_kv_heads"], group, a["v_dim"]).transpose(1, 3, 2, 0)
        for kv_head, v in enumerate(values):
            added = (v @ by_head[kv_head].reshape(a["v_dim"], -1)).reshape(n, group, -1)
            norms[kv_head * group : (kv_head + 1) * group] = np.sqrt(np.einsum("tge,tge->gt", added, added))
        return norms


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
