"""The vocabulary of a model: GGUF metadata flow in, out flow its tokens with their types and scores, the special ids,
and the rules for text. Defaults for what a file does not say are those of llama.cpp.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tinyllm.errors import TokenizerError
from tinyllm.text.pre_tokenizers import PRE_TOKENIZERS
from tinyllm.text.special_tokens import TokenType, end_ids, find_by_name, stripping_ids
from tinyllm.text.splitting import PreTokenizer

log = logging.getLogger("tinyllm")

_PREFIX = "tokenizer.ggml."
_ID_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),  # spelled so in the files
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
_NO_ID = 0xFFFFFFFF
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

# Numbers 1 to 6 of `tokenizer.ggml.token_type`; any other is a token of no type, which text never becomes.
_FLAG_OF_NUMBER = np.array(
    [
        0,
        TokenType.NORMAL,
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
        TokenType.UNUSED,
        TokenType.BYTE,
    ],
    np.uint8,
)


@dataclass(frozen=True)
class _Family:
    """What `tokenizer.ggml.model` stands for where the file says nothing else."""

    kind: str
    ids: Mapping[str, int] = field(default_factory=dict)
    pre: str | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    add_space_prefix: bool = False
    clean_spaces: bool = False


_FAMILIES = {
    "llama": _Family("SPM", {"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_space_prefix=True),
    "gpt2": _Family("BPE", {"bos": 11, "eos": 11}),
    "whitespace": _Family("BPE", {"bos": 11, "eos": 11}),
    "gemma4": _Family("BPE", pre="gemma4"),
    "bert": _Family(
        "WPM",
        {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
        add_bos=True,
        add_sep=True,
        clean_spaces=True,
    ),
    "t5": _Family("UGM", {"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
}


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


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """All that a tokenizer needs from a file."""

    kind: str
    """BPE, SPM (SentencePiece), WPM (WordPiece) or UGM (Unigram)."""
    tokens: list[str]
    """Bytes that are not UTF-8 are escaped as Python does it (surrogateescape)."""
    ids: dict[str, int]
    types: np.ndarray
    """uint8 [n_vocab], flags of TokenType, repaired."""
    file_types: np.ndarray
    """The same as the file has it, which is what a Unigram model goes by."""
    scores: np.ndarray
    """float32 [n_vocab]."""
    merges: Sequence[str]
    pre: str | None
    """The name of the pre-tokenizer as the file has it."""
    pre_tokenizer: PreTokenizer
    special_ids: Mapping[str, int]
    """By role: bos, eos, eot, eom, unk, sep, pad, mask, fim_pre, fim_suf, fim_mid, fim_pad, fim_rep, fim_sep."""
    eog_ids: frozenset[int]
    """The tokens that end a generation."""
    lstrip_ids: frozenset[int]
    """Special tokens that take the white space before them along."""
    rstrip_ids: frozenset[int]
    """Special tokens that take the white space behind them along."""
    add_bos: bool
    add_eos: bool
    add_sep: bool
    add_space_prefix: bool
    merge_spaces: bool
    clean_spaces: bool
    lowercase: bool
    strip_accents: bool
    character_map: bytes
    """SentencePiece's precompiled map for normalization, empty if there is none."""

    @cached_property
    def reach(self) -> Reach:
        return Reach(self.tokens)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises TokenizerError, naming the key, where a vocabulary is missing, broken or of an unknown kind."""
    fields = _Fields(metadata)
    family = _family(fields)
    tokens = _tokens(fields)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        raise TokenizerError(f"key '{_PREFIX}tokens': {len(tokens) - len(ids)} tokens are there twice")
    pre = family.pre or fields.text("pre")
    pre_tokenizer = _pre_tokenizer(pre) if family.kind == "BPE" else PreTokenizer(())
    file_types = _types(fields, len(tokens))
    _check_byte_tokens(tokens, file_types)
    types = file_types.copy()
    special_ids = _given_ids(fields, family, pre_tokenizer, len(tokens))
    find_by_name(special_ids, ids, types)
    eog_ids = end_ids(special_ids, ids, types)
    model_name, architecture = (str(metadata.get(f"general.{key}", "")) for key in ("name", "architecture"))
    lstrip_ids, rstrip_ids = stripping_ids(model_name, architecture, pre or "", ids, types)
    lowercase = fields.flag("normalizer.lowercase", family.kind == "WPM")
    return Vocabulary(
        kind=family.kind,
        tokens=tokens,
        ids=ids,
        types=types,
        file_types=file_types,
        scores=_scores(fields, len(tokens)),
        merges=_merges(fields, pre) if family.kind == "BPE" else (),
        pre=pre,
        pre_tokenizer=pre_tokenizer,
        special_ids=special_ids,
        eog_ids=eog_ids,
        lstrip_ids=lstrip_ids,
        rstrip_ids=rstrip_ids,
        add_bos=fields.flag("add_bos_token", family.add_bos or pre_tokenizer.add_bos) or pre_tokenizer.always_bos,
        add_eos=fields.flag("add_eos_token", family.add_eos),
        add_sep=fields.flag("add_sep_token", family.add_sep or pre_tokenizer.add_sep),
        add_space_prefix=fields.flag("add_space_prefix", family.add_space_prefix),
        merge_spaces=fields.flag("remove_extra_whitespaces", False),
        clean_spaces=family.clean_spaces or pre_tokenizer.clean_spaces,
        lowercase=lowercase,
        strip_accents=fields.flag("normalizer.strip_accents", lowercase),
        character_map=b"" if (blob := fields.array("precompiled_charsmap", "iu", 1)) is None else blob.tobytes(),
    )


class _Fields:
    """The metadata of the tokenizer: a value has the type that it must have, or there is an error naming the key."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata

    def _get(self, name: str, kind: type, what: str) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is not None and type(value) is not kind:
            raise TokenizerError(f"key '{_PREFIX}{name}' is not {what}")
        return value

    def text(self, name: str) -> str | None:
        return self._get(name, str, "a string")

    def number(self, name: str) -> int | None:
        return self._get(name, int, "a whole number")

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, bool, "true or false")
        return default if value is None else value

    def strings(self, name: str) -> list[str] | None:
        value = self._get(name, list, "a list of strings")
        if value and type(value[0]) is not str:
            raise TokenizerError(f"key '{_PREFIX}{name}' is not a list of strings")
        return value

    def array(self, name: str, kinds: str, item_bytes: int, length: int = 0) -> np.ndarray | None:
        """Numbers of one of the dtype kinds and of that size, at least `length` of them."""
        value = self._get(name, np.ndarray, "a list of numbers")
        if value is None:
            return None
        if value.dtype.kind not in kinds or value.dtype.itemsize != item_bytes:
            raise TokenizerError(f"key '{_PREFIX}{name}' has numbers of type {value.dtype}, which it cannot have")
        if len(value) < length:
            raise TokenizerError(f"key '{_PREFIX}{name}' has {len(value)} values for {length} tokens")
        return value


def _family(fields: _Fields) -> _Family:
    model = fields.text("model")
    if model is None:
        raise TokenizerError(f"key '{_PREFIX}model' is missing: the file has no tokenizer")
    if model not in _FAMILIES:
        raise TokenizerError(
            f"key '{_PREFIX}model': tokenizers of kind {model[:40]!r} are not supported, only {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[model]


def _tokens(fields: _Fields) -> list[str]:
    tokens = fields.strings("tokens")
    if not tokens:
        raise TokenizerError(f"key '{_PREFIX}tokens' is {'missing' if tokens is None else 'empty'}")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    return tokens


def _types(fields: _Fields, n_vocab: int) -> np.ndarray:
    numbers = fields.array("token_type", "iu", 4, n_vocab)
    if numbers is None:
        return np.full(n_vocab, TokenType.NORMAL, np.uint8)
    numbers = numbers[:n_vocab]
    return _FLAG_OF_NUMBER[np.where((numbers >= 0) & (numbers < len(_FLAG_OF_NUMBER)), numbers, 0)]


def _check_byte_tokens(tokens: list[str], types: np.ndarray) -> None:
    for token in np.flatnonzero(types & TokenType.BYTE).tolist():
        if not _BYTE_TOKEN.fullmatch(tokens[token]):
            raise TokenizerError(f"key '{_PREFIX}tokens': token {token} is of type byte, but is not written <0xNN>")


def _scores(fields: _Fields, n_vocab: int) -> np.ndarray:
    scores = fields.array("scores", "if", 4, n_vocab)
    return np.zeros(n_vocab, np.float32) if scores is None else scores[:n_vocab].astype(np.float32)


def _merges(fields: _Fields, pre: str | None) -> list[str]:
    merges = fields.strings("merges")
    if merges is None:
        if pre == "kimi-k2":
            return []
        raise TokenizerError(f"key '{_PREFIX}merges' is missing")
    if "\n".join(merges).count(" ") < len(merges):
        raise TokenizerError(f"key '{_PREFIX}merges' has merges that are not two tokens with a space between them")
    return merges


def _pre_tokenizer(name: str | None) -> PreTokenizer:
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    problem = "names no pre-tokenizer" if name is None else f"names the unknown pre-tokenizer {name[:40]!r}"
    log.warning("the file %s: 'default' is used, and text may be cut otherwise than the model was trained on", problem)
    return PRE_TOKENIZERS["default"]


def _given_ids(fields: _Fields, family: _Family, pre_tokenizer: PreTokenizer, n_vocab: int) -> dict[str, int]:
    special_ids = {role: token for role, token in family.ids.items() if token < n_vocab}
    if not pre_tokenizer.default_bos:
        special_ids.pop("bos", None)
    for role, names in _ID_KEYS.items():
        for name in names:
            token = fields.number(name)
            if token is None or token == _NO_ID:
                continue
            if 0 <= token < n_vocab:
                special_ids[role] = token
            else:
                log.warning("key '%s%s' is %d, but there are %d tokens: ignored", _PREFIX, name, token, n_vocab)
    return special_ids
