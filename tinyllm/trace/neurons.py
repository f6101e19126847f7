"""Feed-forward neurons where a token was chosen: how strongly they fire, and which tokens their output vectors promote.

Also the nearest neighbours of embedding rows. Vectors come from the file, readings from the model's own final norm and
output matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.embedding_table import EmbeddingTable
from tinyllm.gguf_file import BLOCK_SIZES
from tinyllm.kernels.dequantize import decode
from tinyllm.sampling.candidates import largest
from tinyllm.trace.output_head import OutputHead

if TYPE_CHECKING:
    from tinyllm.gguf_file import TensorInfo
    from tinyllm.model import Model

N_NEURONS, N_NEURONS_LATER = 8, 4
N_TOKENS = 4
N_NEIGHBOURS = 5
NEIGHBOUR_LIMIT = 64_000_000
"""Larger embedding tables (in elements) are not searched unless asked for: decoding them takes seconds."""
_CANDIDATES = 24


@dataclass(eq=False)
class Neurons:
    """The neurons of one layer that write most at one position, by |activation| · ‖output vector‖, strongest first.

    `promoted` and `suppressed`: int [n, 4], the tokens whose logits the written vector raises and lowers most.
    """

    index: np.ndarray
    activation: np.ndarray
    strength: np.ndarray
    promoted: np.ndarray
    suppressed: np.ndarray


def strongest(model: Model, head: OutputHead, activations: dict[int, np.ndarray]) -> dict[int, list[Neurons]]:
    """For each layer with activations (float32 [n_positions, n_ff]) the strongest neurons of each position, more of
    them at the first than at the others."""

    def of_layer(item: tuple[int, np.ndarray]) -> list[_Written] | None:
        layer, rows = item
        tensor = model.file.tensors.get(f"blk.{layer}.ffn_down.weight")
        fits = tensor is not None and tensor.shape == (model.config.n_embd, rows.shape[1])
        return _strongest_writers(tensor, rows) if fits else None

    with ThreadPoolExecutor(model.n_threads) as pool:
        found = dict(zip(activations, pool.map(of_layer, activations.items()), strict=True))
    # One vector for each neuron: many are among the strongest at several positions.
    places: dict[tuple[int, int], int] = {}
    vectors: list[np.ndarray] = []
    for layer, positions in found.items():
        for written in positions or ():
            for neuron, vector in zip(written.index.tolist(), written.vectors, strict=True):
                if places.setdefault((layer, neuron), len(vectors)) == len(vectors):
                    vectors.append(vector)
    raised, lowered = _readings(head, np.array(vectors, np.float32).reshape(-1, model.config.n_embd))
    return {
        layer: [_with_tokens(layer, written, places, raised, lowered) for written in positions]
        for layer, positions in found.items()
        if positions is not None
    }


@dataclass(eq=False)
class _Written:
    """The strongest neurons of one position, and their output vectors [n, n_embd]."""

    index: np.ndarray
    activation: np.ndarray
    strength: np.ndarray
    vectors: np.ndarray


def _strongest_writers(tensor: TensorInfo, rows: np.ndarray) -> list[_Written]:
    """By position (float32 [n_positions, n_ff]); only the columns of the largest activations are read of the matrix."""
    candidates = [largest(np.abs(act), _CANDIDATES) for act in rows]
    union = np.unique(np.concatenate(candidates))
    vectors = _columns(tensor, union)
    lengths = np.linalg.norm(vectors, axis=0)
    tensor.release()
    found = []
    for position, (act, index) in enumerate(zip(rows, candidates, strict=True)):
        strength = np.abs(act[index]) * lengths[np.searchsorted(union, index)]
        best = np.argsort(-strength)[: N_NEURONS if position == 0 else N_NEURONS_LATER]
        index = index[best]
        found.append(_Written(index, act[index], strength[best], vectors[:, np.searchsorted(union, index)].T))
    return found


def _with_tokens(
    layer: int, written: _Written, places: dict[tuple[int, int], int], raised: np.ndarray, lowered: np.ndarray
) -> Neurons:
    rows = [places[layer, neuron] for neuron in written.index.tolist()]
    # A negative activation writes the vector's opposite.
    negative = written.activation[:, None] < 0
    promoted = np.where(negative, lowered[rows], raised[rows])
    suppressed = np.where(negative, raised[rows], lowered[rows])
    return Neurons(written.index, written.activation, written.strength, promoted, suppressed)


def _columns(tensor: TensorInfo, columns: np.ndarray) -> np.ndarray:
    """float32 [n_rows, len(columns)], decoding no other blocks than those that hold the columns."""
    n_elements, n_bytes = BLOCK_SIZES[tensor.type]
    blocks, at = np.unique(columns // n_elements, return_inverse=True)
    raw = tensor.data.reshape(tensor.shape[0], -1, n_bytes)[:, blocks]
    values = decode(tensor.type.name, raw.reshape(tensor.shape[0], -1), len(blocks) * n_elements)
    return values[:, at * n_elements + columns % n_elements]


def _readings(head: OutputHead, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that vectors raise and lower most, against what a stream of zeros gives: int [n, 4] each."""
    raised = np.empty((len(vectors), N_TOKENS), np.int64)
    lowered = np.empty_like(raised)
    if not len(vectors):
        return raised, lowered
    biases = head.logits(np.zeros_like(vectors[:1]))[0].copy()
    for start in range(0, len(vectors), head.max_rows):
        rows = vectors[start : start + head.max_rows]
        # Unit RMS, so that the norm's epsilon does not weigh on short vectors.
        rows = rows / np.maximum(np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True)), 1e-30)
        logits = head.logits(rows)
        if biases.any():
            logits -= biases
        raised[start : start + len(rows)] = head.best()[0][:, :N_TOKENS]
        lowered[start : start + len(rows)] = head.best(sign=-1.0)[0][:, :N_TOKENS]
    return raised, lowered


def neighbours(model: Model, ids: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
    """The tokens whose embedding rows point most nearly in the direction of each id's own: (id, cosine), best first."""
    unique = np.unique(np.asarray(ids, np.int64))
    table = EmbeddingTable(model.file)
    cosines = table.cosines(table.rows(unique))
    cosines[np.arange(len(unique)), unique] = -2  # a token is no neighbour of itself
    result = {}
    for token, row in zip(unique.tolist(), cosines, strict=True):
        best = largest(row, N_NEIGHBOURS)
        result[token] = list(zip(best.tolist(), row[best].tolist(), strict=True))
    return result
