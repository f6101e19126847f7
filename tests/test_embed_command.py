"""`tinyllm embed` through the command line, on a tiny encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tinyllm as library
from tinyllm.store.files import home

ENCODERS = sorted((Path(__file__).parent / "data" / "architectures").glob("*bert*.gguf"))
pytestmark = pytest.mark.skipif(not ENCODERS, reason="no tiny encoder in tests/data")


@pytest.fixture(scope="module")
def encoder() -> Path:
    for path in ENCODERS:
        with library.load(path) as model:
            try:
                model.embed("a b")
            except library.TinyLLMError:
                continue
            return path
    pytest.skip("the tiny encoders have no vocabulary")


@pytest.fixture
def command(tinyllm, encoder):
    """`tinyllm embed` with the kernels that this process has."""
    return lambda *arguments: tinyllm("embed", "-m", encoder, *arguments, env={"TINYLLM_HOME": str(home())})


def test_vectors_are_those_of_the_library(command, encoder):
    done = command("one", "two", "--json", "--no-normalize")
    assert done.returncode == 0, done.stderr
    with library.load(encoder) as model:
        want = [model.embed(text) for text in ("one", "two")]
    np.testing.assert_allclose(json.loads(done.stdout)["embeddings"], want, rtol=1e-6)


def test_plain_output_is_a_line_of_numbers_per_text_of_length_one(command, encoder):
    done = command("one", "two")
    rows = np.array([[float(number) for number in line.split()] for line in done.stdout.splitlines()])
    assert rows.shape[0] == 2
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-4)


def test_a_text_is_like_itself(command, encoder):
    done = command("one", "one", "--similarity", "--json")
    np.testing.assert_allclose(json.loads(done.stdout)["similarity"], np.ones((2, 2)), rtol=1e-5)


@pytest.mark.parametrize("arguments", [["one", "--similarity"], ["one", "--pooling", "best"]], ids=" ".join)
def test_wrong_use_is_told(command, arguments):
    done = command(*arguments)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("Error: Invalid value")
