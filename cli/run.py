"""`tinyllm run`: a prompt goes in, the model's answer comes out on stdout, and everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.loading import (
    load_constraint,
    load_model,
    load_template,
    tell_full,
    tell_trained,
    tell_unused,
    usage_errors,
)
from tinyllm_cli.option_groups import option_groups
from tinyllm_cli.options import ConstraintOptions, ModelOptions, SamplingOptions, TextOptions
from tinyllm_cli.prompt_input import need_text
from tinyllm_cli.reply import PlainReply
from tinyllm_cli.text import counted, one_line
from tinyllm_cli.thinking import ThinkingSplitter, opened_by

if TYPE_CHECKING:
    from tinyllm.chat_format import ChatTemplate
    from tinyllm.generate import Generation, Step
    from tinyllm.model import Model

INTERRUPTED = 130


@option_groups
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[str], typer.Option("--file", "-f", help="Put this file's text before the prompt (repeatable).")
    ] = [],  # noqa: B006 (Typer copies it)
    raw: Annotated[
        bool, typer.Option("--raw", "--no-chat", help="Continue the text as it is, without a chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
    logprobs: Annotated[
        int, typer.Option("--logprobs", help="List the N most probable tokens of each step (stderr, or JSON).", min=0)
    ] = 0,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is complete.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell about model, prompt, seed and speed.")] = False,
    *,
    text: TextOptions,
    constraint: ConstraintOptions,
    sampling: SamplingOptions,
    engine: ModelOptions,
) -> None:
    """Answer one prompt.

    The prompt is the argument, or else what is piped in; with both, the piped text comes first, as files do:
    `tinyllm run "Summarize this." < notes.txt`. A chat model gets it in its chat template, a base model as it is.
    """
    with usage_errors():
        params = sampling.params()
        question = need_text(None if prompt is None else text.typed(prompt), file, empty=raw)
        if raw and (text.system is not None or text.chat_template is not None):
            raise InvalidParameterError("--raw uses no chat template: --system and --chat-template have no place in it")
        template_args, stops = text.template_args(), text.stops()
        if raw and template_args:
            raise InvalidParameterError("--raw uses no chat template: there is nothing to set in one")
    model = load_model(engine)
    tell_trained(model.path.stem, engine.ctx_size, model.config.n_ctx_train)
    template = None if raw else load_template(text.chat_template, model)
    tell_unused(template_args, template)
    generation = start(
        model,
        question,
        system=None if text.system is None else text.typed(text.system),
        template=template,
        template_args=template_args,
        params=params,
        max_tokens=text.max_tokens,
        stop=stops,
        ignore_eos=text.ignore_eos,
        constraint=load_constraint(constraint, model),
        logprobs=logprobs,
    )
    if verbose:
        _tell_before(model, generation, template)
    opened = opened_by(model.tokenizer.decode(generation.prompt_ids[-8:])) if template else None
    steps, interrupted = show(
        generation, None if as_json else PlainReply(opened, text.hide_thinking, stream=not no_stream)
    )
    if as_json:
        thinking = ThinkingSplitter(opened, hide=text.hide_thinking)
        print(json.dumps(as_object(model, generation, steps, thinking, with_logprobs=logprobs > 0), ensure_ascii=False))
    elif logprobs:
        _print_logprobs(model, steps)
    if verbose:
        _tell_after(generation)
    if generation.finish_reason == "length":
        _tell_limit(model, generation, constraint)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def start(
    model: Model,
    question: str,
    *,
    system: str | None = None,
    template: ChatTemplate | None = None,
    template_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Generation:
    """Begins the answer to a question in the template, or without one the continuation of the text itself."""
    from tinyllm.generate import chat, generate

    if template is None:
        if system is not None:
            raise InvalidParameterError(
                "this model has no place for a system message: --chat-template names a template"
            )
        return generate(model, question, **options)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    return chat(model, messages, template=template, template_args=template_args, **options)


def show(generation: Generation, reply: PlainReply | None) -> tuple[list[Step], bool]:
    """Runs to the end, writing to `reply` if there is one; returns the steps and whether Ctrl-C ended them."""
    steps: list[Step] = []
    interrupted = False
    try:
        for step in generation:
            steps.append(step)
            if reply is not None:
                reply.show(step.text)
    except KeyboardInterrupt:
        interrupted = True
        held = generation.take_held()
        if reply is not None:
            reply.show(held)
    if reply is not None:
        reply.finish()
    return steps, interrupted


def as_object(
    model: Model, generation: Generation, steps: Sequence[Step], thinking: ThinkingSplitter, with_logprobs: bool
) -> dict[str, Any]:
    """What `--json` prints. `tokens` are ids; `finish_reason` is "stop", "length" or "interrupted"."""
    answer = "".join(part.text for part in [*thinking.push(generation.text), *thinking.flush()])
    statistics = generation.statistics
    found: dict[str, Any] = {"text": answer}
    if thinking.hidden:
        found["thinking"] = thinking.hidden
    found |= {
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason or "interrupted",
        "prompt_tokens": statistics.prompt_tokens,
        "seed": generation.seed,
        "model": model.path.name,
    }
    if with_logprobs:
        found["logprobs"] = [
            {
                **_scored(model, step.token, step.logprob),
                "top_logprobs": [_scored(model, token, logprob) for token, logprob in step.top_logprobs],
            }
            for step in steps
        ]
    found["timings"] = {
        "load_s": round(model.load_s, 4),
        "prompt_s": round(statistics.prompt_s, 4),
        "prompt_tok_s": round(statistics.prompt_tok_s, 2),
        "decode_s": round(statistics.decode_s, 4),
        "decode_tok_s": round(statistics.decode_tok_s, 2),
    }
    return found


def _scored(model: Model, token: int, logprob: float) -> dict[str, Any]:
    return {"id": token, "token": model.tokenizer.token_text(token), "logprob": round(logprob, 5)}


def _print_logprobs(model: Model, steps: Sequence[Step]) -> None:
    """A line per step on stderr: the token, its probability, and the alternatives."""

    def spelled(token: int, logprob: float) -> str:
        return f"{one_line(repr(model.tokenizer.token_text(token)))} {math.exp(logprob):.1%}"

    for step in steps:
        alternatives = "  ".join(spelled(*pair) for pair in step.top_logprobs)
        print(f"{step.logprob:8.4f}  {spelled(step.token, step.logprob):<24}  | {alternatives}", file=sys.stderr)


def _tell_before(model: Model, generation: Generation, template: ChatTemplate | None) -> None:
    render.note(
        f"model: {model.path} ({model.config.architecture}), loaded in {model.load_s:.2f} s, "
        f"context {model.n_ctx}, {counted(model.n_threads, 'thread')}"
    )
    how = "in the chat template" if template else "as it is" if model.chat_template else "as it is (no chat template)"
    render.note(
        f"prompt: {counted(generation.statistics.prompt_tokens, 'token')}, the text {how}; seed {generation.seed}"
    )


def _tell_after(generation: Generation) -> None:
    s = generation.statistics
    render.note(
        f"prompt {counted(s.prompt_tokens, 'token')} in {s.prompt_s:.2f} s ({s.prompt_tok_s:.1f} tok/s); "
        f"answer {counted(s.generated, 'token')} in {s.decode_s:.2f} s ({s.decode_tok_s:.1f} tok/s); "
        f"ended by {generation.finish_reason or 'Ctrl-C'}"
    )


def _tell_limit(model: Model, generation: Generation, constraint: ConstraintOptions) -> None:
    used = generation.statistics.prompt_tokens + generation.statistics.generated
    if used > model.n_ctx:
        tell_full(model.n_ctx)
    if constraint.given():
        render.note("the answer was cut off by the limit of tokens: it is not complete in its form")
