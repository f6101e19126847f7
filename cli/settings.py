"""Options from the environment and from a configuration file: both flow into the options of every subcommand.

The option `--threads` of `run` is looked for on the command line, in TINYLLM_RUN_THREADS and TINYLLM_THREADS, in the
file's table `[run]` and at its top, and then has its default.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tinyllm.errors import InvalidParameterError


def config_file() -> Path:
    """`$TINYLLM_CONFIG`, else `tinyllm/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`. It need not exist."""
    if chosen := os.environ.get("TINYLLM_CONFIG"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "tinyllm" / "config.toml"


def options(command: TyperCommand) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each option of a command that can be set elsewhere, with its keys: `temp` and `temperature` for `--temp`."""
    for param in command.params:
        if param.param_type_name == "option" and param.expose_value and not param.hidden:
            yield tuple(name[2:].replace("-", "_") for name in param.opts if name.startswith("--")), param


def connect(command: TyperCommand) -> None:
    """Let a command's options be read from the environment: its own variables come before those for all commands."""
    for keys, param in options(command):
        names = [f"{command.name}_{key}" for key in keys] + list(keys)
        param.envvar = [f"TINYLLM_{name}".upper() for name in names]
        param.show_envvar = False  # one rule, told once at the end of each help, instead of a name at every option
        param.split_envvar_value = _split


def _split(text: str) -> list[str]:
    """The values in a variable for an option that can be repeated: a JSON list of texts, or else one text."""
    try:
        values = json.loads(text)
    except ValueError:
        return [text]
    is_list = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return values if is_list else [text]


def defaults_from_file(command: TyperCommand) -> dict[str, Any]:
    """What the configuration file says for a command, by the names of its parameters.

    Raises:
        InvalidParameterError: the file cannot be read, or holds a key that no command has.
    """
    config, name = _read_config(), command.name or ""
    params = {key: param for keys, param in options(command) for key in keys}
    own = config.get(name, {})
    if not isinstance(own, dict):
        raise InvalidParameterError(f"{config_file()}: {name!r} must be a table, as in [{name}]")
    if strange := next((key for key in own if key not in params), None):
        raise InvalidParameterError(f"{config_file()}: `{name}` has no option {strange!r}")
    if any(key not in params for key in config):  # they may be meant for another command
        _check_top_keys(config)
    merged = {key: value for key, value in config.items() if key in params} | own
    return {
        params[key].name: [value] if params[key].multiple and not isinstance(value, list) else value
        for key, value in merged.items()
    }


def _check_top_keys(config: dict[str, Any]) -> None:
    commands = _commands()
    known = {key for command in commands.values() for keys, _ in options(command) for key in keys}
    for key, value in config.items():
        if key not in (commands if isinstance(value, dict) else known):
            kind = "command" if isinstance(value, dict) else "option"
            raise InvalidParameterError(f"{config_file()}: there is no {kind} {key!r}")


def source_of(param: Any, ctx: Any) -> str:
    """Where the value of a parameter comes from, when it is not the command line: `TINYLLM_THREADS`, or the file."""
    kind = getattr(ctx.get_parameter_source(param.name), "name", "")
    if kind == "ENVIRONMENT":
        return next(name for name in param.envvar if os.environ.get(name))
    return {"DEFAULT_MAP": str(config_file()), "DEFAULT": "default"}.get(kind, "")


@cache
def _read_config() -> dict[str, Any]:
    path = config_file()
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if os.environ.get("TINYLLM_CONFIG"):
            raise InvalidParameterError(f"{path}: no such file (TINYLLM_CONFIG names it)") from None
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise InvalidParameterError(f"{path}: {error.strerror}") from None


def _commands() -> dict[str, TyperCommand]:
    """All commands by the names that they have here; those of a group have its name in front: `experiment_cache`."""
    from tinyllm_cli.lazy import LazyCommands, LazyGroup

    commands: dict[str, TyperCommand] = {}
    for name, command in LazyCommands(LazyGroup.table).items():
        members = command.commands.values() if isinstance(command, LazyGroup) else [command]
        commands |= {member.name or name: member for member in members}
    return commands


def show_config(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the settings in force and where each comes from.

    An option is looked for on the command line, in the environment (TINYLLM_THREADS, or TINYLLM_RUN_THREADS for one
    command alone), and in the configuration file, whose keys are the options' names; a table named like a command holds
    for that command alone:

    \b
        model = "qwen-0.5b"
        threads = 4
        [run]
        top_k = 20
    """
    from tinyllm.store import files as store
    from tinyllm_cli import render

    path = config_file()
    places = {"config_file": str(path), "config_file_exists": path.is_file(), "models": str(store.models_folders()[0])}
    rows = list(_in_force())
    if as_json:
        print(json.dumps({**places, "options": rows}, indent=2, ensure_ascii=False))
        return
    state = "" if places["config_file_exists"] else " (not there)"
    render.table(["", ""], [["configuration", f"{path}{state}"], ["models", places["models"]], ["", ""]])
    lines = [[row["option"], _spelled(row["value"]), row["source"]] for row in rows]
    render.table(["OPTION", "VALUE", "FROM"], lines)


def _in_force() -> Iterator[dict[str, Any]]:
    """A row per option; options in which all commands agree are one row, else `command.option` has a row of its own."""
    found: dict[str, dict[str, tuple[Any, str]]] = {}
    for name, command in _commands().items():
        if name == "config":
            continue
        connect(command)
        # Required arguments are absent here, so the context is asked for values without being told to insist on them.
        ctx = command.make_context(name, [], resilient_parsing=True, default_map=defaults_from_file(command))
        for keys, param in options(command):
            found.setdefault(keys[0], {})[name] = (_alone(ctx.params.get(param.name)), source_of(param, ctx))
    for key, by_command in found.items():
        values = list(by_command.values())
        if all(value == values[0] for value in values):
            yield {"option": key, "value": values[0][0], "source": values[0][1]}
        else:
            for name, (value, source) in by_command.items():
                yield {"option": f"{name}.{key}", "value": value, "source": source}


def _alone(value: Any) -> Any:
    """The only item of a list, so that an option which one command repeats agrees with the others."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _spelled(value: Any) -> str:
    if value is None or value in ([], ()):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
