"""Perplexity: the windowed protocol against a plain computation, and against the exact figures of real models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import reference_dir
from fake_model import write_chain_model

import tinyllm
from tinyllm.errors import InvalidParameterError
from tinyllm.perplexity import measure, windows_of

TEXT = "Hello world. Hello, hello: the wide world is round.\n" * 4
TOLERANCE = 0.007
"""Two exact evaluations of quantized files differ by up to 0.6 % by how activations are rounded."""


@pytest.fixture
def chain(tmp_path):
    with tinyllm.load(write_chain_model(tmp_path / "chain.gguf", [b"Hello", b" world"])) as model:
        yield model


def plain_nll(model, window: int, first: int) -> np.ndarray:
    ids = model.tokenizer.encode(TEXT, parse_special=False)
    found = []
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window]
        logits = model.logits(part).astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        found += [-log_probs[i - 1, part[i]] for i in range(first, window)]
    return np.array(found)


@pytest.mark.parametrize("window", [16, 40])
def test_the_second_half_of_each_window_is_scored(chain, window):
    (score,) = measure([chain], TEXT, window)
    want = plain_nll(chain, window, window // 2 + 1)
    np.testing.assert_allclose(np.concatenate(score.nll), want, rtol=1e-5)
    assert score.perplexity == pytest.approx(math.exp(want.mean()), rel=1e-5)


def test_one_window_scores_everything_but_the_first(chain):
    (score,) = measure([chain], TEXT, None)
    n = len(chain.tokenizer.encode(TEXT, parse_special=False))
    assert score.n_scored == n - 1
    assert score.n_bytes == len(TEXT.encode()) - len(chain.tokenizer.token_bytes(chain.tokenizer.encode(TEXT)[0]))
    np.testing.assert_allclose(np.concatenate(score.nll), plain_nll(chain, n, 1), rtol=1e-5)


def test_a_model_does_not_differ_from_itself(chain):
    first, second = measure([chain, chain], TEXT, 32)
    assert first.mean_kl is None
    assert second.mean_kl == pytest.approx(0, abs=1e-9) and second.agreement == 1
    assert second.perplexity == first.perplexity


def test_windows_begin_with_bos_where_the_vocabulary_wants_it():
    assert list(windows_of(range(10, 21), 5, 1)) == [[1, 11, 12, 13, 14], [1, 16, 17, 18, 19]]
    assert list(windows_of(range(4), 5, None)) == []


@pytest.mark.parametrize(("text", "window"), [("short", 512), ("x" * 900, 600)], ids=["short text", "small context"])
def test_what_cannot_be_measured_is_told(chain, text, window):
    with pytest.raises(InvalidParameterError, match="tokens"):
        measure([chain], text, window)


@pytest.mark.model
@pytest.mark.shared
def test_smollm2_meets_its_exact_figure(tinyllm, smollm2_path):
    folder = reference_dir() / "reference/generation"
    exact = math.exp(np.load(folder / "smollm2.perplexity.npz")["nll_exact"].mean())
    ran = tinyllm("perplexity", folder / "perplexity.txt", "-m", smollm2_path, "--json")
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    assert found["scored"] == 1020
    assert found["perplexity"] == pytest.approx(exact, rel=TOLERANCE)


def test_a_missing_file_is_one_line(tinyllm, tmp_path):
    ran = tinyllm("perplexity", Path(tmp_path) / "none.txt")
    assert ran.returncode == 1
    assert "none.txt" in ran.stderr and len(ran.stderr.splitlines()) == 1
