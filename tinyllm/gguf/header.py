"""The header of a GGUF file: a mapped file flows in, its metadata and tensor table flow out, every field checked.
Nothing a file claims (a count, length, type, offset) is used before it is known to fit into the file, and what the
file may claim is bounded, so that no header costs more than a second or two and a few hundred megabytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tinyllm.errors import ModelFileError, TinyLLMError, UnsupportedModelError
from tinyllm.gguf.ggml_types import BLOCK_SIZES, UNREADABLE_TYPES, GGMLType
from tinyllm.gguf.metadata import (
    LENGTH,
    SCALARS,
    STRINGS_PER_STEP,
    StoredNumbers,
    StoredStrings,
    StoredText,
    Value,
    ValueType,
)

# Sparse files can have any size for nothing, so the file's size alone bounds too little. These are several times what
# the largest models have: 20 MB of header, under 100 keys, a few thousand tensors, 0.8 million tokens and merges.
MAX_HEADER_BYTES = 1 << 27
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 15
MAX_STRINGS = 1 << 21
MAX_NAME_BYTES = 1 << 24
MAX_DIMS = 4

SMALLEST_ENTRY = 8 + 4 + 1  # a key of no characters with a value of one byte
SMALLEST_TENSOR = 8 + 4 + 4 + 8  # a name of no characters, no dimensions

DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_COUNTS = struct.Struct("<QQ")
_ARRAY = struct.Struct("<IQ")
_TENSOR_TAIL = [struct.Struct(f"<{n_dims}QIQ") for n_dims in range(MAX_DIMS + 1)]

_OTHER_FILES = (
    (b"version https://git-lfs", "is a Git LFS pointer; fetch the file that it stands for"),
    (b"<", "looks like a web page; download the file itself"),
    (b"PK\x03\x04", "is a zip or PyTorch file; convert it to GGUF"),
    (b"lmgg", "is a GGML file from before GGUF; convert it to GGUF"),
    (b"tjgg", "is a GGML file from before GGUF; convert it to GGUF"),
    (b"fmgg", "is a GGML file from before GGUF; convert it to GGUF"),
    (b"\0\0\0\0", "begins with zeros, as an unfinished download does; fetch it again"),
)


class TensorRecord(NamedTuple):
    name: str
    shape: tuple[int, ...]  # numpy order: rows before inputs
    type: GGMLType
    n_bytes: int
    offset: int  # from the start of the file


class Header(NamedTuple):
    version: int
    values: dict[str, Value]
    tensors: list[TensorRecord]


def printable(text: object, limit: int | None = None) -> str:
    """`text` on one line that any terminal can show: whatever does not print is escaped, the rest after `limit` cut."""
    text = str(text)
    shown = text if limit is None or len(text) <= limit else text[:limit] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


def quoted(name: str) -> str:
    """A name from a file, fit for a message."""
    return repr(name) if len(name) <= 80 else repr(name[:80]) + "..."


def read_header(path: Path, buffer: mmap.mmap) -> Header:
    """Parse and check everything in front of the tensor data, and that all tensor data lie inside the file.

    Raises ModelFileError naming the file and the field, or UnsupportedModelError for a tensor of an unknown type.
    """
    reader = _Reader(path, buffer)
    version = _read_version(reader)
    n_tensors, n_keys = reader.unpack(_COUNTS, "header")
    reader.check_count(n_tensors, SMALLEST_TENSOR, MAX_TENSORS, "number of tensors")
    reader.check_count(n_keys, SMALLEST_ENTRY, MAX_KEYS, "number of keys")
    values: dict[str, Value] = {}
    for index in range(n_keys):
        key = reader.name(f"key {index}")
        field = f"key {quoted(key)}"
        if key in values:
            raise reader.error(field, "appears twice")
        values[key] = _read_alignment(reader, field) if key == "general.alignment" else _read_value(reader, field)
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    tensors = _read_tensors(reader, n_tensors, alignment)
    _refuse_joined_files(reader, tensors, alignment)
    return Header(version, values, tensors)


class _Reader:
    """Walks the header from front to back. Each step is checked first, and names its field when it fails."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.buffer = buffer
        self.pos = 0
        self.limit = min(len(buffer), MAX_HEADER_BYTES)
        self.name_bytes_left = MAX_NAME_BYTES
        self.strings_left = MAX_STRINGS

    def error(self, field: str, problem: str, kind: type[TinyLLMError] = ModelFileError) -> TinyLLMError:
        return kind(f"{printable(self.path)}: {field}: {problem}")

    def too_long(self, field: str, what: str) -> TinyLLMError:
        if self.limit == len(self.buffer):
            return self.error(field, f"{what}, but the file ends at byte {self.limit}; it is broken or cut off")
        return self.error(field, f"{what}, but a header of more than {self.limit >> 20} MB is not read")

    def take(self, n_bytes: int, field: str) -> int:
        """Step over `n_bytes`; returns where they start."""
        start = self.pos
        if n_bytes > self.limit - start:
            raise self.too_long(field, f"{n_bytes} bytes from byte {start} on")
        self.pos = start + n_bytes
        return start

    def unpack(self, layout: struct.Struct, field: str) -> tuple:
        return layout.unpack_from(self.buffer, self.take(layout.size, field))

    def text(self, field: str) -> StoredText:
        (length,) = self.unpack(LENGTH, field)
        return StoredText(self.take(length, field), self.pos)

    def name(self, field: str) -> str:
        text = self.text(field)
        self.name_bytes_left -= text.end - text.start
        if self.name_bytes_left < 0:
            raise self.error(field, f"names of more than {MAX_NAME_BYTES >> 20} MB are not read")
        return text.read(self.buffer)

    def check_count(self, count: int, smallest: int, most: int, field: str) -> None:
        """Refuse a count of things of at least `smallest` bytes that cannot be true before anything is done with it."""
        if count * smallest > self.limit - self.pos:
            raise self.too_long(field, f"{count} of at least {smallest} bytes each from byte {self.pos} on")
        if count > most:
            raise self.error(field, f"{count}; more than {most} are not read")


def _read_version(reader: _Reader) -> int:
    magic = reader.buffer[:32]
    if magic[:4] == b"FUGG":
        raise reader.error("header", "is a big-endian GGUF file; only little-endian files are read")
    if magic[:4] != b"GGUF":
        for start, problem in _OTHER_FILES:
            if magic.startswith(start):
                raise reader.error("header", problem)
        if magic[8:10] == b'{"':
            raise reader.error("header", "is a safetensors file; convert it to GGUF")
        raise reader.error("header", f"is not a GGUF file: it begins with {magic[:4]!r}")
    reader.take(4, "header")
    (version,) = reader.unpack(_U32, "version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise reader.error("version", "is a big-endian GGUF file; only little-endian files are read")
    raise reader.error("version", f"GGUF version {version}; only versions 2 and 3 are read, convert the model again")


def _read_value(reader: _Reader, field: str) -> Value:
    (kind,) = reader.unpack(_U32, field)
    if kind == ValueType.STRING:
        return reader.text(field)
    if kind == ValueType.ARRAY:
        return _read_array(reader, field)
    if kind not in SCALARS:
        raise reader.error(field, f"unknown value type {kind}")
    (value,) = reader.unpack(SCALARS[kind], field)
    if kind != ValueType.BOOL:
        return value
    if value > 1:
        raise reader.error(field, f"a boolean of value {value}")
    return value == 1


def _read_array(reader: _Reader, field: str) -> Value:
    kind, count = reader.unpack(_ARRAY, field)
    if kind == ValueType.STRING:
        return _read_strings(reader, count, field)
    if kind == ValueType.ARRAY:
        raise reader.error(field, "an array of arrays, which is not supported")
    if kind not in SCALARS:
        raise reader.error(field, f"an array of unknown value type {kind}")
    start = reader.take(count * SCALARS[kind].size, field)
    if kind == ValueType.BOOL and np.frombuffer(reader.buffer, np.uint8, count, start).max(initial=0) > 1:
        raise reader.error(field, "an array of booleans with other values than 0 and 1")
    return StoredNumbers(ValueType(kind), start, count)


def _read_strings(reader: _Reader, count: int, field: str) -> StoredStrings:
    """Find the bounds of each string. They can only be walked one by one: this loop is the cost of opening a file."""
    reader.check_count(count, LENGTH.size, reader.strings_left, f"{field}: number of strings")
    reader.strings_left -= count
    bounds = np.empty(count + 1, np.int64)
    bounds[0] = end = reader.pos
    buffer, length_at = reader.buffer, LENGTH.unpack_from
    for first in range(0, count, STRINGS_PER_STEP):
        n_steps = min(STRINGS_PER_STEP, count - first)
        try:
            # unpack_from raises behind the end of the file, so only the last string can overshoot without notice.
            steps = [end := end + 8 + length_at(buffer, end)[0] for _ in range(n_steps)]
        except (struct.error, OverflowError):
            raise reader.too_long(field, f"a string reaches to byte {end}") from None
        if end > reader.limit:
            raise reader.too_long(field, f"a string reaches to byte {end}")
        bounds[first + 1 : first + 1 + n_steps] = steps
    reader.pos = end
    return StoredStrings(bounds)


def _read_alignment(reader: _Reader, field: str) -> int:
    (kind,) = reader.unpack(_U32, field)
    if kind != ValueType.UINT32:
        raise reader.error(field, f"is of value type {kind}, but must be a UINT32")
    (alignment,) = reader.unpack(_U32, field)
    if alignment < 8 or alignment & (alignment - 1):
        raise reader.error(field, f"{alignment} is not a power of two of at least 8")
    return alignment


def _aligned(pos: int, alignment: int) -> int:
    return -(-pos // alignment) * alignment


def _read_tensors(reader: _Reader, n_tensors: int, alignment: int) -> list[TensorRecord]:
    table: dict[str, TensorRecord] = {}
    for index in range(n_tensors):
        name = reader.name(f"tensor {index}")
        if name in table:
            raise reader.error(f"tensor {quoted(name)}", "appears twice")
        table[name] = _read_tensor(reader, name, alignment)
    data_start = _aligned(reader.pos, alignment)
    tensors = [record._replace(offset=data_start + record.offset) for record in table.values()]
    file_size = len(reader.buffer)
    for name, _, _, n_bytes, offset in tensors:
        if offset + n_bytes > file_size:
            what = f"its data lie at bytes {offset} to {offset + n_bytes}"
            hint = "it is broken or cut off, fetch it again"
            raise reader.error(f"tensor {quoted(name)}", f"{what}, but the file ends at byte {file_size}; {hint}")
    for before, after in pairwise(sorted(tensors, key=attrgetter("offset"))):
        if before.offset + before.n_bytes > after.offset:
            raise reader.error(f"tensor {quoted(after.name)}", f"its data overlap those of {quoted(before.name)}")
    return tensors


def _read_tensor(reader: _Reader, name: str, alignment: int) -> TensorRecord:
    """One entry of the tensor table, its offset still counted from the start of the data."""
    field = f"tensor {quoted(name)}"
    (n_dims,) = reader.unpack(_U32, field)
    if n_dims > MAX_DIMS:
        raise reader.error(field, f"{n_dims} dimensions; at most {MAX_DIMS} are allowed")
    *dims, type_id, offset = reader.unpack(_TENSOR_TAIL[n_dims], field)
    if type_id not in BLOCK_SIZES:
        known = f" ({UNREADABLE_TYPES[type_id]})" if type_id in UNREADABLE_TYPES else ""
        problem = f"its type {type_id}{known} is not supported; supported are {', '.join(t.name for t in GGMLType)}"
        raise reader.error(field, problem, UnsupportedModelError)
    n_elements = math.prod(dims)
    if not n_elements:
        raise reader.error(field, f"a dimension is zero: {dims}")
    kind = GGMLType(type_id)
    block_elements, block_bytes = BLOCK_SIZES[kind]
    row_elements = dims[0] if dims else 1
    if row_elements % block_elements:
        raise reader.error(field, f"rows of {row_elements} are not whole {kind.name} blocks of {block_elements}")
    if offset % alignment:
        raise reader.error(field, f"its offset {offset} is not a multiple of the alignment {alignment}")
    return TensorRecord(name, tuple(reversed(dims)), kind, n_elements // block_elements * block_bytes, offset)


def _refuse_joined_files(reader: _Reader, tensors: list[TensorRecord], alignment: int) -> None:
    """Shards written one behind the other with `cat` look like the first shard with something behind it."""
    end = max((record.offset + record.n_bytes for record in tensors), default=reader.pos)
    for next_file in (end, _aligned(end, alignment)):
        if reader.buffer[next_file : next_file + 4] == b"GGUF":
            problem = f"another GGUF file begins at byte {next_file}, as when `cat` joins shards"
            raise reader.error(
                "tensor data", f"{problem}; keep the shards apart, or join them by llama-gguf-split --merge"
            )
