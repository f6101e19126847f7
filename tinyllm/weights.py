"""Tensors by name, packed into tiles: a file's tensors go in, out come matrices ready for the kernels.

All packed weights lie in one arena of huge pages; the file's pages are let go as each tensor has been packed.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from .buffers import huge_zeros
from .errors import ModelFileError, UnsupportedModelError
from .gguf.ggml_types import BLOCK_SIZES, GGMLType
from .gguf_file import GGUFFile, TensorInfo
from .kernels import abi
from .kernels.dequantize import decode
from .kernels.formats import PANEL_ROWS, Tile, tile_of
from .kernels.jit import kernel_addresses
from .kernels.pack import kernel_of, table_of
from .team import Team

# RoPE factors are read with the configuration.
_HARMLESS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Packing goes in so many stages, at the end of which the file's pages are let go. To hand each part to the threads by
# itself makes loading 1.4 times as long on a busy machine; in one stage, all would be in memory twice.
_STAGES = 8
_BLOCK = re.compile(r"blk\.(\d+)\.")

log = logging.getLogger("tinyllm")


@dataclass(eq=False)
class Vector:
    """A norm's weight, a bias: float32, padded with zeros to a multiple of 32."""

    array: np.ndarray
    n: int

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def values(self) -> np.ndarray:
        return self.array[: self.n]


@dataclass(eq=False)
class Part:
    """Rows of a matrix as they lie in the file, or in memory; the rows of a part begin on a panel of their own."""

    type_name: str
    n_outputs: int
    row_bytes: int
    source: TensorInfo | np.ndarray
    first_row: int = 0

    @property
    def rows(self) -> np.ndarray:
        """The raw rows: uint8 [n_outputs, row_bytes]."""
        data = self.source.view(np.uint8) if isinstance(self.source, np.ndarray) else self.source.data
        return data.reshape(-1, self.row_bytes)[self.first_row : self.first_row + self.n_outputs]

    @property
    def n_bytes(self) -> int:
        return self.n_outputs * self.row_bytes

    def release(self) -> None:
        """Let the rows go, once they have been packed."""
        if isinstance(self.source, TensorInfo):
            self.source.release()
        else:
            self.source = np.empty(0)


@dataclass(eq=False)
class Matrix:
    """A weight matrix [n_outputs, n_inputs] in panels of 16 output rows, or `count` of them one behind the other.

    `twin`: its two parts, of so many panels each, lie in turns of two panels.
    """

    name: str
    tile: Tile
    n_outputs: int
    n_inputs: int
    parts: tuple[Part, ...]
    stage: str = ""
    bias: Vector | None = None
    count: int = 1
    address: int = 0
    twin: int = 0

    @property
    def panels(self) -> int:
        return -(-self.n_outputs // PANEL_ROWS)

    @property
    def panel_bytes(self) -> int:
        return self.tile.panel_bytes(self.n_inputs)

    @property
    def tiles(self) -> int:
        return self.panel_bytes // self.tile.bytes

    @property
    def n_bytes(self) -> int:
        return self.count * self.panels * self.panel_bytes

    def make_twins(self) -> None:
        """Let the two parts lie in turns, if they can: their records are of two panels."""
        sizes = {part.n_outputs for part in self.parts}
        if len(self.parts) == 2 and len(sizes) == 1 and self.panels % 4 == 0 and not self.tile.is_float:
            self.twin = self.panels // 2


@dataclass(eq=False)
class Fused:
    """Matrices with the same input and outputs side by side; `columns` are the first column of each named part."""

    matrices: list[Matrix]
    columns: list[int]

    @property
    def width(self) -> int:
        return sum(matrix.panels * PANEL_ROWS for matrix in self.matrices)


class Weights:
    """Hands out matrices and vectors by GGUF tensor name, then packs all matrices at once.

    `taken` are the names that were asked for: what is left over in the file is not understood.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        self.taken: set[str] = set()
        self._matrices: list[Matrix] = []
        self._in_blocks = {name[block.end() :] for name in file.tensors if (block := _BLOCK.match(name))}
        self._arena: np.ndarray | None = None

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def expects(self, name: str) -> bool:
        """Whether the file has this optional tensor, or should: if one block has it, all that ask for it must."""
        block = _BLOCK.match(name)
        return self.has(name) or (block is not None and name[block.end() :] in self._in_blocks)

    def ignore(self, *names: str) -> None:
        """These tensors may be in the file, but are not needed."""
        self.taken.update(names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an optional tensor in numpy order; () if the file has none of this name.

        Raises ModelFileError if other blocks have one.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None and self.expects(name):
            raise self.missing(name)
        return tensor.shape if tensor else ()

    def type_name(self, name: str) -> str:
        """The type of a tensor, "" if the file has none of this name."""
        tensor = self.file.tensors.get(name)
        return tensor.type.name if tensor else ""

    def tensor(self, name: str, *shape: int) -> TensorInfo:
        """The tensor of this name, whose shape (numpy order) must be as given.

        Raises ModelFileError if it is missing or has another shape.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise self.missing(name)
        if tensor.shape != shape:
            raise ModelFileError(f"{self.file.path}: tensor {name} has shape {tensor.shape}, expected {shape}")
        self.taken.add(name)
        return tensor

    def missing(self, name: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: tensor {name} is missing")

    def floats(self, name: str, *shape: int) -> np.ndarray:
        """The values of a tensor: float32 of this shape."""
        tensor = self.tensor(name, *shape)
        return decode(tensor.type.name, tensor.data, math.prod(shape)).reshape(shape)

    def vector(self, name: str, n: int, optional: bool = False) -> Vector | None:
        """A float vector; None if it is optional and absent."""
        if optional and not self.expects(name):
            return None
        return vector_of(self.floats(name, n))

    def matrix(self, name: str, n_outputs: int, n_inputs: int, bias: Vector | None = None, stage: str = "") -> Matrix:
        """One matrix."""
        return self.fused(((name, n_outputs, stage),), n_inputs, (bias,)).matrices[0]

    def row(self, name: str, n_inputs: int) -> Matrix:
        """A vector as the matrix with one output."""
        return self.stacked_floats(name, self.floats(name, n_inputs).reshape(1, 1, n_inputs), "F32")

    def fused(
        self,
        names: Sequence[tuple[str, int, str]],
        n_inputs: int,
        biases: Sequence[Vector | None] = (),
        twins: bool = False,
    ) -> Fused:
        """Matrices with the same input, (name, outputs, stage) each: neighbours of one format become one matrix.

        `twins`: what two of them make is wanted together, so they lie in turns if they have one format and one size.
        """
        result, columns, column = [], [], 0
        for (name, n_outputs, stage), bias in zip_longest(names, biases):
            tensor = self.tensor(name, n_outputs, n_inputs)
            part = Part(tensor.type.name, n_outputs, tensor.row_bytes, tensor)
            last = result[-1] if result else None
            if (
                last is not None
                and last.parts[-1].type_name == part.type_name
                and last.n_outputs % PANEL_ROWS == 0
                and (last.bias is None) == (bias is None)
            ):
                last.parts += (part,)
                if bias is not None:
                    last.bias = vector_of(np.concatenate([last.bias.values, bias.values]))
                last.n_outputs += n_outputs
                last.stage += f"+{stage}"
            else:
                result.append(Matrix(name, tile_of(part.type_name), n_outputs, n_inputs, (part,), stage, bias))
            columns.append(column)
            column += -(-n_outputs // PANEL_ROWS) * PANEL_ROWS
        if twins and len(result) == 1:
            result[0].make_twins()
        self._matrices += result
        return Fused(result, columns)

    def stacked(
        self, name: str, count: int, n_outputs: int, n_inputs: int, bias: np.ndarray | None = None, stage: str = ""
    ) -> Matrix:
        """`count` matrices in one tensor [count, n_outputs, n_inputs]; `bias` is [count, n_outputs]."""
        tensor = self.tensor(name, count, n_outputs, n_inputs)
        if n_outputs % PANEL_ROWS == 0:
            parts = (Part(tensor.type.name, count * n_outputs, tensor.row_bytes, tensor),)
        else:
            parts = tuple(
                Part(tensor.type.name, n_outputs, tensor.row_bytes, tensor, i * n_outputs) for i in range(count)
            )
        return self._stack(name, parts, count, n_outputs, n_inputs, bias, stage)

    def stacked_floats(self, name: str, values: np.ndarray, type_name: str, stage: str = "") -> Matrix:
        """Matrices [count, n_outputs, n_inputs] that were made at load, kept as F16 or F32."""
        count, n_outputs, n_inputs = values.shape
        source = np.ascontiguousarray(values, np.float16 if type_name == "F16" else np.float32)
        row_bytes = n_inputs * source.itemsize
        parts = tuple(Part(type_name, n_outputs, row_bytes, source, i * n_outputs) for i in range(count))
        return self._stack(name, parts, count, n_outputs, n_inputs, None, stage)

    def _stack(
        self,
        name: str,
        parts: tuple[Part, ...],
        count: int,
        n_outputs: int,
        n_inputs: int,
        bias: np.ndarray | None,
        stage: str,
    ) -> Matrix:
        matrix = Matrix(name, tile_of(parts[0].type_name), n_outputs, n_inputs, parts, stage, count=count)
        if bias is not None:
            padded = np.zeros((count, matrix.panels * PANEL_ROWS), np.float32)
            padded[:, :n_outputs] = bias
            matrix.bias = vector_of(padded)
        self._matrices.append(matrix)
        return matrix

    def refuse_unknown(self, n_layers: int) -> None:
        """Raise UnsupportedModelError if the file has a tensor that nobody asked for: it would change the result."""
        for name in self.file.tensors:
            block = _BLOCK.match(name)
            if name in self.taken or name in _HARMLESS or (block and int(block[1]) >= n_layers):
                continue
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {name} is not known in this architecture; without it, results would change"
            )

    @property
    def n_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(matrix.n_bytes for matrix in self._matrices)

    def place(self) -> None:
        """Give every matrix its address in the arena."""
        for name in sorted({part.type_name for matrix in self._matrices for part in matrix.parts}):
            block = BLOCK_SIZES.get(GGMLType[name])
            in_file, in_memory = 8 * block[1] / block[0], tile_of(name).bits_per_weight
            if in_memory > 1.2 * in_file:
                log.warning("%s weights take %.1f bits each in memory, %.1f in the file", name, in_memory, in_file)
        sizes = [-(-matrix.n_bytes // 256) * 256 for matrix in self._matrices]
        # Prefetching reaches behind the last matrix.
        self._arena = huge_zeros(sum(sizes) + (1 << 16))
        address = self._arena.ctypes.data
        for matrix, size in zip(self._matrices, sizes, strict=True):
            matrix.address = address
            address += size

    def packers(self) -> set[str]:
        """The kernels that `pack` will need."""
        return {
            kernel
            for matrix in self._matrices
            for part in matrix.parts
            for kernel in (kernel_of(part.type_name), _check_of(matrix))
        }

    def pack(self, team: Team) -> None:
        """Fill the arena, all threads on each tensor; what has been packed of the file is let go again and again."""
        addresses = kernel_addresses(self.packers())
        stage_bytes = max(sum(part.n_bytes for matrix in self._matrices for part in matrix.parts) // _STAGES, 1)
        pending: list[_Packing] = []
        for matrix in self._matrices:
            target = matrix.address
            for part in matrix.parts:
                pending.append(_Packing(matrix, part, target))
                target += (2 if matrix.twin else -(-part.n_outputs // PANEL_ROWS)) * matrix.panel_bytes
                if sum(packing.part.n_bytes for packing in pending) >= stage_bytes:
                    _pack(team, addresses, pending)
                    pending = []
        _pack(team, addresses, pending)


@dataclass(frozen=True)
class _Packing:
    """A part of a matrix, and where its first panel goes."""

    matrix: Matrix
    part: Part
    target: int


def _check_of(matrix: Matrix) -> str:
    return f"finite.check:{matrix.tile.name}"


def _pack(team: Team, addresses: dict[str, int], packings: list[_Packing]) -> None:
    """Pack and check parts in one run of the threads, then let their rows go."""
    several = np.array([2], np.int64)
    flags = np.zeros(len(packings), np.int64)
    words, table = [], []
    for packing, flag in zip(packings, range(flags.ctypes.data, flags.ctypes.data + flags.nbytes, 8), strict=True):
        matrix, part = packing.matrix, packing.part
        panels = {
            "n_rows": several.ctypes.data,
            "panels": -(-part.n_outputs // PANEL_ROWS),
            "panel_bytes": matrix.panel_bytes,
            "gap": 2 * matrix.panel_bytes if matrix.twin else 0,
            "tiles": matrix.tiles,
            "weights": packing.target,
        }
        codebook = table_of(part.type_name)
        packed = abi.PACK.pack(
            rows=part.n_outputs,
            n_inputs=matrix.n_inputs,
            row_bytes=part.row_bytes,
            source=part.rows.ctypes.data,
            table=0 if codebook is None else codebook.ctypes.data,
            **panels,
        )
        checked = abi.CHECK.pack(flag=flag, **panels)
        for kernel, block in ((kernel_of(part.type_name), packed), (_check_of(matrix), checked)):
            words.append(np.array(block, np.int64))
            address = addresses[kernel]
            table.append((address, address, words[-1].ctypes.data, several.ctypes.data, 0))
    team.run(np.array(table, np.int64).reshape(-1, abi.OP_BYTES // 8))
    for packing, flag in zip(packings, flags, strict=True):
        source = packing.part.source
        if flag:
            name = source.name if isinstance(source, TensorInfo) else packing.matrix.name
            log.warning("tensor %s has infinite or NaN weights: answers will be broken", name)
        packing.part.release()


def vector_of(values: np.ndarray) -> Vector:
    """The values flattened, aligned, and padded with zeros."""
    padded = np.zeros(-(-values.size // 32) * 32 + 16, np.float32)
    padded = padded[-(padded.ctypes.data // 4) % 16 :]
    padded[: values.size] = values.ravel()
    return Vector(padded, values.size)
