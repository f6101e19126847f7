"""`tinyllm experiment NAME`: the table of experiments; the module of each is imported when it is asked for."""

from __future__ import annotations

from typing import ClassVar

import typer

from tinyllm_cli.lazy import LazyGroup, Subcommand


class ExperimentGroup(LazyGroup):
    """The experiments, in the order of `tinyllm experiment --help`."""

    prefix = "experiment_"
    table: ClassVar[dict[str, Subcommand]] = {
        "cache": Subcommand("tinyllm_cli.experiment_cache:cache", "Generation with a KV cache and without."),
        "memory": Subcommand("tinyllm_cli.experiment_memory:memory", "What keys and values cost: MHA, GQA, MQA, MLA."),
        "context": Subcommand("tinyllm_cli.experiment_context:context", "How the speed falls as the context grows."),
        "sampling": Subcommand(
            "tinyllm_cli.experiment_sampling:sampling", "Temperature, top-p and min-p at one token."
        ),
        "middle": Subcommand("tinyllm_cli.experiment_middle:middle", "Where in a long text a model finds a fact."),
        "languages": Subcommand(
            "tinyllm_cli.experiment_languages:languages", "What the same text costs in several languages."
        ),
    }


app = typer.Typer(
    cls=ExperimentGroup,
    name="experiment",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`tinyllm experiment NAME --help` tells more; docs/experiments.md explains each and shows results.",
)


@app.callback()
def experiment() -> None:
    """Try out what theory says of language models: each experiment is one command with a table, many have a picture."""
