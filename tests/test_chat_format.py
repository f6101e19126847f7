"""Chat templates against renderings made by Hugging Face's code, the formats that have a name, and system messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.chat_cases import DATA, NOW, TURNS, USER, CharacterTokenizer, arguments
from tests.conftest import reference_dir
from tinyllm.chat_format import ChatTemplate, fold_system, prepare_chat, split_reasoning
from tinyllm.errors import ChatTemplateError
from tinyllm.text.chat_builtin import BUILTIN_NAMES, builtin_source

CHATML = builtin_source("chatml")


def check(source: str, entry: dict[str, Any]) -> None:
    template = ChatTemplate(source, entry["bos_token"], entry["eos_token"])
    for case in entry["cases"]:
        if "expected" in case:
            assert template.render(case["messages"], **arguments(case)) == case["expected"], case["name"]
        else:
            with pytest.raises(ChatTemplateError) as refusal:
                template.render(case["messages"], **arguments(case))
            assert "\n" not in str(refusal.value)
            if case["error_kind"] == "raise_exception":
                assert case["expected_error"] in str(refusal.value)


@pytest.mark.parametrize("entry", DATA["templates"], ids=lambda entry: entry["template"])
def test_renders_as_hugging_face_does(entry):
    check(entry["text"], entry)


@pytest.mark.shared
def test_renders_the_whole_reference_collection():
    folder = reference_dir() / "reference/chat"
    for entry in json.loads((folder / "cases.json").read_text())["templates"]:
        with open(folder / "templates" / entry["template"], newline="", encoding="utf-8") as file:
            check(file.read(), entry)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n", "  Hello\n"),  # trim_blocks, lstrip_blocks
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),  # no HTML escapes
        ("{{ [1, {'a': 2}] | tojson(indent=1) }}", '[\n 1,\n {\n  "a": 2\n }\n]'),
        ("{% for i in [0, 1, 2] %}{% if i == 0 %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "1"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abHelloc"),
        ("{{ strftime_now('%d %b %Y') }}", "15 Jan 2025"),
        ("{{ documents is none }} {{ tools is none }} {{ nothing is defined }}", "True True False"),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s></s>True"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f(1) + '!' }}", "[a][1]!"),
        ("{% set x %}{{ messages | length }}{% endset %}{{ x.strip() + 'x' }}", "1x"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ 'a-b'.split('-') | join('+') }} {{ messages | map(attribute='role') | join(', ') }}", "a+b user"),
        ("{{ '{}<{}>{x}'.format(1, 'b', x='c') }} {{ '%s%03d' | format('a', 7) }}", "1<b>c a007"),
        (
            "{% for x in [1, 2] %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ loop.nextitem }} {% endfor %}",
            "0False22 1True2 ",
        ),
        ("{{ '<b>' | safe + '&' }}", "<b>&amp;"),
        ("{{ 'x' if messages[0]['content'][1:-1] == 'ell' else 'y' }}", "x"),
        ("{{ '%s and %s' % ('a', messages[0].content) }}", "a and Hello"),
    ],
)
def test_is_set_up_as_hugging_face_does(source, expected):
    assert ChatTemplate(source, "<s>", "</s>").render(USER, now=NOW) == expected


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('Only one at a time,\nplease') }}", "refuses these messages: Only one at a time, please"),
        ("{% if %}", "cannot be compiled: line 1"),
        ("\n\n{{ x | no_such_filter }}", "line 3: No filter named 'no_such_filter'"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages + 'x' }}", "failed: TypeError: can only concatenate"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled: RecursionError"),
        ("x" * 1_000_001, "1000001 characters"),
    ],
)
def test_shows_what_is_wrong_in_one_line(source, message):
    with pytest.raises(ChatTemplateError, match=re.escape(message)) as error:
        ChatTemplate(source).render(USER)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_messages_are_left_as_they_are():
    template = ChatTemplate("{% for m in messages %}{% set m = {'role': 'x'} %}{{ m.role }}{% endfor %}")
    messages = [dict(message) for message in TURNS]
    template.render(messages)
    assert messages == TURNS


def test_rendered_text_is_an_ordinary_string():
    assert type(ChatTemplate(CHATML).render(USER)) is str


def test_importing_does_not_load_jinja():
    script = "import sys, tinyllm.chat_format; tinyllm.chat_format.ChatTemplate('x'); print('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"


# System messages


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}{{ messages[0].content }}",
            id="refused",
        ),
        pytest.param("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", id="ignored"),
    ],
)
@pytest.mark.parametrize("content, folded", [("Hi", "Be brief.\n\nHi"), ([{"type": "text", "text": "Hi"}], None)])
def test_a_system_message_without_a_place_goes_into_the_first_user_message(source, content, folded):
    template = ChatTemplate(source)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    prompt = prepare_chat(template, CharacterTokenizer([]), messages)
    assert prompt.system_folded
    assert prompt.text == (folded or "[{'type': 'text', 'text': 'Be brief.\\n\\n'}, {'type': 'text', 'text': 'Hi'}]")
    assert messages[1]["content"] == content


@pytest.mark.parametrize("entry", DATA["templates"], ids=lambda entry: entry["template"])
def test_no_system_message_is_lost(entry):
    template = ChatTemplate(entry["text"], entry["bos_token"], entry["eos_token"])
    prompt = prepare_chat(template, CharacterTokenizer([]), TURNS)
    assert prompt.text.count("You are terse.") == 1
    refused = any(
        case["name"] == "multi_turn" and "You are terse." not in case.get("expected", "") for case in entry["cases"]
    )
    assert prompt.system_folded == refused


def test_a_system_message_alone_becomes_a_user_message():
    messages, folded = fold_system(
        ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"), TURNS[:1]
    )
    assert (messages, folded) == ([{"role": "user", "content": "You are terse."}], True)


@pytest.mark.parametrize("messages", [[], USER, [{"role": "system", "content": " "}, *USER], TURNS])
def test_messages_that_the_template_can_write_are_not_changed(messages):
    assert fold_system(ChatTemplate(CHATML), messages) == (messages, False)


def test_a_template_that_refuses_both_ways_says_why_it_refused_first():
    source = "{{ raise_exception('never: ' ~ messages[0].role) }}"
    with pytest.raises(ChatTemplateError, match="never: system"):
        prepare_chat(ChatTemplate(source), CharacterTokenizer([]), TURNS)


# Named formats and sources

TRANSCRIBED = {
    "bailing": "ling-lite",
    "chatglm3": "chatglm3",
    "chatglm4": "chatglm4",
    "chatml": "chatml",
    "command-r": "command-r-plus",
    "deepseek": "deepseek-coder-instruct",
    "deepseek2": "deepseek-v2",
    "gemma": "google-gemma-2-2b-it",
    "glmedge": "glm-edge",
    "granite": "granite-3.0",
    "kimi-k2": "moonshotai-Kimi-K2",
    "llama2": "llama-2-chat",
    "llama3": "llama-3",
    "megrez": "megrez",
    "minicpm": "minicpm",
    "mistral-v1": "mistral-v1",
    "mistral-v3": "mistral-v3",
    "mistral-v3-tekken": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-v7": "mistral-v7",
    "mistral-v7-tekken": "Mistral-Small-3.2-24B-Instruct-2506",
    "monarch": "alphamonarch",
    "openchat": "openchat-3.5",
    "orion": "orion",
    "phi3": "phi-3-small",
    "phi4": "phi-4",
    "rwkv-world": "llama-cpp-rwkv-world",
    "seed-oss": "seed-oss",
    "vicuna": "vicuna-1.1",
    "vicuna-orca": "orca-vicuna",
    "yandex": "yandexgpt-5",
    "zephyr": "zephyr",
}
WITHOUT_SYSTEM = {"mistral-v1", "mistral-v3", "mistral-v3-tekken", "orion", "yandex"}  # or it goes to an odd place
WITH_DEFAULT_SYSTEM = {"deepseek", "kimi-k2", "megrez", "mistral-v7-tekken"}  # written when there is none
BOS_OPENS_EACH_MESSAGE = {"monarch", "seed-oss"}


@pytest.mark.shared
@pytest.mark.parametrize("name", TRANSCRIBED)
def test_a_named_format_is_what_the_models_template_writes(name):
    """But for BOS, which named formats leave to the tokenizer, and for default system messages."""
    data = json.loads((reference_dir() / "reference/chat/cases.json").read_text())
    entry = next(entry for entry in data["templates"] if entry["template"] == f"{TRANSCRIBED[name]}.jinja")
    template = ChatTemplate(builtin_source(name), entry["bos_token"], entry["eos_token"])
    names = set()
    names |= set() if name in WITHOUT_SYSTEM else {"system_user", "multi_turn"}
    names |= set() if name in WITH_DEFAULT_SYSTEM else {"user", "multi_turn_no_system"}
    for case in entry["cases"]:
        if case["name"] in names and "expected" in case:
            expected = case["expected"]
            if name not in BOS_OPENS_EACH_MESSAGE:
                expected = expected.removeprefix(entry["bos_token"])
            assert template.render(case["messages"]) == expected, case["name"]


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_every_named_format_writes_a_conversation(name):
    messages = [*TURNS, {"role": "assistant", "content": [{"type": "text", "text": "A model"}]}, USER[0]]
    template = ChatTemplate(builtin_source(name), "<bos>", "<eos>")
    text = prepare_chat(template, CharacterTokenizer([]), messages).text
    places = [text.index(part) for part in ("You are terse.", "Hello", "Hi there", "Who are you?", "A model")]
    assert places == sorted(places)
    assert text.endswith(template.render(USER).partition("Hello")[2])
    with pytest.raises(ChatTemplateError, match="no role tool"):
        template.render([*USER, {"role": "tool", "content": "1"}])


def test_a_template_is_named_or_read_from_a_file(tmp_path):
    tokenizer = CharacterTokenizer(["<s>"], bos="<s>")
    path = tmp_path / "mine.jinja"
    path.write_bytes("{{ bos_token }}\r\né {{ messages[0].content }}".encode())
    assert ChatTemplate.named("chatml", tokenizer).render(USER).startswith("<|im_start|>user\nHello")
    assert ChatTemplate.named(str(path), tokenizer).render(USER) == "<s>\né Hello"


@pytest.mark.parametrize("content, reason", [(None, "neither a file"), (b"\xff\xfe{", "not UTF-8")])
def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path, content, reason):
    path = tmp_path / "template"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ChatTemplateError, match=f"{reason}.*chatml.*llama3"):
        ChatTemplate.named(str(path), CharacterTokenizer([]))


def test_the_template_of_a_file():
    tokenizer = CharacterTokenizer(["<s>"], bos="<s>")
    metadata = {"tokenizer.chat_template": "{{ bos_token }}plain", "tokenizer.chat_template.tool_use": "tools"}
    assert ChatTemplate.from_metadata(metadata, tokenizer).render(USER) == "<s>plain"
    assert ChatTemplate.from_metadata(metadata, tokenizer, "tool_use").render(USER) == "tools"
    assert ChatTemplate.from_metadata(metadata, tokenizer, "rag").render(USER) == "<s>plain"
    assert ChatTemplate.from_metadata({}, tokenizer) is None


def test_errors_of_a_template_name_the_types_that_its_author_knows():
    with pytest.raises(ChatTemplateError) as error:
        ChatTemplate("{{ 'user: ' + messages[0].content }}").render([{"role": "user", "content": None}])
    assert "unsupported operand type(s) for +: 'str' and 'NoneType'" in str(error.value)


# Reasoning


@pytest.mark.parametrize(
    "reply, expected",
    [
        ("<think>\nsum\n</think>\n\n4", ("sum", "4")),
        ("4", ("", "4")),
        ("  <think>never ends", ("never ends", "")),
        ("opened by the prompt</think>4", ("opened by the prompt", "4")),
        ("[THINK]a[/THINK]b", ("a", "b")),
        ("about <think> tags", ("", "about <think> tags")),
        ("<think></think>4", ("", "4")),
        ("", ("", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(reply, expected):
    assert split_reasoning(reply) == expected


@pytest.mark.parametrize(
    "name, keeps", [("Qwen-Qwen3-0.6B", False), ("zephyr", True), ("Qwen-Qwen2.5-7B-Instruct", True)]
)
def test_whether_a_template_keeps_reasoning(name, keeps):
    entry = next(entry for entry in DATA["templates"] if entry["template"] == f"{name}.jinja")
    assert ChatTemplate(entry["text"], "", "</s>").keeps_reasoning() == keeps
