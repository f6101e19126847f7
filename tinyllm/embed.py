"""Embeddings: a text or its token ids go in, out comes a vector of the model's width that stands for the meaning."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

import numpy as np

from .config import POOLINGS
from .errors import InvalidParameterError, UnsupportedModelError
from .tokenizer import ids_of

if TYPE_CHECKING:
    from .model import Model


def embed(
    model: Model, text: str | bytes | Ids[int], pooling: str | None = None, normalize: bool = False
) -> np.ndarray:
    """float32 [n_embd]: the tokens' last states pooled, as the file says or else by their mean.

    `pooling`: "mean", "cls" (the first token's), "last", or "none" for the rows of all tokens [n_tokens, n_embd].
    `normalize`: scale to length 1.

    Raises ContextFullError for a text that is too long, InvalidParameterError for one without tokens
    and for what is no text.
    """
    # A model without a vocabulary can still be asked by ids.
    ids = ids_of(text, lambda text: model.tokenizer.encode(text))
    if not ids:
        raise InvalidParameterError("there is nothing to embed: the text has no tokens")
    pooling = pooling or model.config.pooling or "mean"
    if pooling not in POOLINGS.values():
        known = ", ".join(POOLINGS.values())
        raise (InvalidParameterError if pooling != model.config.pooling else UnsupportedModelError)(
            f"pooling {pooling!r} is not supported: use one of {known}"
        )
    sequence = model.new_sequence()
    try:
        rows = sequence.evaluate(ids, want="hidden")
    finally:
        sequence.release()
    match pooling:
        case "mean":
            rows = rows.mean(axis=0, dtype=np.float64)
        case "cls":
            rows = rows[0]
        case "last":
            rows = rows[-1]
    if pooling != "none":
        for matrix in model.network.weights.dense:
            rows = matrix @ rows
    if normalize:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return rows.astype(np.float32)
