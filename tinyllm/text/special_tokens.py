"""Special tokens: what a file says of them and their names flow in, out flow their ids, which of them end a generation,
and where they are in a text. Files leave much of this unsaid; the names and repairs are those that llama.cpp goes by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np


class TokenType(IntFlag):
    """What a token is. One that is made a control token here stays what else the file calls it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    UNUSED = 16
    BYTE = 32


SPECIAL = TokenType.CONTROL | TokenType.USER_DEFINED | TokenType.UNKNOWN

# For ids that a file does not give. Of several names that a vocabulary has, the first in this order is taken.
NAMES = {
    "eot": (
        "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
        "<｜end▁of▁sentence｜> <end_of_utterance>"
    ),
    "eom": "<|eom_id|>",
    "fim_pre": (
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>"
    ),
    "fim_suf": (
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>"
    ),
    "fim_mid": (
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
    ),
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}  # fmt: skip

_ENDS = (
    *NAMES["eot"].split(),
    *NAMES["eom"].split(),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>"),
    *("<turn|>", "<|tool_response>", "[e~["),
)
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


def find_by_name(special_ids: dict[str, int], ids: Mapping[str, int], types: np.ndarray) -> None:
    """Add to `special_ids` what can be told by a token's name. A token found so becomes a control token."""
    for role, names in NAMES.items():
        if role in special_ids:
            continue
        for name in names.split():
            if name in ids:
                special_ids[role] = ids[name]
                types[ids[name]] |= TokenType.CONTROL
                break


def end_ids(special_ids: Mapping[str, int], ids: Mapping[str, int], types: np.ndarray) -> frozenset[int]:
    """The tokens that end a generation. Those known by name become control tokens."""
    ends = {special_ids[role] for role in ("fim_pad", "fim_rep", "fim_sep") if role in special_ids}
    for name in _ENDS:
        if name in ids:
            ends.add(ids[name])
            types[ids[name]] |= TokenType.CONTROL
    for name in _ALWAYS_SHOWN:
        if name in ids:
            types[ids[name]] = TokenType.USER_DEFINED
    ends.update(special_ids[role] for role in ("eos", "eot", "eom") if role in special_ids)

    def is_end(*names: str) -> bool:
        return any(ids.get(name) in ends for name in names)

    # In the formats of gpt-oss and Solar Open, <|end|> ends a message, not the turn.
    call = is_end("<|call|>", "<|calls|>")
    if is_end("<|end|>") and call and (is_end("<|return|>") or is_end("<|flush|>")):
        ends.remove(ids["<|end|>"])
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    # Gemma 4 and PLaMo have ends of their own, and </s> as a piece of HTML.
    if is_end("</s>") and is_end("<|tool_response>", "<|plamo:eos|>"):
        ends.remove(ids["</s>"])
        types[ids["</s>"]] = TokenType.NORMAL
    return frozenset(ends)


def stripping_ids(
    name: str, architecture: str, pre: str, ids: Mapping[str, int], types: np.ndarray
) -> tuple[frozenset[int], frozenset[int]]:
    """The special tokens that take along the white space before them, and those that take what is behind.

    No key says so; it is known of some models by `name` (any case), `architecture` or pre-tokenizer.
    """

    def known(names: Iterable[str]) -> frozenset[int]:
        return frozenset(ids[name] for name in names if name in ids)

    name = name.lower()
    nothing: frozenset[int] = frozenset()
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        return known(["<mask>"]), nothing
    if "phi-3" in name or "phi3" in name:
        special = frozenset(np.flatnonzero(types & SPECIAL).tolist())
        return nothing, (special | known(["</s>"])) - known(["<unk>", "<s>", "<|endoftext|>"])
    if "modern-bert" in name:
        return known(["[MASK]"]), nothing
    return nothing, nothing


_STRIPPED = " \t\n\v\f\r"
_START = 4


class _Special(NamedTuple):
    order: int
    token: int
    text: str


class SpecialTokenFinder:
    """Parts texts at the special tokens in them: the longest are looked for first, everywhere in the text."""

    def __init__(
        self, tokens: Sequence[str], types: np.ndarray, *, lstrip: Collection[int] = (), rstrip: Collection[int] = ()
    ):
        """`types` are flags of TokenType, uint8 [n_vocab]; `lstrip` and `rstrip` the tokens that take along the white
        space before or behind them."""
        self._lstrip = lstrip
        self._rstrip = rstrip
        special = np.flatnonzero(types & SPECIAL).tolist()
        special.sort(key=lambda token: -len(tokens[token].encode("utf-8", "surrogateescape")))
        self._all: dict[str, list[_Special]] = defaultdict(list)
        self._user_defined: dict[str, list[_Special]] = defaultdict(list)
        for order, token in enumerate(special):
            entry = _Special(order, token, tokens[token])
            # Vocabularies have thousands of special tokens with few ways to begin (<unused0>, <unused1>, ...).
            self._all[entry.text[:_START]].append(entry)
            if not types[token] & (TokenType.CONTROL | TokenType.UNKNOWN):
                self._user_defined[entry.text[:_START]].append(entry)

    def part(self, text: str, parse_special: bool) -> list[str | int]:
        """Special tokens' ids and the texts between them. Without `parse_special` only user-defined tokens count."""
        by_start = self._all if parse_special else self._user_defined
        found = [
            entry for start, entries in by_start.items() if start in text for entry in entries if entry.text in text
        ]
        parts: list[str | int] = [text] if text else []
        for _, token, name in sorted(found):
            finer: list[str | int] = []
            for part in parts:
                if isinstance(part, int) or name not in part:
                    finer.append(part)
                else:
                    finer += self._part_at(part, token, name)
            parts = finer
        return parts

    def _part_at(self, text: str, token: int, name: str) -> list[str | int]:
        parts: list[str | int] = []
        pieces = text.split(name)
        for index, piece in enumerate(pieces):
            if index:
                parts.append(token)
                if token in self._rstrip:
                    piece = piece.lstrip(_STRIPPED)
            if token in self._lstrip and index < len(pieces) - 1:
                piece = piece.rstrip(_STRIPPED)
            if piece:
                parts.append(piece)
        return parts
