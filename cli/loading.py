"""From names to a model in memory, a chat template and a constraint: options go in, trouble is shown on stderr."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tinyllm.errors import InvalidParameterError, TinyLLMError
from tinyllm_cli import render
from tinyllm_cli.options import ConstraintOptions, ModelOptions, existing_file, text_or_file

if TYPE_CHECKING:
    from tinyllm.chat_format import ChatTemplate
    from tinyllm.model import Model
    from tinyllm.sampling.grammar import Constraint
    from tinyllm.tokenizer import Tokenizer


def load_model(options: ModelOptions) -> Model:
    """Loads the model that the options name, fetching it first if need be."""
    from tinyllm import model

    path = find_file(options.model)
    try:
        with usage_errors():
            return model.load(
                path,
                n_ctx=options.ctx_size or None,
                n_threads=options.threads,
                kv_type=options.cache_type,
                n_batch=options.batch_size,
            )
    except MemoryError:
        if not options.ctx_size:
            raise
        raise TinyLLMError(
            f"there is not enough memory for {options.ctx_size} positions: use a smaller context or window"
        ) from None


def find_file(name: str) -> Path:
    """The file of the model that `name` means, fetched first if need be."""
    from tinyllm import hub

    render.show_log()
    with render.download_progress() as progress:
        return hub.resolve(name, progress)


def load_template(name: str | None, model: Model) -> ChatTemplate | None:
    """The chat template that was asked for (a known format's name or a file), else the model's own, if it has one."""
    if name is None:
        return model.chat_template
    from tinyllm.chat_format import ChatTemplate

    return ChatTemplate.named(name, model.tokenizer)


def tell_trained(name: str, n_ctx: int, trained: int | None) -> None:
    """Tells when a context is longer than those that a model was trained on, where known."""
    if trained is not None and n_ctx > trained:
        render.note(f"{name} was trained on contexts of {trained} tokens: beyond them it may write nonsense")


def tell_full(n_ctx: int) -> None:
    """Tells that the end of the context has ended an answer."""
    render.note(f"the context of {n_ctx} tokens is full: -c makes it larger")


def tell_unused(variables: Iterable[str], template: ChatTemplate | None) -> None:
    """Tells which variables change nothing because the chat template does not look at them."""
    for name in variables:
        if template is None or not re.search(rf"\b{re.escape(name)}\b", template.source):
            of = "--think or --no-think" if name == "enable_thinking" else "--chat-template-kwargs"
            why = "there is no chat template" if template is None else f"the chat template does not know {name}"
            render.note(f"{of} changes nothing: {why}")


def load_constraint(options: ConstraintOptions, model: Model) -> Constraint | None:
    """The constraint that the options ask for, if any, at its beginning.

    One that cannot be, or that nothing but an empty answer fits, is wrong usage; in a file it is a TinyLLMError.
    """
    if not options.given():
        return None
    with usage_errors():
        if len(options.given()) > 1:
            raise InvalidParameterError(f"choose one of {', '.join(options.given())}")
        try:
            constraint = _constraint(options, model.tokenizer)
            first = constraint.mask()
            first[list(model.tokenizer.eog_ids)] = False
            if not first.any():
                raise InvalidParameterError(f"{options.given()[0]}: nothing but an empty answer fits")
        except InvalidParameterError as error:
            if name := existing_file(options.json_schema or options.grammar or ""):
                raise TinyLLMError(f"{name}: {error}") from None
            raise
    return constraint


def _constraint(options: ConstraintOptions, tokenizer: Tokenizer) -> Constraint:
    from tinyllm.sampling.grammar import Constraint

    if options.json_schema is not None:
        return Constraint.from_json_schema(text_or_file("--json-schema", options.json_schema, marks='{["'), tokenizer)
    if options.grammar is not None:
        # Every rule has a colon behind its name.
        return Constraint.from_grammar(text_or_file("--grammar", options.grammar, marks=":"), tokenizer)
    if options.regex is not None:
        return Constraint.from_regex(options.regex, tokenizer)
    return Constraint.from_json_schema({}, tokenizer)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Values that cannot be are wrong usage (exit code 2) when they were typed as options."""
    try:
        yield
    except InvalidParameterError as error:
        raise typer.BadParameter(str(error)) from None
