"""Text that is safe on one line of a terminal, and sizes, numbers and ages as people read them."""

from __future__ import annotations

import re

_UNSAFE = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"  # controls, bidi overrides, lone surrogates
_NOT_ON_A_LINE = re.compile(f"[{_UNSAFE}]")
_NOT_ON_A_TERMINAL = re.compile(f"(?![\n\t])[{_UNSAFE}]")


def one_line(text: str) -> str:
    """`text` with line breaks and control characters (escape codes among them) made visible."""
    return _NOT_ON_A_LINE.sub(_visible, text)


def harmless(text: str) -> str:
    """`text` with its line breaks and tabs, and any other control character made visible: for texts of model files."""
    return _NOT_ON_A_TERMINAL.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def size(n_bytes: float) -> str:
    """Bytes in decimal units: `98 MB`, `1.1 GB`."""
    if n_bytes < 999.5:
        return f"{n_bytes:.0f} B"
    for unit in ("KB", "MB"):
        n_bytes /= 1000
        if n_bytes < 999.5:
            return f"{n_bytes:.{0 if n_bytes >= 9.95 else 1}f} {unit}"
    return f"{n_bytes / 1000:.{1 if n_bytes < 999_950 else 0}f} GB"


def count(n: float) -> str:
    """A number of parameters: `134.5 M`, `1.54 B`."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, " K"), (1e9, 1e6, " M"), (1e12, 1e9, " B")):
        if n < limit:
            return f"{n / divisor:.4g}{unit}"
    return f"{n / 1e12:.4g} T"


def age(seconds: float) -> str:
    """How long ago: `3 minutes ago`."""
    for unit, length in (("year", 31557600), ("month", 2629800), ("week", 604800), ("day", 86400), ("hour", 3600)):
        if seconds >= length:
            return _ago(int(seconds // length), unit)
    return _ago(int(seconds // 60), "minute") if seconds >= 60 else "just now"


def _ago(n: int, unit: str) -> str:
    return f"{counted(n, unit)} ago"


def counted(n: int, unit: str) -> str:
    """A number with the name of what it counts: `1 token`, `2 tokens`."""
    return f"{n} {unit}{'s' if n != 1 else ''}"
