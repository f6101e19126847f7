"""What /set changes in a chat: a name and a value as typed go in, the session changes, what holds now comes out."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from typing import Any

from tinyllm.errors import InvalidParameterError
from tinyllm_cli.chat_session import Session
from tinyllm_cli.options import LEAST
from tinyllm_cli.prompt_input import unescape

SPELLINGS = {"temp": "temperature", "n": "max_tokens", "predict": "max_tokens", "num_predict": "max_tokens"}
SWITCHES = {"markdown": "markdown", "stats": "show_stats", "hide_thinking": "hide_thinking", "ignore_eos": "ignore_eos"}


def settings(session: Session) -> dict[str, str]:
    """Everything that /set can change, as it is now."""
    found = {item.name: _spelled(getattr(session.params, item.name)) for item in fields(session.params)}
    found["max_tokens"] = str(session.max_tokens)
    found["stop"] = _spelled(session.stop)
    found["context_shift"] = _spelled(session.conversation.context_shift)
    return found | {name: _spelled(getattr(session, attribute)) for name, attribute in SWITCHES.items()}


def change(session: Session, name: str, value: str) -> str:
    """Sets what `name` means, if there is a value, and tells what holds then. Raises InvalidParameterError."""
    name = name.replace("-", "_")
    name = SPELLINGS.get(name, name)
    if name not in settings(session):
        raise InvalidParameterError(f"/set {name}: no such setting; /set lists them")
    if value:
        _assign(session, name, value)
    return f"{name} = {settings(session)[name]}"


def _assign(session: Session, name: str, value: str) -> None:
    if name in SWITCHES:
        setattr(session, SWITCHES[name], _switch(name, value))
    elif name == "context_shift":
        session.conversation.context_shift = _switch(name, value)
    elif name == "max_tokens":
        session.max_tokens = int(_number(name, value, int))
    elif name == "stop":
        session.stop = [] if value == '""' else [unescape(text) for text in _words(value)]
    elif name == "seed":
        seed = _number(name, value, int)
        session.params = replace(session.params, seed=None if seed < 0 else seed)
        session.retries = 0
    else:
        kind = type(getattr(type(session.params)(), name))
        if kind not in (int, float):
            raise InvalidParameterError(f"/set {name}: can only be given when the chat starts")
        session.params = replace(session.params, **{name: _number(name, value, kind)})


def _words(value: str) -> list[str]:
    """Words and quoted texts; backslashes stay for the escapes."""
    lexer = shlex.shlex(value, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        return list(lexer)
    except ValueError as error:
        raise InvalidParameterError(f"/set stop: {error}") from None


def _switch(name: str, value: str) -> bool:
    states = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}
    if value.lower() not in states:
        raise InvalidParameterError(f"/set {name}: on or off, not {value}")
    return states[value.lower()]


def _number(name: str, value: str, kind: type) -> Any:
    try:
        number = kind(value)
    except ValueError:
        raise InvalidParameterError(
            f"/set {name}: {value} is not a number" + (" without a point" * (kind is int))
        ) from None
    if number < LEAST.get(name, number):
        raise InvalidParameterError(f"/set {name}: it is at least {LEAST[name]:g}, not {value}")
    return number


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(json.dumps(text, ensure_ascii=False) for text in value) or "none"
    return "none" if value is None or value == {} else str(value)
