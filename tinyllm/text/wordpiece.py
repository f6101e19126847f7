"""WordPiece tokenization (BERT): the text of one fragment flows in, the ids of the longest tokens that each word is
made of flow out. Words are parted, lowered and stripped of accents first, each character by itself.
"""

from __future__ import annotations

import unicodedata

from tinyllm.errors import TokenizerError
from tinyllm.text.characters import CharTable, category, is_space, lowered, repaired
from tinyllm.text.splitting import UNDERLINE
from tinyllm.text.vocabulary import Reach, Vocabulary

# As BERT has them, with its slip of U+2B920 for U+2B820.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPieceEncoder:
    """Words are written with U+2581 in front of them; a word that tokens cannot make up is one unknown token."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._unknown = vocabulary.special_ids.get("unk")
        self._lowercase = vocabulary.lowercase
        self._strip_accents = vocabulary.strip_accents
        self._table = CharTable(self._normalized)

    def _normalized(self, char: str) -> str:
        """What a character becomes: a space where a word ends, nothing where it is left out."""
        if self._strip_accents:
            char = unicodedata.normalize("NFD", char)[0]
        kind = category(char)
        if is_space(char):
            return " "
        if char in "\0\ufffd" or kind == "C" or (self._strip_accents and kind == "M"):
            return ""
        code = ord(char)
        alone = kind == "P" or (kind == "S" and code < 0x7F) or any(first <= code <= last for first, last in _CHINESE)
        if self._lowercase:
            char = lowered(char)
        return f" {char} " if alone else char

    def encode(self, text: str) -> list[int]:
        known: dict[str, list[int]] = {}
        found: list[int] = []
        for word in repaired(text).translate(self._table).split(" "):
            if word:
                if word not in known:
                    known[word] = self._pieces(UNDERLINE + word)
                found += known[word]
        return found

    def _pieces(self, word: str) -> list[int]:
        ids, reach = self._vocabulary.ids, self._vocabulary.reach
        found: list[int] = []
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + reach[word[start : start + Reach.KEY]]), start, -1):
                if (token := ids.get(word[start:end])) is not None:
                    found.append(token)
                    start = end
                    break
            else:
                return [self._unknown_id()]
        return found

    def _unknown_id(self) -> int:
        if self._unknown is None:
            raise TokenizerError("it has no token for what is unknown")
        return self._unknown
