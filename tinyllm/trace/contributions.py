"""Who wrote a token's logit: the residual stream is a sum, and so is the logit once the final norm's scale is fixed.

Every half layer's addition times the token's output row, over the scale that the final state has (direct logit
attribution; Elhage et al. 2021). A reading of the sum, not a statement about causes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.kernels.dequantize import decode

if TYPE_CHECKING:
    from tinyllm.model import Model
    from tinyllm.trace.lens import Lens


@dataclass(eq=False)
class Contributions:
    """Parts of one chosen token's logit: `parts` float64 [2 · n_layers + 1], the embedding and then each half layer.

    `constant` comes from biases behind the stream. The sum of both is `sum`; `logit` is what the model computed (before
    a cap, if it has one), and the difference is the rounding of the quantized last product. `centred` are the parts
    over the mean of the vocabulary, which the softmax does not see; None where a LayerNorm, a bias or a cap stands
    at the end.
    """

    position: int
    token: int
    parts: np.ndarray
    constant: float
    logit: float
    centred: np.ndarray | None
    vocabulary_mean: float

    @property
    def sum(self) -> float:
        return float(self.parts.sum()) + self.constant

    @property
    def rounding(self) -> float:
        return self.logit - self.sum


def contributions(
    model: Model, states: np.ndarray, position: int, token: int, logits: np.ndarray, lens: Lens
) -> Contributions:
    """Take the logit of `token` at a position apart; `states`: float32 [S, T, n_embd], `logits`: the model's there."""
    config, tensors = model.config, model.file.tensors
    stream = states[:, position].astype(np.float64)
    writes = np.diff(stream, axis=0, prepend=np.zeros((1, stream.shape[1])))
    matrix = tensors.get("output.weight") or tensors["token_embd.weight"]
    row = decode(matrix.type.name, matrix.rows([token]), matrix.shape[1])[0].astype(np.float64)
    # A model's only norm may be named after the embedding (LFM2).
    norm = next((name for name in ("output_norm", "token_embd_norm") if f"{name}.weight" in tensors), "")
    constant = 0.0
    if f"{norm}.bias" in tensors:
        constant += float(_floats(model, f"{norm}.bias") @ row)
    if "output.bias" in tensors:
        constant += float(_floats(model, "output.bias")[token])
    if norm:
        row = row * _floats(model, f"{norm}.weight")
    scales = np.array([_scale(state, config.norm, config.norm_eps) for state in stream])
    if config.norm == "layer":
        writes = writes - writes.mean(axis=1, keepdims=True)
    parts = writes @ row * (config.logit_scale / scales[-1])
    cap = getattr(config, "logit_cap", 0.0)
    logit = float(logits[token])
    centred, mean = None, float(logits.mean(dtype=np.float64))
    if config.norm == "rms" and not cap and "output.bias" not in tensors and lens.read[:, position].all():
        # The lens read each state with its own scale; with the final one the means over the vocabulary add up too.
        means = lens.mean_logit[:, position].astype(np.float64) * scales / scales[-1]
        centred = parts - np.diff(means, prepend=0.0)
        mean = float(means[-1])
    return Contributions(
        position=position,
        token=token,
        parts=parts,
        constant=constant * config.logit_scale,
        logit=cap * math.atanh(min(max(logit / cap, -1 + 1e-7), 1 - 1e-7)) if cap else logit,
        centred=centred,
        vocabulary_mean=mean,
    )


def _scale(state: np.ndarray, norm: str, eps: float) -> float:
    """What the final norm divides this state by."""
    centre = state.mean() if norm == "layer" else 0.0
    return math.sqrt(float(np.mean(np.square(state - centre))) + eps)


def _floats(model: Model, name: str) -> np.ndarray:
    tensor = model.file.tensors[name]
    return decode(tensor.type.name, tensor.data, tensor.shape[0]).astype(np.float64)
