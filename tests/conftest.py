"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def reference_dir() -> Path:
    """The folder of the large reference collections; skips the test where there is none."""
    folder = Path(os.environ.get("TINYLLM_REFERENCE") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs the reference collections: {folder} is missing (TINYLLM_REFERENCE names their folder)")
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, fetched into the user's store at first use. Tests with it are marked `model`."""
    from tinyllm import hub

    return hub.resolve("smollm2")


@pytest.fixture
def tinyllm(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a `tinyllm` command line in a process of its own, with a store and settings that are empty at first.

    Called as `tinyllm("show", path, env={"LANG": "C"}, input="...")`; variables set to None are removed. `stdout` and
    `stderr` are text, decoded as UTF-8 with surrogate escapes.
    """

    def run(
        *arguments: object, env: dict[str, str | None] | None = None, **options
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tinyllm_cli.main", *map(str, arguments)],
            env={key: value for key, value in (clean_environment(tmp_path) | (env or {})).items() if value is not None},
            capture_output=True,
            timeout=120,
            **{"encoding": "utf-8", "errors": "surrogateescape"} | options,
        )

    return run


def clean_environment(folder: Path) -> dict[str, str]:
    """The environment without settings of the user, and with the store in `folder`."""
    private = ("TINYLLM_", "HF_", "XDG_", "PYTHON", "NO_COLOR", "LC_", "LANG")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(private)}
    return kept | {"TINYLLM_HOME": str(folder / "store"), "XDG_CONFIG_HOME": str(folder / "config")}
