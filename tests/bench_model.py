"""A small random model of the llama architecture for the tests of bench: two layers, Q8_0 and Q4_0 matrices."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf_builders import write_model

N_LAYERS, N_EMBD, N_HEADS, N_KV_HEADS, N_FF, N_VOCAB = 2, 64, 4, 2, 96, 80
HEAD_DIM = N_EMBD // N_HEADS


def write_bench_model(path: Path) -> Path:
    """Write it; the queries' and the FFN's matrices are Q4_0, all others Q8_0."""
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {"output_norm.weight": np.ones(N_EMBD, np.float32)}
    types: dict[str, gguf.GGMLQuantizationType] = {}

    def matrix(name: str, rows: int, columns: int, kind: str) -> None:
        types[name] = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal((rows, columns), np.float32) / np.sqrt(columns, dtype=np.float32)
        tensors[name] = gguf.quants.quantize(values, types[name])

    matrix("token_embd.weight", N_VOCAB, N_EMBD, "Q8_0")
    for layer in range(N_LAYERS):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"{block}{norm}.weight"] = np.ones(N_EMBD, np.float32)
        matrix(f"{block}attn_q.weight", N_EMBD, N_EMBD, "Q4_0")
        matrix(f"{block}attn_k.weight", N_KV_HEADS * HEAD_DIM, N_EMBD, "Q8_0")
        matrix(f"{block}attn_v.weight", N_KV_HEADS * HEAD_DIM, N_EMBD, "Q8_0")
        matrix(f"{block}attn_output.weight", N_EMBD, N_EMBD, "Q8_0")
        matrix(f"{block}ffn_gate.weight", N_FF, N_EMBD, "Q4_0")
        matrix(f"{block}ffn_up.weight", N_FF, N_EMBD, "Q4_0")
        matrix(f"{block}ffn_down.weight", N_EMBD, N_FF, "Q8_0")
    metadata = {
        "general.file_type": 7,
        "llama.block_count": N_LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": N_EMBD,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": N_HEADS,
        "llama.attention.head_count_kv": N_KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": N_VOCAB,
    }
    write_model(path, tensors, metadata, types=types)
    return path
