"""Subcommands that are imported when they are asked for: a table of names flows in, a Typer group comes out."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from tinyllm.errors import InvalidParameterError
from tinyllm_cli.quick_values import use_quick_values

EPILOG = (
    "Every option can also be set in the environment (TINYLLM_THREADS for --threads) or a file: see `tinyllm config`."
)


ENGINE_NAMES = {
    "kv_type": ("cache_type",),
    "n_threads": ("threads",),
    "n_batch": ("batch_size",),
    "n_ctx": ("ctx_size", "window", "positions", "lengths"),
}
"""What the engine calls the values of options that have other names here, by what the commands call them."""


class ClosedPipe(Exception):
    """Stdout was closed by its reader. Typer would turn a BrokenPipeError into a failure."""


@contextmanager
def _closed_pipes() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipe from error


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand's function or group is ("module:name") and its line in `tinyllm --help`."""

    target: str
    help: str

    def load(self) -> Callable[..., Any] | typer.Typer:
        """Import the function or the group."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)


class LazyCommands(Mapping[str, TyperCommand | TyperGroup]):
    """What a Typer group takes for its dict of commands; each one is made at the first look at it.

    `prefix` comes before the names that settings know them by.
    """

    def __init__(self, table: Mapping[str, Subcommand], prefix: str = ""):
        self.table, self.prefix = table, prefix
        self._made: dict[str, TyperCommand | TyperGroup] = {}

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in self._made:
            self._made[name] = make_command(self.prefix + name, self.table[name].load())
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def make_command(name: str, target: Callable[..., Any] | typer.Typer) -> TyperCommand | TyperGroup:
    """The command that a function with Typer's annotations describes, or the group of a Typer application."""
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=PlainCommand, epilog=EPILOG)(target)
    command = typer.main.get_command(app)
    command.name = name
    for param in command.params:
        _name_value(param)
    return command


def with_option(message: str, command: TyperCommand) -> str:
    """A message of the engine that begins with the name of a parameter, beginning with the option for it."""
    options = {param.name: param.opts[0] for param in command.params if param.param_type_name == "option"}

    def spelled(match: re.Match[str]) -> str:
        names = [match[0], *ENGINE_NAMES.get(match[0], ())]
        return next((options[name] for name in names if name in options), match[0])

    return re.sub(r"^(\w+(?= must be | ')|\w+_\w+)", spelled, message)


def _name_value(param: Any) -> None:
    """Call values in help texts what other programs call them, where Typer would write their Python types."""
    descriptor = getattr(param, "type_descriptor", None)
    if param.metavar is None and descriptor is not None and not getattr(param, "is_flag", False):
        if param.param_type_name == "argument":
            param.metavar = param.name.upper().removesuffix("S") if param.nargs == -1 else param.name.upper()
        else:
            param.metavar = {str: "TEXT", list[str]: "TEXT", int: "N", float: "X"}.get(descriptor.annotation)


class LazyGroup(TyperGroup):
    """The root command; a subclass with a table and a prefix is a group below it."""

    table: ClassVar[dict[str, Subcommand]] = {}
    prefix: ClassVar[str] = ""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands = LazyCommands(self.table, self.prefix)

    def get_params(self, ctx: typer.Context) -> list[Any]:
        return [use_quick_values(param) for param in super().get_params(ctx)]

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, subcommand.help) for name, subcommand in self.table.items()])

    def make_context(self, *arguments: Any, **extra: Any) -> typer.Context:
        with _closed_pipes():  # --help and --version print here
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: typer.Context) -> Any:
        with _closed_pipes():
            return super().invoke(ctx)


class PlainCommand(TyperCommand):
    """A subcommand: its options are read from the settings too, and its help lists them by panel."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> typer.Context:
        from tinyllm_cli import settings

        settings.connect(self)
        if not extra.get("resilient_parsing") and not {"-h", "--help"} & set(args):
            extra.setdefault("default_map", settings.defaults_from_file(self))
        return super().make_context(info_name, args, parent=parent, **extra)

    def invoke(self, ctx: typer.Context) -> Any:
        from tinyllm_cli import outputs, render

        render.show_log()
        outputs.keep_apart(ctx)
        try:
            return super().invoke(ctx)
        except InvalidParameterError as error:
            raise InvalidParameterError(with_option(str(error), self)) from None
        except typer.BadParameter as error:
            error.message = with_option(error.message, self)
            raise

    def get_params(self, ctx: typer.Context) -> list[Any]:
        from tinyllm_cli import settings

        return [use_quick_values(param, settings.source_of) for param in super().get_params(ctx)]

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:
        """Like Typer's, but with the panels (`rich_help_panel`) that it shows only through rich."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                is_argument = param.param_type_name == "argument"
                name = record[0].partition(" <")[0] if is_argument else record[0]  # without the Python type behind it
                panel = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                panels.setdefault(panel, []).append((name, record[1]))
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
