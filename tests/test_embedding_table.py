"""The embedding table: cosines against a plain computation, words as they stand in a sentence, what lies near them."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from bench_model import write_bench_model
from gguf_builders import write_model
from word_model import write_word_model

from tinyllm.embedding_table import EmbeddingTable, look_up, word_analogy, word_neighbours
from tinyllm.errors import InvalidParameterError, UnsupportedModelError
from tinyllm.gguf_file import open_gguf
from tinyllm.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_word_model(tmp_path_factory.mktemp("words") / "words.gguf")


@pytest.fixture(scope="module")
def words(path):
    """The table and the tokenizer."""
    with open_gguf(path) as file:
        yield EmbeddingTable(file), Tokenizer.from_metadata(file.metadata)


def texts(tokenizer, tokens):
    return [tokenizer.token_text(near.id) for near in tokens]


def test_cosines_of_a_quantized_table_are_those_of_its_values(tmp_path):
    path = write_bench_model(tmp_path / "tiny.gguf")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["token_embd.weight"]
    values = gguf.quants.dequantize(reader.data, reader.tensor_type)
    with open_gguf(path) as file:
        table = EmbeddingTable(file)
        np.testing.assert_allclose(table.rows([3, 70]), values[[3, 70]], rtol=1e-6)
        found = table.cosines(values[[3, 70]])
    lengths = np.linalg.norm(values, axis=1)
    np.testing.assert_allclose(found, values[[3, 70]] @ values.T / lengths / lengths[[3, 70], None], atol=1e-6)


def test_a_file_without_a_table_is_told(tmp_path):
    write_model(tmp_path / "none.gguf", {"output_norm.weight": np.ones(8, np.float32)})
    with open_gguf(tmp_path / "none.gguf") as file, pytest.raises(UnsupportedModelError, match="no embedding table"):
        EmbeddingTable(file)


@pytest.mark.parametrize(
    ("text", "form", "n_tokens"),
    [("king", " king", 1), (" king", " king", 1), ("zz", "zz", 2), ("<s>", "<s>", 1)],
)
def test_a_word_is_looked_up_as_it_stands_in_a_sentence(words, text, form, n_tokens):
    found = look_up(words[1], text)
    assert found.text == form and len(found.ids) == n_tokens


def test_neighbours_are_ordered_and_the_word_and_special_tokens_set_apart(words):
    table, tokenizer = words
    found = word_neighbours(table, tokenizer, "king", 3)
    assert texts(tokenizer, found.nearest) == [" King", " queen", " prince"]
    assert [near.rank for near in found.nearest] == [2, 3, 4]
    assert texts(tokenizer, found.own) == [" king"] and found.own[0].rank == 0
    assert found.own[0].cosine == pytest.approx(1)
    assert texts(tokenizer, found.special)[:1] == ["<s>"] and found.special[0].rank == 1
    everything = table.cosines(table.rows(found.words[0].ids))[0, : tokenizer.n_vocab]
    assert found.mean == pytest.approx(everything.mean(), abs=1e-6)
    assert found.deviation == pytest.approx(everything.std(), abs=1e-6)
    assert found.nearest[0].cosine == pytest.approx(everything[found.nearest[0].id])


def test_a_word_of_several_tokens_is_looked_for_by_the_mean_of_its_rows(words):
    table, tokenizer = words
    found = word_neighbours(table, tokenizer, " king queen", 200)
    assert len(found.words[0].ids) == 2
    mean = table.rows(found.words[0].ids).mean(axis=0, keepdims=True)
    best = {near.id: near.cosine for near in [*found.nearest, *found.own, *found.special]}
    want = table.cosines(mean)[0]
    assert all(cosine == pytest.approx(want[token]) for token, cosine in best.items())
    assert len(found.nearest) == 200 and len(found.own) == 2


def test_an_analogy_leaves_its_words_out_and_tells_their_ranks(words):
    table, tokenizer = words
    found = word_analogy(table, tokenizer, "king", "man", "woman", 2)
    assert texts(tokenizer, found.nearest)[0] == " queen"
    assert texts(tokenizer, found.own) == [" king", " man", " woman"]
    ranks = {near.id: near.rank for near in [*found.nearest, *found.own]}
    king, man, woman = (near.rank for near in found.own)
    assert ranks[found.nearest[0].id] == 0 < king < woman < man


def test_an_empty_word_is_told(words):
    with pytest.raises(InvalidParameterError, match="nothing to look up"):
        look_up(words[1], "")


def test_the_command_prints_ranks_pieces_and_what_is_set_apart(tinyllm, path):
    done = tinyllm("embed", "-m", path, "--neighbours", "king", "-k", 2)
    assert done.returncode == 0 and done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1] == ["RANK", "TOKEN", "ID", "COSINE"]
    assert lines[2][1] == "·King" and lines[2][-3:] == ["the", "same", "word"]
    assert lines[4][1] == "·king" and lines[4][-2:] == ["asked", "for"]
    assert lines[5][1] == "<s>" and lines[5][-1] == "special"
    several = tinyllm("embed", "-m", path, "--neighbours", " king queen")
    assert "2 tokens (·king ·queen)" in several.stderr


def test_the_command_prints_json_for_an_analogy(tinyllm, path):
    done = tinyllm("embed", "-m", path, "--analogy", "king", "man", "woman", "--json")
    found = json.loads(done.stdout)
    assert found["nearest"][0]["text"] == " queen" and bytes(found["nearest"][0]["bytes"]) == b" queen"
    assert [word["text"] for word in found["words"]] == [" king", " man", " woman"]
    assert len(found["nearest"]) == 10 and {near["text"] for near in found["own"]} == {" king", " man", " woman"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--neighbours", "a", "--analogy", "a", "b", "c"],
        ["--neighbours", "a", "b"],
        ["--neighbours", "a", "--similarity"],
        ["--neighbours", ""],
        ["a", "-k", "3"],
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_wrong_usage(tinyllm, path, arguments):
    done = tinyllm("embed", "-m", path, *arguments)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("Error: Invalid value")
