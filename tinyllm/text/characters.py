"""Characters as tokenizers see them: raw text flows in, out flow text without encoding faults, the class of each
character (letter, number, ...), and the printable stand-ins that byte-level vocabularies are written in.
"""

from __future__ import annotations

import re
import unicodedata

# Every letter beyond ASCII counts the same for a pre-tokenizer, and so does every number, mark and so on. Texts are
# therefore matched after each such character has been replaced by one that stands for its class.
LETTER, HAN, NUMBER, PUNCTUATION, MARK, SYMBOL, OTHER = "ⓁⒽⓃⓅⓂⓈⓄ"
SPACE = "\v"

_CLASS_OF_CATEGORY = {"L": LETTER, "N": NUMBER, "P": PUNCTUATION, "M": MARK, "S": SYMBOL, "Z": OTHER, "C": OTHER}
_SPACES_BEYOND_ASCII = "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACE_BEYOND_ASCII = re.compile(f"[{_SPACES_BEYOND_ASCII}]")
_HAN = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ebef\U0002f800-\U0002fa1f]"
)

# Assigned by Unicode 15.0 and 15.1, which Python 3.11 (14.0) and 3.12 (15.0) do not or not wholly know.
_UNICODE_15 = {
    "N": "11F50-11F59 1D2C0-1D2D3 1E4F0-1E4F9",
    "L": "1123F-11240 11F02-11F02 11F04-11F10 11F12-11F33 1342F-1342F 13441-13446 1B132-1B132 1B155-1B155 1DF25-1DF2A "
    "1E030-1E06D 1E4D0-1E4EB 2B739-2B739 2EBF0-2EE5D 31350-323AF",
    "M": "CF3-CF3 ECE-ECE 10EFD-10EFF 11241-11241 11F00-11F01 11F03-11F03 11F34-11F3A 11F3E-11F42 13440-13440 "
    "13447-13455 1E08F-1E08F 1E4EC-1E4EF",
    "P": "11B00-11B09 11F43-11F4F",
    "S": "2FFC-2FFF 31EF-31EF 1F6DC-1F6DC 1F774-1F776 1F77B-1F77F 1F7D9-1F7D9 1FA75-1FA77 1FA87-1FA88 1FAAD-1FAAF "
    "1FABB-1FABD 1FABF-1FABF 1FACE-1FACF 1FADA-1FADB 1FAE8-1FAE8 1FAF7-1FAF8",
    "C": "13439-1343F",
}


def _newer_categories() -> dict[str, str]:
    ranges = ((kind, *entry.split("-")) for kind, entries in _UNICODE_15.items() for entry in entries.split())
    return {chr(code): kind for kind, first, last in ranges for code in range(int(first, 16), int(last, 16) + 1)}


class CharTable(dict[int, str]):
    """A table for `str.translate` that is filled as characters are met."""

    def __init__(self, compute):
        self._compute = compute

    def __missing__(self, code: int) -> str:
        value = self[code] = self._compute(chr(code))
        return value


_newer: dict[str, str] = {}


def category(char: str) -> str:
    """The general category's first letter (L, N, P, M, S, Z, C) by Unicode 15.1; "" if the character is unassigned."""
    kind = unicodedata.category(char)
    if kind != "Cn":
        return kind[0]
    if not _newer:
        _newer.update(_newer_categories())
    return _newer.get(char, "")


def is_space(char: str) -> bool:
    """Whether Unicode calls it white space; unlike `str.isspace` without the separators U+001C to U+001F."""
    return char in "\t\n\v\f\r " or _SPACE_BEYOND_ASCII.match(char) is not None


def is_han(char: str) -> bool:
    return _HAN.match(char) is not None


def _class_of(char: str) -> str:
    if char.isascii():
        return char
    if is_space(char):
        return SPACE
    kind = _CLASS_OF_CATEGORY.get(category(char), OTHER)
    return HAN if kind == LETTER and is_han(char) else kind


_classes = CharTable(_class_of)


def classes(text: str) -> str:
    """`text` with every character beyond ASCII replaced by the one that stands for its class; the length stays."""
    return text if text.isascii() else text.translate(_classes)


def plain_spaces(text: str) -> str:
    """`text` with every white space beyond ASCII replaced by `SPACE`; the length stays."""
    return text if text.isascii() else _SPACE_BEYOND_ASCII.sub(SPACE, text)


_lower = CharTable(lambda char: char.lower()[0])


def lowered(text: str) -> str:
    """`text` in small letters, each character by itself; the length stays."""
    return text.translate(_lower)


# The alphabet of GPT-2: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and on.
_printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_others = [byte for byte in range(256) if byte not in _printable]
CHAR_OF_BYTE = {byte: chr(byte) for byte in _printable} | {byte: chr(256 + k) for k, byte in enumerate(_others)}
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def byte_characters(text: str) -> str:
    """The UTF-8 bytes of `text`, each written as its character of the GPT-2 alphabet."""
    return text.encode("utf-8", "surrogatepass").decode("latin-1").translate(CHAR_OF_BYTE)


_ESCAPE = re.compile("[\udc80-\udcff]")
_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_SEQUENCE = re.compile(
    "[\udcc0-\udcdf][\udc80-\udcbf]|[\udce0-\udcef][\udc80-\udcbf]{2}|[\udcf0-\udcf7][\udc80-\udcbf]{3}|[\udc80-\udcff]"
)


def escaped(text: str | bytes) -> str:
    """`text` as Python escapes undecodable bytes (PEP 383): no surrogates but those that stand for a raw byte.

    Raw bytes of a str, as from `sys.argv`, stay what they are; other lone surrogates become their three raw bytes.
    """
    if isinstance(text, bytes):
        return text.decode("utf-8", "surrogateescape")
    return text if text.isascii() else _SURROGATE.sub(lambda match: escaped(surrogate_bytes(match[0])), text)


def surrogate_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def has_raw_bytes(text: str) -> bool:
    return not text.isascii() and _ESCAPE.search(text) is not None


def escape_chunks(text: str) -> list[str]:
    """The characters of escaped text, but of its raw bytes as many at once as their first claims to need.

    So does llama.cpp read SentencePiece texts, even where what follows a first byte is a character of its own.
    """
    data = text.encode("utf-8", "surrogateescape")
    chunks = []
    start = 0
    while start < len(data):
        end = start + (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4)[data[start] >> 4]
        chunks.append(data[start:end].decode("utf-8", "surrogateescape"))
        start = end
    return chunks


def repaired(text: str, unreadable: str = "\ufffd") -> str:
    """Escaped text read as generously as llama.cpp reads UTF-8.

    Sequences that are well formed but not allowed (surrogates, overlong ones) are the character they spell; every
    other raw byte becomes `unreadable`.
    """

    def read(match: re.Match[str]) -> str:
        lead, *tail = (ord(char) & 0xFF for char in match[0])
        if not tail:
            return unreadable
        code = lead & (0x3F >> len(tail))
        for byte in tail:
            code = code << 6 | byte & 0x3F
        return chr(code) if code < 0x110000 else unreadable * (1 + len(tail))

    return _SEQUENCE.sub(read, text) if has_raw_bytes(text) else text
