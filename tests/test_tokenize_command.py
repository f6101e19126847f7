"""`tinyllm tokenize` over a byte-level tokenizer with some longer pieces."""

from __future__ import annotations

import json
import sys

import pytest
from fake_model import FakeTokenizer

from tinyllm_cli import main, tokenize
from tinyllm_cli.tokenize import Token, coloured, segments


class Longest(FakeTokenizer):
    """Takes the longest piece that fits, else a byte."""

    def encode(self, text, add_special=True, parse_special=True):
        data, ids = text.encode() if isinstance(text, str) else text, [256] if add_special and self.add_bos else []
        while data:
            fitting = [i for i in range(260, self.n_vocab) if data.startswith(self.token_bytes(i))]
            best = max(fitting, key=lambda i: len(self.token_bytes(i)), default=data[0])
            ids.append(best)
            data = data[len(self.token_bytes(best)) :]
        return ids


TOKENIZERS = {
    "a": Longest([b"Hello", b" world"]),
    "b": Longest([b"Hel", b"lo wor", b"ld", b"!"], add_bos=True),
}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command line; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tokenize, "load", TOKENIZERS.__getitem__)
    monkeypatch.setattr(sys, "stdin", None)
    return lambda *arguments: (main._run(["tokenize", *arguments]), *capsys.readouterr())


def test_a_line_per_token_and_counts(run):
    code, out, err = run("-m", "a", "Hello world\n")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert [(line[1], line[2]) for line in lines[:3]] == [("260", "'Hello'"), ("261", "'"), ("10", "'\\n'")]
    assert lines[0][3:] == ["48", "65", "6c", "6c", "6f"]
    assert out.splitlines()[-1].startswith("3 tokens, 12 characters, 12 bytes")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("a", "1 token, 1 character, 1 byte, 1.00 bytes per token"), ("é", "2 tokens, 1 character, 2 bytes, 1.00 b")],
)
def test_one_is_singular(run, text, counts):
    assert run("-m", "a", text)[1].splitlines()[-1].startswith(counts)


def test_json(run):
    found = json.loads(run("-m", "b", "Hé", "--json")[1])
    assert (found["n_tokens"], found["n_characters"], found["n_bytes"]) == (4, 2, 3)
    assert found["ids"] == [256, ord("H"), 0xC3, 0xA9]
    assert found["tokens"][0] == {"id": 256, "text": "<s>", "bytes": list(b"<s>"), "control": True}


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (["--ids"], "[256, 104, 105]\n"),
        (["--ids", "--no-special"], "[104, 105]\n"),
        (["--ids", "--no-bos"], "[104, 105]\n"),
    ],
    ids=str,
)
def test_ids_only(run, arguments, out):
    assert run("-m", "b", "hi", *arguments)[1] == out


def test_escapes_on_demand(run):
    assert run("-m", "a", "\\n", "--ids")[1] == "[92, 110]\n"
    assert run("-m", "a", "\\n", "--ids", "-e")[1] == "[10]\n"


def test_two_models_side_by_side(run):
    code, out, _ = run("--compare", "a", "b", "Hello world!")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["a", "b", "MORE"]
    assert lines[1] == "'Hello' ' world'  <s> 'Hel' 'lo wor' 'ld'    +2"
    assert lines[2].split() == ["'!'", "'!'"]
    assert lines[3].startswith("a: 3 tokens") and lines[4].startswith("b: 5 tokens")
    assert len(json.loads(run("--compare", "a", "b", "Hello", "--json")[1])) == 2


def test_two_models_that_are_the_same(run):
    assert run("--compare", "a", "a", "Hello")[1].count("'Hello'") == 2


def test_no_text_is_wrong_usage(run):
    code, out, err = run("-m", "a")
    assert (code, out) == (2, "")
    assert "there is no text" in err


def as_tokens(*pieces: str) -> list[Token]:
    return [Token(id=at, text=piece, data=piece.encode(), control=piece == "<s>") for at, piece in enumerate(pieces)]


@pytest.mark.parametrize(
    ("text", "a", "b", "sizes"),
    [
        ("abcd", ["ab", "cd"], ["a", "b", "cd"], [(1, 2), (1, 1)]),
        ("abcd", ["abc", "d"], ["ab", "cd"], [(2, 2)]),
        ("ab", ["a", "b"], ["<s>", "a", "b"], [(1, 2), (1, 1)]),
        ("ab cd", ["ab", " cd"], [" ab", " cd"], [(1, 1), (1, 1)]),
        ("", [], [], []),
        ("", [], ["<s>"], [(0, 1)]),
    ],
    ids=str,
)
def test_segments(text, a, b, sizes):
    assert [(len(x), len(y)) for x, y in segments(text, as_tokens(*a), as_tokens(*b))] == sizes


def test_colours_keep_lines_and_show_control_characters():
    shown = coloured(as_tokens("a", "\n\n", "\x1b[2J", "b"))
    assert shown.count("\n") == 2
    assert "\x1b[2J" not in shown and "\\x1b[2J" in shown


def test_bytes_that_are_no_text_are_told(tinyllm, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"abc\xff\xfe")
    ran = tinyllm("tokenize", "--file", tmp_path / "bad.txt", "-m", tmp_path / "none.gguf")
    assert "byte 3" in ran.stderr and "U+FFFD" in ran.stderr
