"""Tokenization by merging neighbours: the text of one fragment flows in, token ids flow out, for byte-pair vocabularies
(GPT-2 and its heirs, ranked merges) and SentencePiece ones (scored tokens). The time is that of a sort of the text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush

from tinyllm.characters import BYTE_OF_CHAR, byte_characters, escape_chunks, has_raw_bytes, is_space, lowered, repaired
from tinyllm.errors import TokenizerError
from tinyllm.splitting import PreTokenizer

log = logging.getLogger("tinyllm")

UNDERLINE = "\u2581"

Rank = Callable[[str, str], float | None]

_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64
_SHORT = 512


def merge(symbols: list[str], rank: Rank) -> list[str]:
    """Join the neighbours of the lowest rank, the leftmost first, until none have a rank.

    `symbols` is used up. `rank(left, right)` is None where the two may not be joined.
    """
    heap = []
    for right in range(1, len(symbols)):
        left = right - 1
        if (order := rank(symbols[left], symbols[right])) is not None:
            heap.append((order, left, right, len(symbols[left]) + len(symbols[right])))
    heapify(heap)
    before = list(range(-1, len(symbols)))
    behind = list(range(1, len(symbols) + 1))
    behind[-1:] = [-1]
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


class Reach(dict[str, int]):
    """How long the tokens get that begin like a text: by its first `KEY` characters, the length of the longest token
    with these, or `KEY` - 1 if there are none."""

    KEY = 3

    def __init__(self, tokens: Iterable[str]):
        super().__init__()
        for token in tokens:
            if len(token) >= self.KEY and len(token) > self.get(token[: self.KEY], 0):
                self[token[: self.KEY]] = len(token)

    def __missing__(self, start: str) -> int:
        return self.KEY - 1


class WordCutter:
    """Cuts text before each underlined space that no token reaches across, so that words can be looked up again."""

    def __init__(self, *vocabularies: Iterable[str]):
        """A vocabulary's entries may have one more space in front of the underline, as merges have."""
        self._vocabularies = vocabularies

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        crossed = re.compile(f"([^{UNDERLINE}\0]) ?{UNDERLINE}")
        chars = {char for entries in self._vocabularies for char in crossed.findall("\0".join(entries))}
        return re.compile(f"(?<=[^{re.escape(''.join(sorted(chars)))}{UNDERLINE}])(?={UNDERLINE})")

    def words(self, text: str) -> list[str]:
        return [text] if len(text) < _SHORT else self._cut.split(text)


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
                if len(word) <= _CACHED_LENGTH:
                    if len(known) >= _CACHED_WORDS:
                        known.clear()
                    known[word] = word_ids
            ids += word_ids
        return ids


class BytePairEncoder(_WordMerger):
    """Byte-pair encoding with a list of merges in the order of their rank."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], pre_tokenizer: PreTokenizer, *, lowercase: bool):
        super().__init__()
        self._ids = ids
        self._merges = merges
        self._pre_tokenizer = pre_tokenizer
        self._lowercase = lowercase
        self._cutter = WordCutter(ids, merges)
        self._left_out: set[str] = set()

    @cached_property
    def _ranks(self) -> dict[str, int]:
        count = len(self._merges)
        return dict(zip(reversed(self._merges), range(count - 1, -1, -1), strict=True))  # the first of equals counts

    def encode(self, text: str) -> list[int]:
        pre = self._pre_tokenizer
        text = repaired(text)
        if pre.underlined_spaces:
            words = pre.split(text.replace(" ", UNDERLINE))
            return self._encode_words(part for word in words for part in self._cutter.words(word))
        if pre.drops_spaces:
            words = pre.split(lowered(text) if self._lowercase else text)
            return self._encode_words(word for word in words if not is_space(word[0]))
        return self._encode_words(pre.split(text))

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
        if symbol not in self._left_out:
            self._left_out.add(symbol)
            what = f"the byte 0x{BYTE_OF_CHAR[symbol]:02X}" if self._pre_tokenizer.byte_level else f"{symbol!a}"
            log.warning("the vocabulary has no token for %s: it is left out of the text", what)
        return []


class SentencePieceEncoder(_WordMerger):
    """SentencePiece's BPE: any two neighbours that make a token may be joined, the best score first."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], unknown: int | None):
        super().__init__()
        self._ids = ids
        self._scores = scores
        self._unknown = unknown
        self._cutter = WordCutter(ids)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", UNDERLINE)
        if has_raw_bytes(text):
            return self._merge(escape_chunks(text))
        return self._encode_words(self._cutter.words(text))

    def _word_ids(self, word: str) -> list[int]:
        return self._merge(list(word))

    def _merge(self, symbols: list[str]) -> list[int]:
        ids, scores = self._ids, self._scores

        def rank(left: str, right: str) -> float | None:
            token = ids.get(left + right)
            return None if token is None else -scores[token]

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
