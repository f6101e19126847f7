"""What the guides say must be there: files and functions by name, command lines, links, and the output of snippets."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from tinyllm_cli.app import app

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [ROOT / "README.md", ROOT / "models.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATED = [path for path in GUIDES if path.name.endswith(".zh.md")]

# `tinyllm/kernels/attention.py: attend`, or the file alone.
_CODE_NAME = re.compile(r"`((?:tinyllm|cli|tests|benchmarks)/[\w/]+\.py)(?:: ([\w.]+))?`")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_SEPARATORS = {"|", "&&", ";", ">", "<"}


def guide(test):
    return pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)(test)


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes, `Class.method`s and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


@guide
def test_named_code_exists(path):
    for file, name in _CODE_NAME.findall(path.read_text()):
        assert (ROOT / file).is_file(), file
        assert not name or name in names_in(ROOT / file), f"{file}: {name}"


def test_the_map_of_the_code_names_files_that_exist():
    table = (ROOT / "README.md").read_text().partition("## Map of the code")[2].partition("\n\nWho may")[0]
    named = re.findall(r"`([\w/*]+(?:\.py|/))`", table)
    assert len(named) > 30
    for name in named:
        assert any(list((ROOT / folder).glob(name)) for folder in ("", "tinyllm", "tinyllm/kernels")), name


def untranslated(text: str) -> list[tuple[str, str]]:
    """Blocks that a translation leaves as they are: what is typed, and what is printed."""
    return [(kind, block) for kind, block in _FENCE.findall(text) if kind in ("console", "python", "output")]


@pytest.mark.parametrize("path", TRANSLATED, ids=lambda path: path.name)
def test_translations_name_the_same_code_and_show_the_same_output(path):
    text = path.read_text()
    original = path.with_name(path.name.replace(".zh.md", ".md")).read_text()
    assert _CODE_NAME.findall(text) == _CODE_NAME.findall(original)
    assert untranslated(text) == untranslated(original)
    headings, headings_original = (len(re.findall(r"^#+ ", t, re.MULTILINE)) for t in (text, original))
    assert headings == headings_original


@guide
def test_links_lead_somewhere(path):
    for target in _LINK.findall(path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


def code_lines(text: str) -> Iterator[str]:
    """Lines that may be command lines: of a console what follows `$`, of other blocks all, and inline code."""
    for kind, block in _FENCE.findall(text):
        for line in block.splitlines():
            if kind != "console" or line.startswith("$ "):
                yield line.removeprefix("$ ")
    rest = _FENCE.sub("", text)
    yield from _INDENTED.findall(rest)
    yield from _INLINE.findall(rest)


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of each `tinyllm` command line in a guide; several may stand on a line, or behind a pipe."""
    for line in code_lines(text):
        if not re.search(r"(^|[|&;] ?)tinyllm [a-z]", line):
            continue
        words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
        starts = [at for at, word in enumerate(words) if word == "tinyllm"]
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
            arguments = words[start + 1 : end]
            stop = next((at for at, word in enumerate(arguments) if word in _SEPARATORS), len(arguments))
            yield [word for word in arguments[:stop] if word not in ("...", "…")]


def check_command(arguments: list[str]) -> None:
    """Raises for a subcommand or an option that does not exist, and for an argument too many."""
    command, rest = typer.main.get_command(app), list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name.isupper():  # stands for any of them
            return
        command = command.commands[name]
    context = command.make_context("tinyllm", [], resilient_parsing=True)
    context.resilient_parsing = False
    _, left, _ = command.make_parser(context).parse_args(rest)
    assert not left, f"{left} left over"


@guide
def test_command_lines_parse(path):
    for arguments in command_lines(path.read_text()):
        try:
            check_command(arguments)
        except Exception as error:
            pytest.fail(f"tinyllm {shlex.join(arguments)}: {type(error).__name__}: {error}")


def test_there_are_command_lines_and_wrong_ones_are_noticed():
    found = [line for path in GUIDES for line in command_lines(path.read_text())]
    assert len(found) > 40
    assert list(command_lines("`git diff | tinyllm run 'Why?'  # a remark`")) == [["run", "Why?"]]
    assert list(command_lines("```console\n$ tinyllm show M > file\ntinyllm list\n```")) == [["show", "M"]]
    for wrong in (["walk"], ["run", "--no-such-option"], ["show", "one", "two"], ["bench", "-p"]):
        with pytest.raises(Exception):  # noqa: B017 (Typer's exceptions have no public names)
            check_command(wrong)


def shown_commands(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Command lines of consoles with what is shown of their output, in pieces between marks of what was left out."""
    for kind, block in _FENCE.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:] if kind == "console" else ():
            command, _, output = part.partition("\n")
            yield (
                shlex.split(command)[1:],
                [piece for piece in re.split(r"^\[…\]\n", output, flags=re.MULTILINE) if piece],
            )


@pytest.mark.model
def test_the_journey_shows_what_commands_print(smollm2_path):
    """Those whose output is the same on every machine and needs no second model."""
    exact = ("show", "tokenize", "embed", "experiment memory")
    shown = list(shown_commands((ROOT / "docs" / "journey.md").read_text()))
    chosen = [(a, pieces) for a, pieces in shown if " ".join(a).startswith(exact) and "--compare" not in a]
    assert len(chosen) >= 5
    wide = os.environ | {"COLUMNS": "100"}
    for arguments, pieces in chosen:
        command = [sys.executable, "-m", "tinyllm_cli.main", *arguments]
        output = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, env=wide).stdout
        at = 0
        for piece in pieces:
            assert piece in output[at:], (arguments, piece, output)
            at = output.index(piece, at) + len(piece)


@pytest.mark.model
def test_snippets_of_the_journey_print_what_is_shown(smollm2_path):
    blocks = _FENCE.findall((ROOT / "docs" / "journey.md").read_text())
    shown = [(code, after[1]) for (kind, code), after in pairwise(blocks) if kind == "python"]
    assert len(shown) >= 2
    for code, wanted in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "journey.md", "exec"), {})
        assert printed.getvalue() == wanted
