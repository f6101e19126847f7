"""Tiny models to look into: those of tests/data with one family's peculiarities each, and a llama with its oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from fake_model import FakeTokenizer
from gguf_builders import write_model
from numpy_llama import rms_norm, rotate

import tinyllm
from tinyllm.model import Model

FOLDER = Path(__file__).parent / "data" / "architectures"
N_VOCAB = 48
PROMPT = np.random.default_rng(7).integers(0, N_VOCAB, 40).tolist()


class FewTokens(FakeTokenizer):
    """The files have no vocabulary: ids stand for letters."""

    eog_ids = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self._bytes = [b" %c" % (97 + i % 26) for i in range(N_VOCAB)]
        self.n_vocab = N_VOCAB


@contextmanager
def tiny_model(name: str, **options: object) -> Iterator[Model]:
    """A model of the folder with an exact cache and two threads, unless the options say otherwise."""
    with few_tokens(FOLDER / f"{name}.gguf", **options) as model:
        yield model


@contextmanager
def few_tokens(path: Path, **options: object) -> Iterator[Model]:
    """A model without a vocabulary of its own."""
    with tinyllm.load(path, **{"n_ctx": 64, "n_threads": 2, "kv_type": "f32"} | options) as model:
        model.tokenizer = FewTokens()
        yield model


def decoders() -> list[str]:
    """Names of the models that choose tokens."""
    return sorted(path.stem for path in FOLDER.glob("*.gguf") if "bert" not in path.stem)


N_LAYERS, N_EMBD, N_HEADS, N_KV_HEADS, HEAD_DIM, N_FF, EPS = 2, 64, 4, 2, 32, 96, 1e-5


def write_llama(path: Path) -> dict[str, np.ndarray]:
    """A random llama in float32 whose heads share keys and values in pairs; its tensors."""
    rng = np.random.default_rng(3)
    shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), "output.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYERS):
        shapes |= {f"blk.{i}.attn_{name}.weight": (N_HEADS * HEAD_DIM, N_EMBD) for name in "q"}
        shapes |= {f"blk.{i}.attn_{name}.weight": (N_KV_HEADS * HEAD_DIM, N_EMBD) for name in "kv"}
        shapes |= {f"blk.{i}.attn_output.weight": (N_EMBD, N_HEADS * HEAD_DIM)}
        shapes |= {f"blk.{i}.ffn_{name}.weight": (N_FF, N_EMBD) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (N_EMBD, N_FF)}
    tensors = {name: (1.5 * rng.normal(size=s) / np.sqrt(s[1])).astype(np.float32) for name, s in shapes.items()}
    norms = ["output_norm", *(f"blk.{i}.{half}_norm" for i in range(N_LAYERS) for half in ("attn", "ffn"))]
    tensors |= {f"{name}.weight": rng.uniform(0.5, 1.5, N_EMBD).astype(np.float32) for name in norms}
    metadata = {
        "block_count": N_LAYERS,
        "context_length": 512,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": EPS,
        "vocab_size": N_VOCAB,
    }
    write_model(path, tensors, {f"llama.{key}": value for key, value in metadata.items()})
    return tensors


class Reference:
    """That llama in float64 (see `numpy_llama`), keeping states of the stream and attention weights.

    `states`: behind the embedding and each half layer, [T, n_embd]; `probs`: per layer, [n_heads, T, T].
    """

    def __init__(self, tensors: dict[str, np.ndarray], ids: list[int]):
        self.w = w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        n, positions = len(ids), np.arange(len(ids))
        x = w["token_embd.weight"][ids]
        self.states, self.probs = [x], []
        for i in range(N_LAYERS):
            h = rms_norm(x, w[f"blk.{i}.attn_norm.weight"], EPS)
            q, k, v = ((h @ w[f"blk.{i}.attn_{part}.weight"].T).reshape(n, -1, HEAD_DIM) for part in "qkv")
            q, k = rotate(q, positions, 10000.0), rotate(k, positions, 10000.0)
            k, v = (np.repeat(part, N_HEADS // N_KV_HEADS, axis=1) for part in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
            scores[:, positions[:, None] < positions] = -np.inf
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            self.probs.append(probs / probs.sum(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", self.probs[-1], v).reshape(n, -1)
            x = x + mixed @ w[f"blk.{i}.attn_output.weight"].T
            self.states.append(x)
            h = rms_norm(x, w[f"blk.{i}.ffn_norm.weight"], EPS)
            gate, up = (h @ w[f"blk.{i}.ffn_{part}.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down.weight"].T
            self.states.append(x)

    def lens(self, state: int) -> np.ndarray:
        """Logits if the model ended behind a state: [T, n_vocab]."""
        return rms_norm(self.states[state], self.w["output_norm.weight"], EPS) @ self.w["output.weight"].T
