"""`tinyllm chat`: messages from a terminal or a pipe go in, the model's answers come out, until the input ends."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tinyllm.errors import ChatTemplateError, TinyLLMError
from tinyllm_cli import chat_commands, render
from tinyllm_cli.chat_input import Entry, LineReader, Reader, TerminalReader, history_file, is_dumb
from tinyllm_cli.chat_session import Session
from tinyllm_cli.loading import load_constraint, load_model, load_template, tell_trained, tell_unused, usage_errors
from tinyllm_cli.option_groups import option_groups
from tinyllm_cli.options import ConstraintOptions, ModelOptions, SamplingOptions, TextOptions

INTERRUPTED = 130


@option_groups
def chat(
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are, without Markdown.")] = False,
    context_shift: Annotated[
        bool, typer.Option("--context-shift", help="Forget the oldest turns when the context is full.")
    ] = False,
    no_stats: Annotated[bool, typer.Option("--no-stats", help="No line of statistics below the answers.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Neither read nor write the history file.")] = False,
    *,
    text: TextOptions,
    constraint: ConstraintOptions,
    sampling: SamplingOptions,
    engine: ModelOptions,
) -> None:
    """Talk with a model.

    On a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves. From a pipe: each line is a message.
    Three quotes begin and end a message of several lines.
    """
    with usage_errors():
        params, template_args, stops = sampling.params(), text.template_args(), text.stops()
    model = load_model(engine)
    tell_trained(model.path.stem, engine.ctx_size, model.config.n_ctx_train)
    template = load_template(text.chat_template, model)
    if template is None:
        raise ChatTemplateError(
            f"{model.path.name} has no chat template: `tinyllm run` continues text, --chat-template names a template"
        )
    tell_unused(template_args, template)
    from tinyllm.conversation import Conversation

    conversation = Conversation(
        model,
        system=None if text.system is None else text.typed(text.system),
        template=template,
        template_args=template_args,
        context_shift=context_shift,
    )
    session = Session(
        conversation,
        params,
        max_tokens=text.max_tokens,
        stop=stops,
        ignore_eos=text.ignore_eos,
        constraint=load_constraint(constraint, model),
        markdown=not plain and not render.is_plain(sys.stdout),
        hide_thinking=text.hide_thinking,
        show_stats=not no_stats,
    )
    reader = new_reader(session, keep_history=not no_history)
    if reader.interactive:
        render.note(f"{model.path.name}, context of {model.n_ctx} tokens. /help lists the commands, Ctrl-D leaves.")
    code = converse(session, reader)
    conversation.close()
    raise typer.Exit(code)


def new_reader(session: Session, keep_history: bool = True) -> Reader:
    """The reader that fits: prompt_toolkit's on a terminal that can do it, else line by line."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty() or is_dumb():
        return LineReader()
    return TerminalReader(
        list(chat_commands.COMMANDS),
        lambda command, typed: chat_commands.complete(session, command, typed),
        history_file() if keep_history else None,
    )


def converse(session: Session, reader: Reader) -> int:
    """Takes entry after entry until the end; returns the exit code (130 after Ctrl-C twice)."""
    failed = False
    while True:
        try:
            entry = reader.read()
        except EOFError:
            break
        except KeyboardInterrupt:
            if session.interrupted or not reader.interactive:
                return INTERRUPTED
            session.interrupted = True
            render.note("[Ctrl-C again or Ctrl-D leaves]")
            continue
        session.interrupted = False
        try:
            take(session, entry)
        except chat_commands.Leave:
            break
        except KeyboardInterrupt:
            return INTERRUPTED
        except TinyLLMError as error:
            chat_commands.report(error)
            failed = True
        if session.interrupted and not reader.interactive:
            return INTERRUPTED
    return int(failed and not reader.interactive)


def take(session: Session, entry: Entry) -> None:
    """Does what an entry asks for: a command, or a question to the model."""
    command = None if entry.literal else chat_commands.parse(entry.text)
    if command is not None:
        chat_commands.execute(session, *command)
    elif entry.text.strip():
        session.ask(entry.text)
