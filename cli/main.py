"""The `tinyllm` command: arguments flow in, an exit code comes out (0 done, 1 failed, 2 wrong usage, 130 Ctrl-C).

Each subcommand's module is imported when it is asked for, so that help and completion need none of them.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn, TextIO

import typer

from tinyllm import __version__
from tinyllm.errors import TinyLLMError
from tinyllm_cli.lazy import ClosedPipe, LazyGroup, Subcommand
from tinyllm_cli.text import one_line

LazyGroup.table = {
    "run": Subcommand("tinyllm_cli.run:run", "Answer one prompt."),
    "chat": Subcommand("tinyllm_cli.chat:chat", "Talk with a model."),
    "bench": Subcommand("tinyllm_cli.bench:bench", "Measure speed, and where the time goes."),
    "trace": Subcommand("tinyllm_cli.trace:trace", "Look inside: what each stage makes of a prompt."),
    "perplexity": Subcommand("tinyllm_cli.perplexity:perplexity", "Measure how well models predict a text."),
    "experiment": Subcommand("tinyllm_cli.experiment:app", "Try out what theory says, with tables and pictures."),
    "list": Subcommand("tinyllm_cli.models:list_models", "List the models on this machine."),
    "pull": Subcommand("tinyllm_cli.models:pull", "Fetch a model, or check the one that is here."),
    "show": Subcommand("tinyllm_cli.models:show", "Tell what is in a model file."),
    "rm": Subcommand("tinyllm_cli.models:remove", "Delete models from the store."),
    "tokenize": Subcommand("tinyllm_cli.tokenize:tokenize", "Show the tokens of a text."),
    "embed": Subcommand("tinyllm_cli.embed:embed", "Turn texts into vectors."),
    "config": Subcommand("tinyllm_cli.settings:show_config", "Show the settings in force and where they come from."),
}

app = typer.Typer(
    cls=LazyGroup,
    name="tinyllm",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: no boxes in pipes, and rich need not be imported
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`tinyllm COMMAND --help` tells more. Every option can also be set in the environment (TINYLLM_THREADS for "
    "--threads) and in a configuration file: see `tinyllm config`.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tinyllm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run quantized language models on the CPU of this machine."""


def main() -> NoReturn:
    """Entry point of the `tinyllm` command."""
    _prepare_streams()
    code = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _leave_closed_pipe()
    except OSError as error:  # a full disk, for one
        code = _fail(f"the output cannot be written: {error.strerror}")
        _discard_output()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run a command line; whatever goes wrong becomes one line on stderr."""
    try:
        typer.main.get_command(app).main(arguments, prog_name="tinyllm")
    except SystemExit as exit_:
        if exit_.code == 130 and sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt shall not stand behind the ^C
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return 130
    except ClosedPipe:
        return _leave_closed_pipe()
    except TinyLLMError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("not enough memory")
    except Exception as error:
        if os.environ.get("TINYLLM_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.strerror:
            return _fail(f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror)
        return _fail(f"unexpected {type(error).__name__}: {error} (TINYLLM_TRACEBACK=1 shows where)")
    return 0


def _fail(message: str) -> int:
    print(f"tinyllm: error: {one_line(message)}", file=sys.stderr)
    return 1


def _prepare_streams() -> None:
    """Make printing safe: any text in any locale, and also without a stdout or stderr."""
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere())
        elif hasattr(stream, "reconfigure"):
            # Files and pipes get UTF-8 whatever the locale; a terminal gets what it says that it understands.
            chosen = None if stream.isatty() or os.environ.get("PYTHONIOENCODING") else "utf-8"
            stream.reconfigure(encoding=chosen, errors=errors)


def _leave_closed_pipe() -> int:
    """Nobody reads on: end without a word, with the code that a shell gives to a process that SIGPIPE has ended."""
    _discard_output()
    return 141


def _discard_output() -> None:
    """Let the flush at interpreter exit go nowhere instead of failing again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = _nowhere()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


if __name__ == "__main__":
    main()
