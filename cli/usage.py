"""Options that do not go together: a context and names of parameters go in, wrong usage (exit code 2) comes out.

Only what was typed counts: a setting of the environment or the file that does not apply to a call is no mistake.
"""

from __future__ import annotations

from typing import Any

import typer


def refuse(ctx: typer.Context, why: str, *names: str) -> None:
    """Refuse those of the parameters that were typed: they have no effect `why` ("with --full", "without --trace")."""
    params = [param for param in ctx.command.params if param.name in names and _is_typed(ctx, param)]
    if typed := [_spelling(ctx, param) for param in params]:
        raise typer.BadParameter(f"{' and '.join(typed)} {'has' if len(typed) == 1 else 'have'} no effect {why}")


def _is_typed(ctx: typer.Context, param: Any) -> bool:
    return getattr(ctx.get_parameter_source(param.name), "name", "") == "COMMANDLINE"


def _spelling(ctx: typer.Context, param: Any) -> str:
    """The option as the help lists it first; of an on/off switch, the side that was typed."""
    return (param.secondary_opts if ctx.params[param.name] is False and param.secondary_opts else param.opts)[0]
