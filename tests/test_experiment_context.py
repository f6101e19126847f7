"""`experiment context`: what is read is what the engine's costs say, and depths stay inside the context."""

from __future__ import annotations

import pytest
from bench_model import HEAD_DIM, N_KV_HEADS, N_LAYERS, write_bench_model
from experiment_cases import ARCHITECTURES, Command, check_picture

import tinyllm
from tinyllm.errors import InvalidParameterError, UnsupportedModelError
from tinyllm.experiments.context import cache_bytes, depths_of, measure
from tinyllm.experiments.memory import CacheDesign
from tinyllm.kernels.abi import ATTEND
from tinyllm.measure.costs import Costs, StepShape


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_bench_model(tmp_path_factory.mktemp("context") / "tiny.gguf")


@pytest.fixture
def context(monkeypatch, capsys, tmp_path, model_path):
    command = Command(monkeypatch, capsys, tmp_path)
    return lambda *arguments: command("context", "-m", model_path, "-t", 1, "-n", 2, "-r", 1, *arguments)


@pytest.mark.parametrize("name", ["gemma3", "deepseek2", "qwen2moe"])
def test_the_cache_is_read_as_the_costs_of_the_ops_say(name):
    with tinyllm.load(ARCHITECTURES / f"{name}.gguf", n_ctx=64, n_threads=1) as model:
        plan, design = model.network.plan, CacheDesign.of(model.config, name)
        costs = Costs(plan)
        attends = [op for op in plan.ops if op.arguments is ATTEND]
        for depth in (0, 10, 40):
            moved = sum(costs.of(op, StepShape(1, 1, depth)).n_bytes for op in attends)
            queries = sum(4 * op.values["n_heads"] * (op.values["head_dim"] + op.values["v_dim"]) for op in attends)
            assert cache_bytes(design, depth, 1, "f16") == pytest.approx(moved - queries)


def test_bytes_are_averaged_over_the_tokens(model_path):
    with tinyllm.load(model_path, n_ctx=64, n_threads=1) as model:
        design = CacheDesign.of(model.config, "tiny")
    per_position = N_LAYERS * 2 * N_KV_HEADS * 2 * (HEAD_DIM + 32) // 2  # values of 16 are padded to 32
    assert cache_bytes(design, 10, 4, "f16") == per_position * (11 + 12 + 13 + 14) / 4


def test_a_row_for_each_depth(model_path):
    found = list(measure(model_path, [0, 32, 96], n_gen=2, repetitions=2, n_threads=1))
    rows = [row for row, _ in found]
    assert [row.depth for row in rows] == [0, 32, 96]
    for row, result in found:
        assert len(result.samples_ns) == 2 and 0 < row.attention < 1
        assert row.ms == pytest.approx(1e3 * result.seconds / 2)
        assert row.predicted * row.token_bytes == pytest.approx(rows[0].speed * rows[0].token_bytes)
    # A deeper token moves more by what it reads of the cache, and by nothing else.
    more = [row.token_bytes - rows[0].token_bytes for row in rows]
    assert more == pytest.approx([row.cache_bytes - rows[0].cache_bytes for row in rows])


def test_depths_stay_inside_the_context(model_path):
    depths = depths_of(model_path, [4096, 0, 511, 510, 0], 2)
    assert (depths.n_ctx, depths.inside, depths.beyond) == (512, (0, 510), (511, 4096))
    with pytest.raises(InvalidParameterError, match="context has 512 positions"):
        depths_of(model_path, [600], 2)


def test_an_encoder_decodes_nothing():
    with pytest.raises(UnsupportedModelError):
        list(measure(ARCHITECTURES / "bert.gguf", [0], n_gen=1, repetitions=1, n_threads=1))


def test_the_table(context, tmp_path):
    picture = tmp_path / "context.svg"
    done = context("-d", "0,64,1k", "--svg", picture)
    assert done.code == 0, done.err
    header, first, second = done.table[:3]
    assert header[0] == "depth" and header[3] == "attention"
    assert (first[0], second[0]) == ("0", "64")
    assert first[4] == "576 B"  # 1.5 positions of 384 bytes
    assert "its context has 512 positions, so there is no depth 1024" in done.err
    assert "% of the speed at 0" in done.out
    check_picture(picture, "speed (tokens/s)", "context before the token (tokens)", "if by bytes read")


def test_several_models_side_by_side(context, tmp_path):
    other = ARCHITECTURES / "gemma3.gguf"
    done = context("-m", other, "-d", "0,32", "--json")
    assert done.code == 0, done.err
    first, second = done.answer["models"]
    assert first["model"].endswith("tiny.gguf") and second["model"].endswith("gemma3.gguf")
    assert [row["depth"] for row in second["rows"]] == [0, 32]
    table = context("-m", other, "-d", "0,32").table
    assert table[0][0] == "model" and [row[0] for row in table[1:5]] == ["tiny", "32", "gemma3", "32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["-d", "deep"], "--depths 'deep'"), (["-d", "4k"], "no depth fits"), (["--cache-type", "q3"], "'q3'")],
    ids=["no number", "too deep", "cache type"],
)
def test_wrong_use_is_told(context, arguments, message):
    done = context(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
