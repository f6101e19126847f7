"""Ids and texts against llama.cpp's, for every pre-tokenizer and kind of vocabulary: those in tests/data/tokenizer and,
where they are present, the large reference collections.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import reference_dir

import tinyllm.text.splitting
from tinyllm import load_tokenizer
from tinyllm.errors import InvalidParameterError, TokenizerError
from tinyllm.gguf_file import open_gguf
from tinyllm.text.merges import merge
from tinyllm.text.pre_tokenizers import PRE_TOKENIZERS
from tinyllm.text.splitting import UNDERLINE
from tinyllm.tokenizer import Tokenizer, ids_of

DATA = Path(__file__).parent / "data" / "tokenizer"
EXPECTED = json.loads((DATA / "expected.json").read_text())
INPUTS = EXPECTED["texts"] + [bytes.fromhex(text) for text in EXPECTED["raw"]]
BY_PRE_TOKENIZER = {name: group for group in EXPECTED["pre_tokenizers"] for name in group["names"]}
REFERENCES = """
    baichuan bert-bge command-r deepseek-coder deepseek-llm falcon gemma-4 gemma3-270m gpt-2 llama-bpe llama-spm mpt
    nomic-bert-moe phi-3 qwen2.5-coder qwen2 qwen35 refact smollm2 starcoder
"""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@cache
def metadata_of(path: Path) -> dict[str, Any]:
    with open_gguf(path) as file:
        return dict(file.metadata)


def small(file: str, **changes: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata_of(DATA / file) | {f"tokenizer.ggml.{k}": v for k, v in changes.items()})


def made_up(
    tokens: dict[str, int], name: str = "", architecture: str = "llama", model: str = "gpt2", **more: Any
) -> Tokenizer:
    """A vocabulary of single printable characters and of the given tokens with their types, which come first."""
    characters = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ", UNDERLINE]
    words = [*tokens, *characters]
    types = [*tokens.values(), *([NORMAL] * len(characters))]
    fields = {
        "model": model,
        "pre": "gpt-2",
        "tokens": words,
        "token_type": np.array(types, np.int32),
        "scores": np.zeros(len(words), np.float32),
        "merges": [],
    } | more
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    return Tokenizer.from_metadata(metadata | {"general.name": name, "general.architecture": architecture})


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream_decoder()
    return [*map(decoder.push, ids), decoder.flush()]


# Small vocabularies, recorded from llama.cpp


def assert_as_recorded(tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    for index, text in enumerate(INPUTS):
        ids = record["plain"][index]
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text
        assert tokenizer.decode(ids) == record["decoded"].get(str(index), text), text
        assert "".join(streamed(tokenizer, ids)) == pieces(tokenizer, ids), text
        if "special" in record:
            ids = record["special"][index]
            assert tokenizer.encode(text) == ids, text
            assert tokenizer.decode(ids, remove_special=True) == record["special_decoded"][index], text
    assert sorted(tokenizer.eog_ids) == record["ends"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS.keys() - {"whitespace"})
def test_pre_tokenizer(name):
    assert_as_recorded(small("bpe.gguf", pre=name), BY_PRE_TOKENIZER[name])


@pytest.mark.parametrize("name", EXPECTED["vocabularies"])
def test_vocabulary(name):
    record = EXPECTED["vocabularies"][name]
    tokenizer = Tokenizer.from_metadata(metadata_of(DATA / record["file"]) | record["changes"])
    assert_as_recorded(tokenizer, record)


# The reference collections


def reference_tokenizer(data: dict[str, Any]) -> Tokenizer:
    folders = [reference_dir() / "reference/tokenizer", Path(os.environ.get("TINYLLM_MODELS", "."))]
    path = next((folder / data["gguf"] for folder in folders if (folder / data["gguf"]).exists()), None)
    if path is None:
        pytest.skip(f"needs the model {data['gguf']} (TINYLLM_MODELS names its folder)")
    return Tokenizer.from_metadata(metadata_of(path) | data.get("override", {}))


@pytest.mark.shared
@pytest.mark.parametrize("name", REFERENCES.split())
def test_reference(name):
    data = json.loads((reference_dir() / f"reference/tokenizer/{name}.expected.json").read_text())
    tokenizer = reference_tokenizer(data)
    metadata_of.cache_clear()
    for case in data["cases"]:
        text, plain, special = case["text"], case["ids_plain"], case["ids_special"]
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
        assert tokenizer.encode(text) == special, text
        assert tokenizer.decode(plain) == case["detok"], text
        assert tokenizer.decode(special, remove_special=True) == case.get("detok_special", case["detok"]), text
        assert pieces(tokenizer, plain) == "".join(streamed(tokenizer, plain)) == case.get("pieces", case["detok"])
    for attribute, key in {"kind": "vocab_type", "pre": "pre_tokenizer", "n_vocab": "n_vocab"}.items():
        assert getattr(tokenizer, attribute) == data[key] or key == "pre_tokenizer"
    for flag in ("add_bos", "add_eos", "add_sep"):
        assert getattr(tokenizer, flag) == data[flag], flag
    assert sorted(tokenizer.eog_ids) == data["end_of_generation_ids"]
    # Of several tokens that end a turn, llama.cpp takes the first in the order of its hash table.
    named = {role: token for role, token in data["special_ids"].items() if role not in ("nl", "eot")}
    assert {role: tokenizer.special_ids.get(role) for role in named} == named
    assert tokenizer.eot_id is None or tokenizer.eot_id in tokenizer.eog_ids


@pytest.mark.shared
def test_conformance():
    folder = reference_dir() / "conformance/tokenizers"
    data = json.loads((folder / "cases.json").read_text())
    for name, want in data["files"].items():
        tokenizer = load_tokenizer(folder / f"{name}.gguf")
        for index, text in enumerate(data["texts"]):
            plain, key = want["plain"][index], str(index)
            assert tokenizer.encode(text, False, False) == plain, (name, text)
            assert tokenizer.encode(text, False, True) == want["parse_special"].get(key, plain), (name, text)
            assert tokenizer.decode(plain) == want["detokenized"].get(key, text), (name, text)
        assert tokenizer.encode("")[:1] == want["add_special_before"], name
        assert tokenizer.encode(data["texts"][8], parse_special=False) == want["add_special_example"], name


@pytest.mark.shared
@pytest.mark.parametrize(
    ("vocabulary", "text", "ids"),
    [
        ("llama-bpe", "3333", "8765 18"),
        ("llama-spm", "The train is moving very fast!", "1 450 7945 338 8401 1407 5172 29991"),
        (
            "llama-bpe",
            "请你基于以下「评估标准」",
            "128000 15225 57668 125510 88852 13177 64479 112494 110778 10646",
        ),
    ],
)
def test_known_faults(vocabulary, text, ids):
    tokenizer = load_tokenizer(reference_dir() / f"reference/tokenizer/{vocabulary}.gguf")
    ids = [int(token) for token in ids.split()]
    assert tokenizer.encode(text, add_special=ids[0] == tokenizer.bos_id) == ids


# The default model

SMOLLM2 = {
    "Hello world": "19556 905",
    " Hello world": "38699 905",
    "Hello, y'all!  How are you?": "19556 28 329 23 449 17 216 1073 359 346 47",
    "3333": "35 35 35 35",
    "What is 3333+777?": "1780 314 216 35 35 35 35 27 39 39 39 47",
    "I'll we've THEY'RE": "57 3060 392 3543 6462 73 23 3256",
    "\n\n\n": "16506",
    "    if x:\n        return 1\n": "333 585 1792 42 448 1003 216 33 198",
    "\t\tx": "197 197 104",
    "café": "83 1939 2756",
    "e\u0301": "85 151 219",
    "你好": "18645 250 48392 138",
    "😀": "10813 242 218",
    "👩‍👩‍👧": "10813 235 119 321 231 10813 235 119 321 231 10813 235 117",
    "ΑΒΓ": "153 235 153 236 153 237",
    "a\u00a0b": "81 15442 82",
    "ied 4 ½ months": "885 216 36 216 16738 2704",
    "trailing   ": "4861 4966 333",
    "   leading": "256 2899",
    "\r\n": "2738",
    "": "",
    "A" * 20: "44843 44843 26024",
    "\0": "190",
    "ﬀ": "20755 218",
    "<|im_start|>user\nhi<|im_end|>\n": "1 4093 198 6004 2 198",
}


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.mark.model
def test_smollm2(smollm2):
    assert {text: smollm2.encode(text) for text in SMOLLM2} == {
        text: [int(token) for token in ids.split()] for text, ids in SMOLLM2.items()
    }
    control_as_text = smollm2.encode("<|im_start|>system", parse_special=False)
    assert control_as_text == [44, 108, 306, 79, 3738, 108, 46, 9690]


@pytest.mark.model
@pytest.mark.parametrize(
    ("ids", "steps"),
    [
        ([10813, 242, 218], ["", "", "😀", ""]),
        ([18645, 250, 48392, 138], ["", "你", "", "好", ""]),
        ([10813, 235, 119, 321, 231, 10813, 235, 117], ["", "", "👩", "", "\u200d", "", "", "👧", ""]),
        ([10813], ["", "\ufffd"]),
        ([10813, 19556], ["", "\ufffdHello", ""]),
    ],
)
def test_streaming_holds_back_what_is_no_whole_character(smollm2, ids, steps):
    assert streamed(smollm2, ids) == steps


# Streaming and decoding


def test_bytes_that_make_no_character_come_out_of_the_stream_at_once():
    tokenizer = small("bpe.gguf")
    byte = {tokenizer.token_bytes(token): token for token in range(256)}
    decoder = tokenizer.stream_decoder()
    assert decoder.push(byte[b"\x80"]) == "\ufffd"
    assert [decoder.push(byte[bytes([part])]) for part in "é".encode()] == ["", "é"]
    assert [decoder.push(byte[part]) for part in (b"\xf0", b"\x9f", b"a")] == ["", "", "\ufffda"]
    assert decoder.push(byte[b"\xe4"]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == "" and decoder.push(byte[b"b"]) == "b"


def test_token_text_shows_bytes():
    tokenizer = small("bpe.gguf")
    (first, second, third) = tokenizer.encode("€", add_special=False)
    assert [tokenizer.token_text(token) for token in (first, second, third)] == ["<0xE2>", "<0x82>", "<0xAC>"]


def test_special_tokens_can_be_left_out_of_a_text():
    tokenizer = small("bpe.gguf")
    ids = tokenizer.encode("a<|user|>b", add_special=False)
    assert tokenizer.decode(ids) == "a<|user|>b"
    assert tokenizer.decode(ids, skip_special=True) == "ab"
    assert [tokenizer.is_control(token) for token in ids] == [False, True, False]


@pytest.mark.parametrize("token", [-1, 962, 1 << 40])
@pytest.mark.parametrize("method", ["decode", "token_bytes", "token_text", "is_control"])
def test_ids_out_of_range(method, token):
    tokenizer = small("bpe.gguf")
    with pytest.raises(TokenizerError, match=f"^{token} is no token: ids go from 0 to 961$"):
        getattr(tokenizer, method)([token] if method == "decode" else token)


# Text that is not quite text


def test_surrogates_are_the_bytes_that_python_hides_in_them():
    tokenizer = small("sentencepiece.gguf")
    assert tokenizer.encode("a\udcff\udc80") == tokenizer.encode(b"a\xff\x80")
    assert tokenizer.decode(tokenizer.encode("\udce4\udcbd\udca0"), remove_special=True) == " 你"


@pytest.mark.parametrize("file", ["bpe.gguf", "sentencepiece.gguf", "unigram.gguf", "wordpiece.gguf"])
@pytest.mark.parametrize("text", ["\ud800", "\udfff x", "a\udc00\udcff", b"\xf7\xbf\xbf\xbf", bytes(range(256)), "\0"])
def test_any_text_has_ids(file, text):
    tokenizer = small(file)
    assert tokenizer.decode(tokenizer.encode(text)) is not None


# Special tokens


def test_tokens_known_by_name_end_a_generation():
    tokenizer = made_up({"<|im_end|>": CONTROL, "<|eot_id|>": NORMAL, "x<|end|>": NORMAL, "<|file_sep|>": NORMAL})
    assert tokenizer.eog_ids == {0, 1, 3, 11}  # 11: what byte-pair vocabularies end with unless their file says so
    assert tokenizer.eot_id == 1
    assert tokenizer.is_control(1) and not tokenizer.is_control(2)
    assert tokenizer.encode("<|eot_id|>") == [1]
    assert len(tokenizer.encode("<|eot_id|>", parse_special=False)) == len("<|eot_id|>")


def test_given_ids_win_over_names():
    tokenizer = made_up({"<|im_end|>": CONTROL, "stop": CONTROL}, eot_token_id=1, eos_token_id=1)
    assert (tokenizer.eot_id, tokenizer.eos_id) == (1, 1)
    assert tokenizer.eog_ids == {0, 1}


@pytest.mark.parametrize("others", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_end_of_a_message_does_not_end_the_turn_of_some_formats(others):
    tokenizer = made_up({"<|end|>": CONTROL} | dict.fromkeys(others, CONTROL), eos_token_id=1)
    assert tokenizer.eog_ids == {1, 2}
    assert not tokenizer.is_control(0)
    assert tokenizer.encode("<|end|>", parse_special=False) == [0]


def test_strike_through_tag_of_gemma_4_does_not_end_a_generation():
    tokenizer = made_up({"</s>": CONTROL, "<|tool_response>": CONTROL}, eos_token_id=1)
    assert tokenizer.eog_ids == {1}
    assert not tokenizer.is_control(0)


def test_longest_special_token_wins_everywhere():
    tokenizer = made_up({"<a>": USER_DEFINED, "<a><b>": USER_DEFINED, "b><a": USER_DEFINED})
    assert tokenizer.encode("<a><b><a>", parse_special=False) == [1, 0]
    assert tokenizer.encode("<b><a>") == [*tokenizer.encode("<"), 2, *tokenizer.encode(">")]


@pytest.mark.parametrize(
    ("token", "name", "architecture", "text", "left", "right"),
    [
        ("<mask>", "", "nomic-bert-moe", "a \n<mask> b", "a", " b"),
        ("[MASK]", "Modern-BERT base", "bert", "a [MASK] b", "a", " b"),
        ("<x>", "Phi-3 mini", "phi3", "a <x> \t\nb", "a ", "b"),
        ("<s>", "Phi-3 mini", "phi3", "a <s> b", "a ", " b"),
        ("<x>", "other", "llama", "a <x> b", "a ", " b"),
    ],
)
def test_white_space_around_special_tokens(token, name, architecture, text, left, right):
    tokenizer = made_up({token: CONTROL}, name, architecture)
    assert tokenizer.encode(text) == [*tokenizer.encode(left), 0, *tokenizer.encode(right)]


def test_missing_token_is_said_once(caplog):
    tokenizer = made_up({})
    assert tokenizer.encode("a\x01b\x01") == tokenizer.encode("ab")
    assert [record.getMessage() for record in caplog.records] == [
        "the vocabulary has no token for the byte 0x01: it is left out of the text"
    ]


def test_missing_tokens_of_a_text_are_said_in_one_line(caplog):
    tokenizer = made_up({})
    assert tokenizer.encode(bytes(range(1, 9)) + b"a") == tokenizer.encode("a")
    (record,) = caplog.records
    assert "0x07, 0x08: they are left out of the text" in record.getMessage()


# Pre-tokenizer names


@pytest.mark.parametrize(("pre", "said"), [("no-such", "unknown pre-tokenizer 'no-such'"), (None, "names no pre-")])
def test_unknown_pre_tokenizer_is_said(pre, said, caplog):
    tokenizer = small("bpe.gguf", pre=pre)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert said in record.getMessage() and "'default' is used" in record.getMessage()
    text = "12345 a.b"
    assert tokenizer.encode(text) == small("bpe.gguf", pre="default").encode(text)


def test_other_kinds_need_no_pre_tokenizer(caplog):
    small("sentencepiece.gguf", pre="no-such")
    assert not caplog.records


# Broken vocabularies

BROKEN = {
    "no model": ({"model": None}, "tokenizer.ggml.model' is missing"),
    "unknown model": ({"model": "rwkv"}, "tokenizers of kind 'rwkv' are not supported"),
    "model of another type": ({"model": 3}, "model' is not a string"),
    "no tokens": ({"tokens": None}, "tokens' is missing"),
    "empty tokens": ({"tokens": []}, "tokens' is empty"),
    "tokens are numbers": ({"tokens": np.zeros(4, np.int32)}, "tokens' is not a list of strings"),
    "tokens twice": ({"tokens": ["a", "b", "a"]}, "1 tokens are there twice"),
    "no merges": ({"merges": None}, "merges' is missing"),
    "merges are numbers": ({"merges": np.zeros(4, np.int32)}, "merges' is not a list of strings"),
    "merges without space": ({"merges": ["ab", "cd"]}, "not two tokens with a space between"),
    "too few types": ({"token_type": np.ones(3, np.int32)}, "token_type' has 3 values for 962 tokens"),
    "types are floats": ({"token_type": np.ones(962, np.float32)}, "token_type' has numbers of type float32"),
    "types are strings": ({"token_type": ["a"] * 962}, "token_type' is not a list of numbers"),
    "too few scores": ({"scores": np.ones(3, np.float32)}, "scores' has 3 values for 962 tokens"),
    "byte tokens that are none": ({"token_type": np.full(962, BYTE, np.int32)}, "token 0 is of type byte"),
    "bos is a string": ({"bos_token_id": "1"}, "bos_token_id' is not a whole number"),
    "add_bos is a number": ({"add_bos_token": 1}, "add_bos_token' is not true or false"),
    "pre is a number": ({"pre": 1}, "pre' is not a string"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_vocabulary(changes, message):
    metadata = metadata_of(DATA / "bpe.gguf") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_metadata(metadata, source="some.gguf")
    assert message in str(error.value)
    assert str(error.value).startswith("some.gguf: ") and "\n" not in str(error.value)


def test_merges_that_do_not_fit():
    tokenizer = made_up({}, merges=["q q", "a b"])
    assert tokenizer.encode("ba") == tokenizer.encode("b") + tokenizer.encode("a")
    with pytest.raises(TokenizerError, match="its merges do not fit its tokens: they lead to 'ab', which is no token"):
        tokenizer.encode("abc")


@pytest.mark.parametrize(
    "blob", [b"\1", b"\0\0\0\0", b"\x04\0\0\0", b"\x04\0\0\0\xff\xff\xff\xff\0", b"\x03\0\0\0abc\0"]
)
def test_broken_character_map(blob):
    with pytest.raises(TokenizerError, match="precompiled_charsmap'"):
        small("unigram.gguf", precompiled_charsmap=np.frombuffer(blob, np.uint8)).encode("a")


def test_ids_of_special_tokens_out_of_range_are_ignored(caplog):
    tokenizer = small("bpe.gguf", bos_token_id=5000, padding_token_id=0xFFFFFFFF)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (11, None)
    assert "bos_token_id' is 5000, but there are 962 tokens" in caplog.text


def test_unknown_characters_without_an_unknown_token():
    tokenizer = small("wordpiece.gguf", tokens=["a", "b"], token_type=None, unknown_token_id=None)
    with pytest.raises(TokenizerError, match="no token for what is unknown"):
        tokenizer.encode("c", add_special=False)


# Long texts


RUNS = ["a", " ", "\n", "7", "ab", "a ", "é", "!"]


@pytest.mark.parametrize("file", ["bpe.gguf", "sentencepiece.gguf"])
@pytest.mark.parametrize("text", RUNS, ids=ascii)
def test_long_runs(file, text):
    tokenizer = small(file)
    ids = tokenizer.encode(text * 100_000, add_special=False)
    assert tokenizer.decode(ids) == text * 100_000


@pytest.mark.parametrize("file", ["unigram.gguf", "wordpiece.gguf"])
@pytest.mark.parametrize("text", RUNS, ids=ascii)
def test_long_runs_where_not_all_text_is_kept(file, text):
    tokenizer = small(file)
    ids = tokenizer.encode(text * 100_000, add_special=False)
    kept = "e" if (file, text) == ("wordpiece.gguf", "é") else text.strip()
    assert tokenizer.unk_id in ids or "".join(tokenizer.decode(ids).split()) == kept * 100_000


@pytest.mark.parametrize("file", ["sentencepiece.gguf", "unigram.gguf", "unigram-mapped.gguf", "gemma4"])
def test_long_texts_are_cut_where_no_token_reaches_across(file, monkeypatch):
    text = "".join(random.Random(3).choices([*EXPECTED["texts"], " the", "\u2581", "  "], k=400))
    file, changes = ("bpe.gguf", {"pre": "gemma4"}) if file == "gemma4" else (file, {})
    cut = small(file, **changes).encode(text)
    monkeypatch.setattr(tinyllm.text.splitting, "_SHORT", sys.maxsize)
    assert small(file, **changes).encode(text) == cut


def random_words(seed: int) -> Iterator[str]:
    choose = random.Random(seed)
    for _ in range(300):
        yield "".join(choose.choices("etaoinshrdlu", k=choose.randint(1, 40)))


def test_merging_agrees_with_the_tokenizers_library():
    models = pytest.importorskip("tokenizers").models
    metadata = metadata_of(DATA / "bpe.gguf")
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    library = models.BPE(
        {token: index for index, token in enumerate(tokens)}, [tuple(pair.split(" ")) for pair in merges]
    )
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    for word in random_words(7):
        merged = merge(list(word), lambda left, right: ranks.get(f"{left} {right}"))
        assert merged == [token.value for token in library.tokenize(word)]


def test_what_is_no_text_is_refused():
    tokenizer = load_tokenizer(DATA / "bpe.gguf")
    for text in (None, 5, ["a"]):
        with pytest.raises(InvalidParameterError, match="a text is a str or bytes, not"):
            tokenizer.encode(text)
    for prompt in (None, 5, ["a"], [1.5]):
        with pytest.raises(InvalidParameterError, match="a prompt is a text or a list of token ids"):
            ids_of(prompt, tokenizer.encode)
    assert ids_of("ab", tokenizer.encode) == tokenizer.encode("ab") and ids_of((1, 2), tokenizer.encode) == [1, 2]


# The start of a program


def test_loading_is_light(tmp_path):
    program = (
        "import sys, tinyllm; tinyllm.load_tokenizer(sys.argv[1]).encode('a');"
        "print(*sorted({'numba', 'llvmlite', 'tokenizers', 'gguf', 'jinja2'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(DATA / "bpe.gguf")], capture_output=True, text=True, check=True
    )
    assert run.stdout == "\n"
