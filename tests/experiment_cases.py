"""What tests of experiments share: tiny models, commands run in this process, and checks of pictures."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tinyllm_cli import main

ARCHITECTURES = Path(__file__).parent / "data" / "architectures"
SVG = "{http://www.w3.org/2000/svg}"


class Output(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """What `--json` printed."""
        return json.loads(self.out)

    @property
    def table(self) -> list[list[str]]:
        """The cells of a plain table, line by line."""
        return [re.split(r" {2,}", line.strip()) for line in self.out.splitlines() if line.strip()]


class Command:
    """Runs `tinyllm experiment NAME ...` in this process, with kernels that it has and without the user's settings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path):
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))

    def __call__(self, *arguments: object) -> Output:
        line = ["experiment", *map(str, arguments)]
        self._monkeypatch.setattr(sys, "argv", ["tinyllm", *line])
        return Output(main._run(line), *self._capsys.readouterr())


def check_picture(path: Path, *texts: str) -> ElementTree.Element:
    """The root of an SVG file, which is sound, names itself, and shows these texts."""
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert root[0].text and root[1].text
    shown = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    for text in texts:
        assert text in shown, shown
    return root
