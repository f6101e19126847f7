"""Traced strings against `str` itself, and their memory against letters: capitals are scaffold, small ones data."""

from __future__ import annotations

import random

import pytest
from markupsafe import Markup

from tinyllm.text.traced_text import TracedText, scaffold, scaffold_of


def traced(text: str) -> TracedText:
    return TracedText(text, bytes(letter.isupper() for letter in text))


OPERATIONS = {
    "add": lambda s: s + "xY",
    "add traced": lambda s: s + traced("xY") if isinstance(s, TracedText) else s + "xY",
    "add on the left": lambda s: "xy" + s,
    "times": lambda s: s * 3,
    "times on the left": lambda s: 2 * s,
    "first": lambda s: s[0],
    "last": lambda s: s[-1],
    "slice": lambda s: s[1:-1],
    "backwards": lambda s: s[::-1],
    "strip": lambda s: s.strip(),
    "strip letters": lambda s: s.strip("aA "),
    "lstrip": lambda s: s.lstrip(),
    "rstrip": lambda s: s.rstrip("b "),
    "removeprefix": lambda s: s.removeprefix(" "),
    "removesuffix": lambda s: s.removesuffix("B"),
    "split": lambda s: s.split(),
    "split once": lambda s: s.split(None, 1),
    "split at": lambda s: s.split("a"),
    "split at twice": lambda s: s.split("a", 2),
    "rsplit at": lambda s: s.rsplit("b", 1),
    "rsplit": lambda s: s.rsplit(None, 1),
    "partition": lambda s: s.partition("A"),
    "rpartition": lambda s: s.rpartition("b"),
    "splitlines": lambda s: s.splitlines(),
    "splitlines keeping": lambda s: s.splitlines(True),
    "replace": lambda s: s.replace("a", "xy"),
    "replace once": lambda s: s.replace("A", "", 1),
    "replace nothing": lambda s: s.replace("", "-").replace("-", ""),
    "join": lambda s: s.join(["x", s, "y"]),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_characters_keep_their_memory(operation):
    dice = random.Random(1)
    for _ in range(300):
        text = "".join(dice.choices("aAbB \n\r\u2028", k=dice.randint(1, 12)))
        results, expected = operation(traced(text)), operation(text)
        assert results == expected
        for result in results if isinstance(results, list | tuple) else [results]:
            memory = scaffold_of(result)
            assert len(memory) == len(result)
            if type(result) is not str:
                letters = [(letter, bool(bit)) for letter, bit in zip(result, memory, strict=True) if letter.isalpha()]
                assert all(letter.isupper() == bit for letter, bit in letters if letter not in "xXyY")


@pytest.mark.parametrize(
    "operation, memory",
    [
        (lambda s: s % "b", b"\1\1\0\1"),
        (lambda s: s % ("b",), b"\1\1\0\1"),
        (lambda s: (s + "%d") % ("b", 1), bytes(5)),
        (lambda s: s.lower(), b"\1" * 5),
        (lambda s: (s + "ß").upper(), bytes(7)),
        (lambda s: str(s), b"\1" * 5),
        (lambda s: "".join([s]), bytes(5)),
        (lambda s: s.center(9), bytes(9)),
        (lambda s: s.plain(), bytes(5)),
    ],
)
def test_what_is_not_followed_is_data(operation, memory):
    assert scaffold_of(operation(scaffold("AB%sC"))) == memory


def test_markup_keeps_its_rules():
    assert scaffold("<") + Markup("&") == Markup("&lt;&")
    assert Markup("&") + scaffold("<") == Markup("&&lt;")


def test_plain_text_is_an_ordinary_string():
    assert type(scaffold("a").plain()) is str and type(str(scaffold("a"))) is TracedText
