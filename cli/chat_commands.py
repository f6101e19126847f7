"""The slash commands of a chat: a line that begins with one goes in, the session changes, a report goes to stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tinyllm.errors import InvalidParameterError, TinyLLMError
from tinyllm_cli import chat_settings
from tinyllm_cli.chat_session import Session, stats_line
from tinyllm_cli.outputs import written
from tinyllm_cli.prompt_input import read_text
from tinyllm_cli.text import counted, harmless, one_line

QUOTED_NOTHING = '""'
TRACED_TOKENS, LENS_BUDGET_S = 8, 1.5  # as `tinyllm trace`


class Leave(Exception):
    """The user wants to end the chat."""


@dataclass(frozen=True)
class Command:
    """What a command does, how it is typed, and its line in /help."""

    run: Callable[[Session, str], None]
    usage: str
    help: str


def parse(line: str) -> tuple[str, str] | None:
    """(command, argument) of a line that is a command, known or not; None for a message, such as one about a path."""
    match = re.fullmatch(r"(/[a-z?]+)(?:\s+(.*))?", line, re.DOTALL)
    return (match[1], (match[2] or "").strip()) if match else None


def execute(session: Session, name: str, argument: str) -> None:
    """Runs a command. Raises TinyLLMError for what cannot be done, Leave for /exit."""
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        raise InvalidParameterError(f"{name}: no such command; /help lists them")
    if argument and " " not in command.usage:
        raise InvalidParameterError(f"{name} takes nothing behind it, not {argument!r}")
    command.run(session, argument)


def say(text: str) -> None:
    """Tells the result of a command: on stderr, because stdout is for the model's answers."""
    print(harmless(text), file=sys.stderr)


def _help(session: Session, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    say("\n".join(f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()))
    say(
        '\n""" begins and ends a message of several lines; Alt-Enter makes a new line in any message. '
        "Ctrl-C stops an answer or clears the line; twice, it leaves, as Ctrl-D does."
    )


def _exit(session: Session, argument: str) -> None:
    raise Leave


def _system(session: Session, argument: str) -> None:
    if argument:
        session.conversation.system = None if argument == QUOTED_NOTHING else argument
    say(f"system message: {session.conversation.system or 'none (what the chat template says)'}")


def _set(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        say(_all_settings(session))
    elif name == "system":
        _system(session, value.strip() or QUOTED_NOTHING)
    else:
        say(chat_settings.change(session, name, value.strip()))


def _all_settings(session: Session) -> str:
    return "\n".join(f"{key} = {shown}" for key, shown in chat_settings.settings(session).items())


def _show(session: Session, argument: str) -> None:
    conversation, model = session.conversation, session.conversation.model
    template = conversation.template or model.chat_template
    topics = {
        "model": lambda: (
            f"{model.path}\narchitecture {model.config.architecture}, context {model.n_ctx}, "
            f"{counted(model.n_threads, 'thread')}"
        ),
        "system": lambda: conversation.system or "none (what the chat template says)",
        "template": lambda: template.source,
        "settings": lambda: _all_settings(session),
        "messages": lambda: "\n".join(f"{m['role']}: {m['content']}" for m in conversation.messages) or "none yet",
    }
    if argument and argument not in topics:
        raise InvalidParameterError(f"/show {argument}: there are {', '.join(topics)}")
    for topic in [argument] if argument else ["model", "system", "settings"]:
        say(topics[topic]())


def _clear(session: Session, argument: str) -> None:
    session.conversation.clear()
    session.attachments.clear()
    say("the conversation is empty")


def _undo(session: Session, argument: str) -> None:
    question = session.conversation.undo()
    say(f"taken back: {one_line(question['content'])[:200]}" if question else "there is nothing to take back")


def _regen(session: Session, argument: str) -> None:
    if not session.ask_again():
        say("there is no question to answer again")


def _save(session: Session, argument: str) -> None:
    path = _path(argument, "/save")
    if path.exists() and not _is_saved_chat(path):
        raise InvalidParameterError(f"{path}: exists and is not a saved chat; choose another name")
    messages = session.conversation.messages
    data = {"tinyllm_chat": 1, "model": session.conversation.model.path.name, "messages": messages}
    with written(path):
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    say(f"{counted(len(messages), 'message')} saved to {path}")


def _load(session: Session, argument: str) -> None:
    path = _path(argument, "/load")
    try:
        messages = json.loads(read_text(path))["messages"]
        sound = all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages)
    except (ValueError, TypeError, KeyError, RecursionError):
        sound = False
    if not sound:
        raise InvalidParameterError(f"{path}: not a saved chat")
    session.conversation.messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    say(f"{counted(len(messages), 'message')} loaded from {path}")


def _is_saved_chat(path: Path) -> bool:
    try:
        # A device may never end.
        return path.is_file() and "tinyllm_chat" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidParameterError(f"{command}: name a file")
    return Path(argument.strip("'\"")).expanduser()


def _read(session: Session, argument: str) -> None:
    path = _path(argument, "/read")
    text = read_text(path)
    session.attachments.append(text)
    n_tokens = len(session.conversation.model.tokenizer.encode(text, add_special=False, parse_special=False))
    say(
        f"{path}: {counted(len(text), 'character')}, {counted(n_tokens, 'token')}; "
        "they go in front of your next message"
    )


def _stats(session: Session, argument: str) -> None:
    if session.last is None:
        say("no answer yet")
        return
    conversation = session.conversation
    say(stats_line(session.last.statistics, conversation.n_tokens, conversation.model.n_ctx))
    say(f"seed {session.last.seed}, ended by {session.last.finish_reason or 'Ctrl-C'}")
    computed, reused = (sum(getattr(s, name) for s in session.totals) for name in ("computed_tokens", "reused_tokens"))
    generated = sum(s.generated for s in session.totals)
    seconds = sum(s.prompt_s + s.decode_s for s in session.totals)
    say(
        f"in all: {counted(len(session.totals), 'answer')} of {counted(generated, 'token')}, "
        f"prompts of {computed} computed and {reused} reused tokens, {seconds:.1f} s of computing"
    )


def _tokens(session: Session, argument: str) -> None:
    conversation, tokenizer = session.conversation, session.conversation.model.tokenizer
    if argument:
        ids = tokenizer.encode(argument, add_special=False, parse_special=False)
        say(" ".join(f"{one_line(repr(tokenizer.token_text(token)))}:{token}" for token in ids))
        say(counted(len(ids), "token"))
        return
    for message in conversation.messages:
        n = len(tokenizer.encode(message["content"], add_special=False, parse_special=False))
        say(f"{n:6} {message['role']}: {one_line(message['content'])[:60]}")
    say(f"{conversation.n_tokens:6} in the context of {conversation.model.n_ctx}, with what the chat template adds")


def _trace(session: Session, argument: str) -> None:
    path, conversation = _path(argument, "/trace"), session.conversation
    if path.suffix != ".html":  # a slip of the fingers shall not overwrite another file
        raise InvalidParameterError(f"{path}: name a page that ends in .html")
    asked = max((at for at, message in enumerate(conversation.messages) if message["role"] == "user"), default=None)
    if asked is None:
        raise InvalidParameterError("/trace: there is no question yet")
    from tinyllm.trace import trace
    from tinyllm.trace.page import write_page

    ids = conversation.encode(conversation.messages[: asked + 1])
    found = trace(conversation.model, ids, max_tokens=TRACED_TOKENS, params=session.params, lens_budget_s=LENS_BUDGET_S)
    with written(path):
        write_page(found, path, command=f"/trace {argument}")
    say(f"{counted(len(ids), 'token')} of the last question and {TRACED_TOKENS} of an answer: open {path}")


COMMANDS = {
    "/help": Command(_help, "/help", "List the commands."),
    "/system": Command(_system, "/system [TEXT]", 'Show or set the system message ("" for none).'),
    "/set": Command(
        _set, "/set [NAME [VALUE]]", "Show or change a setting: /set temp 0, /set stop ###, /set stats off."
    ),
    "/show": Command(_show, "/show [TOPIC]", "Show model, system, template, settings or messages."),
    "/clear": Command(_clear, "/clear", "Forget the conversation."),
    "/undo": Command(_undo, "/undo", "Take the last question and its answer back."),
    "/regen": Command(_regen, "/regen", "Answer the last question again."),
    "/save": Command(_save, "/save FILE", "Save the conversation."),
    "/load": Command(_load, "/load FILE", "Go on with a saved conversation."),
    "/read": Command(_read, "/read FILE", "Put a file's text in front of the next message."),
    "/stats": Command(_stats, "/stats", "Speed and counts of the last answer, and of all."),
    "/tokens": Command(_tokens, "/tokens [TEXT]", "Count the tokens of the messages, or show those of a text."),
    "/trace": Command(_trace, "/trace FILE.html", "Write a page that shows inside how the last question is answered."),
    "/exit": Command(_exit, "/exit", "Leave."),
}
ALIASES = {"/?": "/help", "/quit": "/exit", "/bye": "/exit"}


def complete(session: Session, command: str, typed: str) -> Iterable[str] | None:
    """The words that the argument of a command may become; None when it is a path."""
    if command in ("/save", "/load", "/read", "/trace"):
        return None
    if command == "/set":
        return [] if " " in typed else ["system", *chat_settings.settings(session)]
    return ["model", "system", "template", "settings", "messages"] if command == "/show" else []


def report(error: TinyLLMError) -> None:
    """Shows an error of one turn; the chat goes on."""
    print(f"tinyllm: error: {one_line(str(error))}", file=sys.stderr)
