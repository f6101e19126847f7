"""GGUF files: a path flows in, out flows the model's metadata and a read-only view of each tensor on the mapped file.
A model in several shards opens as one, whichever shard is named.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinyllm.errors import ModelFileError, ModelNotFoundError
from tinyllm.gguf.ggml_types import BLOCK_SIZES, GGMLType
from tinyllm.gguf.header import Header, printable, quoted, read_header
from tinyllm.gguf.metadata import Metadata, StoredArray

__all__ = ["BLOCK_SIZES", "GGMLType", "GGUFFile", "Metadata", "TensorInfo", "open_gguf"]

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, or the whole set of shards that it belongs to, after checking every field.

    Raises ModelNotFoundError if there is no such file, ModelFileError if it is no sound GGUF file, and
    UnsupportedModelError if a tensor has a type that cannot be read.
    """
    given = Path(path)
    with ExitStack() as opened:
        shard = _open_shard(given, opened)
        shards = [shard] if shard.count == 1 else _open_set(shard, opened)
        file = GGUFFile(shards)
        opened.pop_all()
    return file


class GGUFFile:
    """An opened model file. Usable as a context manager; its tensors' data are gone once it is closed."""

    path: Path
    """The file, or the first of its shards."""
    paths: tuple[Path, ...]
    version: int
    n_bytes: int
    """Size of all shards together."""
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    """By name, in the order of the file."""

    def __init__(self, shards: list[_Shard]):
        self._maps = [shard.map for shard in shards]
        self.paths = tuple(shard.path for shard in shards)
        self.path = self.paths[0]
        self.version = shards[0].header.version
        self.n_bytes = sum(map(len, self._maps))
        self.metadata = Metadata(shards[0].header.values, shards[0].map)
        self.tensors = {
            record.name: TensorInfo(*record, shard.map) for shard in shards for record in shard.header.tensors
        }

    def close(self) -> None:
        """Unmap the file. Arrays that were taken from `TensorInfo.data` stay valid and keep their part mapped."""
        for map_ in self._maps:
            with suppress(BufferError):
                map_.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """One tensor of an open file."""

    name: str
    shape: tuple[int, ...]
    """In numpy order, the reverse of the file's: a matrix is [outputs, inputs], experts [experts, outputs, inputs]."""
    type: GGMLType
    n_bytes: int
    offset: int
    """From the start of the file that holds it."""
    _map: mmap.mmap = field(repr=False)

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is, along the last axis."""
        block_elements, block_bytes = BLOCK_SIZES[self.type]
        return (self.shape[-1] if self.shape else 1) // block_elements * block_bytes

    @property
    def data(self) -> np.ndarray:
        """The raw blocks: a read-only uint8 [n_bytes] view of the mapped file."""
        return np.frombuffer(self._map, np.uint8, self.n_bytes, self.offset)

    def rows(self, indices: Any) -> np.ndarray:
        """Copies of raw rows: uint8 [*indices.shape, row_bytes].

        Indices as in numpy, with its IndexError; the rows of stacked matrices count on from one matrix to the next.
        """
        return self.data.reshape(-1, self.row_bytes)[np.asarray(indices, np.intp)]

    def release(self) -> None:
        """Let the pages of this tensor leave the process's memory; they are read again when touched."""
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            start = self.offset - self.offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, self.offset + self.n_bytes - start)


class _Shard(NamedTuple):
    path: Path
    map: mmap.mmap
    header: Header
    number: int  # from 0
    count: int  # 1 if the model is not split
    n_tensors: int  # of all shards together

    def metadata_values(self) -> dict[str, Any]:
        """The metadata without its arrays."""
        values = self.header.values
        metadata = Metadata(values, self.map)
        return {key: metadata[key] for key, value in values.items() if not isinstance(value, StoredArray)}


def _open_shard(path: Path, opened: ExitStack) -> _Shard:
    map_ = opened.enter_context(_map_file(path))
    header = read_header(path, map_)
    if header.values.get("split.count", 1) in (0, 1):
        return _Shard(path, map_, header, number=0, count=1, n_tensors=len(header.tensors))
    number, count, n_tensors = (
        _split_value(path, header, key) for key in ("split.no", "split.count", "split.tensors.count")
    )
    return _Shard(path, map_, header, number, count, n_tensors)


def _split_value(path: Path, header: Header, key: str) -> int:
    value = header.values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _error(path, f"key {quoted(key)}: must be a whole number, for the file is a shard of a split model")
    return value


def _open_set(given: _Shard, opened: ExitStack) -> list[_Shard]:
    """All shards of a split model in order, found by the name of one of them."""
    role = f"is shard {given.number + 1} of {given.count}"
    name = _SHARD_NAME.fullmatch(given.path.name)
    if name is None:
        pattern = f"...-{given.number + 1:05}-of-{given.count:05}.gguf"
        raise _error(given.path, f"{role}, but must be named {pattern} for the others to be found")
    if (int(name["number"]), int(name["count"])) != (given.number + 1, given.count):
        raise _error(given.path, f"key 'split.no': the file {role}, which its name contradicts; was it renamed?")
    shards: list[_Shard] = []
    tensors: set[str] = set()
    for number in range(given.count):
        path = given.path.with_name(f"{name['stem']}-{number + 1:05}-of-{given.count:05}.gguf")
        if not path.exists():
            raise _error(given.path, f"{role}, and {quoted(path.name)} is missing beside it; fetch that one too")
        shard = given if path == given.path else _open_shard(path, opened)
        shards.append(shard)
        if shard.count != given.count:
            raise _error(path, f"is not one of {given.count} shards, though its name says so; fetch it again")
        _check_member(shard, number, shards[0])
        for record in shard.header.tensors:
            if record.name in tensors:
                problem = f"tensor {quoted(record.name)}: is in an earlier shard too"
                raise _error(path, f"{problem}; is this a shard of another model?")
            tensors.add(record.name)
    if len(tensors) != given.n_tensors:
        problem = f"{given.n_tensors}, but its {given.count} shards hold {len(tensors)} tensors"
        raise _error(shards[0].path, f"key 'split.tensors.count': {problem}; are they all of one model?")
    return shards


def _check_member(shard: _Shard, number: int, first: _Shard) -> None:
    """Refuse a shard that is out of place, or contradicts the first in what both say about their model."""
    wanted = {**first.metadata_values(), "split.no": number}
    for key, value in shard.metadata_values().items():
        if value != wanted.get(key, value):
            problem = f"key {quoted(key)}: {printable(value, 40)}, where {quoted(first.path.name)}"
            raise _error(
                shard.path, f"{problem} asks for {printable(wanted[key], 40)}; is this a shard of another model?"
            )


def _map_file(path: Path) -> mmap.mmap:
    try:
        # A FIFO without a writer would block the opening for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            problem = f"is a link to {quoted(os.readlink(path))}, which does not exist"
        else:
            problem = "no such file"
        raise ModelNotFoundError(f"{printable(path)}: {problem}") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        mode = os.fstat(descriptor)
        if stat.S_ISDIR(mode.st_mode):
            raise _error(path, "is a folder; name the .gguf file in it")
        if not stat.S_ISREG(mode.st_mode):
            raise _error(path, "is not an ordinary file")
        if mode.st_size == 0:
            raise _error(path, "is empty; fetch it again")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(descriptor)


def _error(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{printable(path)}: {problem}")


def _unreadable(path: Path, error: OSError | ValueError) -> ModelFileError:
    reason = getattr(error, "strerror", None) or error
    return _error(path, f"cannot be read: {printable(reason)}")
