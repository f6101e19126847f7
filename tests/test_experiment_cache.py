"""`experiment cache`: both ways write the same, and each computes as many tokens as theory says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from bench_model import write_bench_model
from experiment_cases import ARCHITECTURES, Command, check_picture
from fake_model import FakeModel, write_chain_model

import tinyllm
from tinyllm.errors import ContextFullError, InvalidParameterError
from tinyllm.experiments import cache as experiment
from tinyllm.experiments.cache import compare, growth, with_cache, without_cache

# Windows of 16 positions, a latent cache, recurrent states, experts, and plain GQA.
TELLING = ("gemma3", "deepseek2", "qwen35moe", "lfm2moe", "gpt-oss", "qwen2moe")


@pytest.fixture
def cache(monkeypatch, capsys, tmp_path):
    command = Command(monkeypatch, capsys, tmp_path)
    model = write_chain_model(tmp_path / "chain.gguf", [b"Hello", b" world"], n_ctx=128)
    return lambda *arguments: command("cache", "-m", model, "-t", 1, *arguments)


@pytest.mark.parametrize("name", TELLING)
def test_both_ways_write_the_same_with_the_same_logits(name):
    with tinyllm.load(ARCHITECTURES / f"{name}.gguf", n_ctx=64, n_threads=1) as model:
        rows = list(compare(model, [3, 14, 15], [3, 20, 50]))
    assert [row.position for row in rows] == [3, 20, 50]
    assert all(row.same_tokens and row.same_logits for row in rows)


def test_each_way_computes_as_many_tokens_as_theory_says():
    model = FakeModel(lambda tokens: (7 * len(tokens)) % 200)
    cached = [token.id for token in with_cache(model, [1, 2, 3, 4], 20)]
    assert len(model.evaluated) == 20
    model.evaluated.clear()
    recomputed = [token.id for token in without_cache(model, [1, 2, 3, 4], 20)]
    assert len(model.evaluated) == sum(range(4, 21))
    assert cached == recomputed == [(7 * n) % 200 for n in range(4, 21)]
    *_, row = compare(model, [1, 2, 3, 4], [10, 20])
    assert (row.cached_tokens, row.recomputed_tokens) == (20, sum(range(4, 21)))
    assert all(sequence.released for sequence in model.sequences)


def test_totals_are_sums_and_growth_is_their_exponent():
    model = FakeModel(lambda tokens: 5, seconds_per_step=0.0005)
    first, second = compare(model, [1], [4, 8])
    assert second.cached_s > first.cached_s > 0 and second.recomputed_s > first.recomputed_s > 0
    assert second.total_speedup == second.recomputed_s / second.cached_s
    linear = [replace(row, cached_s=row.position * 2.0, recomputed_s=row.position**2 / 3) for row in (first, second)]
    (step,) = growth(linear)
    assert (step.start, step.end) == (4, 8)
    assert math.isclose(step.cached, 1) and math.isclose(step.recomputed, 2)


def test_what_cannot_be_is_refused(tmp_path):
    with tinyllm.load(write_bench_model(tmp_path / "tiny.gguf"), n_ctx=16, n_threads=1) as model:
        for prompt, positions in (([1, 2, 3], [2, 8]), ([], [8]), ([1], [])):
            with pytest.raises(InvalidParameterError, match="positions count from the beginning"):
                next(compare(model, prompt, positions))
        with pytest.raises(ContextFullError):
            next(compare(model, [1], [17]))


def test_the_command_says_that_both_agree(cache, tmp_path):
    picture = tmp_path / "cache.svg"
    done = cache("-p", "6,12", "--prompt", "ab", "--svg", picture)
    assert done.code == 0, done.err
    assert done.table[0][0] == "tokens" and [row[0] for row in done.table[1:3]] == ["6", "12"]
    assert [row[-1] for row in done.table[1:3]] == [f"6 / {sum(range(2, 7))}", f"12 / {sum(range(2, 13))}"]
    assert "both ways wrote the same tokens, from the same logits bit for bit" in done.out
    check_picture(picture, "total time (s)", "length of the text (tokens)", "with cache", "recomputed", "O(n²)")


@pytest.mark.parametrize("positions", ["128", "130"])
def test_positions_beyond_the_training_are_told(cache, positions):
    done = cache("-p", positions, "--prompt", "ab")
    assert done.code == 0
    assert ("trained on contexts of 128 tokens" in done.err) == (positions == "130")


def test_json(cache):
    done = cache("-p", "4", "-p", "8", "--prompt", "ab", "--json")
    assert done.code == 0, done.err
    answer = done.answer
    assert (answer["model"], answer["threads"], answer["prompt_tokens"]) == ("chain.gguf", 1, 2)
    assert answer["same_tokens"] and answer["same_logits"]
    assert [row["position"] for row in answer["rows"]] == [4, 8]
    assert all(row["cached_ms"] > 0 and row["recomputed_ms"] > 0 for row in answer["rows"])
    assert [(step["start"], step["end"]) for step in answer["growth"]] == [(4, 8)]


def test_a_cache_that_holds_something_else_is_an_error(cache, monkeypatch):
    truly = experiment.with_cache

    def off_by_one(model, prompt, last):
        for token in truly(model, prompt, last):
            yield replace(token, id=token.id + 1, checksum=0)

    monkeypatch.setattr(experiment, "with_cache", off_by_one)
    done = cache("-p", "6", "--prompt", "ab")
    assert done.code == 1 and "the two ways wrote different tokens" in done.out
    assert "the cache does not hold what it should" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "x"], 2, "--positions 'x'"),
        (["-p", "2", "--prompt", "abcdef"], 2, "the prompt alone has 6 tokens"),
        (["-p", "8", "--cache-type", "q4"], 2, "'q4'"),
    ],
    ids=["no number", "in the prompt", "cache type"],
)
def test_wrong_use_is_told(cache, arguments, code, message):
    done = cache(*arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err.splitlines()[-1]
