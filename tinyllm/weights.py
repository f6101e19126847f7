"""Tensors by name, packed into tiles: a file's tensors go in, out come matrices ready for the kernels.

All packed weights lie in one arena of huge pages; the file's pages are let go as each tensor has been packed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .errors import ModelFileError, UnsupportedModelError
from .gguf_file import GGUFFile, TensorInfo
from .kernels import abi
from .kernels.dequantize import decode
from .kernels.formats import PANEL_ROWS, Tile, tile_of
from .kernels.jit import kernel_addresses
from .kernels.pack import kernel_of, table_of
from .team import Team


@dataclass(eq=False)
class Vector:
    """A norm's weight, a bias: float32, padded with zeros to a multiple of 32."""

    array: np.ndarray
    n: int

    @property
    def address(self) -> int:
        return self.array.ctypes.data


@dataclass(eq=False)
class Matrix:
    """A weight matrix [n_outputs, n_inputs] in panels of 16 output rows."""

    name: str
    tile: Tile
    n_outputs: int
    n_inputs: int
    parts: tuple[TensorInfo, ...]
    stage: str = ""
    bias: Vector | None = None
    address: int = 0

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
        return self.panels * self.panel_bytes


class Weights:
    """Hands out matrices and vectors by GGUF tensor name, then packs all matrices at once.

    `taken` are the names that were asked for: what is left over in the file is not understood.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        self.taken: set[str] = set()
        self._matrices: list[Matrix] = []
        self._arena: np.ndarray | None = None

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def tensor(self, name: str, *shape: int) -> TensorInfo:
        """The tensor of this name, whose shape (numpy order) must be as given.

        Raises ModelFileError if it is missing or has another shape.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.file.path}: tensor {name} is missing")
        if tensor.shape != shape:
            raise ModelFileError(f"{self.file.path}: tensor {name} has shape {tensor.shape}, expected {shape}")
        self.taken.add(name)
        return tensor

    def vector(self, name: str, n: int, optional: bool = False) -> Vector | None:
        """A float vector; None if it is optional and absent."""
        if optional and not self.has(name):
            return None
        tensor = self.tensor(name, n)
        return self.vector_of(decode(tensor.type.name, tensor.data, n))

    @staticmethod
    def vector_of(values: np.ndarray) -> Vector:
        padded = np.zeros(-(-values.size // 32) * 32 + 16, np.float32)
        padded = padded[-(padded.ctypes.data // 4) % 16 :]
        padded[: values.size] = values.ravel()
        return Vector(padded, values.size)

    def matrix(self, name: str, n_outputs: int, n_inputs: int, bias: Vector | None = None, stage: str = "") -> Matrix:
        """One matrix."""
        tensor = self.tensor(name, n_outputs, n_inputs)
        matrix = Matrix(name, tile_of(tensor.type.name), n_outputs, n_inputs, (tensor,), stage, bias)
        self._matrices.append(matrix)
        return matrix

    def fused(self, names: Iterable[tuple[str, int, str]], n_inputs: int, biases: Iterable[Vector | None] = ()) -> list[Matrix]:
        """Matrices with the same input, (name, outputs, stage) each: neighbours of one format become one matrix."""
        result: list[Matrix] = []
        biases = list(biases) or [None] * 99
        for (name, n_outputs, stage), bias in zip(names, biases, strict=False):
            tensor = self.tensor(name, n_outputs, n_inputs)
            tile = tile_of(tensor.type.name)
            last = result[-1] if result else None
            if (
                last is not None
                and last.parts[-1].type == tensor.type
                and last.n_outputs % PANEL_ROWS == 0
                and (last.bias is None) == (bias is None)
            ):
                last.parts += (tensor,)
                if bias is not None:
                    joined = np.concatenate([last.bias.array[: last.n_outputs], bias.array[:n_outputs]])
                    last.bias = self.vector_of(joined)
                last.n_outputs += n_outputs
                last.stage += f"+{stage}"
            else:
                result.append(Matrix(name, tile, n_outputs, n_inputs, (tensor,), stage, bias))
        self._matrices += result
        return result

    @property
    def n_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(matrix.n_bytes for matrix in self._matrices)

    def place(self) -> None:
        """Give every matrix its address in the arena."""
        sizes = [-(-matrix.n_bytes // 256) * 256 for matrix in self._matrices]
        arena = mmap.mmap(-1, sum(sizes) + (4 << 20))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            arena.madvise(mmap.MADV_HUGEPAGE)
        self._arena = np.frombuffer(arena, np.uint8)
        address = self._arena.ctypes.data
        address += -address % (2 << 20)
        for matrix, size in zip(self._matrices, sizes, strict=True):
            matrix.address = address
            address += size

    def packers(self) -> set[str]:
        """The kernels that `pack` will need."""
        names = {kernel_of(part.type.name) for matrix in self._matrices for part in matrix.parts}
        return {name for name in names if name is not None}

    def pack(self, team: Team) -> None:
        """Fill the arena, tensor by tensor, all threads on each."""
        kernels = kernel_addresses({kernel_of(part.type.name) for m in self._matrices for part in m.parts})
        two_rows = np.array([2], np.int64)
        for matrix in self._matrices:
            target = matrix.address
            for part in matrix.parts:
                n_outputs = part.shape[0]
                panels = -(-n_outputs // PANEL_ROWS)
                table = table_of(part.type.name)
                arguments = np.array(
                    abi.PACK.pack(
                        n_rows=two_rows.ctypes.data, rows=n_outputs, n_inputs=matrix.n_inputs, row_bytes=part.row_bytes,
                        source=part.data.ctypes.data, panels=panels, panel_bytes=matrix.panel_bytes, tiles=matrix.tiles,
                        weights=target, table=0 if table is None else table.ctypes.data,
                    ),
                    np.int64,
                )
                kernel = kernels[kernel_of(part.type.name)]
                team.run(np.array([[kernel, kernel, arguments.ctypes.data, two_rows.ctypes.data]], np.int64))
                part.release()
                target += panels * matrix.panel_bytes
