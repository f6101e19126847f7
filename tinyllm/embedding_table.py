"""The embedding table of a model file: tokens or words go in, the tokens whose rows point most nearly the same way come
out. Rows are decoded straight from the file, a part at a time: no model need be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import InvalidParameterError, UnsupportedModelError
from .kernels.dequantize import decode
from .sampling.candidates import largest

if TYPE_CHECKING:
    from .gguf_file import GGUFFile
    from .tokenizer import Tokenizer

_ROWS_AT_A_TIME = 8192
_SPECIAL_SHOWN = 3


class EmbeddingTable:
    """`token_embd.weight` of an open GGUF file, [n_vocab, width].

    Raises UnsupportedModelError for a file that has none.
    """

    def __init__(self, file: GGUFFile):
        tensor = file.tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise UnsupportedModelError(f"{file.path}: there is no embedding table in this file")
        self._tensor = tensor
        self.n_vocab, self.width = tensor.shape

    def rows(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 [len(ids), width] as they are in the file, without a factor that the model puts on all of them."""
        return decode(self._tensor.type.name, self._tensor.rows(np.asarray(ids, np.int64)), self.width)

    def cosines(self, vectors: np.ndarray) -> np.ndarray:
        """Cosines between vectors (float32 [n, width]) and all rows: float32 [n, n_vocab]."""
        wanted = unit(vectors)
        cosines = np.empty((len(wanted), self.n_vocab), np.float32)
        for start in range(0, self.n_vocab, _ROWS_AT_A_TIME):
            numbers = np.arange(start, min(start + _ROWS_AT_A_TIME, self.n_vocab))
            cosines[:, numbers] = wanted @ unit(self.rows(numbers)).T
        return cosines


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; one of zeros stays."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)


@dataclass(frozen=True)
class Word:
    """A text as it was looked up: with a space in front where that is how it stands in a sentence."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Near:
    """A token, its cosine with the vector that was asked for, and its rank in the whole table (0: the nearest)."""

    id: int
    cosine: float
    rank: int


@dataclass(frozen=True)
class Neighbourhood:
    """What lies near one vector.

    `nearest` are ordinary tokens, best first. Set apart from them: `own`, the tokens of the words that were asked for,
    in that order, and `special`, the nearest tokens that are no text. `mean` and `deviation` are over the cosines of
    the whole table: what a token that has nothing to do with the words would have.
    """

    words: list[Word]
    nearest: list[Near]
    own: list[Near]
    special: list[Near]
    mean: float
    deviation: float


def look_up(tokenizer: Tokenizer, text: str) -> Word:
    """The tokens of a word as it stands within a sentence.

    In most vocabularies "king" alone is the end of "making", and the word is " king": the space is put in front unless
    that takes more tokens. Raises InvalidParameterError for a text without tokens.
    """
    forms = [text] if text[:1].isspace() else [f" {text}", text]
    encoded = [(form, tokenizer.encode(form, add_special=False, parse_special=True)) for form in forms]
    form, ids = min(encoded, key=lambda pair: len(pair[1]))
    if not text or not ids:
        raise InvalidParameterError("there is nothing to look up: the text has no tokens")
    return Word(form, ids)


def word_neighbours(table: EmbeddingTable, tokenizer: Tokenizer, text: str, k: int = 10) -> Neighbourhood:
    """The tokens nearest to a word; a word of several tokens is looked for by the mean of their rows."""
    word = look_up(tokenizer, text)
    return _near(table, tokenizer, _vector(table, word), [word], k)


def word_analogy(table: EmbeddingTable, tokenizer: Tokenizer, a: str, b: str, c: str, k: int = 10) -> Neighbourhood:
    """The tokens nearest to a - b + c, each word scaled to length 1 (3CosAdd: Mikolov et al. 2013)."""
    words = [look_up(tokenizer, text) for text in (a, b, c)]
    vectors = unit(np.concatenate([_vector(table, word) for word in words]))
    return _near(table, tokenizer, vectors[[0]] - vectors[[1]] + vectors[[2]], words, k)


def _vector(table: EmbeddingTable, word: Word) -> np.ndarray:
    return table.rows(word.ids).mean(axis=0, keepdims=True)


def _near(table: EmbeddingTable, tokenizer: Tokenizer, vector: np.ndarray, words: list[Word], k: int) -> Neighbourhood:
    # Tables are often longer than the vocabulary: the rows behind it stand for nothing.
    cosines = table.cosines(vector)[0, : tokenizer.n_vocab]
    own = list(dict.fromkeys(token for word in words for token in word.ids))
    nearest: list[Near] = []
    special: list[Near] = []
    seen, n = 0, k + len(own) + 16
    while (len(nearest) < k or not special) and seen < len(cosines):
        ordered = largest(cosines, n)
        for rank in range(seen, len(ordered)):
            token = int(ordered[rank])
            if token in own:
                continue
            found = Near(token, float(cosines[token]), rank)
            if tokenizer.is_control(token) or not tokenizer.token_bytes(token):
                special += [found] * (len(special) < _SPECIAL_SHOWN)
            else:
                nearest += [found] * (len(nearest) < k)
        seen, n = len(ordered), 8 * n
    return Neighbourhood(
        words=words,
        nearest=nearest,
        own=[Near(token, float(cosines[token]), _rank(cosines, token)) for token in own],
        special=special,
        mean=float(cosines.mean(dtype=np.float64)),
        deviation=float(cosines.std(dtype=np.float64)),
    )


def _rank(values: np.ndarray, at: int) -> int:
    """How many values are larger, or as large at an earlier position."""
    return int(np.count_nonzero(values > values[at]) + np.count_nonzero(values[:at] == values[at]))
