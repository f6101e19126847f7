"""The `llama` forward pass in float64 NumPy, straight from its definition: the oracle of the engine's tests."""

from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """RoPE on adjacent pairs: x is [n, heads, head_dim]."""
    n_rot = x.shape[-1]
    angles = positions[:, None] * base ** (-np.arange(0, n_rot, 2) / n_rot)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)


def logits(
    ids: list[int],
    tensors: dict[str, np.ndarray],
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
    base: float = 10000.0,
) -> np.ndarray:
    """Logits at every position: [len(ids), n_vocab]. `tensors` are float, by GGUF name, matrices [out, in]."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    positions = np.arange(len(ids), dtype=np.float64)
    x = w["token_embd.weight"][ids]
    hidden = np.triu(np.ones((len(ids), len(ids)), bool), 1)
    for i in range(n_layers):
        block = {
            name.removeprefix(f"blk.{i}.").removesuffix(".weight"): t
            for name, t in w.items()
            if name.startswith(f"blk.{i}.")
        }
        h = rms_norm(x, block["attn_norm"], eps)
        q, k, v = (h @ block[f"attn_{name}"].T for name in "qkv")
        q = rotate(q.reshape(len(ids), n_heads, -1), positions, base)
        k = rotate(k.reshape(len(ids), n_kv_heads, -1), positions, base)
        v = v.reshape(len(ids), n_kv_heads, -1)
        heads = []
        for head in range(n_heads):
            kv_head = head * n_kv_heads // n_heads
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(q.shape[-1])
            scores[hidden] = -np.inf
            probabilities = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(probabilities / probabilities.sum(-1, keepdims=True) @ v[:, kv_head])
        x = x + np.concatenate(heads, -1) @ block["attn_output"].T
        h = rms_norm(x, block["ffn_norm"], eps)
        gate = h @ block["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ block["ffn_up"].T)) @ block["ffn_down"].T
    output = w.get("output.weight", w["token_embd.weight"])
    return rms_norm(x, w["output_norm.weight"], eps) @ output.T
