"""What an observed run leaves behind: the team calls in behind each op, and rows, ranges and chosen stages are copied.

Buffers are read through the ops' own arguments, so whatever a plan holds can be observed; stages get the field's names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.kernels import abi
from tinyllm.trace.attention import AttentionReader
from tinyllm.trace.live_memory import matrix_at, memory_at
from tinyllm.trace.stage_rows import ActivationRows, Activations, StageRange, StageRows

if TYPE_CHECKING:
    from tinyllm.model import Model, Sequence
    from tinyllm.plan import Op

STAGES = (
    "embed", "attn_norm", "q", "k", "v", "attn_scores", "attn_out", "resid_mid", "ffn_norm", "router",
    "ffn_gate", "ffn_up", "ffn_act", "resid_post", "final_norm", "logits",
)  # fmt: skip
"""In the order of a token's way; a model has those that its architecture has."""

_FFN_WRITES = {"ffn_down", "ffn_out", "resid_post"}


@dataclass(eq=False)
class Router:
    """Choices of one layer's experts: `probs` float32 [T, n_experts], `ids` int [T, n_used], `weights` as applied.

    Where the model takes its softmax over the chosen experts only, `probs` is that over all of them.
    """

    probs: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


@dataclass(eq=False)
class _View:
    """Where a stage of a layer lies behind an op: live memory, float32 [max_rows, width]."""

    stage: str
    layer: int | None
    memory: np.ndarray


class Observation:
    """An observer for `Team.observed` during one sequence's evaluation.

    `keep`: stages whose rows are copied, beside the residual stream and the logits, which always are. `n_tokens`: how
    many positions there will be at most.
    """

    def __init__(self, model: Model, sequence: Sequence, keep: Collection[str], n_tokens: int):
        self.plan, self.network = model.network.plan, model.network
        self.n_layers, self._keep = model.config.n_layers, {*keep, "logits"}
        self.attention = AttentionReader(model, sequence, n_tokens)
        self._states = np.empty((2 * self.n_layers + 1, n_tokens, model.config.n_embd), np.float32)
        self._written = np.zeros(2 * self.n_layers + 1, bool)
        self._n_seen = 0
        self._rows: dict[tuple[str, int | None], StageRows] = {}
        self._routers: dict[int, list[tuple[np.ndarray, ...]]] = defaultdict(list)
        # A stage is looked at where the last op has worked on it: norms and rotations do so in place.
        last = {(view.stage, view.layer): (index, view) for index, view in self._find_views()}
        self._views: dict[int, list[_View]] = defaultdict(list)
        for index, view in last.values():
            self._views[index].append(view)
        self._elapsed = 0.0
        self._after = perf_counter()

    def __call__(self, index: int) -> None:
        """Look at the buffers behind op number `index`."""
        self._elapsed += perf_counter() - self._after
        op = self.plan.ops[index]
        n_rows, n_out = self.plan.step_rows
        if index == 0:
            self._n_seen = int(self.network.inputs.rows[0, abi.ROW_POSITION // 8])
        for view in self._views.get(index, ()):
            rows = view.memory[: n_out if view.stage in ("final_norm", "logits") else n_rows]
            if len(rows):
                self._look(view, rows)
        if op.arguments is abi.ATTEND:
            self.attention.take(op, self._n_seen, n_rows)
        elif op.one.startswith("moe.route"):
            self._add_router(op, n_rows)
        if index == len(self.plan.ops) - 1:
            self._n_seen += n_rows
        self._after = perf_counter()

    def start(self) -> None:
        """Time runs from here: what was computed in between belongs to no stage."""
        self._elapsed, self._after = 0.0, perf_counter()

    def array(self, stage: str, layer: int | None = None) -> np.ndarray | None:
        """A kept stage: float32 [rows, width]; None if it was not kept or does not exist."""
        rows = self._rows.get((stage, layer))
        return None if rows is None else rows.kept()

    def residual(self) -> np.ndarray:
        """The residual stream: float32 [2 · n_layers + 1, T, n_embd], behind the embedding and each half layer."""
        for state in np.flatnonzero(~self._written):
            self._states[state] = self._states[state - 1]
        return self._states[:, : self._n_seen]

    def stages(self) -> dict[tuple[str, int | None], StageRange]:
        """Ranges of all stages that were met, by stage and layer."""
        return {key: rows.range() for key, rows in self._rows.items()}

    def kept_stages(self) -> dict[tuple[str, int | None], np.ndarray]:
        """The copied rows, by stage and layer; the residual stream's are views of it."""
        states = self.residual()
        found = {("embed", None): states[0]}
        for key, rows in self._rows.items():
            if (state := _state_of(*key)) is not None:
                found[key] = states[state]
            elif (array := rows.kept()) is not None:
                found[key] = array
        return found

    def routers(self) -> dict[int, Router]:
        """Choices of experts by layer."""
        return {layer: Router(*map(np.concatenate, zip(*parts, strict=True))) for layer, parts in self._routers.items()}

    def activations(self) -> dict[int, Activations]:
        """What feed-forward neurons did, by layer."""
        return {layer: rows.activations() for layer, rows in self._activation_rows()}

    def last_activations(self) -> dict[int, np.ndarray]:
        """Activations in the last row of each step, by layer: float32 [n_steps, n_ff]."""
        return {layer: rows.step_ends() for layer, rows in self._activation_rows()}

    def _activation_rows(self) -> Iterator[tuple[int, ActivationRows]]:
        return ((layer, rows) for (_, layer), rows in self._rows.items() if isinstance(rows, ActivationRows))

    def _find_views(self) -> Iterator[tuple[int, _View]]:
        """Op numbers, and what can be seen behind them."""
        ops, x = self.plan.ops, self.network.x
        embedding = max((i for i, op in enumerate(ops) if op.stage == "embed" and op.layer is None), default=0)
        yield embedding, _View("embed", None, x.array)
        for index, op in enumerate(ops):
            if op.arguments is abi.ROPE:
                for stage, width in _head_widths(op):
                    yield index, self._view(stage, op, op.values[stage], op.values[f"{stage}_stride"], width)
            elif op.output is None or op.output.max_rows != self.plan.max_rows:
                continue
            elif op.layer is not None and op.output.root is x:
                yield index, _View("resid_post" if op.stage in _FFN_WRITES else "resid_mid", op.layer, x.array)
            elif op.stage in STAGES and op.stage != "embed" and op.arguments is not abi.ROUTE:
                # (routing turns the scores into probabilities in place, see `_add_router`)
                if op.arguments is abi.GATED and op.stage == "ffn_act":
                    first = "ffn_gate" if op.values["up"] else "ffn_up"
                    for stage, address in ((first, op.values["gate"]), ("ffn_up", op.values["up"])):
                        if address:
                            yield index, self._view(stage, op, address, op.values["x_stride"], op.values["n"])
                yield index, _View(op.stage, op.layer, op.output.array)

    def _view(self, stage: str, op: Op, address: int, stride: int, width: int) -> _View:
        return _View(stage, op.layer, matrix_at(address, stride, self.plan.max_rows, width))

    def _look(self, view: _View, values: np.ndarray) -> None:
        key = view.stage, view.layer
        rows = self._rows.get(key)
        if rows is None:
            kind = ActivationRows if view.stage == "ffn_act" else StageRows
            rows = self._rows[key] = kind(view.stage in self._keep and _state_of(*key) is None)
        if (state := _state_of(*key)) is not None:
            self._written[state] = True
            self._states[state, self._n_seen : self._n_seen + len(values)] = values
        rows.add(values)
        rows.seconds += self._elapsed
        self._elapsed = 0.0

    def _add_router(self, op: Op, n_rows: int) -> None:
        values = op.values
        n_used = values["n_used"]
        probs = op.output.array[:n_rows].copy()
        if op.one.endswith(":chosen"):
            probs = np.exp(probs - probs.max(axis=1, keepdims=True))
            probs /= probs.sum(axis=1, keepdims=True)
        ids = memory_at(values["ids"], np.int64, n_rows * n_used).reshape(n_rows, n_used).copy()
        weights = memory_at(values["weights"], np.float32, n_rows * n_used).reshape(n_rows, n_used).copy()
        self._routers[op.layer].append((probs, ids, weights))


def _head_widths(op: Op) -> Iterator[tuple[str, int]]:
    """Queries, keys and values as attention uses them, normed and rotated, and how wide they are."""
    values = op.values
    for stage, n_heads, dim in (("q", "n_heads", "head_dim"), ("k", "n_kv_heads", "head_dim"),
                                ("v", "n_kv_heads", "v_dim")):  # fmt: skip
        if values[stage] and values[n_heads] * values[dim]:
            yield stage, values[n_heads] * values[dim]


def _state_of(stage: str, layer: int | None) -> int | None:
    """The number of the residual stream's state that a stage is, or None."""
    if stage == "embed":
        return 0
    half = {"resid_mid": 1, "resid_post": 2}.get(stage)
    return None if half is None else 2 * layer + half
