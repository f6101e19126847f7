"""`experiment memory`: its formulas against the pages that the engine's cache really has, and known figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_cases import ARCHITECTURES, Command, check_picture

import tinyllm
from tinyllm.config import ModelConfig
from tinyllm.errors import InvalidParameterError
from tinyllm.experiments.memory import PUBLISHED, CacheDesign, default_lengths, measure, page_bytes, pages
from tinyllm.gguf_file import open_gguf
from tinyllm.kernels.abi import CACHE_TYPES, PAGE
from tinyllm.kv_cache import KVCache, PageTable

MODELS = sorted(ARCHITECTURES.glob("*.gguf"))
LENGTHS = (1, 31, 32, 33, 47, 48, 64, 65, 95, 100, 257, 512)


@pytest.fixture
def memory(monkeypatch, capsys, tmp_path):
    command = Command(monkeypatch, capsys, tmp_path)
    return lambda *arguments: command("memory", *arguments)


def config_of(path: Path) -> ModelConfig:
    with open_gguf(path) as file:
        return ModelConfig.from_file(file, 512)


def decoders() -> list[Path]:
    return [path for path in MODELS if "bert" not in path.stem]


def held(table: PageTable, cache: KVCache) -> int:
    """Bytes of the pages that a sequence has."""
    return sum(
        len(table.numbers(group)) * sum(layer.page_bytes for layer in cache.groups[group].layers)
        for group in range(len(cache.groups))
    )


@pytest.mark.parametrize("path", decoders(), ids=lambda path: path.stem)
def test_bytes_are_those_of_the_engines_pages(path):
    config = config_of(path)
    design = CacheDesign.of(config, path.stem)
    for kv_type in filter(design.fits, CACHE_TYPES):
        cache = KVCache(config, 16, kv_type)
        for layer in design.layers:
            assert page_bytes(layer, kv_type) in {pool.page_bytes for pool in cache.layers}
        table, computed = PageTable(cache, 512), 0
        for n in LENGTHS:
            table.reserve(n, computed)
            table.commit(n)
            computed = n
            assert held(table, cache) == design.bytes_at(n, kv_type) - design.state_bytes, n
        if cache.states is not None:
            assert design.state_bytes == cache.states.n_bytes


def test_an_evaluated_sequence_holds_what_is_said():
    path = ARCHITECTURES / "gemma3.gguf"
    design = CacheDesign.of(config_of(path), "gemma3")
    with tinyllm.load(path, n_ctx=256, n_batch=32) as model:
        sequence = model.new_sequence()
        for n in (40, 150, 151):
            sequence.evaluate([1] * (n - len(sequence)), want="none")
            assert held(sequence.pages, model.cache) == design.bytes_at(n, "f16")
            # ... of which the pool has handed out as many pages as are counted.
            taken = sum((group.n_pages - group.n_free) * len(group.layers) for group in model.cache.groups)
            assert taken == sum(pages(n, layer.window) for layer in design.layers)


def test_a_pool_allocates_the_bytes_of_its_pages():
    config = config_of(ARCHITECTURES / "qwen2moe.gguf")
    cache = KVCache(config, 7, "f16")
    design = CacheDesign.of(config, "")
    whole = sum(pool.memory.nbytes - 64 for pool in cache.layers)
    assert whole == design.bytes_at(7 * PAGE, "f16") == 7 * PAGE * design.bytes_per_position("f16")


@pytest.mark.parametrize(
    ("name", "kv_type", "per_position"),
    [
        ("deepseek-v3", "f16", 61 * (512 + 64) * 2),  # 70,272
        ("gpt-3", "f16", 96 * 2 * 12288 * 2),
        ("llama-3.1-405b", "f16", 126 * 2 * 8 * 128 * 2),
        ("mistral-7b", "f32", 32 * 2 * 8 * 128 * 4),
        ("mistral-7b", "q8_0", 32 * 2 * 8 * 128 // 32 * 34),
    ],
)
def test_published_sizes(name, kv_type, per_position):
    assert PUBLISHED[name].bytes_per_position(kv_type) == per_position


def test_a_window_bounds_the_memory():
    mistral = PUBLISHED["mistral-7b"]
    per_position = mistral.bytes_per_position("f16")
    assert mistral.bytes_at(4096, "f16") == 4096 * per_position
    assert mistral.bytes_at(2**20, "f16") == (4096 + PAGE) * per_position  # a page to go back to
    (without, *_) = mistral.alternatives()
    assert without.layout == "GQA, no windows" and without.bytes_at(2**20, "f16") == 2**20 * per_position


def test_heads_share_what_the_layouts_say():
    deepseek = PUBLISHED["deepseek-v3"]
    shared = {design.layout: design.bytes_per_position("f16") for design in deepseek.alternatives()}
    assert shared == {"MHA": 61 * 128 * (192 + 128) * 2, "MQA": 61 * (192 + 128) * 2}
    llama = PUBLISHED["llama-3.1-405b"]
    shared = {design.layout: design.bytes_per_position("f16") for design in llama.alternatives()}
    own = llama.bytes_per_position("f16")
    assert shared == {"MHA": 16 * own, "MQA": own // 8}
    assert [design.layout for design in PUBLISHED["gpt-3"].alternatives()] == ["MQA"]


def test_what_cannot_be_is_refused():
    design = PUBLISHED["gpt-3"]
    with pytest.raises(InvalidParameterError, match="q4_0"):
        measure([design], [32], ["q4_0"])
    with pytest.raises(InvalidParameterError, match="from 1 on"):
        measure([design], [0], ["f16"])
    assert default_lengths([design]) == [512, 2048]


def test_the_command_reads_no_weights(memory, monkeypatch):
    monkeypatch.setattr(tinyllm.model, "Model", None)
    done = memory("-m", ARCHITECTURES / "deepseek2.gguf", "-m", ARCHITECTURES / "gemma3.gguf", "-l", "32,1k", "--json")
    assert done.code == 0, done.err
    assert done.answer["lengths"] == [32, 1024]
    rows = {(row["model"], row["layout"], row["cache_type"]): row for row in done.answer["rows"]}
    assert rows["deepseek2", "MLA", "f16"]["bytes"] == [32 * 2 * 40 * 2, 1024 * 2 * 40 * 2]
    assert rows["deepseek2", "MLA", "f32"]["bytes_per_token"] == 2 * 40 * 4
    assert ("gemma3", "MQA, no windows", "f16") in rows
    assert not any(kv_type == "q8_0" for _, _, kv_type in rows) and "cannot be q8_0" in done.err


def test_the_table_names_each_thing_once(memory, tmp_path):
    picture = tmp_path / "memory.svg"
    done = memory("-m", ARCHITECTURES / "qwen2moe.gguf", "--published", "deepseek-v3", "-l", "8k", "--svg", picture)
    assert done.code == 0 and str(picture) in done.err
    assert done.table[0] == ["model", "layout", "KV heads", "type", "per token", "8k"]
    assert ["DeepSeek-V3 (671B)", "MLA", "1", "f32", "141 KB", "1.2 GB"] in done.table
    assert ["MHA", "128", "f32", "10 MB", "81.9 GB"] in done.table
    assert sum(row[0] == "qwen2moe" for row in done.table) == 1
    check_picture(picture, "context (tokens)", "memory (MB)", "DeepSeek-V3 (671B) MLA", "qwen2moe GQA")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-l", "many"], 2, "--lengths 'many'"),
        (["-l", "0"], 2, "from 1 on"),
        (["--cache-types", "f16,q3"], 2, "'q3'"),
        (["--published", "gpt-9"], 2, "gpt-9"),
        (["-m", ARCHITECTURES / "bert.gguf"], 1, "encoder"),
        (["-m", "nowhere.gguf"], 1, "nowhere.gguf"),
    ],
    ids=["no number", "nothing", "type", "published", "encoder", "no file"],
)
def test_wrong_use_is_one_line(memory, arguments, code, message):
    done = memory(*(["-m", ARCHITECTURES / "qwen2moe.gguf"] if "-m" not in arguments else []), *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err.splitlines()[-1]
