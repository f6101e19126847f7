"""Unigram tokenization (T5, XLM-RoBERTa): the text of one fragment flows in, the ids of its most probable segmentation
flow out. The text is normalized first, as the file's precompiled character map says.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinyllm.errors import TokenizerError
from tinyllm.text.characters import repaired
from tinyllm.text.special_tokens import TokenType
from tinyllm.text.splitting import UNDERLINE, WordCutter
from tinyllm.text.vocabulary import Reach, Vocabulary

UNKNOWN_PENALTY = 10.0
_LONGEST_KEY = 256  # several times any real one; bounds what a map that leads in circles costs
_UNREADABLE = "\udc80"


class CharacterMap:
    """SentencePiece's precompiled map of character sequences to what replaces them.

    A double array in the layout of Darts-clone, preceded by its length in bytes and followed by the replacements, each
    ended by a zero byte (normalizer.cc of https://github.com/google/sentencepiece). Raises TokenizerError if broken.
    """

    def __init__(self, blob: bytes):
        size = int.from_bytes(blob[:4], "little")
        if len(blob) < 4 or size % 4 or 4 + size >= len(blob) or not size:
            raise TokenizerError("key 'tokenizer.ggml.precompiled_charsmap' is broken")
        self._units = np.frombuffer(blob, "<u4", size // 4, 4).tolist()
        self._replacements = blob[4 + size :]
        self.root = self._offset(0)

    def _unit(self, node: int) -> int:
        if node >= len(self._units):
            raise TokenizerError("key 'tokenizer.ggml.precompiled_charsmap' points outside itself")
        return self._units[node]

    def _offset(self, node: int) -> int:
        unit = self._unit(node)
        return (unit >> 10) << ((unit & 1 << 9) >> 6)

    def step(self, node: int, data: bytes) -> tuple[int | None, str | None]:
        """From `node` along `data`: the node behind it, or None if nothing in the map goes on like that, and what
        replaces the sequence that ends there, if one does."""
        value = None
        for byte in data:
            node ^= byte
            unit = self._unit(node)
            if not byte or unit & (1 << 31 | 0xFF) != byte:
                return None, None
            node ^= self._offset(node)
            value = self._unit(node) & ~(1 << 31) if unit & 1 << 8 else None
        return node, None if value is None else self._replacement(value)

    def goes_on(self, node: int) -> bool:
        """Whether any longer sequence begins like the one that leads to `node`."""
        units = self._units
        return any(node ^ byte < len(units) and units[node ^ byte] & (1 << 31 | 0xFF) == byte for byte in range(1, 256))

    def _replacement(self, start: int) -> str:
        end = self._replacements.find(b"\0", start)
        if not 0 <= start < len(self._replacements) or end < 0:
            raise TokenizerError("key 'tokenizer.ggml.precompiled_charsmap' points outside itself")
        return self._replacements[start:end].decode("utf-8", "replace")


class Normalizer:
    """Applies the character map and the space rules. What begins like a user-defined token is left as it is."""

    def __init__(self, blob: bytes, user_defined: Iterable[str], *, add_space_prefix: bool, merge_spaces: bool):
        self._map = CharacterMap(blob) if blob else None
        self._add_space_prefix = add_space_prefix
        self._merge_spaces = merge_spaces
        self._user_defined: dict = {}
        for token in user_defined:
            branch = self._user_defined
            for char in token:
                branch = branch.setdefault(char, {})
        self._alone: dict[str, str | None] = {_UNREADABLE: "\ufffd"}

    def normalize(self, text: str) -> str:
        mapped = self._mapped(repaired(text, _UNREADABLE))
        if not self._merge_spaces:
            start = UNDERLINE if self._add_space_prefix and mapped.strip(" ") else ""
            spaces = len(mapped) - len(mapped.lstrip(" "))
            return (UNDERLINE * spaces + start + mapped[spaces:]).replace(" ", UNDERLINE)
        return "".join(UNDERLINE + word for word in mapped.split(" ") if word)

    def _mapped(self, text: str) -> str:
        alone = self._alone
        parts: list[str] = []
        at = 0
        while at < len(text):
            char = text[at]
            replacement = alone[char] if char in alone else self._learn(char)
            if replacement is None:
                at, replacement = self._longest(text, at)
            else:
                at += 1
            parts.append(replacement)
        return "".join(parts)

    def _learn(self, char: str) -> str | None:
        """What `char` becomes whatever follows it, or None if that depends on it."""
        replacement: str | None = char
        if char in self._user_defined:
            replacement = None
        elif self._map is not None:
            node, found = self._map.step(self._map.root, char.encode("utf-8", "surrogatepass"))
            if node is not None:
                replacement = None if self._map.goes_on(node) else found
        self._alone[char] = replacement
        return replacement

    def _longest(self, text: str, start: int) -> tuple[int, str]:
        """The end and the replacement of the longest sequence from `start` on."""
        branch = self._user_defined
        end = start
        while end < len(text) and text[end] in branch:
            branch = branch[text[end]]
            end += 1
        if end > start:
            return end, text[start:end]
        best = start + 1, text[start]
        if self._map is not None:
            node: int | None = self._map.root
            for end in range(start, min(start + _LONGEST_KEY, len(text))):
                node, found = self._map.step(node, text[end].encode("utf-8", "surrogatepass"))
                if node is None:
                    break
                if found is not None:
                    best = end + 1, found
        return best


class UnigramEncoder:
    """Viterbi's search for the segmentation with the highest sum of scores, word by word where no token reaches across.

    Text becomes only normal, user-defined and unused tokens, user-defined ones at no cost. A character without a token
    costs more than any normal token.
    """

    def __init__(self, vocabulary: Vocabulary):
        types, scores = vocabulary.file_types, vocabulary.scores
        normal, user_defined = (types & flag != 0 for flag in (TokenType.NORMAL, TokenType.USER_DEFINED))
        lowest = scores[normal].min(initial=np.finfo(np.float32).max)
        self._unknown_score = float(lowest - np.float32(UNKNOWN_PENALTY))
        self._scores: list[float | None] = np.where(user_defined, np.float32(0), scores).tolist()
        for token in np.flatnonzero(~(normal | user_defined | (types & TokenType.UNUSED != 0))).tolist():
            self._scores[token] = None
        self._unknown = vocabulary.special_ids.get("unk")
        self._vocabulary = vocabulary
        self._cutter = WordCutter(vocabulary.tokens)
        self._normalizer = Normalizer(
            vocabulary.character_map,
            [vocabulary.tokens[token] for token in np.flatnonzero(user_defined).tolist()],
            add_space_prefix=vocabulary.add_space_prefix,
            merge_spaces=vocabulary.merge_spaces,
        )

    def encode(self, text: str) -> list[int]:
        known: dict[str, list[int | None]] = {}
        found: list[int] = []
        before: int | None = 0
        for word in self._cutter.words(self._normalizer.normalize(text)):
            if word not in known:
                known[word] = self._segment(word)
            for token in known[word]:
                if token is not None:
                    found.append(token)
                elif before is not None:  # neighbours that are unknown make one token together
                    found.append(self._unknown_id())
                before = token
        return found

    def _unknown_id(self) -> int:
        if self._unknown is None:
            raise TokenizerError("it has no token for what is unknown")
        return self._unknown

    def _segment(self, word: str) -> list[int | None]:
        """Token ids, None for each unknown character."""
        ids, scores, reach = self._vocabulary.ids, self._scores, self._vocabulary.reach
        size = len(word)
        best = [0.0] + [-float("inf")] * size
        start_of = [0] * (size + 1)
        token_of: list[int | None] = [None] * (size + 1)
        for start in range(size):
            base = best[start]
            single = False
            for end in range(start + 1, min(size, start + reach[word[start : start + Reach.KEY]]) + 1):
                token = ids.get(word[start:end])
                if token is None or (score := scores[token]) is None:
                    continue
                single = single or end == start + 1
                if base + score > best[end]:
                    best[end], start_of[end], token_of[end] = base + score, start, token
            if not single and base + self._unknown_score > best[start + 1]:
                best[start + 1] = base + self._unknown_score
                start_of[start + 1], token_of[start + 1] = start, None
        found: list[int | None] = []
        end = size
        while end:
            found.append(token_of[end])
            end = start_of[end]
        found.reverse()
        return found
