"""`experiment languages`: the built-in text, counts by the tokenizers themselves, and what is printed of them."""

from __future__ import annotations

import tomllib
import unicodedata
from pathlib import Path

import pytest
from experiment_cases import Command, check_picture

from tinyllm import load_tokenizer
from tinyllm.errors import InvalidParameterError
from tinyllm.experiments.languages import article_1, cost_of, picture

TOKENIZERS = Path(__file__).parent / "data" / "tokenizer"
BPE, WORDPIECE = TOKENIZERS / "bpe.gguf", TOKENIZERS / "wordpiece.gguf"


@pytest.fixture
def languages(monkeypatch, capsys, tmp_path):
    command = Command(monkeypatch, capsys, tmp_path)
    return lambda *arguments: command("languages", *arguments)


def test_the_text_is_there_in_languages_of_many_scripts_and_is_installed():
    texts = article_1()
    assert texts[0].name == "English" and len({text.language for text in texts}) == len(texts) >= 12
    for text in texts:
        letters = [char for char in text.text if char.isalpha()]
        script = {"Han": "CJK", "Kanji, Kana": "CJK HIRAGANA KATAKANA"}.get(text.script, text.script.upper())
        assert all(unicodedata.name(char).split()[0] in script.split() for char in letters), text.name
        assert unicodedata.is_normalized("NFC", text.text) and len(letters) > 30
    project = tomllib.loads((TOKENIZERS.parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["tinyllm.experiments"] == ["*.json"]


@pytest.mark.parametrize("path", [BPE, WORDPIECE, TOKENIZERS / "unigram.gguf"], ids=lambda path: path.stem)
def test_a_cost_counts_what_the_tokenizer_gives(path):
    tokenizer = load_tokenizer(path)
    for text in article_1():
        cost = cost_of(tokenizer, text.text)
        ids = tokenizer.encode(text.text, add_special=False)
        assert cost.n_tokens == len(ids) and cost.n_unknown == sum(token == tokenizer.unk_id for token in ids)
        assert cost.per_character == len(ids) / len(text.text)
        assert cost.per_byte == len(ids) / len(text.text.encode())


def test_bytes_are_never_unknown_and_missing_characters_are():
    thai = next(text.text for text in article_1() if text.language == "th")
    assert cost_of(load_tokenizer(BPE), thai).n_unknown == 0
    lost = cost_of(load_tokenizer(WORDPIECE), thai)
    assert lost.n_unknown == lost.n_tokens == 3
    with pytest.raises(InvalidParameterError, match="empty"):
        cost_of(load_tokenizer(BPE), "")


def test_the_table_has_a_row_per_language_and_columns_per_model(languages):
    done = languages("-m", BPE, "-m", WORDPIECE)
    assert done.code == 0 and done.err == ""
    bpe, wordpiece, headers, *rows = done.table
    assert bpe[0].startswith("A bpe: BPE, ") and wordpiece[0].startswith("B wordpiece: WPM, ")
    assert headers.count("× en") == 2 and headers[-1] == "UNKNOWN" and headers.count("UNKNOWN") == 1
    assert [row[0] for row in rows] == [text.name for text in article_1()]
    thai = next(row for row in rows if row[0] == "Thai")
    text = next(text.text for text in article_1() if text.language == "th")
    assert thai[2:5] == [str(len(text)), str(len(text.encode())), str(cost_of(load_tokenizer(BPE), text).n_tokens)]
    assert rows[0][7] == "1.00" and thai[-1] == "3"


def test_own_texts_take_the_place_of_the_built_in_one(languages, tmp_path):
    (tmp_path / "a.txt").write_text("one two\n")
    (tmp_path / "b.txt").write_text("ein zwei drei vier\n")
    done = languages("-m", BPE, "-f", f"a={tmp_path / 'a.txt'}", "-f", f"b={tmp_path / 'b.txt'}", "--json")
    tokenizer = load_tokenizer(BPE)
    counts = [len(tokenizer.encode(text, add_special=False)) for text in ("one two", "ein zwei drei vier")]
    (model,) = done.answer["models"]
    assert [text["characters"] for text in done.answer["texts"]] == [7, 18]
    assert [cost["tokens"] for cost in model["costs"]] == counts
    assert model["costs"][1]["ratio"] == counts[1] / counts[0]
    assert model["model"] == "bpe" and model["n_vocab"] == tokenizer.n_vocab


@pytest.mark.parametrize("argument", ["de", "=x.txt", "de=", "de=EMPTY"])
def test_a_text_that_cannot_be_is_wrong_usage(languages, tmp_path, argument):
    (tmp_path / "empty.txt").touch()
    done = languages("-m", BPE, "--file", argument.replace("EMPTY", str(tmp_path / "empty.txt")))
    assert done.code == 2 and "--file" in done.err
    missing = languages("-m", BPE, "--file", f"de={tmp_path / 'none.txt'}")
    assert missing.code == 1 and missing.err.count("\n") == 1 and "none.txt" in missing.err


def test_the_picture_names_languages_and_the_most_expensive(languages, tmp_path):
    done = languages("-m", BPE, "--svg", tmp_path / "languages.svg")
    assert done.code == 0
    root = check_picture(tmp_path / "languages.svg", "English", "Thai", "Korean", "tokens / tokens for English")
    texts = article_1()
    costs = [cost_of(load_tokenizer(BPE), text.text) for text in texts]
    worst = max(range(len(texts)), key=lambda i: costs[i].n_tokens)
    assert f"bpe: most for {texts[worst].name}" in root[1].text
    assert picture(["bpe"], texts, [costs]) == (tmp_path / "languages.svg").read_text()
