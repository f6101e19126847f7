"""What an op must move and compute at least: an op and the shape of a step go in, bytes and operations come out.

Bytes are those of weights, cache and activations that are read or written, each once; a multiplication and an addition
are two operations. Seen with measured times and the machine's roofs, they tell how good a kernel is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..kernels import abi
from ..kernels.formats import TILES
from ..plan import Op, Plan

# Float operations of one exponential in the vocabulary: a polynomial of degree six with its range reduction.
_EXP = 20
# Bytes of one activation: as float32, and in an int8 record with its scale and sums.
_FLOAT, _CODE = 4, abi.RECORD // 32
_ID = 8


class StepShape(NamedTuple):
    """One step: `n_rows` tokens of a sequence from `position` on, of which `n_out` want logits."""

    n_rows: int
    n_out: int
    position: int


@dataclass(frozen=True)
class Work:
    """Bytes moved, and operations on int8 and on float32."""

    n_bytes: float = 0.0
    int8_ops: float = 0.0
    f32_ops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.n_bytes + other.n_bytes, self.int8_ops + other.int8_ops, self.f32_ops + other.f32_ops)

    def __mul__(self, factor: float) -> Work:
        return Work(self.n_bytes * factor, self.int8_ops * factor, self.f32_ops * factor)

    @property
    def ops(self) -> float:
        return self.int8_ops + self.f32_ops


class Costs:
    """The work of a plan's ops."""

    def __init__(self, plan: Plan):
        self._ops = plan.ops
        self._rows, self._out_rows = plan.rows, plan.out_rows
        # Ops on pairs of a row and an expert count these: as many for each row as experts are used.
        self._pairs = {op.values["n_pairs"]: op.values["n_used"] for op in plan.ops if op.arguments is abi.GROUP}

    def of(self, op: Op, shape: StepShape) -> Work:
        """The work of an op in a step, together with that of an op that it does on the way.

        Where experts are chosen, any of them is taken to be equally likely.
        """
        if op.done_before:
            return Work()
        return self._of(op, shape) + (self._of(op.then, shape) if op.then is not None else Work())

    def _of(self, op: Op, shape: StepShape) -> Work:
        counter = op.values["n_rows"]
        if counter == self._out_rows:
            n_rows = shape.n_out
        else:
            n_rows = shape.n_rows * (1 if counter == self._rows else self._pairs.get(counter, 1))
        formula = FORMULAS.get(id(op.arguments))
        return formula(op, n_rows, shape) if n_rows and formula else Work()

    def total(self, shapes: Iterable[StepShape]) -> Work:
        """The work of whole steps."""
        return sum((self.of(op, shape) for shape in shapes for op in self._ops), Work())


def _linear(op: Op, n_rows: int, shape: StepShape) -> Work:
    return _products(op, op.one, op.values, n_rows, op.weight_bytes, n_rows * op.operations_per_row)


def _dispatch(op: Op, n_rows: int, shape: StepShape) -> Work:
    """Matrices of which `n_used` take part for each row: of n rows, n_matrices · (1 − (1 − n_used / n_matrices)^n)."""
    n_matrices, matrix_bytes = op.blocks.count, op.blocks.steps["weights"]
    n_used = op.weight_bytes // matrix_bytes
    n_active = n_matrices * (1 - (1 - n_used / n_matrices) ** n_rows)
    operations = n_rows * op.operations_per_row
    return _products(op, op.calls[0], op.blocks.values, n_rows * n_used, n_active * matrix_bytes, operations)


def _products(op: Op, kernel: str, values: dict, n_rows: int, weight_bytes: float, operations: int) -> Work:
    written = values["panels"] * 16 * _FLOAT * (2 if values["accumulate"] else 1)
    n_bytes = weight_bytes + n_rows * (values["x_stride"] + written)
    tile = TILES.get(kernel.partition(":")[2])
    if tile is not None and tile.is_float:
        return Work(n_bytes, f32_ops=operations)
    return Work(n_bytes, int8_ops=operations)


def _norm(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"] * op.values["segments"]
    records = _CODE if op.values["records"] else 0
    return Work(n * (2 * _FLOAT + records), f32_ops=4 * n)


def _quantize(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"]
    return Work(n * (_FLOAT + _CODE), f32_ops=3 * n)


def _split(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"]
    return Work(n * (_FLOAT + 2 * _CODE), f32_ops=8 * n)


def _join(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"]
    return Work(n * 3 * _FLOAT, f32_ops=n)


def _gated(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"]
    read = 2 if op.values["up"] else 1
    records = _CODE if op.values["records"] else 0
    return Work(n * ((read + 1) * _FLOAT + records), f32_ops=n * (_EXP + 3))


def _in_place(ops_per_value: int) -> Formula:
    """A function of each value."""

    def work(op: Op, n_rows: int, shape: StepShape) -> Work:
        n = n_rows * op.values["n"]
        return Work(n * 2 * _FLOAT, f32_ops=n * ops_per_value)

    return work


def _embed(op: Op, n_rows: int, shape: StepShape) -> Work:
    row_bytes = op.values["row_bytes"]
    return Work(n_rows * (row_bytes + op.values["x_stride"]), f32_ops=n_rows * op.values["x_stride"] / _FLOAT)


def _copy_heads(op: Op, n_rows: int, shape: StepShape) -> Work:
    return Work(n_rows * op.values["n"] * op.values["n_heads"] * 2 * _FLOAT)


def _route(op: Op, n_rows: int, shape: StepShape) -> Work:
    n_experts, n_used = op.values["n_experts"], op.values["n_used"]
    n_bytes = n_rows * (3 * n_experts * _FLOAT + n_used * (_ID + _FLOAT))
    return Work(n_bytes, f32_ops=n_rows * n_experts * (_EXP + n_used))


def _group(op: Op, n_rows: int, shape: StepShape) -> Work:
    return Work(n_rows * op.values["n_used"] * 3 * (_ID + _FLOAT))


def _combine(op: Op, n_rows: int, shape: StepShape) -> Work:
    values = op.values
    summands = values["n_used"] + (1 if values["shared"] else 0)
    n = n_rows * values["n"]
    return Work(n * (summands + 1 + values["accumulate"]) * _FLOAT, f32_ops=2 * n * summands)


def _rope(op: Op, n_rows: int, shape: StepShape) -> Work:
    values = op.values
    n_heads, n_kv_heads = values["n_heads"], values["n_kv_heads"]
    rotated = (n_heads + n_kv_heads) * values["n_rot"]
    cached = 0
    if values["pool"]:
        cached = values["page_bytes"] / abi.PAGE + n_kv_heads * (values["head_dim"] + values["v_dim"]) * _FLOAT
    return Work(n_rows * (2 * rotated * _FLOAT + cached), f32_ops=n_rows * 3 * rotated)


def _attend(op: Op, n_rows: int, shape: StepShape) -> Work:
    """Keys and values of each visible position once, and for each row, head and visible position two products and an
    exponential."""
    values = op.values
    rows = np.arange(shape.position, shape.position + n_rows)
    first = np.maximum(rows - values["window_left"], 0)
    last = rows if values["causal"] else np.minimum(rows + values["window_right"], rows[-1])
    n_positions, n_pairs = int(last.max() - first.min()) + 1, int((last - first + 1).sum())
    widths = values["head_dim"] + values["v_dim"]
    n_bytes = n_positions * values["page_bytes"] / abi.PAGE + n_rows * values["n_heads"] * widths * _FLOAT
    return Work(n_bytes, f32_ops=n_pairs * values["n_heads"] * (2 * widths + _EXP))


def _convolve(op: Op, n_rows: int, shape: StepShape) -> Work:
    n, taps = op.values["n"], int(op.one.rpartition("-")[2])
    return Work(n * _FLOAT * (2 * n_rows + 2 * (taps - 1) + taps), f32_ops=n_rows * n * 2 * taps)


def _scan(op: Op, n_rows: int, shape: StepShape) -> Work:
    """The state is read and written once per step; per row and element of it: decay, input, output."""
    values = op.values
    if op.arguments is abi.SELECTIVE_SCAN:
        width, n_states, per_element = values["n"], values["n"] * values["n_state"], _EXP + 6
    elif op.arguments is abi.HEAD_SCAN:
        width = values["n_heads"] * values["head_dim"]
        n_states, per_element = width * values["n_state"], 5
    else:
        width = values["n_heads"] * values["v_dim"]
        n_states, per_element = width * values["k_dim"], 7
    return Work(_FLOAT * (2 * n_states + 3 * n_rows * width), f32_ops=n_rows * n_states * per_element)


def _gate(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"] * op.values["segments"]
    return Work(n * 3 * _FLOAT, f32_ops=n * (_EXP + 5))


Formula = Callable[[Op, int, StepShape], Work]

# By kind of arguments: kernels that take the same arguments do the same work.
FORMULAS: dict[int, Formula] = {
    id(kind): formula
    for kind, formula in (
        (abi.LINEAR, _linear),
        (abi.DISPATCH, _dispatch),
        (abi.NORM, _norm),
        (abi.QUANTIZE, _quantize),
        (abi.SPLIT, _split),
        (abi.JOIN, _join),
        (abi.GATED, _gated),
        (abi.LIMIT, _in_place(_EXP + 5)),
        (abi.WEIGH, _in_place(1)),
        (abi.EMBED, _embed),
        (abi.GATHER, _in_place(0)),
        (abi.COPY_HEADS, _copy_heads),
        (abi.ROUTE, _route),
        (abi.GROUP, _group),
        (abi.COMBINE, _combine),
        (abi.ROPE, _rope),
        (abi.ATTEND, _attend),
        (abi.CONVOLVE, _convolve),
        (abi.SELECTIVE_SCAN, _scan),
        (abi.HEAD_SCAN, _scan),
        (abi.DELTA_RULE, _scan),
        (abi.GATED_NORM, _gate),
        (abi.SIGMOID_GATE, _gate),
    )
}
