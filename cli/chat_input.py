"""What the user of a chat says next: keys or lines go in, whole messages come out.

On a terminal prompt_toolkit reads with history, completion and several lines; from a pipe or a dumb terminal each line
is a message. In both, a block between triple quotes is one message and never a command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tinyllm_cli import render

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

QUOTES = '"""'
PROMPT, CONTINUATION = ">>> ", "... "

Arguments = Callable[[str, str], Iterable[str] | None]
"""(command, what is typed of its argument) -> the words it may become; None: a path."""


class Entry(NamedTuple):
    """One message. `literal`: it came in quotes or several lines, so it is no command whatever it begins with."""

    text: str
    literal: bool


class Reader(Protocol):
    """Where entries come from; `interactive` when a person types them."""

    interactive: bool

    def read(self) -> Entry:
        """The next entry. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C on an empty line."""
        ...


def as_entry(typed: str) -> Entry:
    """What was typed, without the quotes around a block."""
    stripped = typed.strip()
    if stripped.startswith(QUOTES):
        return Entry(stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), literal=True)
    return Entry(stripped, literal="\n" in stripped)


def is_open_block(typed: str) -> bool:
    """Whether a block of quotes has been begun and not ended."""
    stripped = typed.strip()
    return stripped.startswith(QUOTES) and not (len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES))


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")


class LineReader:
    """Reads standard input line by line; prompts on stderr when a person types."""

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()

    def read(self) -> Entry:
        typed = self._read_line(PROMPT)
        while is_open_block(typed):
            try:
                typed += "\n" + self._read_line(CONTINUATION)
            except EOFError:
                break
        return as_entry(typed)

    def _read_line(self, prompt: str) -> str:
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        stream = getattr(sys.stdin, "buffer", sys.stdin)
        line = stream.readline() if stream is not None else b""
        if not line:
            raise EOFError
        text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        return text.rstrip("\r\n")


class TerminalReader:
    """Reads keys through prompt_toolkit."""

    interactive = True

    def __init__(self, commands: Iterable[str], arguments: Arguments, history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import ColorDepth, create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        # Without asking the terminal where the cursor is: some never answer, and what is drawn here needs no answer.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(history)) if history is not None else InMemoryHistory(),
            completer=_completer(list(commands), arguments),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else CONTINUATION,
            enable_open_in_editor=True,
            color_depth=ColorDepth.DEPTH_1_BIT if render.is_plain(sys.stdout) else None,
            output=create_output(sys.stdout),
        )

    def read(self) -> Entry:
        return as_entry(self._session.prompt("\n" + PROMPT))


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def submit(event: KeyPressEvent) -> None:
        if is_open_block(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def cancel(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


def _completer(commands: list[str], arguments: Arguments) -> object:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document as Doc

    class ChatCompleter(Completer):
        """Commands after a slash at the beginning, then what the command takes."""

        def get_completions(self, document: Document, event: object) -> Iterable[Completion]:
            typed = document.text_before_cursor
            if not typed.startswith("/") or "\n" in typed:
                return
            command, space, argument = typed.partition(" ")
            words = commands if not space else arguments(command, argument)
            if words is None:
                yield from PathCompleter(expanduser=True).get_completions(Doc(argument), event)
                return
            begun = argument if space else command
            for word in words:
                if word.startswith(begun):
                    yield Completion(word, start_position=-len(begun))

    return ChatCompleter()


def history_file() -> Path | None:
    """Where the chat keeps its history (`$TINYLLM_HOME`, else `$XDG_STATE_HOME/tinyllm`); None where it cannot.

    What people type is theirs: the file is made readable for its owner only.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(os.environ.get("TINYLLM_HOME") or Path(state) / "tinyllm").expanduser()
    path = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return path if os.access(path, os.R_OK | os.W_OK) else None
    except OSError:
        return None
