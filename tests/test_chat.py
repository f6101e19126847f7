"""`tinyllm chat` over a scripted model: its commands in this process, its terminal through a pseudo-terminal."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_model import FakeModel, answers

import tinyllm
from tinyllm.conversation import Conversation
from tinyllm.sampler import SamplingParams
from tinyllm.sampling.grammar import Constraint
from tinyllm_cli import chat_commands
from tinyllm_cli.chat import converse
from tinyllm_cli.chat_input import Entry, LineReader, as_entry, is_open_block
from tinyllm_cli.chat_session import Session
from tinyllm_cli.markdown_reply import MarkdownReply

pexpect = pytest.importorskip("pexpect")

TESTS = Path(__file__).resolve().parent


class Script:
    """A reader that goes through lines; exceptions among them are raised."""

    def __init__(self, *entries: str | Entry | type[BaseException], interactive: bool = True):
        self._entries = iter(entries)
        self.interactive = interactive

    def read(self) -> Entry:
        entry = next(self._entries, EOFError)
        if isinstance(entry, type):
            raise entry
        return as_entry(entry) if isinstance(entry, str) else entry


def new_session(*replies: str, n_ctx: int = 2048, context_shift: bool = False, **fields) -> Session:
    model = FakeModel(answers(*replies), n_ctx=n_ctx)
    return Session(Conversation(model, context_shift=context_shift), SamplingParams(temperature=0), **fields)


def talk(session: Session, *entries: str | Entry | type[BaseException], interactive: bool = True) -> int:
    return converse(session, Script(*entries, interactive=interactive))


def contents(session: Session) -> list[str]:
    return [message["content"] for message in session.conversation.messages]


class TestTurns:
    def test_answers_go_to_stdout_and_everything_else_to_stderr(self, capsys):
        session = new_session("One.", "Two.")
        assert talk(session, "1?", "2?") == 0
        out, err = capsys.readouterr()
        assert out == "One.\nTwo.\n"
        assert len(err.splitlines()) == 2 and "reused" in err

    def test_statistics_tell_what_was_reused(self, capsys):
        session = new_session("One.", "Two.")
        talk(session, "1?", "2?")
        lines = capsys.readouterr().err.splitlines()
        assert "0 reused" in lines[0]
        first_prompt = session.totals[0].prompt_tokens
        assert f"{first_prompt + len('One.')} reused" in lines[1]
        assert f"context {session.conversation.n_tokens}/2048" in lines[1]

    def test_statistics_can_be_switched_off(self, capsys):
        talk(new_session("One.", show_stats=False), "1?")
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("nothing", ["", "  ", '""""""'])
    def test_empty_entries_are_no_questions(self, nothing):
        session = new_session("One.")
        talk(session, nothing)
        assert contents(session) == []

    @pytest.mark.parametrize(
        "text", ["/usr/bin is a folder", '"""\n/help\n"""', "/help\nme", "/Help", "and /help"], ids=repr
    )
    def test_what_is_no_command(self, text):
        session = new_session("One.")
        talk(session, text)
        assert contents(session) == [text.strip('"').strip("\n"), "One."]

    def test_an_error_is_one_line_and_the_chat_goes_on(self, capsys):
        session = new_session("One.", n_ctx=100)
        assert talk(session, "x" * 200, "1?") == 0
        out, err = capsys.readouterr()
        assert out == "One.\n"
        assert "100" in err.splitlines()[0] and "Traceback" not in err

    def test_an_error_behind_a_pipe_shows_in_the_exit_code(self):
        assert talk(new_session("One.", n_ctx=100), "x" * 200, "1?", interactive=False) == 1

    def test_full_context_is_told_with_what_to_do(self, capsys):
        session = new_session("x" * 500, n_ctx=100)
        talk(session, "1?")
        assert "context of 100 tokens is full" in capsys.readouterr().err

    def test_context_shift_tells_what_is_forgotten(self, capsys):
        session = new_session("x" * 30, n_ctx=150, context_shift=True)
        talk(session, "1?", "2?", "3?")
        assert "2 oldest messages are forgotten" in capsys.readouterr().err
        assert contents(session)[-2:] == ["3?", "x" * 30]

    def test_an_empty_answer_is_told(self, capsys):
        session = new_session("")
        talk(session, "1?")
        assert "no answer came" in capsys.readouterr().err
        assert contents(session) == []

    def test_hidden_thinking_stays_in_the_history(self, capsys):
        session = new_session("<think>hm</think>\n\nYes.", hide_thinking=True)
        talk(session, "1?")
        assert capsys.readouterr().out == "Yes.\n"
        assert contents(session)[1] == "<think>hm</think>\n\nYes."

    def test_each_answer_begins_its_constraint_anew(self, capsys):
        session = new_session("ab", "cab")
        session.constraint = Constraint.from_regex("[ab]{2}", session.conversation.model.tokenizer)
        talk(session, "1?", "2?")
        assert re.fullmatch("ab\n[ab]{2}\n", capsys.readouterr().out)


class TestInterrupts:
    def test_twice_at_the_prompt_leaves(self, capsys):
        assert talk(new_session("One."), KeyboardInterrupt, KeyboardInterrupt) == 130
        assert "Ctrl-C again" in capsys.readouterr().err

    def test_once_does_not(self):
        session = new_session("One.", "Two.")
        assert talk(session, KeyboardInterrupt, "1?", KeyboardInterrupt, "2?") == 0
        assert contents(session) == ["1?", "One.", "2?", "Two."]

    def test_first_stops_the_answer_and_keeps_what_came(self, capsys):
        session = new_session("A long answer.")
        _interrupt_after(session, 6)
        assert talk(session, "1?", "/show messages") == 0
        out, err = capsys.readouterr()
        assert out == "A long\n"
        assert "stopped" in err
        assert contents(session) == ["1?", "A long"]

    def test_the_next_turn_goes_on_from_there(self):
        session = new_session("A long answer.", "Two.")
        _interrupt_after(session, 6)
        talk(session, "1?", "2?")
        assert contents(session) == ["1?", "A long", "2?", "Two."]
        assert session.last.statistics.reused_tokens == session.totals[0].prompt_tokens + len("A long")

    def test_stopping_an_answer_and_once_more_leaves(self):
        session = new_session("A long answer.")
        _interrupt_after(session, 6)
        assert talk(session, "1?", KeyboardInterrupt) == 130

    def test_behind_a_pipe_the_first_one_leaves(self):
        session = new_session("A long answer.")
        _interrupt_after(session, 6)
        assert talk(session, "1?", "2?", interactive=False) == 130


def _interrupt_after(session: Session, n_tokens: int) -> None:
    """Sends the process Ctrl-C's signal while the model computes the token behind so many of the first answer."""
    model, script = session.conversation.model, session.conversation.model.script
    state = {"steps": 0}

    def interrupting(tokens: list[int]) -> int:
        state["steps"] += 1
        if state["steps"] == n_tokens + 1:
            os.kill(os.getpid(), 2)
        return script(tokens)

    model.script = interrupting


class TestCommands:
    @pytest.fixture
    def session(self) -> Session:
        session = new_session("One.", "Two.", "Three.", show_stats=False)
        talk(session, "1?", "2?")
        return session

    def said(self, session: Session, capsys, *lines: str) -> str:
        """What commands say; nothing of it on stdout."""
        capsys.readouterr()
        talk(session, *lines)
        out, err = capsys.readouterr()
        assert out == ""
        return err

    def test_help_lists_all(self, session, capsys):
        said = self.said(session, capsys, "/help")
        assert all(command in said for command in chat_commands.COMMANDS)
        assert self.said(session, capsys, "/?") == said

    def test_unknown_commands_are_named(self, session, capsys):
        assert "/nonsense" in self.said(session, capsys, "/nonsense")
        assert len(contents(session)) == 4

    @pytest.mark.parametrize("name", ["/help", "/clear", "/undo", "/regen", "/stats", "/exit", "/quit", "/?"])
    def test_what_stands_behind_a_command_without_arguments_is_refused(self, session, capsys, name):
        assert f"{name} takes nothing behind it, not 'now'" in self.said(session, capsys, f"{name} now")
        assert contents(session) == ["1?", "One.", "2?", "Two."]

    @pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
    def test_leaving(self, session, command):
        talk(session, command, "not asked")
        assert "not asked" not in contents(session)

    def test_system(self, session, capsys):
        assert "none" in self.said(session, capsys, "/system")
        assert "Be brief." in self.said(session, capsys, "/system Be brief.")
        assert contents(session)[0] == "Be brief."
        self.said(session, capsys, '/system ""')
        assert session.conversation.system is None
        self.said(session, capsys, "/set system Be long.")
        assert session.conversation.system == "Be long."

    def test_undo_and_regen(self, session, capsys):
        assert "2?" in self.said(session, capsys, "/undo")
        assert contents(session) == ["1?", "One."]
        talk(session, "/regen")
        assert contents(session) == ["1?", "One."]
        assert "nothing" in self.said(session, capsys, "/undo", "/undo")

    def test_regen_without_a_question(self, capsys):
        assert "no question" in self.said(new_session("One."), capsys, "/regen")

    def test_regen_takes_other_random_numbers(self, session):
        talk(session, "/set seed 5", "3?")
        seeds = [session.last.seed]
        talk(session, "/regen")
        seeds.append(session.last.seed)
        talk(session, "4?")
        assert [*seeds, session.last.seed] == [5, 6, 5]

    def test_interrupted_regen_leaves_the_old_answer(self, session):
        _interrupt_after(session, 0)
        talk(session, "/regen")
        assert contents(session) == ["1?", "One.", "2?", "Two."]

    def test_clear(self, session, capsys):
        self.said(session, capsys, "/system S", "/clear")
        assert contents(session) == ["S"]

    @pytest.mark.parametrize(
        ("typed", "name", "value"),
        [
            ("temp 0.5", "temperature", "0.5"),
            ("temperature 0.5", "temperature", "0.5"),
            ("top-k 7", "top_k", "7"),
            ("repeat_penalty 1.1", "repeat_penalty", "1.1"),
            ("n 12", "max_tokens", "12"),
            ("seed 3", "seed", "3"),
            ("seed -1", "seed", "none"),
            ("stop ### 'a b' \"\\n\"", "stop", '"###" "a b" "\\n"'),
            ('stop ""', "stop", "none"),
            ("stats off", "stats", "off"),
            ("hide-thinking on", "hide_thinking", "on"),
            ("context_shift yes", "context_shift", "on"),
        ],
    )
    def test_set(self, session, capsys, typed, name, value):
        assert self.said(session, capsys, f"/set {typed}") == f"{name} = {value}\n"
        assert f"{name} = {value}\n" in self.said(session, capsys, "/set")
        assert f"{name} = {value}\n" == self.said(session, capsys, f"/set {name}")

    @pytest.mark.parametrize(
        "typed",
        [
            "nonsense 1",
            "temp hot",
            "temp -1",
            "top_k 1.5",
            "top_k -1",
            "top_p 3",
            "seed -5",
            "n -2",
            "stats maybe",
            "stop 'open",
        ],
    )
    def test_set_what_cannot_be(self, session, capsys, typed):
        before = chat_commands.chat_settings.settings(session)
        said = self.said(session, capsys, f"/set {typed}")
        assert said.startswith("tinyllm: error: ") and said.count("\n") == 1
        assert chat_commands.chat_settings.settings(session) == before

    def test_set_changes_the_next_answer(self, session):
        talk(session, "/set n 3", "3?")
        assert contents(session)[-1] == "Thr"
        talk(session, "/set n -1", "/set stop re", "/regen")
        assert contents(session)[-1] == "Th"

    @pytest.mark.parametrize(
        ("topic", "told"),
        [("", "fake.gguf"), ("model", "2048"), ("template", "im_start"), ("settings", "top_p"), ("messages", "Two.")],
    )
    def test_show(self, session, capsys, topic, told):
        assert told in self.said(session, capsys, f"/show {topic}")

    def test_save_and_load(self, session, capsys, tmp_path):
        path = tmp_path / "a chat.json"
        assert "4 messages" in self.said(session, capsys, f"/save {path}")
        other = new_session("One.", "Two.", "Three.")
        assert "4 messages" in self.said(other, capsys, f"/load {path}")
        assert contents(other) == ["1?", "One.", "2?", "Two."]
        talk(other, "3?", f"/save '{path}'")
        assert len(json.loads(path.read_text())["messages"]) == 6

    def test_save_does_not_overwrite_other_files(self, session, capsys, tmp_path):
        (tmp_path / "thesis.txt").write_text("years of work")
        assert "not a saved chat" in self.said(session, capsys, f"/save {tmp_path}/thesis.txt")
        assert (tmp_path / "thesis.txt").read_text() == "years of work"

    def test_save_reads_no_device(self, session, capsys, tmp_path, monkeypatch):
        os.mkfifo(tmp_path / "endless")
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("this would wait for ever"))
        assert "not a saved chat" in self.said(session, capsys, f"/save {tmp_path}/endless")

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "{",
            "[]",
            "3",
            '{"messages": [{"role": "user"}]}',
            '{"messages": [{"role": 1, "content": ""}]}',
            "[" * 9999,
        ],
    )
    def test_load_what_is_no_chat(self, session, capsys, tmp_path, content):
        (tmp_path / "x").write_text(content)
        assert "not a saved chat" in self.said(session, capsys, f"/load {tmp_path}/x")
        assert len(contents(session)) == 4

    @pytest.mark.parametrize("command", ["/save", "/load", "/read", "/load /no/such", "/save /no/such/file", "/read /"])
    def test_files_that_cannot_be(self, session, capsys, command):
        said = self.said(session, capsys, command)
        assert said.startswith("tinyllm: error: ") and said.count("\n") == 1

    def test_read_goes_in_front_of_the_next_message(self, session, capsys, tmp_path):
        (tmp_path / "notes.txt").write_text("Some notes.\n")
        assert "11 characters, 11 tokens" in self.said(session, capsys, f"/read {tmp_path}/notes.txt")
        talk(session, "Sum up.")
        assert contents(session)[-2] == "Some notes.\n\nSum up."
        talk(session, "And now?")
        assert contents(session)[-2] == "And now?"

    def test_regen_leaves_what_is_attached_to_the_next_message(self, session, tmp_path):
        (tmp_path / "notes.txt").write_text("Some notes.")
        talk(session, f"/read {tmp_path}/notes.txt", "/regen", "Sum up.")
        assert contents(session)[2::2] == ["2?", "Some notes.\n\nSum up."]

    def test_stats(self, session, capsys):
        said = self.said(session, capsys, "/stats")
        assert "2 answers of 10 tokens" in said and "seed" in said
        assert "no answer yet" in self.said(new_session("One."), capsys, "/stats")

    @pytest.mark.model
    def test_trace_writes_a_page_about_the_last_question(self, smollm2_path, tmp_path, capsys):
        page, folder = tmp_path / "inside.html", tmp_path / "folder.html"
        folder.mkdir()
        messages = [{"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "Yes."}]
        with tinyllm.load(smollm2_path, n_ctx=256) as model:
            session = Session(Conversation(model, system="Be brief."), SamplingParams(temperature=0))
            assert "there is no question yet" in self.said(session, capsys, f"/trace {page}")
            session.conversation.messages += messages
            assert "ends in .html" in self.said(session, capsys, f"/trace {tmp_path}/notes.txt")
            assert f"{folder}: Is a directory" in self.said(session, capsys, f"/trace {folder}")
            assert "of the last question" in self.said(session, capsys, f"/trace {page}")
            assert session.conversation.turns == messages
        assert "Paris" in page.read_text("utf-8")

    def test_tokens(self, session, capsys):
        said = self.said(session, capsys, "/tokens")
        assert re.search(r"^ +4 assistant: One\.$", said, re.MULTILINE)
        assert f"{session.conversation.n_tokens} in the context of 2048" in said
        assert self.said(session, capsys, "/tokens ab") == "'a':97 'b':98\n2 tokens\n"

    @pytest.mark.parametrize(
        ("command", "typed", "words"),
        [("/set", "top", {"top_k", "top_p"}), ("/show", "", {"model", "template"}), ("/set", "top_k 3", set())],
    )
    def test_completion(self, session, command, typed, words):
        assert words <= set(chat_commands.complete(session, command, typed))

    def test_paths_are_completed(self, session):
        assert [chat_commands.complete(session, command, "") for command in ("/read", "/save", "/load")] == [None] * 3


class TestInput:
    @pytest.mark.parametrize(
        ("typed", "entry"),
        [
            ("hi", Entry("hi", False)),
            (" hi ", Entry("hi", False)),
            ('"""a\nb"""', Entry("a\nb", True)),
            ('"""\n/a\n\n b\n"""', Entry("/a\n\n b", True)),
            ('"""one line"""', Entry("one line", True)),
            ("a\nb", Entry("a\nb", True)),
            ('say """x"""', Entry('say """x"""', False)),
        ],
    )
    def test_entries(self, typed, entry):
        assert as_entry(typed) == entry

    @pytest.mark.parametrize(
        ("typed", "is_open"),
        [('"""', True), ('"""a', True), ('"""a\nb', True), ('"""a"""', False), ("a", False), ('""""""', False)],
    )
    def test_open_blocks(self, typed, is_open):
        assert is_open_block(typed) == is_open

    @pytest.mark.parametrize(
        ("data", "texts"),
        [
            (b"hi\nmore\n", ["hi", "more"]),
            (b"hi\r\nno end", ["hi", "no end"]),
            (b'"""\na\n\n/b\n"""\nc\n', ["a\n\n/b", "c"]),
            (b'"""never closed\nb', ["never closed\nb"]),
            (b"a\xff\x00b\n", ["a\ufffd\0b"]),
            (b"", []),
        ],
        ids=repr,
    )
    def test_lines(self, monkeypatch, data, texts):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        reader, found = LineReader(), []
        while True:
            try:
                found.append(reader.read().text)
            except EOFError:
                break
        assert found == texts


class TestMarkdown:
    TEXT = (
        "# Title\n\nSome *text* that goes\non.\n\n- one\n- two\n  - inner\n\n1. first\n\n2. second\n\n"
        "```python\nx = [1]\n\n\ny = 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quote\n\nLast ~~words~~."
    )

    def rendered(self, text: str, size: int, height: int = 50) -> str:
        """What a terminal of that height shows in the end (control sequences for erasing are carried out)."""
        from rich.console import Console

        stream = io.StringIO()
        console = Console(
            file=stream, force_terminal=True, color_system=None, width=60, height=height, legacy_windows=False
        )
        reply = MarkdownReply(console)
        for at in range(0, len(text), size):
            reply._next_draw = 0  # as if time had passed
            reply.show(text[at : at + size])
        reply.finish()
        return screen(stream.getvalue())

    @pytest.mark.parametrize("size", [1, 3, 7, 50])
    @pytest.mark.parametrize("height", [50, 6])
    def test_streamed_looks_as_printed_at_once(self, size, height):
        assert self.rendered(self.TEXT, size, height) == self.rendered(self.TEXT, 10**6)

    def test_whole_document_is_as_rich_prints_it(self):
        from rich.console import Console
        from rich.markdown import Markdown

        text = "# Title\n\nText.\n\n- one\n- two\n\n```\ncode\n```\n\nEnd."
        console = Console(file=io.StringIO(), width=60, color_system=None, force_terminal=True)
        console.print(Markdown(text))
        expected = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
        assert [line.rstrip() for line in self.rendered(text, 5).splitlines()] == [
            line.rstrip() for line in expected.splitlines()
        ]

    def test_control_characters_of_a_model_never_reach_the_terminal(self):
        assert "\x1b" not in self.rendered("a\x1b[31mred\x1b]0;title\x07", 4)

    def test_thinking_is_not_markdown(self):
        shown = self.rendered("<think>*hm*\n</think>\n\n*Yes*.", 3)
        assert "*hm*" in shown and "*Yes*" not in shown and "Yes." in shown


def screen(output: str) -> str:
    """The lines that stay on a terminal: carries out `cursor up n` and `erase below`, drops colours."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;]*[A-Za-z]|\r|\n)", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(row - int(part[2:-1] or 1), 0)
        elif part == "\x1b[J":
            del lines[row:]
            lines.append("")
        elif part and not part.startswith("\x1b[") and part != "\r":
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines)


class TestPipe:
    def chat(self, data: bytes, *arguments: str, **spec) -> subprocess.CompletedProcess:
        return subprocess.run(
            [
                sys.executable,
                str(TESTS / "fake_cli.py"),
                json.dumps({"replies": ["One.", "Two."]} | spec),
                "chat",
                *arguments,
            ],
            input=data,
            capture_output=True,
            timeout=20,
        )

    def test_each_line_is_a_message(self):
        process = self.chat(b"hi\nmore\n")
        assert (process.returncode, process.stdout) == (0, b"One.\nTwo.\n")
        assert process.stderr.count(b"reused") == 2

    def test_no_escape_codes(self):
        process = self.chat(b"hi\n/help\n/set\n/show\n", replies=["**a** <b>"])
        assert process.stdout == b"**a** <b>\n"
        assert b"\x1b" not in process.stderr

    def test_bytes_that_are_no_text(self):
        process = self.chat(b"\xff\xfe\n\x00\n")
        assert (process.returncode, process.stdout) == (0, b"One.\nTwo.\n")

    def test_a_model_without_template_cannot_chat(self):
        process = self.chat(b"hi\n", template=None)
        assert (process.returncode, process.stdout, process.stderr.count(b"\n")) == (1, b"", 1)
        assert b"--chat-template" in process.stderr

    def test_options_reach_the_chat(self):
        process = self.chat(b"hi\n/show system\n", "--no-stats", "-n", "2", "--system", "Be brief.")
        assert (process.stdout, process.stderr) == (b"On\n", b"Be brief.\n")


@pytest.fixture
def terminal(tmp_path):
    """Starts a chat on a pseudo-terminal; the history is in `tmp_path`."""
    started = []

    def start(*replies: str, arguments: tuple[str, ...] = (), term: str = "xterm-256color", **spec) -> Chat:
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR" and not k.startswith("TINYLLM_")}
        environment |= {"TERM": term, "TINYLLM_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        child = pexpect.spawn(
            sys.executable,
            [str(TESTS / "fake_cli.py"), json.dumps({"replies": replies} | spec), "chat", *arguments],
            env=environment,
            timeout=15,
            encoding="utf-8",
            dimensions=(24, 100),
        )
        child.delaybeforesend = None
        started.append(child)
        child.expect(">>>")
        return Chat(child)

    yield start
    for child in started:
        child.close(force=True)


class Chat:
    """A chat on a terminal."""

    def __init__(self, child):
        self.child = child

    def send(self, keys: str, until: str = ">>>") -> str:
        """Types keys; returns what came on the screen until the next prompt."""
        self.child.send(keys)
        self.child.expect(r"reused tokens.*?" + until if until == ">>>" and "/" not in keys else until)
        return self.child.before + self.child.after

    def messages(self) -> list[str]:
        """The messages as the chat shows them."""
        self.child.send("/show messages\r")
        self.child.expect("(?s)user: .*?>>>")
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.child.after).replace("\r", "")
        return re.findall(r"(?ms)^(?:user|assistant): (.*?)(?=\n(?:user|assistant): |\s+>>>)", shown)

    def ends(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


class TestTerminal:
    def test_a_turn_with_markdown(self, terminal):
        chat = terminal("Some **bold** text.")
        shown = chat.send("hi\r")
        assert "\x1b[1mbold\x1b[0m" in shown
        assert "**bold**" not in shown

    def test_plain(self, terminal):
        assert "**bold**" in terminal("Some **bold** text.", arguments=("--plain",)).send("hi\r")

    def test_pasted_lines_are_one_message(self, terminal):
        chat = terminal("One.", "Two.")
        chat.send("\x1b[200~/help\r\nb\nc\x1b[201~\r")
        assert chat.messages() == ["/help\nb\nc", "One."]

    def test_a_block_in_quotes(self, terminal):
        chat = terminal("One.")
        chat.child.send('"""a\r')
        chat.child.expect(r"\.\.\.")
        chat.child.send("\r/b\r")
        chat.send('"""\r')
        assert chat.messages() == ["a\n\n/b", "One."]

    def test_alt_enter_makes_a_new_line(self, terminal):
        chat = terminal("One.")
        chat.send("a\x1b\rb\r")
        assert chat.messages() == ["a\nb", "One."]

    def test_history_outlives_the_chat(self, terminal, tmp_path):
        terminal("One.").send("remember me\r")
        chat = terminal("One.")
        chat.send("\x1b[A\r")
        assert chat.messages() == ["remember me", "One."]
        assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0

    def test_no_history_on_demand(self, terminal, tmp_path):
        terminal("One.", arguments=("--no-history",)).send("forget me\r")
        assert not (tmp_path / "chat_history").exists()

    def test_completion_of_commands_and_paths(self, terminal, tmp_path):
        (tmp_path / "notes.txt").write_text("Some notes.")
        chat = terminal("One.")
        shown = chat.send(f"/rea\t {tmp_path}/not\t\r", until="in front of your next message")
        assert "11 characters" in shown

    def test_ctrl_c_stops_the_answer_and_keeps_what_came(self, terminal):
        chat = terminal("a" * 2000, "Two.", seconds_per_step=0.01, arguments=("--plain",))
        chat.child.send("hi\r")
        chat.child.expect("aaaaa")
        started = time.monotonic()
        chat.child.sendintr()
        chat.child.expect("stopped.*>>>")
        assert time.monotonic() - started < 1
        chat.send("more\r")
        question, answer, more, two = chat.messages()
        assert (question, set(answer), more, two) == ("hi", {"a"}, "more", "Two.")

    def test_ctrl_c_while_the_prompt_is_computed(self, terminal):
        chat = terminal("One.", seconds_per_step=5)
        chat.child.send("hi\r")
        time.sleep(0.3)
        started = time.monotonic()
        chat.child.sendintr()
        chat.child.expect("taken back")
        assert time.monotonic() - started < 1

    def test_ctrl_c_twice_leaves(self, terminal):
        chat = terminal("One.")
        chat.child.sendintr()
        chat.child.expect("Ctrl-C again")
        chat.child.sendintr()
        assert chat.ends() == 130

    def test_ctrl_c_clears_a_line_first(self, terminal):
        chat = terminal("One.")
        chat.child.send("half a line")
        time.sleep(0.2)
        chat.child.sendintr()
        chat.send("other\r")
        assert chat.messages() == ["other", "One."]

    def test_ctrl_c_twice_in_an_answer_leaves(self, terminal):
        chat = terminal("a" * 2000, seconds_per_step=0.01, arguments=("--plain",))
        chat.child.send("hi\r")
        chat.child.expect("aaaaa")
        chat.child.sendintr()
        time.sleep(0.05)  # signals that come together count as one
        chat.child.sendintr()
        assert chat.ends() == 130

    def test_ctrl_d_leaves(self, terminal):
        chat = terminal("One.")
        chat.child.sendeof()
        assert chat.ends() == 0

    def test_dumb_terminal(self, terminal):
        chat = terminal("Some **bold** text.", term="dumb")
        shown = chat.send("hi\n")
        assert "Some **bold** text." in shown
        assert "\x1b" not in shown
        chat.child.sendeof()
        assert chat.ends() == 0

    def test_waiting_uses_no_processor(self, terminal):
        chat = terminal("One.")
        chat.send("hi\r")
        before = sum(_cpu_times(chat.child.pid))
        time.sleep(1)
        assert sum(_cpu_times(chat.child.pid)) - before < 0.05


def _cpu_times(pid: int) -> tuple[float, float]:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


@pytest.mark.model
def test_each_turn_of_the_default_model_computes_only_what_is_new(smollm2_path):
    from record_chat import record

    shown = record(str(smollm2_path), "--seed", "1", "-n", "40")
    turns = [
        [int(n) for n in turn] for turn in re.findall(r"prompt (\d+) new \+ (\d+) reused .* context (\d+)/", shown)
    ]
    assert len(turns) == 5
    for (_, _, held), (new, reused, _) in itertools.pairwise(turns):
        assert reused == held
        assert new < 30
