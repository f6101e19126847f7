"""Tokenization by merging neighbours: text without special tokens flows in, ids flow out, for byte-pair vocabularies
(ranked merges) and SentencePiece ones (scored tokens). The `tokenizers` library merges long words faster, but takes
eight times as long to build (0.15 s instead of 0.02 s for 49,000 merges), and most texts are shorter than that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

from tinyllm.errors import TokenizerError
from tinyllm.text.characters import (
    BYTE_OF_CHAR,
    byte_characters,
    escape_chunks,
    has_raw_bytes,
    is_space,
    lowered,
    repaired,
)
from tinyllm.text.splitting import UNDERLINE, WordCutter
from tinyllm.text.vocabulary import Vocabulary

log = logging.getLogger("tinyllm")

Rank = Callable[[str, str], float | None]

_KNOWN_WORDS = 1 << 16
_KNOWN_LENGTH = 64
_NAMED = 8


def merge(symbols: list[str], rank: Rank) -> list[str]:
    """Join the neighbours of the lowest rank, the leftmost first, until none have a rank.

    `symbols` is used up. `rank(left, right)` is None where the two may not be joined.
    """
    heap = []
    for left, right in pairwise(range(len(symbols))):
        if (order := rank(symbols[left], symbols[right])) is not None:
            heap.append((order, left, right, len(symbols[left]) + len(symbols[right])))
    heapify(heap)
    before = list(range(-1, len(symbols) - 1))
    behind = [*range(1, len(symbols)), -1]
    while heap:
        _, left, right, length = heappop(heap)
        # A symbol that was joined to its left neighbour is empty; one that grew makes the pair longer.
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
            continue
        joined = symbols[left] = symbols[left] + symbols[right]
        symbols[right] = ""
        right = behind[left] = behind[right]
        if right >= 0:
            before[right] = left
            if (order := rank(joined, symbols[right])) is not None:
                heappush(heap, (order, left, right, len(joined) + len(symbols[right])))
        if (outer := before[left]) >= 0 and (order := rank(symbols[outer], joined)) is not None:
            heappush(heap, (order, outer, left, len(symbols[outer]) + len(joined)))
    return [symbol for symbol in symbols if symbol]


class _WordMerger:
    """What both kinds of vocabulary share: words that were seen before are not merged again."""

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}

    def _word_ids(self, word: str) -> list[int]:
        raise NotImplementedError

    def _encode_words(self, words: Iterable[str]) -> list[int]:
        ids: list[int] = []
        known = self._known
        for word in words:
            word_ids = known.get(word)
            if word_ids is None:
                word_ids = self._word_ids(word)
                if len(word) <= _KNOWN_LENGTH:
                    if len(known) >= _KNOWN_WORDS:
                        known.clear()
                    known[word] = word_ids
            ids += word_ids
        return ids


class BytePairEncoder(_WordMerger):
    """Byte-pair encoding with a list of merges in the order of their rank."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__()
        self._ids = vocabulary.ids
        self._merges = vocabulary.merges
        self._pre_tokenizer = vocabulary.pre_tokenizer
        self._lowercase = vocabulary.lowercase
        self._cutter = WordCutter(vocabulary.tokens, vocabulary.merges)
        self._left_out: dict[str, None] = {}  # a set in the order of insertion

    @cached_property
    def _ranks(self) -> dict[str, int]:
        count = len(self._merges)
        return dict(zip(reversed(self._merges), range(count - 1, -1, -1), strict=True))  # the first of equals counts

    def encode(self, text: str) -> list[int]:
        told = len(self._left_out)
        ids = self._encode_words(self._words(repaired(text)))
        if missing := list(self._left_out)[told:]:
            self._tell_left_out(missing)
        return ids

    def _words(self, text: str) -> Iterable[str]:
        pre = self._pre_tokenizer
        if pre.underlined_spaces:
            words = pre.split(text.replace(" ", UNDERLINE))
            return (part for word in words for part in self._cutter.words(word))
        if pre.drops_spaces:
            words = pre.split(lowered(text) if self._lowercase else text)
            return (word for word in words if not is_space(word[0]))
        return pre.split(text)

    def _word_ids(self, word: str) -> list[int]:
        pre, ids = self._pre_tokenizer, self._ids
        if pre.byte_level:
            word = byte_characters(word)
        if (pre.whole_words or (pre.whole_newlines and not word.strip("\n"))) and word in ids:
            return [ids[word]]
        ranks = self._ranks
        found: list[int] = []
        for symbol in merge(list(word), lambda left, right: ranks.get(f"{left} {right}")):
            token = ids.get(symbol)
            found += self._spelled(symbol) if token is None else [token]
        return found

    def _spelled(self, symbol: str) -> list[int]:
        """The tokens of a symbol that is none: of its bytes, if the vocabulary has them."""
        if len(symbol) > 1:
            raise TokenizerError(f"its merges do not fit its tokens: they lead to {symbol[:40]!r}, which is no token")
        if not self._pre_tokenizer.byte_level:
            tokens = [self._ids.get(f"<0x{byte:02X}>") for byte in symbol.encode("utf-8", "surrogatepass")]
            if None not in tokens:
                return tokens
        self._left_out[symbol] = None
        return []

    def _tell_left_out(self, symbols: list[str]) -> None:
        """One line, however many there are: binary data have dozens of them."""
        is_bytes = self._pre_tokenizer.byte_level
        names = [f"0x{BYTE_OF_CHAR[symbol]:02X}" if is_bytes else f"{symbol!a}" for symbol in symbols]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        what = ("the byte " if len(names) == 1 else "the bytes ") * is_bytes + ", ".join(names[:_NAMED]) + more
        left_out = "it is" if len(names) == 1 else "they are"
        log.warning("the vocabulary has no token for %s: %s left out of the text", what, left_out)


class SentencePieceEncoder(_WordMerger):
    """SentencePiece's BPE: any two neighbours that make a token may be joined, the best score first."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__()
        self._ids = vocabulary.ids
        self._order = (-vocabulary.scores).tolist()
        self._unknown = vocabulary.special_ids.get("unk")
        self._cutter = WordCutter(vocabulary.tokens)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", UNDERLINE)
        if has_raw_bytes(text):
            return self._merge(escape_chunks(text))
        return self._encode_words(self._cutter.words(text))

    def _word_ids(self, word: str) -> list[int]:
        return self._merge(list(word))

    def _merge(self, symbols: list[str]) -> list[int]:
        ids, order = self._ids, self._order

        def rank(left: str, right: str) -> float | None:
            token = ids.get(left + right)
            return None if token is None else order[token]

        found: list[int] = []
        for symbol in merge(symbols, rank):
            if (token := ids.get(symbol)) is not None:
                found.append(token)
            else:
                found += map(self._byte_id, symbol.encode("utf-8", "surrogateescape"))
        return found

    def _byte_id(self, byte: int) -> int:
        alone = bytes([byte]).decode("utf-8", "surrogateescape")
        token = self._ids.get(f"<0x{byte:02X}>", self._ids.get(alone, self._unknown))
        if token is None:
            raise TokenizerError(f"it has neither a token for the byte 0x{byte:02X} nor one for what is unknown")
        return token
