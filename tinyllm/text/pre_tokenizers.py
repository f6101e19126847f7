"""The pre-tokenizers of byte-pair vocabularies: out flows the one for a name in `tokenizer.ggml.pre`. The expressions
are those that the models were trained with, in the reading of llama.cpp, for which all letters beyond ASCII are alike.
"""

from __future__ import annotations

from tinyllm.text.characters import HAN, LETTER, MARK, NUMBER, PUNCTUATION, SYMBOL
from tinyllm.text.splitting import DigitGroups, Pattern, PreTokenizer


def _ranges(hexadecimal: str) -> str:
    """Ranges of code points as what stands inside the brackets of an expression."""
    return "".join("-".join(chr(int(end, 16)) for end in entry.split("-")) for entry in hexadecimal.split())


# \p{L} and so on over `classes(text)`, to stand inside brackets. W is \s, which in Python has U+001C to U+001F too.
L = f"A-Za-z{LETTER}{HAN}"
N = f"0-9{NUMBER}"
M = MARK
P = rf"!-#%-*,-/:;?@\[-\]_{{}}{PUNCTUATION}"
S = rf"$+<->\^`|~{SYMBOL}"
W = r"\t-\r "

_NOT_LOWER = f"A-Z{LETTER}{HAN}"
_NOT_UPPER = f"a-z{LETTER}{HAN}"
_NOT_HAN = f"A-Za-z{LETTER}"

_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_CONTRACTED = f"(?:{_CONTRACTION})?"
_SPACES = f"[{W}]+(?![^{W}])|[{W}]+"
_SYMBOLS_SLASHES = rf" ?[^{W}{L}{N}]+[\r\n/]*"
_TO_THREE_NUMBERS = f"[{N}]{{1,3}}"
_NUMBERS = f"[{N}]+"


def _words(
    contractions: str = _CONTRACTION,
    letters: str = rf"[^\r\n{L}{N}]?[{L}]+",
    numbers: str = f"[{N}]",
    symbols: str = rf" ?[^{W}{L}{N}]+[\r\n]*",
    newlines: str = rf"[{W}]*[\r\n]+",
    spaces: str = _SPACES,
) -> Pattern:
    """The expression that most models vary; by default that of Qwen2."""
    return Pattern("|".join(filter(None, (contractions, letters, numbers, symbols, newlines, spaces))))


def _cased(marks: str = "", suffix: str = "") -> str:
    """Words that begin with any number of capitals and go on in small letters."""
    prefix, upper, lower = rf"[^\r\n{L}{N}]?", f"[{_NOT_LOWER}{marks}]", f"[{_NOT_UPPER}{marks}]"
    return f"{prefix}{upper}*{lower}+{suffix}|{prefix}{upper}+{lower}*{suffix}"


def _joined(newlines: str = rf" ?[{P}{S}]+[\r\n]*|[{W}]*[\r\n]+") -> Pattern:
    """The expression of DeepSeek V3: punctuation joins the ASCII word behind it. Numbers are left to other steps."""
    letters = rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n{L}{P}{S}]?[{L}{M}]+"
    return Pattern(f"{letters}|{newlines}|{_SPACES}")


def _literal(expression: str) -> Pattern:
    return Pattern(expression, by_class=False)


_NUMBER = Pattern(f"[{N}]")
_GPT2 = Pattern(f"'(?:[stmd]|re|ve|ll)| ?[{L}]+| ?[{N}]+| ?[^{W}{L}{N}]+|{_SPACES}")
_QWEN2 = _words()
_LLAMA3 = _words(numbers=_TO_THREE_NUMBERS)
_GPT4O = _words("", _cased(suffix=_CONTRACTED), _TO_THREE_NUMBERS, _SYMBOLS_SLASHES)
_MARKED_LETTERS = rf"[^\r\n{L}{N}]?[{L}{M}]+{_CONTRACTED}"
_NEWLINE = Pattern(r"[\r\n]")
_LINES = Pattern(r"[^\n]+|\n+")
_CLAUSES = _literal(rf" ?[^(){W}|.,!?{_ranges('2026 3002 FF0C 3001 964 6D4 60C')}]+")
_EAST_ASIAN = _literal(f"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+")
_CHINESE_JAPANESE = f"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_FROM_THE_RIGHT = DigitGroups(N, keep_text=True)

_DEEPSEEK_LETTERS = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_PUNCTUATION = rf"!-/:-~{_ranges('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}"
_AFMOE_SCRIPTS = _ranges(
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
    "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_YOUTU_SCRIPTS = (
    f"[{_ranges('AC00-D7A3 3131-318E')}]+|"
    f"[{_ranges('FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F')}]+|"
    f"[{_ranges('3105-312F')}]+|{_CHINESE_JAPANESE}"
)
_JAIS2_SPACES = "|".join(f"[{W}]{{{n}}}(?![^{W}])" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + f"|[{W}]"
_PHRASE = rf"[^\r\n{L}{N}]?[{L}][{M}]*(?: ?[{L}][{M}]*)*"

DEFAULT_STEPS = (Pattern(rf"[{P}$+<=>\^~|]+"), _GPT2, Pattern(_NUMBERS), Pattern("[0-9]{3}"))

_BY_NAMES = {
    "default": PreTokenizer(DEFAULT_STEPS, clean_spaces=True),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais exaone4":
        PreTokenizer((_GPT2,), clean_spaces=True),
    "jina-v1-en jina-v2-code roberta-bpe": PreTokenizer((_GPT2,), clean_spaces=True, add_sep=True),
    "trillion granite-docling": PreTokenizer((_GPT2,)),
    "starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer((_NUMBER, _GPT2), clean_spaces=True),
    "command-r smollm": PreTokenizer((_NUMBER, _GPT2)),
    "falcon": PreTokenizer((Pattern(rf"[{P}$+<=>\^~|`]+"), _GPT2, Pattern("[0-9]{3}")), clean_spaces=True),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano":
        PreTokenizer((_LLAMA3,), whole_words=True, clean_spaces=True, add_bos=True),
    "dbrx smaug-bpe": PreTokenizer((_LLAMA3,), clean_spaces=True),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), clean_spaces=True, default_bos=False),
    "glm4 glm5": PreTokenizer((_LLAMA3,), whole_words=True, clean_spaces=True, default_bos=False),
    "minicpm5":
        PreTokenizer((Pattern(_TO_THREE_NUMBERS), _words(numbers=_NUMBERS)), whole_words=True, clean_spaces=True),
    "jais-2": PreTokenizer((_words(numbers=_TO_THREE_NUMBERS, spaces=_JAIS2_SPACES),), clean_spaces=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "stablelm2 megrez": PreTokenizer((_QWEN2,), clean_spaces=True),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "qwen35": PreTokenizer(
        (_words(letters=rf"[^\r\n{L}{N}]?[{L}{M}]+", symbols=rf" ?[^{W}{L}{M}{N}]+[\r\n]*"),)
    ),
    "ufakzeka": PreTokenizer((_words(contractions=""),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_words(newlines=rf"[{W}]*[\r\n]"),)),
    "seed-coder": PreTokenizer((_words(symbols=rf" ?[^{W}{L}{N}\r\n]+"),)),
    "exaone-moe": PreTokenizer(
        (_words(letters=_PHRASE, symbols=rf" ?[^{W}{L}{N}]+[\r\n/]?", newlines=rf"[{W}]*[\r\n]"),), clean_spaces=True
    ),
    "tekken":
        PreTokenizer((_words("", _cased(), symbols=_SYMBOLS_SLASHES),), whole_words=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer(
        (_words("", _cased(M, _CONTRACTED), _TO_THREE_NUMBERS, _SYMBOLS_SLASHES),), whole_words=True
    ),
    "tiny_aya cohere2moe":
        PreTokenizer((_FROM_THE_RIGHT, _words("", _MARKED_LETTERS, _TO_THREE_NUMBERS, _SYMBOLS_SLASHES))),
    "youtu": PreTokenizer(
        (_literal(_YOUTU_SCRIPTS), _words("", _MARKED_LETTERS, symbols=_SYMBOLS_SLASHES)), whole_words=True
    ),
    "kimi-k2":
        PreTokenizer((_words(f"[{HAN}]+", rf"[^\r\n{L}{N}]?[{_NOT_HAN}]+{_CONTRACTED}", _TO_THREE_NUMBERS),)),
    "superbpe": PreTokenizer((Pattern(_NUMBERS), DigitGroups("0-9", keep_text=False))),
    "deepseek-llm": PreTokenizer((
        _NEWLINE, _literal(f"[{W}]?[{_DEEPSEEK_LETTERS}]+"), _literal(f"[{W}]?[{_DEEPSEEK_PUNCTUATION}]+"),
        _literal(rf"[{W}]+\Z"), _EAST_ASIAN, Pattern(_NUMBERS),
    )),
    "deepseek-coder":
        PreTokenizer((_NEWLINE, Pattern(f"[{W}]?[{L}]+"), Pattern(f"[{W}]?[{P}]+"), _EAST_ASIAN, _NUMBER)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4":
        PreTokenizer((Pattern(_TO_THREE_NUMBERS), _literal(_CHINESE_JAPANESE), _joined())),
    "spark2_5": PreTokenizer((
        Pattern(_TO_THREE_NUMBERS), _literal(_CHINESE_JAPANESE), _joined(rf" ?[{P}{S}]+|[\r\n]"), _NUMBER,
    )),
    "afmoe": PreTokenizer((_FROM_THE_RIGHT, _literal(f"[{_AFMOE_SCRIPTS}]+"), _joined())),
    "bloom gpt3-finnish": PreTokenizer((_CLAUSES,), clean_spaces=True),
    "poro-chat": PreTokenizer((_CLAUSES,)),
    "viking": PreTokenizer((_CLAUSES, _NUMBER)),
    "chameleon": PreTokenizer(
        (
            Pattern("<sentinel:[0-9]+>"), Pattern("IMGIMG[A-I]{1,4}Z"), Pattern(r"[\t\n]|    |  "), _NUMBER,
            Pattern(rf"[{P}!-/:-@\[-`{{-~]"), _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": PreTokenizer(
        (_LINES,), whole_newlines=True, byte_level=False, underlined_spaces=True, clean_spaces=True, always_bos=True
    ),
    "sarvam-moe": PreTokenizer((_LINES,), byte_level=False, underlined_spaces=True),
    "whitespace":
        PreTokenizer((_literal(f"[^{W}]+"),), byte_level=False, drops_spaces=True, clean_spaces=True),
}  # fmt: skip

PRE_TOKENIZERS = {name: pre for names, pre in _BY_NAMES.items() for name in names.split()}
"""By the name in `tokenizer.ggml.pre`."""
