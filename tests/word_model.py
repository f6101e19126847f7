"""A file with a small vocabulary of words and an embedding table whose geometry is known, but no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from fake_model import SPECIAL_TOKENS, byte_characters
from gguf_builders import write_model

N_DIMENSIONS = 8
WORDS: Mapping[str, Sequence[float]] = {
    " king": (4, 1, 1),
    " queen": (4, -1, 1),
    " King": (4, 1, 1.5),
    " prince": (3, 2, -1),
    " man": (0, 1, 4),
    " woman": (0, -1, 4),
}
"""Royal, male, common. All other tokens are noise in the other dimensions."""


def write_word_model(path: Path) -> Path:
    """Ids 0–255 are bytes, 256–259 control tokens, then come the words and the beginnings that they are merged from."""
    characters = byte_characters()
    spelled = {word: [characters[byte] for byte in word.encode()] for word in WORDS}
    merges = dict.fromkeys(
        ("".join(parts[:i]), parts[i]) for parts in spelled.values() for i in range(1, len(parts))
    )  # a dict keeps each once, in order
    pieces = ["".join(merge) for merge in merges]
    tokens = [*characters, *SPECIAL_TOKENS, *pieces]
    table = 0.1 * np.random.default_rng(0).standard_normal((len(tokens) + 4, N_DIMENSIONS))
    table[:, :3] = 0
    for word, place in WORDS.items():
        table[tokens.index("".join(spelled[word]))] = [*place, *[0] * (N_DIMENSIONS - 3)]
    table[256] = [4, 1, 1.1, *[0] * (N_DIMENSIONS - 3)]  # a control token beside the king
    table[-1] = table[256]  # behind the vocabulary
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL_TOKENS) + [1] * len(pieces),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
    }
    write_model(path, {"token_embd.weight": table.astype(np.float32)}, metadata)
    return path
