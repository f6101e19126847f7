"""The prompt of `run`: an argument, files and standard input go in, one text comes out.

Text from files and from a pipe comes before the argument, with an empty line between (as in
`cat notes.txt | tinyllm run "Summarize this."`). Nothing is unescaped unless `--escape` asks for it; bytes that are no
UTF-8 become U+FFFD.
"""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from tinyllm.errors import InvalidParameterError, TinyLLMError
from tinyllm_cli import render

PATIENCE_S = 2.0

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}


def read_prompt(argument: str | None, files: Sequence[str]) -> str | None:
    """The whole prompt, or None when there is neither an argument nor a file nor anything piped in."""
    parts = [read_text(Path(file)) for file in files]
    if argument == "-" or (not files and _is_piped()):
        piped = _read_stdin()
        if piped or argument == "-":
            parts.append(piped)
    if argument not in (None, "-"):
        parts.append(argument)
    return "\n\n".join(parts) if parts else None


def need_text(argument: str | None, files: Sequence[str] | None, what: str = "prompt", empty: bool = False) -> str:
    """`read_prompt` of a command that cannot do without; `files` None: it has no --file.

    Raises InvalidParameterError when there is no text or, unless `empty` is allowed, nothing but white space.
    """
    text = read_prompt(argument, files or [])
    if text is None or not (empty or text.strip()):
        where = "as an argument" if files is None else "as an argument, with --file"
        raise InvalidParameterError(f"there is no {what}: give it {where} or on standard input")
    return text


def read_text(path: Path) -> str:
    """A file's text without its last line break. Raises TinyLLMError for a file that cannot be read."""
    try:
        return _text(path.expanduser().read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TinyLLMError(f"{path}: {reason}") from None


def clean(text: str) -> str:
    """Text from the command line as Unicode: what was no character in the locale becomes U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # surrogates that no byte stands behind
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def unescape(text: str) -> str:
    r"""Replaces `\n`, `\t`, `\r`, `\0`, `\xHH` and `\uHHHH` by what they stand for; other backslashes stay."""

    def replaced(match: re.Match[str]) -> str:
        code = match[1]
        return ESCAPES[code] if code in ESCAPES else chr(int(code[1:], 16))

    return clean(re.sub(r"""\\([ntr0\\"']|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})""", replaced, text))


def _text(data: bytes) -> str:
    encoding = "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        render.note(f"byte {error.start} of the text is no UTF-8: such bytes are read as U+FFFD")
        text = data.decode(encoding, "replace")
    return text.removesuffix("\n").removesuffix("\r")


def _is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def _read_stdin() -> str:
    """Everything from standard input; says what it waits for when nothing comes."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        return "" if sys.stdin is None else sys.stdin.read()
    try:
        if not sys.stdin.isatty() and not select.select([stream], [], [], PATIENCE_S)[0]:
            render.note("reading standard input until it ends (`< /dev/null` if there is nothing to read)")
    except (OSError, ValueError):
        pass  # not a stream that one can wait for (Windows, tests)
    return _text(stream.read())
