"""What an observed run leaves behind: the team calls in behind each op, and rows, ranges and chosen stages are copied.

Buffers are read through the ops' own arguments, so whatever a plan holds can be observed; stages get the field's names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.kernels import abi
from tinyllm.trace.attention import AttentionReader
from tinyllm.trace.live_memory import matrix_at, memory_at

if TYPE_CHECKING:
    from tinyllm.model import Model, Sequence
    from tinyllm.plan import Op

STAGES = (
    "embed", "attn_norm", "q", "k", "v", "attn_scores", "attn_out", "resid_mid", "ffn_norm", "router",
    "ffn_gate", "ffn_up", "ffn_act", "resid_post", "final_norm", "logits",
)  # fmt: skip
"""In the order of a token's way; a model has those that its architecture has."""

RESIDUAL = ("embed", "resid_mid", "resid_post")
N_TOP_NEURONS = 8
N_BINS = 16
ACTIVE_SHARE = 0.1
"""A neuron counts as active above this share of its row's largest magnitude."""


@dataclass(eq=False)
class StageRange:
    """Size and spread of a stage's rows: float32 [n_tokens] each; `histogram` (int [16]) is of the last row.

    The bins are equal parts from the last row's smallest to its largest value. `seconds`: the time of the stage's ops.
    """

    width: int
    norm: np.ndarray
    low: np.ndarray
    high: np.ndarray
    histogram: np.ndarray
    seconds: float


@dataclass(eq=False)
class Router:
    """Choices of one layer's experts: `probs` float32 [T, n_experts], `ids` int [T, n_used], `weights` as applied."""

    probs: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


@dataclass(eq=False)
class _Rows:
    """Pieces of one stage, step by step."""

    width: int = 0
    norm: list[np.ndarray] = field(default_factory=list)
    low: list[np.ndarray] = field(default_factory=list)
    high: list[np.ndarray] = field(default_factory=list)
    histogram: np.ndarray | None = None
    seconds: float = 0.0
    kept: list[np.ndarray] = field(default_factory=list)


class Observation:
    """An observer for `Team.observed` during one sequence's evaluation.

    `keep`: stages whose rows are copied, beside the residual stream and the logits, which always are. `n_tokens`: how
    many positions there will be at most, which decides how many rows of attention can be kept.
    """

    def __init__(self, model: Model, sequence: Sequence, keep: Collection[str], n_tokens: int):
        self.plan, self.network = model.network.plan, model.network
        self.n_layers = model.config.n_layers
        self.keep = {*keep, *RESIDUAL, "logits"}
        self.attention = AttentionReader(model, sequence, n_tokens)
        self._rows: dict[tuple[str, int | None], _Rows] = defaultdict(_Rows)
        self._routers: dict[int, list[tuple[np.ndarray, ...]]] = defaultdict(list)
        self._neurons: dict[int, list[tuple[np.ndarray, ...]]] = defaultdict(list)
        self._written_by: dict[int, str] = {}
        for op in self.plan.ops:
            if op.layer is not None and self._writes_stream(op):
                self._written_by[id(op)] = "resid_post" if op.stage in _FFN_WRITES else "resid_mid"
        self._seen: set[tuple[str, int | None]] = set()
        self._after = perf_counter()

    def __call__(self, index: int) -> None:
        """Look at the buffers behind op number `index`."""
        seconds = perf_counter() - self._after
        op = self.plan.ops[index]
        n_rows, n_out = self.plan.step_rows
        if index == 0:
            self._seen.clear()
            self._add("embed", None, self.network.x.array[:n_rows], 0.0)
        if op.arguments is abi.ROPE:
            self._add_heads(op, n_rows, seconds)
        elif op.arguments is abi.ATTEND:
            out = op.output.array[:n_rows]
            self.attention.read(op, n_rows, out)
            self._add("attn_out", op.layer, out, seconds)
        elif op.one.startswith("moe.route"):
            self._add_router(op, n_rows)
        elif op.output is not None:
            stage = self._written_by.get(id(op), op.stage)
            if stage in STAGES and stage != "embed" and op.output.max_rows == self.plan.max_rows:
                rows = op.output.array[: n_rows if op.layer is not None else n_out]
                if rows.shape[0]:
                    self._add(stage, op.layer, rows, seconds)
                if stage == "ffn_act":
                    self._add_neurons(op.layer, rows)
        self._after = perf_counter()

    def start(self) -> None:
        """Time runs from here: what was computed in between belongs to no stage."""
        self._after = perf_counter()

    def array(self, stage: str, layer: int | None = None) -> np.ndarray | None:
        """A kept stage: float32 [rows, width]; None if it was not kept or does not exist."""
        rows = self._rows.get((stage, layer))
        return np.concatenate(rows.kept) if rows is not None and rows.kept else None

    def residual(self) -> np.ndarray:
        """The residual stream: float32 [2 · n_layers + 1, T, n_embd], behind the embedding and each half layer."""
        states = [self.array("embed")]
        for layer in range(self.n_layers):
            for stage in ("resid_mid", "resid_post"):
                states.append(states[-1] if (found := self.array(stage, layer)) is None else found)
        return np.stack(states)

    def stages(self) -> dict[tuple[str, int | None], StageRange]:
        """Ranges of all stages that were met, by stage and layer."""
        return {
            key: StageRange(
                rows.width,
                *(np.concatenate(part) for part in (rows.norm, rows.low, rows.high)),
                rows.histogram,
                rows.seconds,
            )
            for key, rows in self._rows.items()
        }

    def kept_stages(self) -> dict[tuple[str, int | None], np.ndarray]:
        """The copied rows, by stage and layer."""
        return {key: np.concatenate(rows.kept) for key, rows in self._rows.items() if rows.kept}

    def routers(self) -> dict[int, Router]:
        """Choices of experts by layer."""
        return {layer: Router(*map(np.concatenate, zip(*parts, strict=True))) for layer, parts in self._routers.items()}

    def neurons(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Feed-forward activations by layer, for each token: share of active ones, how many carry half and 90 % of the
        energy (int [T, 2]), numbers and values of the strongest ([T, 8])."""
        return {layer: tuple(map(np.concatenate, zip(*parts, strict=True))) for layer, parts in self._neurons.items()}

    def _writes_stream(self, op: Op) -> bool:
        output = op.output
        return output is not None and (output is self.network.x or output.base is self.network.x)

    def _add(self, stage: str, layer: int | None, values: np.ndarray, seconds: float) -> None:
        rows = self._rows[stage, layer]
        if (stage, layer) in self._seen:
            for pieces in (rows.norm, rows.low, rows.high, rows.kept):
                del pieces[-1:]  # a later op of the same step worked on it in place
        self._seen.add((stage, layer))
        rows.width = values.shape[1]
        rows.norm.append(np.sqrt(np.einsum("ij,ij->i", values, values)))
        rows.low.append(values.min(axis=1))
        rows.high.append(values.max(axis=1))
        rows.histogram = _histogram(values[-1], rows.low[-1][-1], rows.high[-1][-1])
        rows.seconds += seconds
        if stage in self.keep:
            rows.kept.append(values.copy())

    def _add_heads(self, op: Op, n_rows: int, seconds: float) -> None:
        """Queries, keys and values as attention uses them: normed and rotated."""
        values = {key: value() if callable(value) else value for key, value in op.values.items()}
        q_width, k_width = (values[n] * values["head_dim"] for n in ("n_heads", "n_kv_heads"))
        for stage, width in (("q", q_width), ("k", k_width), ("v", values["n_kv_heads"] * values["v_dim"])):
            if width and values[stage]:
                rows = matrix_at(values[stage], values[f"{stage}_stride"], n_rows, width)
                self._add(stage, op.layer, rows, seconds if stage == "q" else 0.0)

    def _add_router(self, op: Op, n_rows: int) -> None:
        values = op.values
        n_used = values["n_used"]
        probs = op.output.array[:n_rows].copy()
        ids = memory_at(values["ids"], np.int64, n_rows * n_used).reshape(n_rows, n_used).copy()
        weights = memory_at(values["weights"], np.float32, n_rows * n_used).reshape(n_rows, n_used).copy()
        self._routers[op.layer].append((probs, ids, weights))

    def _add_neurons(self, layer: int, act: np.ndarray) -> None:
        size = np.abs(act)
        active = (size > ACTIVE_SHARE * size.max(axis=1, keepdims=True)).mean(axis=1)
        k = min(N_TOP_NEURONS, act.shape[1])
        top = np.argpartition(size, act.shape[1] - k, axis=1)[:, -k:]
        top = np.take_along_axis(top, np.argsort(-np.take_along_axis(size, top, 1), axis=1), 1)
        # Energy shares are wanted where a token is chosen: the last row of a step.
        energy = np.cumsum(np.sort(size[-1])[::-1].astype(np.float64) ** 2)
        carry = np.searchsorted(energy, np.array([0.5, 0.9]) * energy[-1]) + 1
        carries = np.full((len(act), 2), -1)
        carries[-1] = carry
        self._neurons[layer].append((active, carries, top, np.take_along_axis(act, top, 1)))


def _histogram(values: np.ndarray, low: float, high: float) -> np.ndarray:
    if not high > low:
        return np.bincount([0], minlength=N_BINS) * len(values)
    bins = ((values - low) * (N_BINS / (high - low))).astype(np.int64)
    return np.bincount(np.clip(bins, 0, N_BINS - 1), minlength=N_BINS)


_FFN_WRITES = {"ffn_down", "ffn_out", "resid_post"}
