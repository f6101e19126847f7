"""A plan: the named ops of a forward pass, recorded once and run by the team's compiled loop for any number of rows.

Recording hands out buffers and fills a table of (kernel for one row, kernel for many, arguments, row counter).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import Buffer, aligned_zeros
from .kernels import abi
from .kernels.formats import PANEL_ROWS
from .kernels.jit import kernel_addresses
from .weights import Fused, Matrix, Vector

if TYPE_CHECKING:
    from .blocks_moe import ExpertChoice


@dataclass(eq=False)
class Op:
    """One named step. `weight_bytes` are read per run, `operations_per_row` are arithmetic operations per row.

    `source`: what it reads, where the plan looks at that. `private`: see `Plan._make_private`.
    `calls`: the kernels, for one row and for many, that an op calls for each of its `blocks` of arguments.
    """

    stage: str
    layer: int | None
    one: str
    many: str
    arguments: abi.Arguments
    values: dict[str, Any]
    output: Buffer | None
    weight_bytes: int = 0
    operations_per_row: int = 0
    calls: tuple[str, str] | None = None
    blocks: Blocks | None = None
    source: Buffer | None = None
    private: bool = False


@dataclass(eq=False)
class Blocks:
    """Argument blocks of `count` products of the same shape: block i has `values`, plus i times `steps`."""

    count: int
    values: dict[str, Any]
    steps: dict[str, int]


class Plan:
    """Ops in order. `rows` and `out_rows` count rows of the step: those computed, and those whose logits are wanted."""

    def __init__(self, max_rows: int, n_threads: int):
        self.max_rows, self.n_threads = max_rows, n_threads
        self.ops: list[Op] = []
        self._counters = aligned_zeros(128).view(np.int64)
        self._layer: int | None = None
        self._buffers: dict[tuple[str, int, int], Buffer] = {}
        self._scratch_bytes = 0
        self._table: np.ndarray | None = None
        self._kept: list[np.ndarray] = []
        self._shared: dict[str, Any] = {}

    @property
    def rows(self) -> int:
        """Address of the number of rows of a step."""
        return self._counters.ctypes.data

    @property
    def out_rows(self) -> int:
        return self._counters.ctypes.data + 64

    def set_rows(self, n_rows: int, n_out: int) -> None:
        self._counters[0], self._counters[8] = n_rows, n_out

    @property
    def step_rows(self) -> tuple[int, int]:
        """Rows of the step, and rows whose logits are wanted, as last set."""
        return int(self._counters[0]), int(self._counters[8])

    def layer(self, index: int | None) -> None:
        """Ops recorded from here on belong to this layer."""
        self._layer = index

    def buffer(self, name: str, width: int, rows_factor: int = 1) -> Buffer:
        """Memory for `rows_factor` · max_rows rows; layers that ask for the same name and width share it."""
        key = (name, width, rows_factor)
        if key not in self._buffers:
            self._buffers[key] = Buffer(name, width, rows_factor * self.max_rows)
        return self._buffers[key]

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for all layers and kept as long as the plan."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    @property
    def buffers(self) -> dict[str, Buffer]:
        """All buffers by name; of several widths the last."""
        return {name: buffer for (name, _, _), buffer in self._buffers.items()}

    def add(
        self,
        stage: str,
        kernel: str | tuple[str, str],
        arguments: abi.Arguments,
        output: Buffer | None = None,
        rows: int | None = None,
        weight_bytes: int = 0,
        operations_per_row: int = 0,
        **values: Any,
    ) -> Op:
        """Append an op. `kernel` is one name, or a pair for one row and for many.

        A value may be a function without arguments: it is called when the plan is complete.
        """
        one, many = (kernel, kernel) if isinstance(kernel, str) else kernel
        values = {"n_rows": rows or self.rows, **values}
        op = Op(stage, self._layer, one, many, arguments, values, output, weight_bytes, operations_per_row)
        self.ops.append(op)
        return op

    def linear(
        self,
        stage: str,
        x: Buffer,
        weights: Matrix | Fused,
        y: Buffer,
        *,
        rows: int | None = None,
        accumulate: bool = False,
        scale: float = 1.0,
    ) -> Op:
        """y = scale · (W x + b), or y += …; fused matrices fill y's columns one after another. The first op."""
        matrices = weights.matrices if isinstance(weights, Fused) else [weights]
        n_before, column = len(self.ops), 0
        for matrix in matrices:
            target = y.columns(column, matrix.n_outputs, stage) if len(matrices) > 1 else y
            op = self.add(
                stage if len(matrices) == 1 else matrix.stage or stage,
                _products(matrix),
                abi.LINEAR,
                target,
                rows,
                matrix.n_bytes,
                2 * matrix.n_outputs * matrix.n_inputs,
                **self._linear_values(matrix, x, target, accumulate, scale),
            )
            op.source = x
            column += matrix.panels * PANEL_ROWS
        return self.ops[n_before]

    def linear_each(self, stage: str, x: Buffer, matrix: Matrix, y: Buffer, x_step: int, y_step: int) -> None:
        """Stacked matrices, each with columns of its own: y[:, i·y_step …] = W_i x[:, i·x_step …]."""
        everyone = self._word(matrix.count)
        x_bytes = x_step // 32 * abi.RECORD if _quantized(matrix) else 4 * x_step
        self._dispatch(stage, x, matrix, y, matrix.count, everyone, 0, {"x": x_bytes, "y": 4 * y_step}, {})

    def linear_experts(self, stage: str, x: Buffer, matrix: Matrix, y: Buffer, choice: ExpertChoice) -> None:
        """Stacked matrices of experts, each for the rows of those who chose it."""
        self._dispatch(
            stage,
            x,
            matrix,
            y,
            choice.n_used,
            choice.n_active,
            choice.active,
            {"n_rows": 8, "first_row": 8},
            {"n_rows": choice.counts, "first_row": choice.firsts},
            choice.parts,
        )

    def _dispatch(
        self,
        stage: str,
        x: Buffer,
        matrix: Matrix,
        y: Buffer,
        n_used: int,
        n_groups: int,
        groups: int,
        steps: dict[str, int],
        values: dict[str, int],
        parts: int = 1,
    ) -> None:
        """`n_used` matrices take part for each row, on `parts` rows of x each."""
        op = self.add(
            stage,
            "dispatch.dispatch",
            abi.DISPATCH,
            y,
            None,
            n_used * matrix.panels * matrix.panel_bytes,
            2 * n_used * parts * matrix.n_outputs * matrix.n_inputs,
            n_groups=n_groups,
            groups=groups,
            blocks=0,
            one=0,
            many=0,
        )
        op.calls = _products(matrix)
        bias_step = 4 * PANEL_ROWS * matrix.panels if matrix.bias else 0
        op.blocks = Blocks(
            matrix.count,
            {"n_rows": self.rows, **self._linear_values(matrix, x, y, False, 1.0), **values},
            {"weights": matrix.panels * matrix.panel_bytes, "bias": bias_step, **steps},
        )

    def _linear_values(self, matrix: Matrix, x: Buffer, y: Buffer, accumulate: bool, scale: float) -> dict[str, Any]:
        quantized = _quantized(matrix)
        if quantized:
            x.wants_records = True
        self.need_scratch(_GEMM_SCRATCH)
        return {
            "grain": max(1, min(16, matrix.panels // (4 * self.n_threads))),
            "panels": matrix.panels,
            "tiles": matrix.tiles,
            "panel_bytes": matrix.panel_bytes,
            "weights": matrix.address,
            "private": 0,
            "x": x.records if quantized else x.address,
            "x_stride": x.records_stride if quantized else x.stride,
            "y": y.address,
            "y_stride": y.stride,
            "bias": matrix.bias.address if matrix.bias else 0,
            "accumulate": int(accumulate),
            "scale": float(scale),
            "scratch": _SCRATCH,
            "scratch_stride": _SCRATCH,
            "first_row": 0,
        }

    def norm(
        self,
        stage: str,
        kind: str,
        eps: float,
        x: Buffer,
        weight: Vector | None,
        h: Buffer,
        *,
        bias: Vector | None = None,
        rows: int | None = None,
        segments: int = 1,
        weight_stride: int = 0,
        accumulate: bool = False,
        scale: float = 1.0,
    ) -> None:
        """h = scale · (norm(x) · weight + bias), or h += …, in `segments` equal parts of a row; records too where a
        consumer wants them."""
        op = self.add(
            stage,
            f"elementwise.norm:{kind}",
            abi.NORM,
            h,
            rows,
            n=h.width // segments,
            eps=float(eps),
            segments=segments,
            weight=weight.address if weight else 0,
            weight_stride=weight_stride,
            bias=bias.address if bias else 0,
            x=x.address,
            x_stride=x.stride,
            h=h.address,
            h_stride=h.stride,
            accumulate=int(accumulate),
            scale=float(scale),
            **_records(h),
        )
        op.source = x

    def quantize(self, stage: str, x: Buffer, rows: int | None = None) -> None:
        """Records of x for the products that follow; the op is left out if none of them wants records."""
        op = self.add(
            stage,
            "elementwise.quantize",
            abi.QUANTIZE,
            None,
            rows,
            n=x.width,
            x=x.address,
            x_stride=x.stride,
            **_records(x),
        )
        op.source = x

    def split(self, stage: str, x: Buffer, parts: Buffer, rows: int) -> None:
        """Records of x at twice the precision, as two rows each of `parts`."""
        self.add(
            stage,
            "elementwise.split",
            abi.SPLIT,
            None,
            rows,
            n=x.width,
            x=x.address,
            x_stride=x.stride,
            records=parts.records,
            records_stride=parts.records_stride,
        )

    def join(self, stage: str, parts: Buffer, y: Buffer, rows: int) -> None:
        """y[i] = parts[2i] + parts[2i + 1], for products of what was split."""
        self.add(
            stage,
            "elementwise.join",
            abi.JOIN,
            y,
            rows,
            n=y.width,
            x=parts.address,
            x_stride=parts.stride,
            y=y.address,
            y_stride=y.stride,
        )

    def gather(self, stage: str, x: Buffer, index: int, y: Buffer, rows: int | None = None) -> None:
        """y[i] = x[index[i]]; `index` is the address of int64 row numbers."""
        self.add(
            stage,
            "elementwise.gather",
            abi.GATHER,
            y,
            rows or self.out_rows,
            n=x.width,
            index=index,
            x=x.address,
            x_stride=x.stride,
            y=y.address,
            y_stride=y.stride,
        )

    def activate(
        self, stage: str, activation: str, gate: Buffer, up: Buffer | None, y: Buffer, rows: int | None = None
    ) -> None:
        """y = act(gate) · up."""
        kernel = f"elementwise.{'gated' if up else 'plain'}:{activation}"
        self.add(
            stage,
            kernel,
            abi.GATED,
            y,
            rows,
            n=y.width,
            gate=gate.address,
            up=up.address if up else 0,
            x_stride=gate.stride,
            y=y.address,
            y_stride=y.stride,
            **_records(y),
        )

    def limit(self, stage: str, kind: str, limit: float, x: Buffer, rows: int | None = None) -> None:
        """x = limit · tanh(x / limit) ("cap"), or x cut off at ±limit ("clamp"), in place."""
        self.add(
            stage,
            f"elementwise.limit:{kind}",
            abi.LIMIT,
            x,
            rows,
            n=x.width,
            limit=float(limit),
            x=x.address,
            x_stride=x.stride,
        )

    def weigh(self, stage: str, x: Buffer, weights: int, rows: int | None = None) -> None:
        """x[i] = weights[i] · x[i], in place; `weights` is the address of float32 factors."""
        self.add(
            stage,
            "elementwise.weigh",
            abi.WEIGH,
            x,
            rows,
            n=x.width,
            x=x.address,
            x_stride=x.stride,
            weights=weights,
        )

    def copy_heads(self, stage: str, x: Buffer, x_step: int, y: Buffer, y_step: int, n: int, n_heads: int) -> None:
        """y[:, i·y_step …+n] = x[:, i·x_step …+n] for each head i."""
        self.add(
            stage,
            "elementwise.copy_heads",
            abi.COPY_HEADS,
            y,
            n=n,
            n_heads=n_heads,
            x=x.address,
            x_stride=x.stride,
            x_step=4 * x_step,
            y=y.address,
            y_stride=y.stride,
            y_step=4 * y_step,
        )

    def _word(self, value: int) -> int:
        """Address of an int64 that holds the value."""
        word = np.array([value], np.int64)
        self._kept.append(word)
        return word.ctypes.data

    def kernels(self) -> set[str]:
        """Names of all kernels that the ops call."""
        names = {name for op in self.ops for name in (op.one, op.many, *(op.calls or ()))}
        kinds = {name for name in names if name.startswith(("elementwise.norm", "elementwise.quantize"))}
        return names | {
            name.replace(".norm:", ".norm_private:").replace(".quantize", ".quantize_private")
            for name in kinds
            if "private" not in name
        }

    def finish(self) -> None:
        """Compile or load the kernels and build the table; the plan is complete."""
        scratch_stride = -(-self._scratch_bytes // 4096) * 4096 + 256
        self._scratch = aligned_zeros(scratch_stride * self.n_threads)
        shared = {"scratch": self._scratch.ctypes.data, "scratch_stride": scratch_stride}
        for op in self.ops:
            op.values = _resolved(op.values, shared)
        self.ops = [op for op in self.ops if op.arguments is not abi.QUANTIZE or op.values["records"]]
        self._make_private()
        addresses = kernel_addresses(self.kernels())
        self._words = aligned_zeros(len(self.ops) * abi.Arguments.WORDS * 8).view(np.int64).reshape(len(self.ops), -1)
        table = np.zeros((len(self.ops), abi.OP_BYTES // 8), np.int64)
        for words, row, op in zip(self._words, table, self.ops, strict=True):
            if op.blocks is not None:
                one, many = (addresses[name] for name in op.calls)
                op.values |= {"blocks": self._pack(op.blocks, shared), "one": one, "many": many}
            words[:] = op.arguments.pack(**op.values)
            row[:] = addresses[op.one], addresses[op.many], words.ctypes.data, op.values["n_rows"], op.private
        self._table = table

    def _make_private(self) -> None:
        """Let each thread norm or quantize a single row for itself where a product follows at once.

        The threads need not wait for each other then. Thread t's copy is row t of the buffer, which a single row leaves
        free.
        """
        if self.n_threads > self.max_rows:
            return
        for op, following in itertools.pairwise(self.ops):
            made = op.source if op.arguments is abi.QUANTIZE else op.output
            if (
                op.arguments in (abi.NORM, abi.QUANTIZE)
                and following.arguments is abi.LINEAR
                and following.source is made
                and following.values["n_rows"] == op.values["n_rows"]
                and not op.values.get("accumulate")
                and (op.arguments is abi.QUANTIZE or op.source.root is not made.root)
                and following.output.root not in (op.source.root, made.root)
            ):
                kernel, _, parameter = op.one.partition(":")
                op.one = f"{kernel}_private" + (f":{parameter}" if parameter else "")
                op.private, following.values["private"] = True, 1

    def _pack(self, blocks: Blocks, shared: dict[str, int]) -> int:
        """Address of the argument blocks."""
        template = abi.LINEAR.pack(**_resolved(blocks.values, shared))
        memory = aligned_zeros(blocks.count * abi.Arguments.WORDS * 8).view(np.int64).reshape(blocks.count, -1)
        memory[:] = template
        for name, step in blocks.steps.items():
            memory[:, getattr(abi.LINEAR, name) // 8] += np.arange(blocks.count) * step
        self._kept.append(memory)
        return memory.ctypes.data

    def need_scratch(self, n_bytes: int) -> None:
        self._scratch_bytes = max(self._scratch_bytes, n_bytes)

    @property
    def table(self) -> np.ndarray:
        if self._table is None:
            self.finish()
        return self._table


_SCRATCH = 0  # replaced by the plan's scratch when it is finished
# Unpacked chunk of a panel (24 blocks of at most 768 bytes) and the partial sums of 16 panels by 128 tokens.
_GEMM_SCRATCH = 24 * 768 + 16 * 128 * 64


def _quantized(matrix: Matrix) -> bool:
    return not matrix.tile.is_float


def _products(matrix: Matrix) -> tuple[str, str]:
    """The kernels for one row and for many."""
    return f"matmul.gemv:{matrix.tile.name}", f"matmul.gemm:{matrix.tile.name}"


def _records(buffer: Buffer) -> dict[str, Any]:
    """Whether records are wanted is known when all consumers are recorded, so the address is a function."""
    return {
        "records": lambda: buffer.records if buffer.wants_records else 0,
        "records_stride": buffer.records_stride,
    }


def _resolved(values: dict[str, Any], shared: dict[str, int]) -> dict[str, int | float]:
    resolved = {key: value() if callable(value) else value for key, value in values.items()}
    return resolved | {key: value for key, value in shared.items() if key in resolved}
