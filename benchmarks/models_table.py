"""Writes the tables of models.md: every conformance model is run, and its distance to llama.cpp's numbers noted.

    TINYLLM_REFERENCE=FOLDER python benchmarks/models_table.py

The folder holds the conformance collection (conformance/models, conformance/quants, conformance/expected).
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

import tinyllm
from tinyllm.config import ARCHITECTURES
from tinyllm.kernels.formats import tile_of

ROOT = Path(__file__).resolve().parent.parent
MODELS_MD = ROOT / "models.md"
SMALL = ROOT / "tests" / "data" / "architectures"


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the difference over the standard deviation of what is wanted."""
    return float(np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2)) / want.std())


def run(path: Path, expected: dict[str, np.ndarray]) -> tuple[str, float, str]:
    """Architecture, error, and how many greedy tokens agree."""
    n_ctx = int(expected["n_ctx"]) if "n_ctx" in expected else 256
    with tinyllm.load(path, n_ctx=n_ctx, kv_type="f32") as model:
        ids = expected["prompt"].tolist()
        if "embedding" in expected:
            return model.config.architecture, relative_error(model.embed(ids), expected["embedding"].ravel()), "–"
        wanted = expected.get("logits", expected.get("logits_exact"))
        error = relative_error(model.logits(ids)[-len(wanted) :], wanted)
        if "greedy" not in expected:
            return model.config.architecture, error, "–"
        want = expected["greedy"].tolist()
        got = [step.token for step in model.generate(ids, max_tokens=len(want), temperature=0, ignore_eos=True)]
        same = sum(a == b for a, b in zip(got, want, strict=True))
        return model.config.architecture, error, f"{same} of {len(want)}"


def architectures(folder: Path) -> str:
    """One row per architecture, with all its variants."""
    seen: dict[str, list[str]] = defaultdict(list)
    for path in sorted((folder / "models").glob("*.gguf")):
        with np.load(folder / "expected" / f"{path.stem}.npz") as file:
            expected = dict(file)
        architecture, error, greedy = run(path, expected)
        seen[architecture].append(f"{path.stem} {error:.1e} ({float(expected['tolerance']):.1e}), {greedy}")
    with np.load(SMALL / "expected.npz") as file:
        small = dict(file)
    for path in sorted(SMALL.glob("*.gguf")):
        expected = {key.partition("/")[2]: value for key, value in small.items() if key.startswith(f"{path.stem}/")}
        architecture, error, _ = run(path, expected | {"n_ctx": 64})
        if not seen[architecture]:
            seen[architecture].append(f"{path.stem} of the tests {error:.1e}")
    rows = [
        f"| `{name}` | {'; '.join(seen[name]) or 'by its trait row only: no file of it was run'} |"
        for name in sorted(ARCHITECTURES)
    ]
    return "| architecture | file: relative error (limit), greedy tokens equal |\n|---|---|\n" + "\n".join(rows)


def formats(folder: Path) -> str:
    """One row per quantized file."""
    rows = []
    for path in sorted((folder / "quants").glob("*.gguf")):
        with np.load(folder / "expected" / f"{path.stem}.npz") as file:
            expected = dict(file)
        _, error, _ = run(path, expected)
        theirs = float(expected["llamacpp_error"])
        name = path.stem.partition("-")[2].upper()
        bits = f"{tile_of(name).bits_per_weight:.2f}" if name not in ("MIX-Q4_K_M",) else "–"
        rows.append(f"| {path.stem} | {bits} | {error:.4f} | {theirs:.4f} | {error / theirs:.2f} |")
    head = "| file | bits per weight in memory | error to exact | llama.cpp's error | ratio |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows)


def main() -> None:
    folder = Path(os.environ.get("TINYLLM_REFERENCE") or ROOT.parent / "shared") / "conformance"
    if not folder.is_dir():
        sys.exit(f"{folder} is missing: TINYLLM_REFERENCE names the folder of the reference collections")
    text = MODELS_MD.read_text(encoding="utf-8")
    for mark, table in (("architectures", architectures(folder)), ("formats", formats(folder))):
        text = re.sub(f"(<!-- {mark} -->\n).*?(\n<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)  # noqa: B023
    MODELS_MD.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
