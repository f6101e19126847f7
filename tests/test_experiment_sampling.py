"""`experiment sampling`: entropies, cuts and orders against plain formulas, and what is printed of a real model."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from experiment_cases import Command, check_picture
from fake_model import write_chain_model

import tinyllm
from tinyllm.errors import InvalidParameterError
from tinyllm.experiments.sampling import Cut, next_logits, picture, study

LOGITS = np.random.default_rng(4).normal(0, 3, 500).astype(np.float32)
TEMPERATURES = (0.5, 1.0, 2.0)
CUTS = (Cut("top-k", 7), Cut("top-p", 0.8), Cut("min-p", 0.1))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_chain_model(tmp_path_factory.mktemp("chain") / "chain.gguf", [b"Hello", b" world"])


@pytest.fixture
def sampling(monkeypatch, capsys, tmp_path, path):
    command = Command(monkeypatch, capsys, tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    return lambda *arguments: command("sampling", "-m", path, *arguments)


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def kept_by(cut, probs):
    """The tokens that a cut keeps, by its definition."""
    order = np.argsort(-probs, kind="stable")
    if cut.kind == "top-k":
        return set(order[: int(cut.value)].tolist())
    if cut.kind == "min-p":
        return set(np.flatnonzero(probs >= cut.value * probs.max()).tolist())
    return set(order[: int(np.searchsorted(np.cumsum(probs[order]), cut.value)) + 1].tolist())


def entropy(probs):
    probs = probs[probs > 0]
    return -(probs * np.log2(probs)).sum()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_spreads_are_those_of_the_softmax(temperature):
    probs = softmax(LOGITS / temperature)
    spread = study(LOGITS, [temperature], [], 4).temperatures[temperature]
    assert spread.n == 500 and spread.entropy == pytest.approx(entropy(probs), rel=1e-5)
    assert spread.effective == pytest.approx(2 ** entropy(probs), rel=1e-5)
    best = np.argsort(-probs)[:4]
    assert [token for token, _ in spread.top] == best.tolist()
    np.testing.assert_allclose([prob for _, prob in spread.top], probs[best], rtol=1e-5)


def test_without_a_temperature_one_token_is_left():
    spread = study(LOGITS, [0], []).temperatures[0]
    assert spread.effective == pytest.approx(1) and spread.top[0] == (int(LOGITS.argmax()), pytest.approx(1))


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_both_orders_are_what_the_definitions_give(cut, temperature):
    (found,) = study(LOGITS, [temperature], [cut]).orders[cut]
    own, heated = softmax(LOGITS), softmax(LOGITS / temperature)
    before, behind = kept_by(cut, own), kept_by(cut, heated)
    for kept, tokens, seen in ((found.cut_first, before, own), (found.temperature_first, behind, heated)):
        chosen = sorted(tokens)
        assert kept.spread.n == len(tokens)
        assert kept.mass == pytest.approx(seen[chosen].sum(), rel=1e-5)
        assert kept.spread.entropy == pytest.approx(entropy(softmax(LOGITS[chosen] / temperature)), rel=1e-4)
    stray = sum(heated[token] for token in behind - before) / sum(heated[token] for token in behind)
    assert found.stray == pytest.approx(stray, abs=1e-6)
    if temperature == 1 or cut.kind == "top-k":  # the order does not matter
        assert found.stray == 0 and found.cut_first.spread == found.temperature_first.spread


@pytest.mark.parametrize(
    ("kind", "value"), [("top-k", 0), ("top-k", 1.5), ("top-p", 0), ("top-p", 1.1), ("min-p", 0), ("min-p", -1)]
)
def test_cuts_that_cannot_be_are_refused(kind, value):
    with pytest.raises(InvalidParameterError, match=kind):
        Cut(kind, value)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_temperatures_that_cannot_be_are_refused(value):
    with pytest.raises(InvalidParameterError, match="temperature"):
        study(LOGITS, [value], [])


def test_logits_are_those_behind_the_prompt_in_its_template_or_as_it_is(path):
    with tinyllm.load(path) as model:
        raw = next_logits(model, "Hi", raw=True)
        np.testing.assert_array_equal(raw, model.logits(model.tokenizer.encode("Hi"))[-1])
        text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        np.testing.assert_array_equal(next_logits(model, "Hi"), model.logits(model.tokenizer.encode(text))[-1])
        assert model.tokenizer.token_text(int(next_logits(model, "Hi").argmax())) == "Hello"


def test_the_tables_show_a_row_per_temperature_and_per_cut(sampling):
    done = sampling("Hi", "--temps", "1,50", "--top-k", "3", "--top-p", "0.5", "--min-p", "")
    assert done.code == 0 and done.err == ""
    table = done.table
    assert table[0] == ["TEMP", "ENTROPY", "EFFECTIVE", "LIKELIEST"]
    assert [row[0] for row in table[1:3]] == ["1", "50"] and table[1][3].startswith("Hello")
    assert [row[0] for row in table if row[0][:4] in ("top-", "min-")] == ["top-k 3", "top-p 0.5"] * 3
    kept = done.out.split("tokens kept", 1)[1].splitlines()
    assert kept[2].split()[2] == kept[2].split()[4] == "3"
    assert int(kept[3].split()[2]) < int(kept[3].split()[4])
    assert "behind a temperature of 50, top-p 0.5 keeps" in done.out


def test_json_has_every_number(sampling, path):
    found = sampling("Hi", "--raw", "--temps", "2", "--top", "3", "--json").answer
    with tinyllm.load(path) as model:
        want = study(next_logits(model, "Hi", raw=True), [2.0], [Cut("min-p", 0.1)], 3)
        (state,) = found["temperatures"]
        assert state["entropy_bits"] == want.temperatures[2.0].entropy
        assert [(t["id"], t["probability"]) for t in state["top"]] == list(want.temperatures[2.0].top)
        assert state["top"][0]["text"] == model.tokenizer.token_text(state["top"][0]["id"])
    assert [(cut["kind"], cut["value"]) for cut in found["cuts"]] == [
        ("top-k", 40), ("top-p", 0.9), ("top-p", 0.95), ("min-p", 0.05), ("min-p", 0.1)
    ]  # fmt: skip
    (orders,) = want.orders[Cut("min-p", 0.1)]
    assert found["cuts"][-1]["stray"] == orders.stray
    assert found["cuts"][-1]["temperature_first"]["n"] == orders.temperature_first.spread.n


def test_the_picture_has_a_line_per_cut(sampling, tmp_path):
    assert sampling("Hi", "--svg", tmp_path / "cuts.svg").code == 0
    root = check_picture(tmp_path / "cuts.svg", "top-k 40", "min-p 0.05", "effective number, no cut", "temperature")
    assert "top-k 40 keeps 40 at temperature 1 and 40 at 2" in root[1].text
    assert "keeps 7 at temperature 1 and 7 at 1" in picture(LOGITS, [0.5], CUTS, "x")


@pytest.mark.parametrize(
    "arguments",
    [["--temps", "a"], ["--temps", ""], ["--temps", "-1"], ["--top-p", "2"], ["--min-p", "nan"], ["--top", "0"]],
    ids=" ".join,
)
def test_wrong_values_are_wrong_usage(sampling, arguments):
    done = sampling("Hi", *arguments)
    assert done.code == 2 and "Invalid value" in done.err
