"""`tinyllm run` over a scripted model: what reaches stdout, stderr and the exit code."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_model import CHATML, EOS, IM_END, FakeModel, answers, says, write_chain_model

from tinyllm.sampler import SamplingParams
from tinyllm_cli import main, run
from tinyllm_cli.options import SamplingOptions, parse_bias
from tinyllm_cli.prompt_input import unescape
from tinyllm_cli.thinking import Part, ThinkingSplitter

TESTS = Path(__file__).resolve().parent


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes, or with a person who types nothing."""

    def __init__(self, data: bytes | None):
        super().__init__(io.BytesIO(data or b""), encoding="utf-8")
        self._is_terminal = data is None

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path) -> Callable[..., Result]:
    """Runs a command line in this process: `cli(model, "run", "Hi", stdin=b"...")`."""
    monkeypatch.setenv("TINYLLM_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def call(model: FakeModel, *arguments: str, stdin: bytes | None = None) -> Result:
        monkeypatch.setattr(run, "load_model", lambda options: model)
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        code = main._run([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call


def fake_process(spec: dict, *arguments: str, **options) -> subprocess.Popen:
    """The same in a process of its own."""
    command = [sys.executable, str(TESTS / "fake_cli.py"), json.dumps(spec), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def question_in(model: FakeModel) -> str:
    """The user's message that a chat model was given."""
    text = bytes(token for token in model.evaluated if token < 256).decode()
    return text.partition("user\n")[2].partition("\nassistant\n")[0]


def test_the_answer_is_all_that_stdout_gets(cli):
    assert cli(FakeModel(answers("Hello.")), "run", "Hi") == (0, "Hello.\n", "")


def test_a_line_break_at_the_end_is_not_doubled(cli):
    assert cli(FakeModel(answers("Hello.\n")), "run", "Hi").out == "Hello.\n"


def test_no_stream_prints_the_same(cli):
    assert cli(FakeModel(answers("Hello.")), "run", "Hi", "--no-stream").out == "Hello.\n"


class TestPrompt:
    @pytest.fixture
    def asked(self, cli) -> Callable[..., str]:
        def ask(*arguments: str, stdin: bytes | None = None) -> str:
            model = FakeModel(answers("ok"))
            result = cli(model, "run", *arguments, stdin=stdin)
            assert (result.code, result.out) == (0, "ok\n")
            return question_in(model)

        return ask

    @pytest.mark.parametrize(
        ("arguments", "stdin", "question"),
        [
            pytest.param(["Hi"], None, "Hi", id="argument"),
            pytest.param([], b"Hi", "Hi", id="piped"),
            pytest.param(["-"], b"Hi", "Hi", id="dash"),
            pytest.param(["Sum up."], b"Text.\n", "Text.\n\nSum up.", id="piped text before the argument"),
            pytest.param(["Hi"], b"", "Hi", id="nothing piped"),
            pytest.param(["Hi", "-f", "/dev/null"], None, "\n\nHi", id="empty file"),
            pytest.param([], b"a\r\nb\r\n", "a\r\nb", id="one line break at the end goes"),
            pytest.param([], b"\xef\xbb\xbfHi", "Hi", id="byte order mark"),
            pytest.param([], b"a\xff\xfe\x00b", "a\ufffd\ufffd\0b", id="bytes that are no text"),
            pytest.param(["a\\nb"], None, "a\\nb", id="backslashes are taken as they are"),
            pytest.param(["-e", "a\\nb\\t\\x41\\u00e9\\q\\\\n"], None, "a\nb\tAé\\q\\n", id="escapes on demand"),
            pytest.param(["a\udcffb"], None, "a\ufffdb", id="argument that is no text in the locale"),
            pytest.param(["--", "-5 + 3"], None, "-5 + 3", id="prompt that begins with a dash"),
        ],
    )
    def test_sources(self, asked, arguments, stdin, question):
        assert asked(*arguments, stdin=stdin) == question

    @pytest.mark.parametrize(
        ("arguments", "stdin"),
        [
            pytest.param([], None, id="nothing"),
            pytest.param([""], None, id="empty argument"),
            pytest.param(["-"], b"", id="dash and nothing piped"),
            pytest.param([], b"\n", id="a line break"),
            pytest.param([], b" \n\n", id="white space"),
            pytest.param(["-f", "/dev/null"], None, id="empty file"),
        ],
    )
    def test_a_missing_prompt_is_wrong_usage(self, cli, arguments, stdin):
        result = cli(FakeModel(answers("no")), "run", *arguments, stdin=stdin)
        assert (result.code, result.out) == (2, "")
        assert "there is no prompt: give it as an argument, with --file or on standard input" in result.err

    def test_raw_text_may_begin_with_nothing(self, cli):
        assert cli(FakeModel(says("Hi", EOS), add_bos=True), "run", "--raw", "").out == "Hi\n"
        result = cli(FakeModel(says("Hi")), "run", "--raw", "")
        assert (result.code, result.out) == (1, "") and "no begin-of-text token" in result.err

    def test_files_come_before_the_argument(self, asked, tmp_path):
        (tmp_path / "a b.txt").write_text("A\n")
        (tmp_path / "ž.txt").write_text("B")
        assert asked("-f", str(tmp_path / "a b.txt"), "--file", str(tmp_path / "ž.txt"), "C") == "A\n\nB\n\nC"

    def test_standard_input_is_left_alone_when_there_is_a_file(self, asked, tmp_path):
        (tmp_path / "a").write_text("A\n")
        assert asked("-f", str(tmp_path / "a"), stdin=b"not read") == "A"

    def test_escapes_in_a_file_are_never_read(self, asked, tmp_path):
        (tmp_path / "a").write_text("a\\nb")
        assert asked("-e", "-f", str(tmp_path / "a")) == "a\\nb"

    @pytest.mark.parametrize("stdin", [None, b""], ids=["terminal", "nothing piped"])
    def test_no_prompt_is_wrong_usage(self, cli, stdin):
        result = cli(FakeModel(answers("no")), "run", stdin=stdin)
        assert (result.code, result.out) == (2, "")
        assert "there is no prompt" in result.err

    @pytest.mark.parametrize("bad", ["missing.txt", "."])
    def test_a_file_that_cannot_be_read_is_one_line(self, cli, tmp_path, bad):
        result = cli(FakeModel(answers("no")), "run", "-f", str(tmp_path / bad))
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert str(tmp_path / bad) in result.err

    def test_unescape_of_halves_of_surrogate_pairs(self):
        assert unescape("\\uD83D\\uDE00 \\uD83D") == "😀 \ufffd"


class TestTemplate:
    def test_system_message(self, cli):
        model = FakeModel(answers("ok"))
        cli(model, "run", "Hi", "--system", "Be brief.")
        assert bytes(t for t in model.evaluated if t < 256).startswith(b"system\nBe brief.\nuser\nHi\n")

    def test_raw_text_is_continued(self, cli):
        model = FakeModel(says(" more"))
        assert cli(model, "run", "--raw", "Once").out == " more\n"
        assert model.evaluated[:4] == [*b"Once"]

    def test_a_base_model_continues_the_text_and_verbose_says_so(self, cli):
        model = FakeModel(says(" more"), template=None)
        result = cli(model, "run", "Once", "--verbose")
        assert result.out == " more\n"
        assert "no chat template" in result.err

    def test_empty_text_without_bos_is_an_error(self, cli):
        result = cli(FakeModel(says("x")), "run", "--raw", "")
        assert (result.code, result.out) == (1, "")
        assert "empty" in result.err

    def test_system_message_is_never_dropped(self, cli):
        assert cli(FakeModel(says("x")), "run", "--raw", "--system", "S", "Hi").code == 2
        result = cli(FakeModel(says("x"), template=None), "run", "--system", "S", "Hi")
        assert result.code == 1
        assert "system" in result.err

    @pytest.mark.parametrize(
        ("arguments", "shown"),
        [
            (["--no-think"], "False"),
            (["--think"], "True"),
            (["--chat-template-kwargs", '{"enable_thinking": 3}'], "3"),
            ([], ""),
        ],
        ids=str,
    )
    def test_variables_of_the_template(self, cli, arguments, shown):
        model = FakeModel(says("ok"), template="<|im_start|>{{ enable_thinking }}")
        cli(model, "run", "Hi", *arguments)
        assert bytes(model.evaluated[1:-2]).decode() == shown

    def test_a_template_that_refuses_is_shown(self, cli):
        model = FakeModel(says("ok"), template="{{ raise_exception('only in pairs') }}")
        result = cli(model, "run", "Hi")
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert "only in pairs" in result.err

    def test_a_template_without_place_for_a_system_message_gets_it_in_the_question(self, cli, caplog):
        refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
        model = FakeModel(answers("ok"), template=refusing)
        assert cli(model, "run", "Hi", "--system", "Be brief.").out == "ok\n"
        assert question_in(model) == "Be brief.\n\nHi"
        assert "no place for a system message" in caplog.text

    def test_another_template_by_name_or_file(self, cli, tmp_path):
        (tmp_path / "mine.jinja").write_text("[{{ messages[0].content }}]")
        model = FakeModel(says("ok"), template=None)
        cli(model, "run", "Hi", "--chat-template", str(tmp_path / "mine.jinja"))
        assert bytes(model.evaluated[:4]) == b"[Hi]"
        assert cli(FakeModel(answers("ok"), template=None), "run", "Hi", "--chat-template", "chatml").out == "ok\n"
        result = cli(FakeModel(says("ok")), "run", "Hi", "--chat-template", "nonsense")
        assert (result.code, result.err.count("\n")) == (1, 1)

    @pytest.mark.parametrize("bad", ["{", "[]", "1"])
    def test_variables_that_are_no_json_object(self, cli, bad):
        assert cli(FakeModel(says("ok")), "run", "Hi", "--chat-template-kwargs", bad).code == 2


class TestJson:
    def test_object_of_the_contract(self, cli):
        result = cli(FakeModel(answers("Hé")), "run", "Hi", "--json", "--seed", "5")
        found = json.loads(result.out)
        assert result.out.count("\n") == 1
        assert found["text"] == "Hé"
        assert found["tokens"] == [*"Hé".encode(), IM_END]
        assert found["finish_reason"] == "stop"
        assert found["prompt_tokens"] == len("user\nHi\nassistant\n") + 3
        assert found["seed"] == 5
        assert set(found["timings"]) == {"load_s", "prompt_s", "prompt_tok_s", "decode_s", "decode_tok_s"}

    def test_seed_is_told_when_none_was_given(self, cli):
        assert isinstance(json.loads(cli(FakeModel(answers("a")), "run", "Hi", "--json").out)["seed"], int)
        assert "seed" in cli(FakeModel(answers("a")), "run", "Hi", "--verbose").err

    def test_length(self, cli):
        found = json.loads(cli(FakeModel(answers("abc")), "run", "Hi", "--json", "-n", "2").out)
        assert (found["text"], found["finish_reason"], len(found["tokens"])) == ("ab", "length", 2)

    def test_logprobs(self, cli):
        found = json.loads(cli(FakeModel(answers("a")), "run", "Hi", "--json", "--logprobs", "2", "--temp", "0").out)
        first = found["logprobs"][0]
        assert (first["id"], first["token"]) == (ord("a"), "a")
        assert [set(entry) for entry in first["top_logprobs"]] == [{"id", "token", "logprob"}] * 2
        assert first["logprob"] == first["top_logprobs"][0]["logprob"] < 0

    def test_hidden_thinking_is_a_part_of_its_own(self, cli):
        model = FakeModel(answers("<think>hm</think>\n\nYes."))
        found = json.loads(cli(model, "run", "Hi", "--json", "--hide-thinking").out)
        assert (found["text"], found["thinking"]) == ("Yes.", "<think>hm</think>")


def test_logprobs_without_json_go_to_stderr(cli):
    result = cli(FakeModel(answers("a")), "run", "Hi", "--logprobs", "2")
    assert result.out == "a\n"
    assert len(result.err.splitlines()) == 2 and "'a'" in result.err


def test_verbose_speaks_on_stderr_only(cli):
    result = cli(FakeModel(answers("Hello.")), "run", "Hi", "--verbose")
    assert result.out == "Hello.\n"
    assert "tok/s" in result.err and "context 2048" in result.err


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (["--stop", "lo"], "Hel\n"),
        (["-r", "xx", "--stop", "l"], "He\n"),
        (["-n", "3"], "Hel\n"),
        (["--stop", "\\n", "-e"], "Hello\n"),
        (["--stop", "\\n"], "Hello\nyou\n"),
    ],
    ids=str,
)
def test_where_the_answer_ends(cli, arguments, out):
    assert cli(FakeModel(answers("Hello\nyou")), "run", "Hi", *arguments).out == out


def test_ignore_eos_goes_on(cli):
    model = FakeModel(says("ab", EOS, "cd"))
    assert cli(model, "run", "--raw", "Hi", "--ignore-eos", "-n", "5").out == "abcd\n"


def test_prompt_that_does_not_fit_names_both_numbers(cli):
    result = cli(FakeModel(says("x"), n_ctx=50), "run", "--raw", "a" * 51)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "51" in result.err and "50" in result.err


def test_a_context_beyond_the_training_is_told(cli):
    assert "trained" not in cli(FakeModel(answers("a")), "run", "Hi", "-c", "2048").err
    result = cli(FakeModel(answers("a")), "run", "Hi", "-c", "2049")
    assert (result.out, result.err.count("\n")) == ("a\n", 1) and "trained on contexts of 2048 tokens" in result.err


def test_full_context_is_told(cli):
    result = cli(FakeModel(says(then=97), n_ctx=10), "run", "--raw", "12345678")
    assert result.out == "aaa\n"
    assert "context of 10 tokens is full" in result.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temp", "x"], "--temp"),
        (["--temp", "-1"], "--temp"),
        (["--top-p", "2"], "--top-p must be between 0 and 1"),
        (["--top-k", "-1"], "--top-k"),
        (["--mirostat-ent", "-3"], "--mirostat-ent must be"),
        (["--seed", "-5"], "--seed"),
        (["--seed", "9" * 30], "--seed must be"),
        (["-n", "-2"], "--max-tokens"),
        (["-n", "many"], "-n"),
        (["--logit-bias", "five"], "logit-bias"),
        (["--no-such"], "--no-such"),
        (["--stop", ""], "stop"),
    ],
    ids=str,
)
def test_wrong_usage(cli, arguments, named):
    result = cli(FakeModel(answers("no")), "run", "Hi", *arguments)
    assert (result.code, result.out) == (2, "")
    assert named in result.err


def test_options_have_the_samplers_defaults():
    assert SamplingOptions().params() == SamplingParams()
    assert [f.name for f in dataclasses.fields(SamplingOptions)] == [f.name for f in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize(
    ("text", "bias"), [("42+1.5", (42, 1.5)), ("7-inf", (7, float("-inf"))), ("7-0.5", (7, -0.5))], ids=str
)
def test_logit_bias(text, bias):
    assert parse_bias(text) == bias


class TestConstraints:
    def test_a_regular_expression(self, cli):
        result = cli(FakeModel(says("Maybe yes")), "run", "Hi", "--regex", "(yes|no)[!]{2}", "--ignore-eos")
        assert result.code == 0
        assert re.fullmatch(r"(yes|no)!!\n", result.out)

    @pytest.mark.parametrize("source", ['root ::= "a" "b"', 'start: "ab"'], ids=["GBNF", "Lark"])
    @pytest.mark.parametrize("how", ["text", "file"])
    def test_a_grammar(self, cli, tmp_path, source, how):
        (tmp_path / "grammar").write_text(source)
        given = source if how == "text" else str(tmp_path / "grammar")
        assert cli(FakeModel(says("xyz")), "run", "Hi", "--grammar", given).out == "ab\n"

    def test_a_json_schema(self, cli):
        schema = {
            "type": "object",
            "properties": {"n": {"enum": [7]}},
            "required": ["n"],
            "additionalProperties": False,
        }
        result = cli(FakeModel(says("{")), "run", "Hi", "-j", json.dumps(schema))
        assert json.loads(result.out) == {"n": 7}

    def test_cut_off_by_the_limit_is_told(self, cli):
        result = cli(FakeModel(says("{")), "run", "Hi", "--json-object", "-n", "1")
        assert (result.code, result.out) == (0, "{\n")
        assert "not complete" in result.err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--regex", "("],
            ["--json-schema", "{"],
            ["--grammar", "root ::= ("],
            ["--json-object", "--regex", "a"],
            ["--regex", ""],
            ["--regex", "a{0}"],
            ["--json-schema", ""],
            ["--grammar", " \n"],
            ["--grammar", 'root ::= ""'],
        ],
        ids=str,
    )
    def test_what_cannot_be_is_wrong_usage(self, cli, arguments):
        result = cli(FakeModel(says("a")), "run", "Hi", *arguments)
        assert (result.code, result.out) == (2, "")

    @pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("none.json", "none.json: no such file"),
            ("some/none.gbnf", "some/none.gbnf: no such file"),
            ("empty", "empty: the file is empty"),
            ("wrong", "wrong: the"),
            (".", ".: Is a directory"),
        ],
    )
    def test_files_that_cannot_be_read_are_named(self, cli, tmp_path, monkeypatch, option, name, reason):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty").write_text(" \n")
        (tmp_path / "wrong").write_text("neither: a schema nor ::= a grammar")
        result = cli(FakeModel(says("a")), "run", "Hi", option, name)
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert reason in result.err


class TestTemplateVariables:
    THINKS = "{% if enable_thinking %}think{% endif %}" + CHATML

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--think"], "--think or --no-think changes nothing: the chat template does not know enable_thinking"),
            (
                ["--chat-template-kwargs", '{"mood": 1}'],
                "--chat-template-kwargs changes nothing: the chat template does not know mood",
            ),
        ],
        ids=["--think", "--chat-template-kwargs"],
    )
    def test_what_changes_nothing_is_told(self, cli, arguments, reason):
        assert cli(FakeModel(answers("ok")), "run", "Hi", *arguments) == (0, "ok\n", f"{reason}\n")
        result = cli(FakeModel(says("ok", EOS), template=None), "run", "Hi", *arguments)
        assert result.code == 0 and "changes nothing: there is no chat template" in result.err

    def test_what_the_template_knows_is_not_told(self, cli):
        assert cli(FakeModel(answers("ok"), template=self.THINKS), "run", "Hi", "--no-think").err == ""


class TestThinking:
    REPLY = "<think>\nhm, 1 < 2\n</think>\n\nYes."

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
    @pytest.mark.parametrize(
        ("reply", "hide", "opened", "answer", "thinking"),
        [
            pytest.param(REPLY, False, None, "\n\nYes.", "<think>\nhm, 1 < 2\n</think>", id="shown"),
            pytest.param(REPLY, True, None, "Yes.", "", id="hidden"),
            pytest.param("hm</think> Yes.", True, "</think>", "Yes.", "", id="begun in the prompt"),
            pytest.param("hm</think> Yes.", False, "</think>", " Yes.", "hm</think>", id="begun in the prompt, shown"),
            pytest.param("<think>endless", True, None, "", "<think>endless", id="never closed: comes out after all"),
            pytest.param("a <think>b</think>", True, None, "a <think>b</think>", "", id="only at the beginning"),
            pytest.param(" <thin air", True, None, " <thin air", "", id="almost a tag"),
            pytest.param("\n<think>a</think>b", True, None, "b", "", id="space before"),
            pytest.param("[THINK]a[/THINK]b", True, None, "b", "", id="other tags"),
            pytest.param("", True, None, "", "", id="nothing"),
        ],
    )
    def test_parts_however_the_text_is_cut(self, reply, hide, opened, answer, thinking, size):
        splitter = ThinkingSplitter(opened, hide)
        parts: list[Part] = []
        for at in range(0, len(reply), size):
            parts += splitter.push(reply[at : at + size])
        parts += splitter.flush()
        assert "".join(p.text for p in parts if not p.thinking) == answer
        assert "".join(p.text for p in parts if p.thinking) == thinking

    def test_hidden_in_the_output(self, cli):
        assert cli(FakeModel(answers(self.REPLY)), "run", "Hi", "--hide-thinking").out == "Yes.\n"
        assert cli(FakeModel(answers(self.REPLY)), "run", "Hi").out == self.REPLY + "\n"


class TestProcess:
    def test_ctrl_c_ends_at_once_and_keeps_the_text(self):
        process = fake_process({"replies": ["a" * 1000], "seconds_per_step": 0.01}, "run", "Hi")
        assert process.stdout.read(5) == b"aaaaa"
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert time.monotonic() - started < 1
        assert process.returncode == 130
        assert out.strip(b"a") == b"\n"
        assert err == b""

    def test_ctrl_c_during_the_prompt(self):
        process = fake_process({"replies": ["a"], "seconds_per_step": 5}, "run", "Hi", "--verbose")
        process.stderr.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=4)
        assert (process.returncode, out) == (130, b"")
        assert b"Traceback" not in err

    def test_ctrl_c_with_json_prints_what_came(self):
        process = fake_process({"replies": ["a" * 1000], "seconds_per_step": 0.01}, "run", "Hi", "--json", "--verbose")
        process.stderr.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)
        found = json.loads(out)
        assert (process.returncode, found["finish_reason"]) == (130, "interrupted")
        assert set(found["text"]) == {"a"}

    def test_closed_pipe_ends_quietly(self):
        process = fake_process({"replies": ["a" * 100_000], "n_ctx": 200_000}, "run", "Hi")
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=10) in (0, 141)

    @pytest.mark.parametrize("arguments", [[], ["--verbose"], ["--hide-thinking"], ["--json"]], ids=str)
    def test_no_escape_codes_off_a_terminal(self, arguments):
        process = fake_process({"replies": ["<think>a</think> **b**"]}, "run", "Hi", *arguments)
        out, err = process.communicate(timeout=10)
        assert b"\x1b" not in out + err

    @pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
    def test_any_locale(self, locale):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
        process = subprocess.run(
            [sys.executable, str(TESTS / "fake_cli.py"), '{"replies": ["\\u00e9\\ud83d\\ude00"]}', "run"],
            input=b"a\xff\xfe\x00b",
            capture_output=True,
            timeout=20,
            env=environment | {"LANG": locale},
        )
        assert (process.returncode, process.stdout.decode()) == (0, "é😀\n")
        assert b"byte 1 of the text is no UTF-8" in process.stderr and len(process.stderr.splitlines()) == 1

    def test_one_answer_imports_neither_rich_nor_prompt_toolkit(self):
        code = (
            "import sys; sys.argv = ['fake_cli.py', '{\"replies\": [\"a\"]}', 'run', 'Hi', '--verbose']\n"
            "import atexit, runpy\n"
            "heavy = {'rich', 'prompt_toolkit', 'numba', 'huggingface_hub', 'pydantic'}\n"
            "atexit.register(lambda: print(heavy & set(sys.modules)))\n"
            "runpy.run_path('fake_cli.py', run_name='__main__')"
        )
        process = subprocess.run(
            [sys.executable, "-c", code],
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
        assert process.stdout.splitlines() == ["a", "set()"]


@pytest.fixture(scope="module")
def chain_model(tmp_path_factory) -> Path:
    """A model file that says "Hello 😀 and <STOP> more." in five tokens that cut characters and words."""
    pieces = (b"Hel", b"lo \xf0\x9f", b"\x98\x80 and <ST", b"OP> mo", b"re.")
    return write_chain_model(tmp_path_factory.mktemp("Ž é 模型") / "м .gguf", pieces, n_ctx=200)


class TestChainModel:
    """The whole way through the real engine, with a model file that says what the test wants."""

    @pytest.fixture
    def run(self, chain_model, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("TINYLLM_") or key == "TINYLLM_HOME"
        }

        def call(*arguments: str, **options) -> subprocess.CompletedProcess:
            return subprocess.run(
                [sys.executable, "-m", "tinyllm_cli.main", "run", "-m", str(chain_model), *arguments],
                capture_output=True,
                timeout=120,
                env=environment | {"XDG_CONFIG_HOME": str(tmp_path)},
                **({"stdin": subprocess.DEVNULL} | options),
            )

        return call

    def test_answer(self, run):
        process = run("Hi", "--temp", "0")
        assert (process.returncode, process.stdout.decode()) == (0, "Hello 😀 and <STOP> more.\n")
        assert b"\x1b" not in process.stdout + process.stderr

    def test_stop_string_across_tokens(self, run):
        assert run("Hi", "--temp", "0", "--stop", "<STOP>").stdout.decode() == "Hello 😀 and \n"

    @pytest.mark.parametrize(("n", "text"), [(1, "Hel\n"), (2, "Hello \ufffd\n"), (3, "Hello 😀 and <ST\n")])
    def test_limit_within_a_character(self, run, n, text):
        assert run("Hi", "--temp", "0", "-n", str(n)).stdout.decode() == text

    def test_json(self, run):
        found = json.loads(run("Hi", "--temp", "0", "--json").stdout)
        assert found["tokens"] == [260, 261, 262, 263, 264, IM_END]
        assert found["finish_reason"] == "stop"
        assert found["timings"]["decode_tok_s"] > 0

    def test_prompt_that_does_not_fit(self, run):
        process = run("x" * 500)
        assert (process.returncode, process.stdout, process.stderr.count(b"\n")) == (1, b"", 1)
        assert b"200" in process.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--ctx-size", "99999999999"],
            ["--cache-type", "q9"],
            ["--threads", "0"],
            ["--threads", "5000"],
            ["--batch-size", "0"],
            ["--batch-size", "999999"],
        ],
        ids=" ".join,
    )
    def test_options_that_cannot_be(self, run, arguments):
        process = run("Hi", *arguments)
        assert (process.returncode, process.stdout) == (2, b"")
        assert arguments[0].encode() in process.stderr.splitlines()[-1] and b"Traceback" not in process.stderr

    @pytest.mark.parametrize("seed", [1, 2])
    def test_same_seed_same_text(self, run, seed):
        texts = {
            run("Hi", "--temp", "3", "--top-k", "0", "--min-p", "0", "-n", "20", "--seed", str(seed), *more).stdout
            for more in ([], ["-t", "1"], ["-b", "3"])
        }
        assert len(texts) == 1


@pytest.mark.model
class TestDefaultModel:
    def test_greedy_chat(self, smollm2_path, tmp_path):
        process = subprocess.run(
            [sys.executable, "-m", "tinyllm_cli.main", "run", "-m", str(smollm2_path), "Hi", "--temp", "0", "--json"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        found = json.loads(process.stdout)
        assert found["tokens"] == [19556, 17, 1073, 416, 339, 4237, 346, 1834, 47, 2]
        assert (found["text"], found["prompt_tokens"]) == ("Hello! How can I assist you today?", 31)

    def test_ctrl_c_while_the_prompt_is_computed(self, smollm2_path):
        process = subprocess.Popen(
            [sys.executable, "-m", "tinyllm_cli.main", "run", "-m", str(smollm2_path), "word " * 3500, "-v", "-t", "1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for line in process.stderr:
            if line.startswith(b"prompt"):
                break
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert time.monotonic() - started < 1
        assert (process.returncode, out) == (130, b"")
        assert b"ended by Ctrl-C" in err
