"""GGUF files for tests: sound ones by the `gguf` package's writer, forged ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tinyllm.errors import ModelFileError, TinyLLMError
from tinyllm.gguf_file import open_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
F32_TENSOR = 0


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + u32(kind) + payload


def array(element: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + payload


def tensor(name: str | bytes, dims: Sequence[int] = (8,), type_id: int = F32_TENSOR, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def forge(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file of these parts; the counts say what is asked, else the truth."""
    n_keys = len(entries) if n_keys is None else n_keys
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    header = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def write_model(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] | None = None,
    *,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    alignment: int | None = None,
    tensors_per_shard: int = 0,
) -> None:
    """Write arrays and metadata with the writer; an array that `types` names holds raw blocks."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_shard)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sample(path: Path) -> Path:
    """A small sound file with a value of each kind that models have and tensors of one to three dimensions."""
    rng = np.random.default_rng(1)
    tensors = {
        "token_embd.weight": rng.standard_normal((6, 64), np.float32),
        "blk.0.ffn_up_exps.weight": rng.integers(0, 256, (2, 3, 2 * 34), np.uint8),
        "output_norm.weight": rng.standard_normal(5, np.float32).astype(np.float16),
    }
    metadata = {
        "llama.block_count": 2,
        "llama.rope.freq_base": 1e6,
        "general.name": "Žluťoučký kůň",
        "flag": True,
        "tokenizer.ggml.tokens": ["a", "", "你好", "end"],
        "tokenizer.ggml.scores": [0.5, -1.5, 2.0, 0.0],
    }
    write_model(path, tensors, metadata, types={"blk.0.ffn_up_exps.weight": gguf.GGMLQuantizationType.Q8_0})
    return path


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def refusal(path: Path, kind: type[TinyLLMError] = ModelFileError) -> str:
    """The message with which a file is refused, behind the file's name."""
    with pytest.raises(kind) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    return message.removeprefix(f"{path}: ")
