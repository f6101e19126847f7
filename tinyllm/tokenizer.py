"""Text to token ids and back: a model file's metadata flow in, out flows a tokenizer that gives exactly llama.cpp's ids
and text. Special tokens are parted from a text first; the rest is left to the encoder of the vocabulary's kind.
"""

from __future__ import annotations

import codecs
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tinyllm.errors import InvalidParameterError, TokenizerError
from tinyllm.gguf_file import open_gguf
from tinyllm.text.characters import BYTE_OF_CHAR, escaped
from tinyllm.text.merges import BytePairEncoder, SentencePieceEncoder
from tinyllm.text.special_tokens import SPECIAL, SpecialTokenFinder, TokenType
from tinyllm.text.splitting import UNDERLINE
from tinyllm.text.unigram import UnigramEncoder
from tinyllm.text.vocabulary import Vocabulary, read_vocabulary
from tinyllm.text.wordpiece import WordPieceEncoder

_SPACE_BEFORE_PUNCTUATION = re.compile(" (?=[?!.,])")
_SPACE_BEFORE_CONTRACTION = re.compile(" (?='(?:s|m|re|ve))")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file, which needs no tensors.

    Raises what `open_gguf` raises, and TokenizerError if the vocabulary cannot be used.
    """
    with open_gguf(path) as file:
        return Tokenizer.from_metadata(file.metadata, source=str(path))


class Encoder(Protocol):
    """What each kind of vocabulary has."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens. Bytes in it that are not UTF-8 are escaped (surrogateescape)."""


_ENCODERS: dict[str, Callable[[Vocabulary], Encoder]] = {
    "BPE": BytePairEncoder,
    "SPM": SentencePieceEncoder,
    "WPM": WordPieceEncoder,
    "UGM": UnigramEncoder,
}


class Tokenizer:
    """Unchanging, but that it remembers the words it has met; threads may share it."""

    def __init__(self, vocabulary: Vocabulary, source: str = ""):
        """`source` is named in front of errors."""
        self._vocabulary = vocabulary
        self._source = source
        self._bytes: dict[int, bytes] = {}
        self.kind = vocabulary.kind
        """BPE, SPM (SentencePiece), WPM (WordPiece) or UGM (Unigram)."""
        self.pre = vocabulary.pre
        """The name of the pre-tokenizer in the file."""
        self.n_vocab = len(vocabulary.tokens)
        self.special_ids = vocabulary.special_ids
        """By role (bos, eos, eot, eom, unk, sep, pad, mask, fim_pre, ...) for those that there are."""
        self.bos_id = self.special_ids.get("bos")
        self.eos_id = self.special_ids.get("eos")
        self.eot_id = self.special_ids.get("eot")
        self.unk_id = self.special_ids.get("unk")
        self.pad_id = self.special_ids.get("pad")
        self.sep_id = self.special_ids.get("sep")
        self.eog_ids = vocabulary.eog_ids
        """The tokens that end a generation."""
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.add_sep = vocabulary.add_sep
        self._prefixes_space = self.kind == "SPM" and vocabulary.add_space_prefix
        self._special_finder = SpecialTokenFinder(
            vocabulary.tokens, vocabulary.types, lstrip=vocabulary.lstrip_ids, rstrip=vocabulary.rstrip_ids
        )
        self._encoder = _ENCODERS[self.kind](vocabulary)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str = "") -> Tokenizer:
        """From the metadata of a GGUF file. Raises TokenizerError if the vocabulary cannot be used."""
        try:
            return cls(read_vocabulary(metadata), source)
        except TokenizerError as error:
            raise _named(error, source) from None

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.n_vocab} tokens)"

    def encode(self, text: str | bytes, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, which may hold any bytes.

        `add_special` puts BOS in front, and EOS or SEP behind, if the model wants them. User-defined tokens in the text
        are always found, control tokens only with `parse_special`: without it they are ordinary characters.
        Raises InvalidParameterError for what is no text.
        """
        if not isinstance(text, str | bytes):
            raise InvalidParameterError(f"a text is a str or bytes, not {text!r}")
        ids: list[int] = []
        behind_special = True
        try:
            for fragment in self._special_finder.part(escaped(text), parse_special):
                if isinstance(fragment, int):
                    ids.append(fragment)
                    behind_special = True
                else:
                    ids += self._encoder.encode(" " + fragment if behind_special and self._prefixes_space else fragment)
                    behind_special = False
        except TokenizerError as error:
            raise _named(error, self._source) from None
        return self._framed(ids) if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = False, remove_special: bool = False) -> str:
        """The text of tokens. Bytes that make no character become U+FFFD.

        `skip_special` leaves control tokens out; `remove_special` leaves out the BOS and EOS that `encode` puts around.
        Raises TokenizerError for an id that is no token.
        """
        ids = list(ids)
        drop_space = self._vocabulary.add_space_prefix
        if remove_special and self.add_bos and ids[:1] == [self.bos_id]:
            del ids[0]
            drop_space = False
        if remove_special and self.add_eos and ids[-1:] == [self.eos_id]:
            del ids[-1]
        pieces = [b"" if skip_special and self._is_no_text(token) else self.token_bytes(token) for token in ids]
        if drop_space and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces).decode("utf-8", "replace")
        return _without_loose_spaces(text) if self._vocabulary.clean_spaces else text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, control tokens by their name. Raises TokenizerError if it is no token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(self._checked(token))
        return known

    def token_text(self, token: int) -> str:
        """The same for display: bytes that make no character are written `<0xNN>`.

        Raises TokenizerError if it is no token.
        """
        text = self.token_bytes(token).decode("utf-8", "surrogateescape")
        return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) & 0xFF:02X}>", text)

    def is_control(self, token: int) -> bool:
        """Whether it is a mark for the model rather than a piece of text."""
        return bool(self._vocabulary.types[self._checked(token)] & TokenType.CONTROL)

    def stream_decoder(self) -> StreamDecoder:
        """For the text of a generation, token by token."""
        return StreamDecoder(self)

    def _framed(self, ids: list[int]) -> list[int]:
        if self.kind == "WPM":
            start, end = self.bos_id, self.sep_id
        else:
            start, end = self.bos_id if self.add_bos else None, self.eos_id if self.add_eos else None
        return [token for token in (start, *ids, end) if token is not None]

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            problem = TokenizerError(f"{token} is no token: ids go from 0 to {self.n_vocab - 1}")
            raise _named(problem, self._source)
        return token

    def _is_no_text(self, token: int) -> bool:
        return bool(self._vocabulary.types[self._checked(token)] & (TokenType.CONTROL | TokenType.UNKNOWN))

    def _spell(self, token: int) -> bytes:
        text, kind = self._vocabulary.tokens[token], int(self._vocabulary.types[token])
        if kind & TokenType.NORMAL and not kind & SPECIAL:
            if self.kind == "BPE" and not self._vocabulary.pre_tokenizer.underlined_spaces:
                return _from_byte_characters(text)
            text = text.replace(UNDERLINE, " ")
        elif kind & TokenType.BYTE and not kind & SPECIAL:
            return bytes.fromhex(text[3:5])
        elif not kind & SPECIAL:
            return b""
        return text.encode("utf-8", "surrogateescape")


class StreamDecoder:
    """Turns tokens into text as they come: an unfinished character waits for its rest, bytes that can make none become
    U+FFFD."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is whole with this token, perhaps none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end; the decoder can then begin anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _named(error: TokenizerError, source: str) -> TokenizerError:
    return TokenizerError(f"{source}: {error}" if source else str(error))


def _from_byte_characters(text: str) -> bytes:
    try:
        return bytes(map(BYTE_OF_CHAR.__getitem__, text))
    except KeyError:
        return b"".join(
            bytes([BYTE_OF_CHAR[char]])
            if char in BYTE_OF_CHAR
            else f"[UNK_BYTE_0x{char.encode().hex()}{text}]".encode()
            for char in text
        )


def _without_loose_spaces(text: str) -> str:
    """The clean-up of Hugging Face as far as llama.cpp does it."""
    text = _SPACE_BEFORE_PUNCTUATION.sub("", text).replace(" ' ", "'")
    return _SPACE_BEFORE_CONTRACTION.sub("", text)


def ids_of(prompt: str | bytes | Iterable[int], encode: Callable[[str | bytes], list[int]]) -> list[int]:
    """Token ids of a text, or the given ids as they are. Raises InvalidParameterError for what is neither."""
    if isinstance(prompt, str | bytes):
        return encode(prompt)
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise InvalidParameterError("a prompt is a text or a list of token ids, which are whole numbers") from None
