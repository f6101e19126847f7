"""`tinyllm trace`: rows on a terminal, files, JSON, what is refused, and a real model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fake_model import write_chain_model
from rich.cells import cell_len
from test_trace_page import Page
from traced_models import few_tokens, write_llama

from tinyllm.store.files import home
from tinyllm.trace.observation import STAGES
from tinyllm.trace.page import page
from tinyllm.trace.summary import sentence
from tinyllm.trace.texts import LANGUAGES
from tinyllm_cli import main
from tinyllm_cli import trace as command

REAL = "The capital of France is"
LETTERS = "a b c d e f g h"
NEEDS_DEV_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


class Output(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("command") / "llama.gguf"
    write_llama(path)
    with few_tokens(path) as model:
        model.tokenizer.encode = lambda text, **_: [ord(char) % 48 for char in text]
        yield model


class Keyboard(io.StringIO):
    """Standard input where nobody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def keyboard(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Keyboard())


@pytest.fixture
def trace(model, monkeypatch, capsys, tmp_path) -> Callable[..., Output]:
    """Runs `tinyllm trace` on the small model in this process: `trace(LETTERS, "--json")`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(command, "load_model", lambda options: model)

    def call(*arguments: object) -> Output:
        line = ["trace", "--raw", *map(str, arguments), "--seed", "5"]
        monkeypatch.setattr(sys, "argv", ["tinyllm", *line])
        return Output(main._run(line), *capsys.readouterr())

    return call


@pytest.mark.parametrize("language", LANGUAGES)
def test_rows_fit_80_columns(trace, language):
    result = trace(LETTERS, "-n", 2, "--stages", "all", "--lang", language)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert max(cell_len(line) for line in result.out.splitlines()) <= 80


def test_columns_stand_under_their_names(trace):
    lines = trace(LETTERS, "-n", 1).out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    rows = lines[header + 1 : header + 4]
    assert [row[:5].strip() for row in rows] == ["embed", "0", "1"]
    end = lines[header].index("rank") + 4
    assert all(row[end - 5 : end].strip().isdigit() for row in rows)
    assert all(len(row) == end for row in rows)


def test_columns_of_chinese_stand_under_their_names(trace):
    lines = trace(LETTERS, "-n", 1, "--lang", "zh").out.splitlines()
    header = next(line for line in lines if "透镜" in line)
    rows = lines[lines.index(header) + 1 :][:3]
    assert {cell_len(row) for row in rows} == {cell_len(header)}
    assert lines[1].startswith("读完 15 个 token 后，模型说出了")


def test_layers_heads_and_stages_select(trace, tmp_path):
    file = tmp_path / "t.npz"
    result = trace(
        LETTERS, "-n", 1, "--layers", "1", "--heads", "0,3", "--stages", "q,ffn_act", "--json", "--save", file
    )
    found = json.loads(result.out)
    assert [row["layer"] for row in found["rows"]] == ["embed", 1]
    assert found["rows"][1]["heads"] == [0, 3] and len(found["rows"][1]["entropy"]) == 2
    assert [(row["stage"], row["layer"]) for row in found["stages"]] == [("q", 1), ("ffn_act", 1)]
    with np.load(file) as saved:
        assert {"blk.1.q", "blk.1.ffn_act", "blk.1.attn_scores", "blk.1.resid_post", "embed", "tokens"} <= set(saved)
        assert not any(name.startswith("blk.0.") for name in saved)


def test_all_stages_are_saved_under_their_names(trace, tmp_path):
    trace(LETTERS, "-n", 2, "--stages", "all", "--save", tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as saved:
        names = {name.removeprefix(f"blk.{i}.") for i in range(2) for name in saved if name.startswith(f"blk.{i}.")}
        assert names == set(STAGES) - {"embed", "router", "final_norm", "logits"}
        assert {"embed", "final_norm", "logits", "lens.ranks", "lens.top_ids", "n_prompt"} <= set(saved)
        assert saved["blk.0.attn_scores"].shape == (4, 16, 16)
        assert saved["logits"].shape == (2, 48)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_is_what_the_library_writes(trace, model, tmp_path, language):
    file = tmp_path / "t.html"
    arguments = [LETTERS, "-n", 2, "--layers", "0", "--heads", "1", "--token", 3, "--lang", language, "--html", file]
    assert trace(*arguments).code == 0
    found = Page(file.read_text("utf-8"))
    ids = [ord(char) % 48 for char in LETTERS]
    traced = model.trace(ids, max_tokens=2, seed=5, layers=[0])
    line = found.data["command"]
    assert line.startswith("tinyllm trace --raw") and str(file) in line
    same = Page(page(traced, line, language=language, layers=[0], heads=[1], selected=3))
    for key in ("tokens", "texts", "selected", "shown_heads", "about_maps", "attention", "answers", "command"):
        assert found.data[key] == same.data[key]
    assert found.data["steps"][0]["sentence"] == sentence(traced, 0, language)


def test_an_answer_can_be_looked_at_in_json(trace):
    found = json.loads(trace(LETTERS, "-n", 3, "--json").out)
    assert len(found["steps"]) == 3
    for step in found["steps"]:
        draw = step["sampling"]["draw"]
        assert draw["below"] <= draw["u"] < draw["below"] + draw["probability"]
        parts = step["contributions"]
        assert sum(parts["parts"]) + parts["constant"] == pytest.approx(parts["logit"], abs=1e-3)


def test_the_end_of_the_context_is_told(trace):
    full = "the context of 64 tokens is full"
    assert full not in trace(LETTERS, "-n", 3).err
    result = trace("a" * 60, "-n", 20, "--json")
    assert len(json.loads(result.out)["steps"]) == 5 and full in result.err


def test_languages_are_those_that_there_are_texts_in():
    assert command.LANGUAGES == LANGUAGES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "nothing"], "no stage"),
        (["--lang", "fr"], "en, zh"),
        (["--layers", "9"], "0 to 1"),
        (["--heads", "x"], "0-5,20-"),
        (["--system", "s"], "--raw uses no chat template"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_code_2(trace, arguments, message):
    result = trace(LETTERS, *arguments)
    assert result.code == 2 and result.out == ""
    assert message in " ".join(result.err.split()) and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token", "99"], "0 to 14"),
        (["--html", "/nonexistent/t.html"], "/nonexistent/t.html cannot be written"),
        pytest.param(["--html", "/dev/full"], "/dev/full: No space left on device", marks=NEEDS_DEV_FULL),
        pytest.param(["--save", "/dev/full"], "/dev/full: No space left on device", marks=NEEDS_DEV_FULL),
    ],
    ids=["token", "html", "disk full for a page", "disk full for arrays"],
)
def test_what_cannot_be_is_told_in_one_line(trace, arguments, message):
    result = trace(LETTERS, "-n", 1, *arguments)
    assert result.code == 1 and message in result.err


def test_wrong_usage_is_told_before_a_model_is_loaded(tinyllm):
    ran = tinyllm("trace", "--stages", "nothing", "x")
    assert ran.returncode == 2 and "no stage" in ran.stderr


def test_chat_templates_are_marked(tmp_path, monkeypatch, capsys):
    path = write_chain_model(tmp_path / "chain.gguf", [b"Hello", b" world"])
    line = ["trace", "-m", str(path), "Hi", "-n", "2", "--temp", "0", "--json"]
    assert main._run(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert [token["text"] for token in found["tokens"] if not token["template"] and not token["generated"]] == [
        "H",
        "i",
    ]
    assert [step["text"] for step in found["steps"]] == ["Hello", "·world"]


# A real model


@pytest.mark.model
def test_a_real_model_says_paris_and_shows_its_sink(smollm2_path):
    import tinyllm

    with tinyllm.load(smollm2_path) as model:
        found = model.trace(REAL, max_tokens=2, temperature=0, lens_budget_s=2.0)
        logits = model.logits([token.id for token in found.tokens[:-1]])
    np.testing.assert_array_equal(found.logits[0], logits[found.positions[0]])
    assert found.tokens[5].text == "·Paris"
    assert 0 in found.sinks
    assert found.attention_error < 1e-5
    for part in found.contributions:
        assert abs(part.rounding) < 0.01 * abs(part.logit)  # activations of the last product have 8 bits
    assert "·Paris" in sentence(found)


@pytest.mark.model
def test_a_page_of_200_tokens_is_below_five_megabytes(smollm2_path):
    import tinyllm

    words = "The lighthouse keeper wrote a letter about the storm, the island and the long winter. " * 12
    with tinyllm.load(smollm2_path) as model:
        ids = model.tokenizer.encode(words)[:200]
        assert len(page(model.trace(ids, max_tokens=4, seed=1, lens_budget_s=1.5)).encode()) < 5_000_000


@pytest.mark.model
def test_the_command_prints_rows_and_writes_files(tinyllm, smollm2_path, tmp_path):
    env = {"TINYLLM_HOME": str(home())}  # where the kernels are
    files = ["--html", tmp_path / "t.html", "--save", tmp_path / "t.npz", "--layers", "0,28-", "--stages", "q,ffn_act"]
    ran = tinyllm("trace", "-m", smollm2_path, "--raw", REAL, "-n", "2", "--temp", "0", *files, env=env)
    assert ran.returncode == 0, ran.stderr
    assert "·Paris" in ran.stdout and "looks at" in ran.stdout
    Page(Path(tmp_path / "t.html").read_text("utf-8"))
    with np.load(tmp_path / "t.npz") as saved:
        assert "blk.28.q" in saved and "blk.5.q" not in saved
