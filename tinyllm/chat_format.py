"""Chat templates: messages flow in, the text that a model was trained on flows out, and from it the ids of a prompt.

Rendering is Hugging Face's (Jinja2 in its immutable sandbox). Tokenizing knows which characters the template wrote:
only these can become control tokens, never what stands in a message.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.errors import ChatTemplateError
from tinyllm.text.chat_builtin import BUILTIN_NAMES, builtin_source
from tinyllm.text.chat_tokens import encode_traced
from tinyllm.text.traced_text import TracedText, scaffold

if TYPE_CHECKING:
    from tinyllm.text.chat_sandbox import ChatEnvironment
    from tinyllm.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_SOURCE = 1_000_000
"""Characters in a template; the longest in use have about 20,000."""

REASONING_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


class ChatTemplate:
    """A chat template in Jinja, compiled at its first use. Several threads may use it.

    `bos_token` and `eos_token` are the texts of these tokens, for templates that write them.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, variant: str | None = None
    ) -> ChatTemplate | None:
        """The template in a GGUF file's metadata, or its named `variant` ("tool_use"); None if there is none."""
        source = metadata.get(f"tokenizer.chat_template.{variant}") if variant else None
        source = source or metadata.get("tokenizer.chat_template")
        return cls(source, *_special_texts(tokenizer)) if isinstance(source, str) and source else None

    @classmethod
    def named(cls, name: str, tokenizer: Tokenizer) -> ChatTemplate:
        """A template by what a user would type: the name of a known format, or of a file that holds Jinja.

        Raises ChatTemplateError for anything else, with the names that there are.
        """
        if name in BUILTIN_NAMES:
            return cls(builtin_source(name), *_special_texts(tokenizer))
        try:
            source = Path(name).expanduser().read_bytes().decode("utf-8")
        except (OSError, ValueError) as error:
            reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "neither a file nor a known format"
            raise ChatTemplateError(f"chat template {name!r}: {reason}; known are {', '.join(BUILTIN_NAMES)}") from None
        return cls(source, *_special_texts(tokenizer))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        now: datetime | None = None,
        **extra: Any,
    ) -> str:
        """The text of `messages`, with the opening of the assistant's reply if `add_generation_prompt`.

        `now` is what `strftime_now` tells (default: the clock), `extra` are further variables of the template.
        Raises ChatTemplateError, with the template's own message where it refuses.
        """
        return self.render_traced(messages, add_generation_prompt, tools, now, **extra).plain()

    def render_traced(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        now: datetime | None = None,
        **extra: Any,
    ) -> TracedText:
        """As `render`; the text also knows which of its characters the template wrote."""
        variables = {
            "messages": [_with_traced_role(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": scaffold(self.bos_token),
            "eos_token": scaffold(self.eos_token),
            **extra,
        }
        environment = _compiled(self.source)
        try:
            return environment.render(variables, now)
        except Exception as error:  # a template's code can raise anything
            raise _render_error(error) from None

    def keeps_reasoning(self) -> bool:
        """Whether the `<think>` part of an earlier reply is still written when the conversation has gone on."""
        mark = _unguessable()
        messages = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": f"<think>\n{mark}\n</think>\n\n2"},
            {"role": "user", "content": "3"},
        ]
        return mark in self.render(messages)


@dataclass(frozen=True)
class ChatPrompt:
    """Messages made ready for a model."""

    text: str
    ids: list[int]
    system_folded: bool
    """The template has no place for a system message: it was put before the first user message."""


def prepare_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    now: datetime | None = None,
    **extra: Any,
) -> ChatPrompt:
    """Render `messages` and tokenize the text. Options as for `ChatTemplate.render`; raises ChatTemplateError.

    Wherever no message spells out a control token, the ids are those of the whole text with special tokens on, behind
    one BOS if the vocabulary asks for it. What a message spells out is tokenized as ordinary text.
    """
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools, "now": now, **extra}
    messages, folded = fold_system(template, messages, **options)
    text = template.render_traced(messages, **options)
    return ChatPrompt(text.plain(), _with_one_bos(encode_traced(text, tokenizer), tokenizer), folded)


def encode_chat(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
    """The ids of `prepare_chat`."""
    return prepare_chat(template, tokenizer, messages, **options).ids


def fold_system(template: ChatTemplate, messages: Sequence[Message], **options: Any) -> tuple[Sequence[Message], bool]:
    """`messages` with the system message moved into the first user message, if the template refuses or ignores it.

    Returns them unchanged, and False, if the template writes system messages. Raises ChatTemplateError, the template's
    first one, if it refuses the messages either way.
    """
    system = (
        _text(messages[0].get("content")) if messages and messages[0].get("role") in ("system", "developer") else ""
    )
    if not system.strip():
        return messages, False
    mark = _unguessable()
    refusal = None
    try:
        shown = mark in template.render([{**messages[0], "content": mark}, *messages[1:]], **options).lower()
    except ChatTemplateError as error:
        shown, refusal = False, error
    if shown:
        return messages, False
    rest = list(messages[1:])
    user = next((at for at, message in enumerate(rest) if message.get("role") == "user"), None)
    if user is None:
        rest.insert(0, {"role": "user", "content": system})
    else:
        rest[user] = {**rest[user], "content": _prefixed(system, rest[user].get("content"))}
    if refusal is not None:
        try:
            template.render(rest, **options)
        except ChatTemplateError:
            raise refusal from None
    return rest, True


def split_reasoning(reply: str) -> tuple[str, str]:
    """A reply's reasoning and its answer. A block that never closes is all reasoning; without a block all is answer.

    A block may also lack its opening tag, where the prompt ended with it.
    """
    for opening, closing in REASONING_TAGS:
        head, found, tail = reply.partition(closing)
        if found or head.lstrip().startswith(opening):
            return head.lstrip().removeprefix(opening).strip(), tail.strip()
    return "", reply


@lru_cache(maxsize=16)
def _compiled(source: str) -> ChatEnvironment:
    from tinyllm.text.chat_sandbox import ChatEnvironment

    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE}")
    try:
        return ChatEnvironment(source)
    except Exception as error:  # Jinja2, or the compiler behind it when the nesting is too deep
        line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
        raise ChatTemplateError(f"the chat template cannot be compiled: {line}{_one_line(error)}") from None


def _with_one_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    bos = tokenizer.bos_id
    if bos is None:
        return ids
    written = next((at for at, token in enumerate(ids) if token != bos), len(ids))
    return ids[written - 1 :] if written > 1 else [bos, *ids] if tokenizer.add_bos and not written else ids


def _special_texts(tokenizer: Tokenizer) -> tuple[str, str]:
    """The texts of BOS and EOS."""
    ids = (tokenizer.bos_id, tokenizer.eos_id)
    bos, eos = ("" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids)
    return bos, eos


def _with_traced_role(message: Message) -> Message:
    """`message` with its role as scaffold, if that is a bare word: templates build tokens of it, as in `<|user|>`."""
    role = message.get("role") if isinstance(message, dict) else None
    return {**message, "role": scaffold(role)} if isinstance(role, str) and role.isidentifier() else message


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part.get("text", "") for part in parts if isinstance(part, dict) and part.get("type") == "text")


def _prefixed(text: str, content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": f"{text}\n\n"}, *content]
    return f"{text}\n\n{content or ''}"


def _unguessable() -> str:
    return "mark" + secrets.token_hex(16)


def _render_error(error: Exception) -> ChatTemplateError:
    from tinyllm.text.chat_sandbox import TemplateRefusalError

    if isinstance(error, TemplateRefusalError):
        return ChatTemplateError(f"the chat template refuses these messages: {_one_line(error)}")
    if isinstance(error, RecursionError):
        return ChatTemplateError("the chat template failed: it calls itself too deeply")
    return ChatTemplateError(f"the chat template failed: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    """What went wrong, in a line: Jinja2's own errors speak for themselves, Python's need their name."""
    from jinja2 import TemplateError

    # Template authors know the texts that they handle as `str`.
    text = " ".join(str(error).split()).replace(TracedText.__name__, "str")[:300]
    return text if isinstance(error, TemplateError) else f"{type(error).__name__}: {text}"
