"""Perplexity: the windowed protocol against a plain computation, and against the exact figures of real models."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import reference_dir
from experiment_cases import check_picture
from fake_model import FakeModel, write_chain_model

import tinyllm
from tinyllm.errors import InvalidParameterError
from tinyllm.perplexity import measure, windows_of
from tinyllm.store.files import home

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


class Guesser(FakeModel):
    """Logits that depend on the tokens before and on a seed."""

    def __init__(self, seed: int, **fields):
        super().__init__(lambda tokens: 0, **fields)
        self.seed = seed

    def logits_after(self, tokens: list[int]) -> np.ndarray:
        seed = [self.seed, zlib.crc32(np.asarray(tokens, np.int32).tobytes())]
        return np.random.default_rng(seed).normal(0, 2, self.tokenizer.n_vocab).astype(np.float32)


def test_another_model_is_compared_token_by_token():
    a, b = Guesser(1), Guesser(2)
    first, second = measure([a, b], TEXT, 32)
    ids = a.tokenizer.encode(TEXT)
    kl, same, change = [], [], []
    for start in range(0, len(ids) - 31, 32):
        for at in range(start + 17, start + 32):
            p, q = (model.logits_after(ids[start:at]).astype(np.float64) for model in (a, b))
            p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
            kl.append((np.exp(p) * (p - q)).sum())
            same.append(p.argmax() == q.argmax())
            change.append(p[ids[at]] - q[ids[at]])
    assert first.first is None and first.log_ratio is first.kl_99 is first.agreement is None
    assert second.mean_kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert second.kl_99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert second.agreement == pytest.approx(np.mean(same))
    mean, error = second.log_ratio
    assert mean == pytest.approx(math.log(second.perplexity / first.perplexity)) == pytest.approx(np.mean(change), 1e-4)
    assert error == pytest.approx(np.std(change, ddof=1) / math.sqrt(len(change)), rel=1e-4)


def test_models_of_other_vocabularies_are_not_compared():
    first, other = measure([Guesser(1), Guesser(2, pieces=[b"Hello"])], TEXT, 32)
    assert other.first is other.mean_kl is other.log_ratio is None
    assert other.bits_per_byte > 0 and other.n_bytes == first.n_bytes


def test_windows_begin_with_bos_where_the_vocabulary_wants_it():
    assert list(windows_of(range(10, 21), 5, 1)) == [[1, 11, 12, 13, 14], [1, 16, 17, 18, 19]]
    assert list(windows_of(range(4), 5, None)) == []


@pytest.mark.parametrize(("text", "window"), [("short", 512), ("x" * 900, 600)], ids=["short text", "small context"])
def test_what_cannot_be_measured_is_told(chain, text, window):
    with pytest.raises(InvalidParameterError, match="tokens"):
        measure([chain], text, window)


@pytest.fixture
def files(tmp_path):
    """A text, two models of one vocabulary and one of another."""
    (tmp_path / "text.txt").write_text(TEXT)
    names = {"a": [b"Hello", b" world"], "b": [b"Hello", b" world"], "c": [b"Hello"]}
    return tmp_path / "text.txt", *(
        write_chain_model(tmp_path / f"{name}.gguf", pieces) for name, pieces in names.items()
    )


@pytest.fixture
def perplexity(tinyllm):
    """The command, with the kernels that this process has."""
    return lambda *arguments: tinyllm("perplexity", *arguments, "-w", "32", env={"TINYLLM_HOME": str(home())})


def test_the_table_compares_with_the_first(perplexity, files, tmp_path):
    text, a, b, _ = files
    done = perplexity(text, "-m", a, "-m", b, "--svg", tmp_path / "size.svg")
    assert done.returncode == 0, done.stderr
    headers, *rows = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
    assert headers[-5:] == ["change", "±", "KL", "KL 99 %", "same first"] and headers[:2] == ["model", "size"]
    assert rows[0][0] == "a.gguf" and len(rows[0]) == 7
    assert rows[1][7:] == ["+0.00 %", "0.00", "0.00000", "0.0000", "100.0 %"]
    root = check_picture(tmp_path / "size.svg", "a", "b", "size of the file (MB)", "perplexity")
    assert f"a: {os.path.getsize(a) / 1e6:.3g} MB" in root[1].text


def test_json_has_sizes_and_nothing_where_vocabularies_differ(perplexity, files, tmp_path):
    text, a, _, c = files
    done = perplexity(text, "-m", a, "-m", c, "--json", "--svg", tmp_path / "size.svg")
    first, other = json.loads(done.stdout)
    assert first["size"] == os.path.getsize(a) and first["bits_per_weight"] == 32
    assert not first["same_vocabulary"] and not other["same_vocabulary"]
    assert {other[key] for key in ("log_ratio", "log_ratio_error", "mean_kl", "kl_99", "agreement")} == {None}
    check_picture(tmp_path / "size.svg", "bits per byte")
    told = perplexity(text, "-m", a, "-m", c)
    assert "same first" not in told.stdout
    assert told.stderr.splitlines()[-1].startswith("KL is not defined between vocabularies: c.gguf and a.gguf")


@pytest.mark.model
@pytest.mark.shared
def test_smollm2_meets_its_exact_figure(tinyllm, smollm2_path):
    folder = reference_dir() / "reference/generation"
    exact = math.exp(np.load(folder / "smollm2.perplexity.npz")["nll_exact"].mean())
    ran = tinyllm(
        "perplexity", folder / "perplexity.txt", "-m", smollm2_path, "--json", env={"TINYLLM_HOME": str(home())}
    )
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    assert found["scored"] == 1020
    assert found["perplexity"] == pytest.approx(exact, rel=TOLERANCE)


def test_a_missing_file_is_one_line(tinyllm, tmp_path):
    ran = tinyllm("perplexity", Path(tmp_path) / "none.txt")
    assert ran.returncode == 1
    assert "none.txt" in ran.stderr and len(ran.stderr.splitlines()) == 1
