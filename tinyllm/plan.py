"""A plan: the named ops of a forward pass, recorded once and run by the team's compiled loop for any number of rows.

Recording hands out buffers and fills a table of (kernel for one row, kernel for many, arguments, row counter).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .buffers import Buffer, aligned_zeros
from .kernels import abi
from .kernels.jit import kernel_addresses

_GATED = "elementwise.gated:"


def _part(kernel: str) -> str:
    """The kernel that does a gated activation's work for some rows and columns."""
    return kernel.replace(_GATED, "elementwise.gated_part:")


@dataclass(eq=False)
class Op:
    """One named step. `weight_bytes` are read per run, `operations_per_row` are arithmetic operations per row.

    `source`: what it reads, where the plan looks at that. `private`: see `Plan._make_private`. `then`: an op whose work
    this one does piece by piece, see `Plan._fuse_activations`; that op is `done_before`.
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
    then: Op | None = None
    done_before: bool = False


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
        self._counts = memoryview(self._counters)
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
        self._counts[0], self._counts[8] = n_rows, n_out

    @property
    def step_rows(self) -> tuple[int, int]:
        """Rows of the step, and rows whose logits are wanted, as last set."""
        return self._counts[0], self._counts[8]

    def alone(self, n_rows: int, n_out: int) -> list[bool]:
        """Which ops have no barrier behind them in a step of so many rows: see `_make_private` and `Op.done_before`."""
        counts = {self.rows: n_rows, self.out_rows: n_out}
        return [op.done_before or (op.private and counts.get(op.values["n_rows"]) == 1) for op in self.ops]

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

    def word(self, value: int) -> int:
        """Address of an int64 that holds the value."""
        word = np.array([value], np.int64)
        self._kept.append(word)
        return word.ctypes.data

    def kernels(self) -> set[str]:
        """Names of all kernels that the ops call."""
        names = {name for op in self.ops for name in (op.one, op.many, *(op.calls or ()))}
        names |= {_part(name) for name in names if name.startswith(_GATED)}
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
        self._fuse_activations()
        addresses = kernel_addresses(self.kernels())
        self._words = aligned_zeros(len(self.ops) * abi.Arguments.WORDS * 8).view(np.int64).reshape(len(self.ops), -1)
        table = np.zeros((len(self.ops), abi.OP_BYTES // 8), np.int64)
        words_of = {id(op): words.ctypes.data for words, op in zip(self._words, self.ops, strict=True)}
        for words, row, op in zip(self._words, table, self.ops, strict=True):
            if op.then is not None:
                op.values |= {"then": addresses[_part(op.then.one)], "then_arguments": words_of[id(op.then)]}
            if op.blocks is not None:
                one, many = (addresses[name] for name in op.calls)
                op.values |= {"blocks": self._pack(op.blocks, shared), "one": one, "many": many}
            words[:] = op.arguments.pack(**op.values)
            one, many = (0, 0) if op.done_before else (addresses[op.one], addresses[op.many])
            row[:] = one, many, words.ctypes.data, op.values["n_rows"], op.private
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

    def _fuse_activations(self) -> None:
        """Let the product that makes gate and up apply the activation as well, a few columns at a time.

        They are in the cache of the thread that has just made them, and a barrier less is to be waited at.
        """
        for op, following in itertools.pairwise(self.ops):
            if op.arguments is not abi.LINEAR or not following.one.startswith(_GATED):
                continue
            product, gated = op.values, following.values
            if product["twin"] and gated["gate"] == product["y"] and gated["n_rows"] == product["n_rows"]:
                op.then, following.done_before = following, True

    def _pack(self, blocks: Blocks, shared: dict[str, int]) -> int:
        """Address of the argument blocks."""
        template = abi.LINEAR.pack(**_resolved(blocks.values, shared))
        memory = aligned_zeros(blocks.count * abi.Arguments.WORDS * 8).view(np.int64).reshape(blocks.count, -1)
        memory[:] = template
        for name, step in blocks.steps.items():
            memory[:, getattr(abi.LINEAR, name) // 8] += np.arange(blocks.count) * step
        self._kept.append(memory)
        return memory.ctypes.data

    def uses_of(self, buffer: Buffer) -> list[int]:
        """Numbers of the `words` that hold the buffer's address, when the plan is complete."""
        return np.flatnonzero(self._words == buffer.address).tolist()

    @cached_property
    def words(self) -> memoryview:
        """The argument blocks of all ops, int64, one behind the other: what is written here, the next run uses."""
        return memoryview(self._words.reshape(-1))

    def need_scratch(self, n_bytes: int) -> None:
        self._scratch_bytes = max(self._scratch_bytes, n_bytes)

    @property
    def table(self) -> np.ndarray:
        if self._table is None:
            self.finish()
        return self._table


def _resolved(values: dict[str, Any], shared: dict[str, int]) -> dict[str, int | float]:
    resolved = {key: value() if callable(value) else value for key, value in values.items()}
    return resolved | {key: value for key, value in shared.items() if key in resolved}
