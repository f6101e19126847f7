"""What an op must move and compute at least: an op and the shape of a step go in, bytes and operations come out.

Bytes are those of weights, cache and activations that are read or written, each once; a multiplication and an addition
are two operations. Seen with measured times and the machine's roofs, they tell how good a kernel is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .kernels import abi
from .kernels.formats import TILES
from .plan import Op

# Float operations of one exponential in the vocabulary: a polynomial of degree six with its range reduction.
_EXP = 20
# Bytes of one activation: as float32, and in an int8 record with its scale and sums.
_FLOAT, _CODE = 4, abi.RECORD // 32


@dataclass(frozen=True)
class StepShape:
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


def work_of(op: Op, shape: StepShape, rows_address: int) -> Work:
    """The work of an op in a step; `rows_address` is the plan's counter of all rows (other ops run for n_out rows)."""
    n_rows = shape.n_rows if op.values["n_rows"] == rows_address else shape.n_out
    if n_rows == 0:
        return Work()
    formula = FORMULAS.get(id(op.arguments))
    return formula(op, n_rows, shape) if formula else Work()


def _linear(op: Op, n_rows: int, shape: StepShape) -> Work:
    values = op.values
    written = values["panels"] * 16 * _FLOAT * (2 if values["accumulate"] else 1)
    n_bytes = op.weight_bytes + n_rows * (values["x_stride"] + written)
    operations = n_rows * op.operations_per_row
    tile = TILES.get(op.one.partition(":")[2])
    if tile is not None and tile.is_float:
        return Work(n_bytes, f32_ops=operations)
    return Work(n_bytes, int8_ops=operations)


def _norm(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"] * op.values["segments"]
    return Work(n * (2 * _FLOAT + _CODE), f32_ops=4 * n)


def _quantize(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"]
    return Work(n * (_FLOAT + _CODE), f32_ops=3 * n)


def _gated(op: Op, n_rows: int, shape: StepShape) -> Work:
    n = n_rows * op.values["n"]
    read = 2 if op.values["up"] else 1
    return Work(n * ((read + 1) * _FLOAT + _CODE), f32_ops=n * (_EXP + 3))


def _gather(op: Op, n_rows: int, shape: StepShape) -> Work:
    return Work(n_rows * op.values["n"] * 2 * _FLOAT)


def _rope(op: Op, n_rows: int, shape: StepShape) -> Work:
    values = op.values
    n_heads, n_kv_heads = values["n_heads"], values["n_kv_heads"]
    rotated = (n_heads + n_kv_heads) * values["n_rot"]
    cached = values["page_bytes"] / abi.PAGE
    read = n_kv_heads * (values["head_dim"] + values["v_dim"]) * _FLOAT
    return Work(n_rows * (2 * rotated * _FLOAT + read + cached), f32_ops=n_rows * 3 * rotated)


def _attend(op: Op, n_rows: int, shape: StepShape) -> Work:
    """Keys and values of every visible position once per step; two products and an exponential per row, head and
    position."""
    values = op.values
    first, last = shape.position, shape.position + n_rows - 1
    window = values["window_left"] + 1
    positions = last + 1 - max(0, first + 1 - window)
    seen = _triangle(last + 1, window) - _triangle(first, window)
    pairs = seen if values["causal"] else n_rows * positions
    widths = values["head_dim"] + values["v_dim"]
    n_bytes = positions * values["page_bytes"] / abi.PAGE + n_rows * values["n_heads"] * widths * _FLOAT
    return Work(n_bytes, f32_ops=pairs * values["n_heads"] * (2 * widths + _EXP))


def _triangle(n: int, window: int) -> int:
    """Σ min(i, window) for i = 1 … n: the positions that the first n rows see."""
    full = min(n, window)
    return full * (full + 1) // 2 + (n - full) * window


def _convolve(op: Op, n_rows: int, shape: StepShape) -> Work:
    n, taps = op.values["n"], op.values["taps"]
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
        (abi.NORM, _norm),
        (abi.QUANTIZE, _quantize),
        (abi.GATED, _gated),
        (abi.GATHER, _gather),
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
