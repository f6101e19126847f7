"""What a plan's ops do: products, norms, activations and the small steps between them, each recorded by one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .buffers import Buffer
from .kernels import abi
from .kernels.formats import PANEL_ROWS
from .plan import Blocks, Op, Plan
from .weights import Fused, Matrix, Vector

if TYPE_CHECKING:
    from .blocks.moe import ExpertChoice

_MEMORY_PAGE = 4096
_SCRATCH = 0  # replaced by the plan's scratch when it is finished
# Unpacked chunk of a panel (24 blocks of at most 768 bytes) and the partial sums of 16 panels by 128 tokens.
_GEMM_SCRATCH = 24 * 768 + 16 * 128 * 64


class PlanWriter(Plan):
    """A plan with a method for each kind of op; buffers come in, the op is appended."""

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
        everyone = self.word(matrix.count)
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
            "grain": _grain(matrix, 4 * self.n_threads),
            **_streams(matrix, self.n_threads),
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
            "twin": matrix.twin,
            "then": 0,
            "then_arguments": 0,
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
            **x.at("x"),
            **h.at("h"),
            accumulate=int(accumulate),
            scale=float(scale),
            **_records(h),
        )
        op.source = x

    def quantize(self, stage: str, x: Buffer, rows: int | None = None) -> None:
        """Records of x for the products that follow; the op is left out if none of them wants records."""
        op = self.add(stage, "elementwise.quantize", abi.QUANTIZE, None, rows, n=x.width, **x.at("x"), **_records(x))
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
            **x.at("x"),
            records=parts.records,
            records_stride=parts.records_stride,
        )

    def join(self, stage: str, parts: Buffer, y: Buffer, rows: int) -> None:
        """y[i] = parts[2i] + parts[2i + 1], for products of what was split."""
        self.add(stage, "elementwise.join", abi.JOIN, y, rows, n=y.width, **parts.at("x"), **y.at("y"))

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
            **x.at("x"),
            **y.at("y"),
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
            **y.at("y"),
            **_records(y),
        )

    def limit(self, stage: str, kind: str, limit: float, x: Buffer, rows: int | None = None) -> None:
        """x = limit · tanh(x / limit) ("cap"), or x cut off at ±limit ("clamp"), in place."""
        self.add(stage, f"elementwise.limit:{kind}", abi.LIMIT, x, rows, n=x.width, limit=float(limit), **x.at("x"))

    def weigh(self, stage: str, x: Buffer, weights: int, rows: int | None = None) -> None:
        """x[i] = weights[i] · x[i], in place; `weights` is the address of float32 factors."""
        self.add(stage, "elementwise.weigh", abi.WEIGH, x, rows, n=x.width, **x.at("x"), weights=weights)

    def copy_heads(self, stage: str, x: Buffer, x_step: int, y: Buffer, y_step: int, n: int, n_heads: int) -> None:
        """y[:, i·y_step …+n] = x[:, i·x_step …+n] for each head i."""
        self.add(
            stage,
            "elementwise.copy_heads",
            abi.COPY_HEADS,
            y,
            n=n,
            n_heads=n_heads,
            **x.at("x"),
            x_step=4 * x_step,
            **y.at("y"),
            y_step=4 * y_step,
        )


def _quantized(matrix: Matrix) -> bool:
    return not matrix.tile.is_float


def _grain(matrix: Matrix, n_units: int) -> int:
    """Panels that a thread takes at a time if there shall be so many units, at most 16; of twins whole turns."""
    grain = min(16, matrix.panels // n_units)
    return max(1, grain // 4) * 4 if matrix.twin else max(1, grain)


def _streams(matrix: Matrix, n_threads: int) -> dict[str, int]:
    """How panels are dealt out for one row: in streams, if there is enough to do for all threads then."""
    turn = 4 if matrix.twin else 1
    stream = matrix.panels // abi.STREAMS // turn * turn
    if stream * matrix.panel_bytes % _MEMORY_PAGE == 0:
        # Streams at the same place of their pages of memory are in each other's way.
        stream = max(stream - turn, 0)
    return {"stream": stream if stream // turn >= 4 * (n_threads - 1) else 0, "turn": turn}


def _products(matrix: Matrix) -> tuple[str, str]:
    """The kernels for one row and for many."""
    return f"matmul.gemv:{matrix.tile.name}", f"matmul.gemm:{matrix.tile.name}"


def _records(buffer: Buffer) -> dict[str, Any]:
    """Whether records are wanted is known when all consumers are recorded, so the address is a function."""
    return {
        "records": lambda: buffer.records if buffer.wants_records else 0,
        "records_stride": buffer.records_stride,
    }
