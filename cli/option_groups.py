"""Options shared by commands: a parameter annotated with a dataclass goes in, an option per field comes out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that takes option groups: Typer sees their fields, the function gets the groups.

    A group is a dataclass whose fields are annotated as Typer options; a name may occur only once in a command.
    """
    parameters = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    shown = []
    for name, parameter in parameters.items():
        if name in groups:
            shown += _options(groups[name])
        else:
            shown.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_groups(**values: Any) -> None:
        made = {
            name: group(**{item.name: values.pop(item.name) for item in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    del with_groups.__wrapped__  # Typer would look through it and see the groups
    with_groups.__signature__ = inspect.Signature(shown)
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return with_groups


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default if item.default is not MISSING else item.default_factory(),
            annotation=hints[item.name],
        )
        for item in fields(group)
    ]
