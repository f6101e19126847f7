"""A short cut for option values that are plainly right: text flows in, str, int, float or a list of them comes out.

Typer converts every value through pydantic, whose import takes 0.15 s of each start. Whatever is not plainly right is
left to Typer, so that its checks and its messages stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args, get_origin

import typer

_MISSING = object()
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})(e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE)


def use_quick_values(param: Any, source_of: Callable[[Any, Any], str] = lambda param, ctx: "") -> Any:
    """Let a parameter take the short cut, and return it. Versions of Typer that convert in another way are left alone.

    `source_of(param, context)` says where a value comes from; messages about bad values name it.
    """
    if hasattr(param, "get_runtime_param") and hasattr(param, "type_descriptor"):
        param.get_runtime_param = lambda: _QuickValue(source_of)
    return param


class _QuickValue:
    """What Typer asks to convert the value of a parameter."""

    def __init__(self, source_of: Callable[[Any, Any], str]):
        self._source_of = source_of

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        descriptor = param.type_descriptor
        if wrong := _wrong_type(value, descriptor.annotation):
            raise typer.BadParameter(f"{wrong} (from {self._source_of(param, ctx)})", ctx, param)
        quick = _convert(value, descriptor.annotation, descriptor.parameter_info, param)
        if quick is not _MISSING:
            return quick
        try:
            return type(param).get_runtime_param(param).coerce(value, param=param, ctx=ctx)
        except typer.BadParameter as error:
            if source := self._source_of(param, ctx):
                error.message += f" (from {source})"
            raise


def _wrong_type(value: Any, annotation: Any) -> str:
    """What is wrong with a value of the configuration file that Typer would take for something else."""
    wanted = get_args(annotation) if get_origin(annotation) in (list, tuple) else (annotation,)
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, bool) and bool not in wanted:
            return f"{str(item).lower()} is no {'number' if {int, float} & set(wanted) else 'text'}"
        if isinstance(item, int | float) and not isinstance(item, bool) and wanted == (bool,):
            return f"{item} is neither true nor false"
        if isinstance(item, list | dict):
            return f"{item} is not one value"
    return "a list is not one value" if isinstance(value, list) and wanted == (annotation,) else ""


def _convert(value: Any, annotation: Any, info: Any, param: Any) -> Any:
    """The converted value, or _MISSING when Typer shall decide."""
    several = param.multiple or param.nargs == -1
    if value is None:
        return () if several else None
    if info.parser is not None:
        return _MISSING
    if get_origin(annotation) is list and isinstance(value, list | tuple):
        (inner,) = get_args(annotation)
        values = [_convert_one(item, inner, info) for item in value]
        return _MISSING if _MISSING in values else values
    return _MISSING if several else _convert_one(value, annotation, info)


def _convert_one(value: Any, annotation: Any, info: Any) -> Any:
    if annotation is str:
        return value if isinstance(value, str) else _MISSING
    if annotation is int and isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if annotation is float and isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    wanted = int if annotation is int else (int, float) if annotation is float else ()
    if not isinstance(value, wanted) or isinstance(value, bool):
        return _MISSING
    low, high = info.min, info.max
    return _MISSING if (low is not None and value < low) or (high is not None and value > high) else annotation(value)
