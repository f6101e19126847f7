"""A plan: the named ops of a forward pass, recorded once and executed by the team's compiled loop for any number of rows.

Recording hands out buffers and fills a table of (kernel for one row, kernel for many, arguments, row counter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .kernels import abi
from .kernels.jit import kernel_addresses
from .weights import Matrix, Vector


def _padded(n: int) -> int:
    return -(-n // 32) * 32


def aligned_zeros(n_bytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed bytes, committed by the system as they are touched."""
    memory = np.zeros(n_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + n_bytes]


@dataclass(eq=False)
class Buffer:
    """A named matrix of activations: float32 [max_rows, stride], its first `width` columns in use, zeros behind.

    `records` holds the same values quantized to int8 in blocks of 32 (`abi.RECORD`), where a consumer wants them.
    """

    name: str
    width: int
    max_rows: int
    wants_records: bool = False
    column: int = 0
    base: Buffer | None = None
    _memory: np.ndarray | None = field(default=None, repr=False)
    _records: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self):
        if self.base is None:
            self._memory = aligned_zeros(self.max_rows * self.stride)

    @property
    def stride(self) -> int:
        """Bytes from row to row. A panel of 16 outputs may start at any column and be filled up with zeros."""
        return self.base.stride if self.base else _padded(self.width + 15) * 4

    @property
    def address(self) -> int:
        if self.base:
            return self.base.address + 4 * self.column
        return self._memory.ctypes.data

    @property
    def records(self) -> int:
        if self._records is None:
            self._records = aligned_zeros(self.max_rows * self.records_stride)
        return self._records.ctypes.data

    @property
    def records_stride(self) -> int:
        return _padded(self.width) // 32 * abi.RECORD

    def columns(self, start: int, width: int, name: str) -> Buffer:
        """A view of some columns."""
        return Buffer(name, width, self.max_rows, column=self.column + start, base=self.base or self)

    @property
    def array(self) -> np.ndarray:
        """float32 [max_rows, width], a view of the live memory."""
        root = self.base or self
        rows = root._memory.view(np.float32).reshape(self.max_rows, -1)
        return rows[:, self.column : self.column + self.width]


@dataclass(eq=False)
class Op:
    """One named step. `reads` and `operations` are bytes of weights and arithmetic operations per run, and per row."""

    stage: str
    layer: int | None
    one: str
    many: str
    arguments: abi.Arguments
    values: dict[str, int | float]
    output: Buffer | None
    weight_bytes: int = 0
    operations_per_row: int = 0


class Plan:
    """Ops in order. `rows` and `out_rows` are the counters of the step: rows computed, and rows whose logits are wanted."""

    def __init__(self, max_rows: int, n_threads: int):
        self.max_rows, self.n_threads = max_rows, n_threads
        self.ops: list[Op] = []
        self._counters = aligned_zeros(128).view(np.int64)
        self._layer: int | None = None
        self._scratch_bytes = 0
        self._table: np.ndarray | None = None

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

    def buffer(self, name: str, width: int, max_rows: int | None = None) -> Buffer:
        return Buffer(name, width, max_rows or self.max_rows)

    def add(self, stage: str, kernel: str | tuple[str, str], arguments: abi.Arguments, output: Buffer | None = None,
            rows: int | None = None, weight_bytes: int = 0, operations_per_row: int = 0, **values: int | float) -> None:
        """Append an op. `kernel` is one name, or a pair for one row and for many."""
        one, many = (kernel, kernel) if isinstance(kernel, str) else kernel
        values = {"n_rows": rows or self.rows, **values}
        self.ops.append(Op(stage, self._layer, one, many, arguments, values, output, weight_bytes, operations_per_row))

    def linear(self, stage: str, x: Buffer, matrices: Sequence[Matrix], y: Buffer, *, rows: int | None = None,
               accumulate: bool = False, scale: float = 1.0) -> None:
        """y = scale · (W x + b), or y += …; several matrices fill y's columns one after another."""
        column = 0
        for matrix in matrices:
            tile = matrix.tile
            quantized = not tile.is_float
            name = matrix.tile.name
            self._scratch_bytes = max(self._scratch_bytes, _GEMM_SCRATCH)
            self.add(
                stage if len(matrices) == 1 else matrix.stage or stage,
                (f"matmul.gemv:{name}", f"matmul.gemm:{name}"),
                abi.LINEAR,
                y.columns(column, matrix.n_outputs, stage) if len(matrices) > 1 else y,
                rows,
                matrix.n_bytes,
                2 * matrix.n_outputs * matrix.n_inputs,
                grain=max(1, min(16, matrix.panels // (4 * self.n_threads))),
                panels=matrix.panels,
                tiles=matrix.tiles,
                panel_bytes=matrix.panel_bytes,
                weights=matrix.address,
                x=x.records if quantized else x.address,
                x_stride=x.records_stride if quantized else x.stride,
                y=y.address + 4 * column,
                y_stride=y.stride,
                bias=matrix.bias.address if matrix.bias else 0,
                accumulate=int(accumulate),
                scale=float(scale),
                scratch=_SCRATCH,
                scratch_stride=_SCRATCH,
                experts=0,
            )
            x.wants_records |= quantized
            column += matrix.n_outputs

    def norm(self, stage: str, kind: str, eps: float, x: Buffer, weight: Vector | None, h: Buffer, *,
             bias: Vector | None = None, rows: int | None = None, segments: int = 1, weight_stride: int = 0) -> None:
        """h = norm(x) · weight + bias, in `segments` equal parts of a row; records too where a consumer wants them."""
        self.add(
            stage, f"elementwise.norm:{kind}", abi.NORM, h, rows,
            n=h.width // segments, eps=float(eps), segments=segments,
            weight=weight.address if weight else 0, weight_stride=weight_stride, bias=bias.address if bias else 0,
            x=x.address, x_stride=x.stride, h=h.address, h_stride=h.stride, **_records(h),
        )

    def quantize(self, stage: str, x: Buffer) -> None:
        """Records of x for the products that follow."""
        self.add(stage, "elementwise.quantize", abi.QUANTIZE, None, n=x.width, x=x.address, x_stride=x.stride,
                 records=x.records, records_stride=x.records_stride)

    def gather(self, stage: str, x: Buffer, index: int, y: Buffer) -> None:
        """The rows of x whose logits are wanted; `index` is the address of their int64 numbers."""
        self.add(stage, "elementwise.gather", abi.GATHER, y, self.out_rows, n=x.width, index=index,
                 x=x.address, x_stride=x.stride, y=y.address, y_stride=y.stride)

    def activate(self, stage: str, activation: str, gate: Buffer, up: Buffer | None, y: Buffer) -> None:
        """y = act(gate) · up."""
        kernel = f"elementwise.{'gated' if up else 'plain'}:{activation}"
        self.add(stage, kernel, abi.GATED, y, n=y.width, gate=gate.address, up=up.address if up else 0,
                 x_stride=gate.stride, y=y.address, y_stride=y.stride, **_records(y))

    def kernels(self) -> set[str]:
        """Names of all kernels that the ops call."""
        return {name for op in self.ops for name in (op.one, op.many)}

    def finish(self) -> None:
        """Compile or load the kernels and build the table; the plan is complete."""
        scratch_stride = -(-self._scratch_bytes // 4096) * 4096 + 256
        scratch = aligned_zeros(scratch_stride * self.n_threads)
        addresses = kernel_addresses(self.kernels())
        words = aligned_zeros(len(self.ops) * abi.Arguments.WORDS * 8).view(np.int64).reshape(len(self.ops), -1)
        table = np.zeros((len(self.ops), 4), np.int64)
        for index, op in enumerate(self.ops):
            values = {
                key: (value() if callable(value) else value) for key, value in op.values.items()
            }
            for key, value in (("scratch", scratch.ctypes.data), ("scratch_stride", scratch_stride)):
                if key in values:
                    values[key] = value
            words[index] = op.arguments.pack(**values)
            table[index] = (addresses[op.one], addresses[op.many], words[index].ctypes.data, values["n_rows"])
        self._words, self._table, self._scratch = words, table, scratch

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


def _records(buffer: Buffer) -> dict:
    """Whether records are wanted is known when all consumers are recorded, so these values are functions."""
    return {
        "records": lambda: buffer.records if buffer.wants_records else 0,
        "records_stride": buffer.records_stride,
    }
