"""Writes what llama.cpp makes of a list of texts, for tests/test_tokenizer.py, into expected.json beside this file.

    python record.py        (needs llama-cpp-python and gguf; made with llama-cpp-python 0.3.36)

The vocabularies are tiny: their merges and tokens reach across words, numbers, punctuation and lines, so that ids show
where a text was cut. `unigram-mapped.gguf` is `unigram.gguf` with a character map, written here too.
"""

from __future__ import annotations

import ctypes
import json
import struct
from pathlib import Path

import gguf
import llama_cpp as llama

HERE = Path(__file__).resolve().parent

PRE_TOKENIZERS = """
    default gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais exaone4
    jina-v1-en jina-v2-code roberta-bpe trillion granite-docling starcoder refact codeshell exaone minerva-7b mellum2
    command-r smollm falcon llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx
    smaug-bpe chatglm-bpe glm4 glm5 minicpm5 jais-2 qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2
    stablelm2 megrez laguna qwen35 ufakzeka bailingmoe bailingmoe2 llada-moe seed-coder exaone-moe tekken gpt-4o llama4
    kanana2 talkie minimax-m2 granite-embed-multi-97m tiny_aya cohere2moe youtu kimi-k2 superbpe deepseek-llm
    deepseek-coder deepseek-v3 hunyuan-dense joyai-llm hy_v4 spark2_5 afmoe bloom gpt3-finnish poro-chat viking
    chameleon gemma4 granite-embed-multi-311m sarvam-moe
"""

# Name: file and the metadata to change in it.
OTHERS = {
    "whitespace": ("bpe.gguf", {"tokenizer.ggml.model": "whitespace", "tokenizer.ggml.pre": "whitespace"}),
    "sentencepiece": ("sentencepiece.gguf", {}),
    "sentencepiece-no-prefix": ("sentencepiece.gguf", {"tokenizer.ggml.add_space_prefix": False}),
    "sentencepiece-eos": (
        "sentencepiece.gguf",
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    ),
    "unigram": ("unigram.gguf", {}),
    "unigram-no-prefix": ("unigram.gguf", {"tokenizer.ggml.add_space_prefix": False}),
    "unigram-mapped": ("unigram-mapped.gguf", {}),
    "unigram-mapped-merged-spaces": ("unigram-mapped.gguf", {"tokenizer.ggml.remove_extra_whitespaces": True}),
    "wordpiece": ("wordpiece.gguf", {}),
    "wordpiece-cased": ("wordpiece.gguf", {"tokenizer.ggml.normalizer.lowercase": False}),
    "wordpiece-accents": ("wordpiece.gguf", {"tokenizer.ggml.normalizer.strip_accents": False}),
}

TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!  How are you?",
    "I'm sure THEY'LL say it's  fine, don't 'tis 'x ' s",
    "1 12 123 1234 12345 1234567 3.14 2,000,000",
    "x=1234+56;y= 12 ;  if (a==b) { return c[0]; }",
    "def f(x):\n    return x**2  # square\n\n\n\tdef g():\r\n\r\n pass",
    "snake_case camelCase HTTPServer __init__ McDonald ABCdef",
    "https://www.example.com/path?q=1&r=2#frag user@example.com",
    "... --- *** === !!! ??? ,,, '' \"\" $5.00 100% ~x ^y `z` a|b",
    "trailing   ",
    "   leading",
    " \n \n\n  x \t\t y\n \n",
    "caf\u00e9 na\u00efve stra\u00dfe e\u0301a\u0300 \u0301x \u01c4\u01c5\u01c6 \u02b0\u00aa",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0391\u0392\u0393\u03c2",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4e2d\u6587abc\u4e2d\u6587 123 \u3000\u3000\u4e16\u754c  \u754c",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c \u30ab\u30bf\u30ab\u30ca\u30fc\uff76",
    "\uc548\ub155\ud558\uc138\uc694 \u1112\u1161\u11ab \u3131\u3105",
    "\u0645\u0631\u062d\u0628\u0627\u060c \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u061b \u0664\u0665",
    "\u0939\u093f\u0928\u094d\u0926\u0940\u0964 \u0e44\u0e17\u0e22 \u1000\u17a0\u0e81",
    "\u0967\u0968\u0969 \u00bd \u2167 \u00b2 12\u0969 1\u00bd",
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001fae8 1\ufe0f\u20e3 \u20ac",
    "\u2018curly\u2019 \u201cquotes\u201d \u2014 dash\u2026 it\u2019s",
    "\u00a0nbsp\u2003em\u200bzw\u2028line\x85nel\x1c\x1d\x7f\x00",
    "\ufb01\ufb00 \uff21\uff22 \u2460 \ufffd \u0378 \ue000 \U000e0001",
    "\U00020000\U0002a700\U0002ebf0 \uf900 \u2f00",
    "<s>text</s> <|user|> hi<|end|>\n<|assistant|> a <|end|> b<|start|><|pad|>",
    "<|endoftext|><|endoftext|> <0x0A> <unk> [MASK] [CLS]",
    "<sentinel:3> IMGIMGABCDZ IMGIMGABCDEZ",
    "the the the  the\u2581the \u2581\u2581x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "a b c d , e . f ? g ' h 's 'm 're n 't",
    "                    deep" + " " * 70 + "x",
]
RAW = [
    b"a\xff\xfe\x00b",
    b"\xc3(\xe2\x82 \xf0\x9f\x98",
    b"\xed\xa0\x80x\xc0\x80y\xe0\x80\x80",
    b"ok \x80\xbf\xe4\xbd\xa0\xe4\xbd",
]
MAPPED = {
    "\ufb01": "fi",
    "\uff21": "A",
    "\uff22": "B",
    "\u2460": "1",
    "e\u0301": "\u00e9",
    "a\u0300": "\u00e0",
    "a": "a",
    "\u3000": " ",
    "\t": " ",
    "\n": " ",
    "\u200b": "",
    "\u00bd": "1 2",
    "\ufffd": " ",
}


def double_array(mapping: dict[str, str]) -> bytes:
    """A precompiled character map: length, double array (Darts-clone), replacements."""
    trie: dict = {}
    texts = bytearray(b"")
    for key, value in mapping.items():
        branch = trie
        for byte in key.encode():
            branch = branch.setdefault(byte, {})
        branch[0] = len(texts)
        texts += value.encode() + b"\0"
    units: dict[int, int] = {0: 0}
    bases: set[int] = set()

    def place(node: int, branch: dict) -> None:
        base = next(b for b in range(1, 1 << 20) if b not in bases and not any(b ^ byte in units for byte in branch))
        bases.add(base)
        units[node] |= (node ^ base) << 10 | (0 in branch) << 8
        for byte, below in branch.items():
            units[base ^ byte] = below | 1 << 31 if byte == 0 else byte
        for byte, below in branch.items():
            if byte:
                place(base ^ byte, below)

    place(0, trie)
    size = (max(units) // 256 + 2) * 256
    array = struct.pack(f"<{size}I", *(units.get(index, 0) for index in range(size)))
    return struct.pack("<I", len(array)) + array + bytes(texts)


def write_mapped(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, value)
        else:
            writer.add_key_value(field.name, value, field.types[0])
    writer.add_array("tokenizer.ggml.precompiled_charsmap", double_array(MAPPED))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class Vocabulary:
    def __init__(self, path: Path, changes: dict[str, str | bool]):
        overrides = (llama.llama_model_kv_override * (len(changes) + 1))()
        for override, (key, value) in zip(overrides, changes.items(), strict=False):
            override.key = key.encode()
            if isinstance(value, bool):
                override.tag, override.value.val_bool = llama.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
            else:
                override.tag, override.value.val_str = llama.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
        parameters = llama.llama_model_default_params()
        parameters.vocab_only = True
        parameters.kv_overrides = overrides
        self.model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        self.vocab = llama.llama_model_get_vocab(self.model)

    def encode(self, text: bytes, special: bool) -> list[int]:
        ids = (ctypes.c_int32 * (len(text) * 4 + 16))()
        return ids[: llama.llama_tokenize(self.vocab, text, len(text), ids, len(ids), special, special)]

    def decode(self, ids: list[int], special: bool) -> str:
        buffer = ctypes.create_string_buffer(len(ids) * 64 + 64)
        array = (ctypes.c_int32 * len(ids))(*ids)
        size = llama.llama_detokenize(self.vocab, array, len(ids), buffer, len(buffer), special, True)
        return buffer.raw[:size].decode("utf-8", "replace")

    def record(self, with_special: bool) -> dict:
        inputs = [text.encode() for text in TEXTS] + RAW
        plain = [self.encode(text, False) for text in inputs]
        texts = [self.decode(ids, False) for ids in plain]
        record = {
            "plain": plain,
            "decoded": {i: text for i, text in enumerate(texts) if i >= len(TEXTS) or text != TEXTS[i]},
        }
        if with_special:
            record["special"] = [self.encode(text, True) for text in inputs]
            record["special_decoded"] = [self.decode(ids, True) for ids in record["special"]]
        record["ends"] = [
            i for i in range(llama.llama_vocab_n_tokens(self.vocab)) if llama.llama_vocab_is_eog(self.vocab, i)
        ]
        return record


def main() -> None:
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    write_mapped(HERE / "unigram.gguf", HERE / "unigram-mapped.gguf")
    records = {}
    for name, (file, changes) in OTHERS.items():
        records[name] = {"file": file, "changes": changes} | Vocabulary(HERE / file, changes).record(True)
    groups: dict[str, list[str]] = {}
    for name in PRE_TOKENIZERS.split():
        record = Vocabulary(HERE / "bpe.gguf", {"tokenizer.ggml.pre": name}).record(False)
        groups.setdefault(json.dumps(record), []).append(name)
    content = {
        "texts": TEXTS,
        "raw": [text.hex() for text in RAW],
        "vocabularies": records,
        "pre_tokenizers": [{"names": names} | json.loads(record) for record, names in groups.items()],
    }
    (HERE / "expected.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
