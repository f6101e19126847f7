"""The commands of `tinyllm` and their options for all: a table flows in, the Typer application comes out.

Each subcommand's module is imported when it is asked for, so that help and completion need none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tinyllm import __version__
from tinyllm_cli.lazy import LazyGroup, Subcommand

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
