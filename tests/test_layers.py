"""The structure that the README promises: who imports whom, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS_MAY_IMPORT = {"numpy", "numba", "llvmlite", "__future__"} | set(sys.stdlib_module_names)


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.add(".".join(filter(None, (base, node.module))))
    return found


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", files("tinyllm"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_engine_knows_nothing_of_the_terminal(path):
    assert not {name.partition(".")[0] for name in imports(path)} & {"typer", "rich", "click", "tinyllm_cli", "cli"}
    calls = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert "print" not in {call.func.id for call in calls}


@pytest.mark.parametrize("path", files("tinyllm/kernels"), ids=lambda p: p.name)
def test_kernels_know_no_file_and_no_model(path):
    for name in imports(path):
        own = name == "tinyllm.errors" or name.startswith("tinyllm.kernels")
        assert own or name.partition(".")[0] in KERNELS_MAY_IMPORT, name


@pytest.mark.parametrize("path", files("tinyllm"), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_stands_on_experiments(path):
    if path.parent.name != "experiments":
        assert not any(name.startswith("tinyllm.experiments") for name in imports(path))


def test_architectures_are_named_in_one_place():
    import tinyllm.config as config

    # Also the name of a tokenizer, and of kinds of layers.
    names = set(config.ARCHITECTURES) - {"bert", "mamba", "mamba2"}
    for path in files("tinyllm"):
        # Tokenizers have names of their own, and rules by the name of a model.
        if path.name in ("config.py", "tokenizer.py", "special_tokens.py", "pre_tokenizers.py", "vocabulary.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            compared = isinstance(node, ast.Compare) and [node.left, *node.comparators]
            for value in compared or ():
                if isinstance(value, ast.Constant):
                    assert value.value not in names, (path, value.value)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import tinyllm", ["numpy", "numba", "llvmlite", "gguf", "jinja2"]),
        ("import tinyllm_cli.main", ["numpy", "numba", "llvmlite", "gguf", "jinja2", "huggingface_hub"]),
        ("import tinyllm.experiments.chart", ["numpy"]),
        ("import tinyllm.model, tinyllm.generate", ["numba", "gguf", "huggingface_hub", "rich", "typer"]),
    ],
    ids=["package", "command line", "charts", "model"],
)
def test_importing_is_cheap(code, absent):
    probe = f"{code}; import sys; print(*[m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
