"""Generation in three thin layers: ids become sampled tokens, tokens become Steps of text, messages become a prompt.

In flow a prompt (text, ids or messages), a Sequence that may hold a part of it already, and sampling parameters;
out flow Steps, with Statistics beside them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tinyllm.errors import ChatTemplateError, ContextFullError, InvalidParameterError
from tinyllm.prefix import keep_sampled, reuse_prefix
from tinyllm.sampler import Choice, Sampler, SamplingParams
from tinyllm.stopping import StopFilter, control_stops
from tinyllm.tokenizer import ids_of

if TYPE_CHECKING:
    import numpy as np

    from tinyllm.chat_format import ChatPrompt, ChatTemplate
    from tinyllm.model import Model
    from tinyllm.model import Sequence as ModelSequence
    from tinyllm.sampling.grammar import Constraint
    from tinyllm.sampling.record import Recorder

log = logging.getLogger("tinyllm")

SYSTEM_FOLDED = "the chat template has no place for a system message: it was put in front of the first question"


@dataclass(frozen=True, slots=True)
class Step:
    """One sampled token and the text that it completes.

    `text` can be empty (an unfinished character, what may become a stop string, an end-of-generation token) and
    can hold text that earlier steps held back. `logprob` is the natural logarithm of the token's probability before
    any sampler touched it; `top_logprobs` are (id, logprob) of the most probable tokens, if asked for.
    `finish_reason` is set on the last step: "stop" (an end-of-generation token or a stop string) or "length"
    (max_tokens reached or the context full).
    """

    token: int
    text: str
    logprob: float
    finish_reason: str | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Statistics:
    """Counts and seconds of one generation; the time that its consumer takes between steps is not in them."""

    prompt_tokens: int = 0  # all of the prompt, reused ones included
    reused_tokens: int = 0  # of these, the ones that the sequence held already
    computed_tokens: int = 0  # the others, and what had to be computed again when the context moved
    prompt_s: float = 0.0
    generated: int = 0
    decode_s: float = 0.0

    @property
    def prompt_tok_s(self) -> float:
        """Prompt tokens computed per second; 0 before there is anything to divide."""
        return self.computed_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second behind the first one, which comes out of the prompt's run; 0 before there are any."""
        return max(self.generated - 1, 0) / self.decode_s if self.decode_s else 0.0


class Generation(Iterator[Step]):
    """An iterator over Steps that also knows, at any time, what came so far.

    The sequence ends up with the prompt and all generated tokens but the last. When the iteration is cut short (Ctrl-C,
    `should_stop`), `finish_reason` stays None and `take_held()` hands out text that was still held back.
    """

    def __init__(
        self,
        model: Model,
        ids: list[int],
        sampler: Sampler,
        *,
        max_tokens: int | None,
        stop: Sequence[str],
        ignore_eos: bool,
        sequence: ModelSequence | None,
        constraint: Constraint | None,
        logprobs: int,
        should_stop: Callable[[], bool] | None,
        make_room: Callable[[], list[int] | None] | None,
    ) -> None:
        self.prompt_ids = ids
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.statistics = Statistics(prompt_tokens=len(ids))
        self.seed = sampler.seed
        self._model = model
        self._end_ids = set() if ignore_eos else set(model.tokenizer.eog_ids)
        self._end_ids |= control_stops(model.tokenizer, stop)
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self._make_room = make_room
        self._pieces: list[str] = []
        self._characters = model.tokenizer.stream_decoder()
        self._stops = StopFilter(stop)
        self._steps = self._run(sampler, sequence, constraint, should_stop)

    def __next__(self) -> Step:
        return next(self._steps)

    @property
    def text(self) -> str:
        """The text of all steps so far."""
        return "".join(self._pieces)

    def read(self) -> str:
        """Runs to the end and returns the whole text."""
        for _ in self:
            pass
        return self.text

    def take_held(self) -> str:
        """Text still held back when the iteration was cut short: returned once, and a part of `text` from then on."""
        rest, _ = self._stops.push(self._characters.flush())
        self._pieces.append(rest + self._stops.flush())
        return self._pieces[-1]

    def close(self) -> None:
        """Ends the generation early; a sequence that it made for itself is given back."""
        self._steps.close()

    def _run(
        self,
        sampler: Sampler,
        sequence: ModelSequence | None,
        constraint: Constraint | None,
        should_stop: Callable[[], bool] | None,
    ) -> Iterator[Step]:
        own = sequence is None
        sequence = self._model.new_sequence() if sequence is None else sequence
        try:
            rows = self._run_prompt(sequence, self.prompt_ids, should_stop)
            self.statistics.reused_tokens = len(self.prompt_ids) - self.statistics.computed_tokens
            if self._max_tokens == 0:
                self.finish_reason = "length"
                return
            for token in self.prompt_ids:
                sampler.accept(token)
            while rows is not None:
                prompt = self.prompt_ids
                for choice in sample_tokens(sequence, rows, sampler, self.statistics, constraint, should_stop):
                    yield self._step(choice, tuple(sampler.top_logprobs(self._logprobs)))
                    if self.finish_reason is not None:
                        return
                    if self.prompt_ids is not prompt:
                        break
                else:
                    return
                rows = self._run_prompt(sequence, self.prompt_ids + self.tokens, should_stop)
        finally:
            if own:
                sequence.release()

    def _run_prompt(
        self, sequence: ModelSequence, ids: list[int], should_stop: Callable[[], bool] | None
    ) -> np.ndarray | None:
        started = perf_counter()
        new_ids = reuse_prefix(sequence, ids)
        self.statistics.computed_tokens += len(new_ids)
        rows = sequence.evaluate(new_ids, want="last", should_stop=should_stop)
        self.statistics.prompt_s += perf_counter() - started
        return rows

    def _step(self, choice: Choice, top_logprobs: tuple[tuple[int, float], ...]) -> Step:
        """Adds a token to the text and decides whether it was the last."""
        token = choice.token
        self.tokens.append(token)
        ends = token in self._end_ids
        silent = ends or self._model.tokenizer.is_control(token)
        text, stopped = self._stops.push(self._characters.flush() if silent else self._characters.push(token))
        if ends or stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._max_tokens or self._is_full():
            self.finish_reason = "length"
        self._pieces.append(text)
        if self.finish_reason is not None and not stopped:
            text += self.take_held()
        return Step(token, text, choice.logprob, self.finish_reason, top_logprobs)

    def _is_full(self) -> bool:
        """Whether the last token has no place in the context, not even behind a shorter prompt."""
        n_ctx = self._model.n_ctx
        if len(self.prompt_ids) + len(self.tokens) <= n_ctx:
            return False
        shorter = self._make_room() if self._make_room is not None else None
        if shorter is None or len(shorter) + len(self.tokens) > n_ctx:
            return True
        self.prompt_ids = shorter
        return False


def sample_tokens(
    sequence: ModelSequence,
    rows: np.ndarray | None,
    sampler: Sampler,
    statistics: Statistics,
    constraint: Constraint | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Choice]:
    """Yields token after token; `rows` (float32 [n, n_vocab]) are the prompt's logits, of which the last are used.

    A token is run only when the one behind it is asked for. Ends by itself when `should_stop` made the model stop,
    which shows as rows that are None.
    """
    while rows is not None:
        started = perf_counter()
        choice = sampler.sample(rows[-1], mask=constraint.mask() if constraint is not None else None)
        sampler.accept(choice.token)
        if constraint is not None:
            constraint.accept(choice.token)
        statistics.generated += 1
        statistics.decode_s += perf_counter() - started
        yield choice
        started = perf_counter()
        rows = sequence.evaluate([choice.token], want="last", should_stop=should_stop)
        statistics.decode_s += perf_counter() - started


def generate(
    model: Model,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = None,
    params: SamplingParams | None = None,
    stop: str | Sequence[str] | None = (),
    ignore_eos: bool = False,
    sequence: ModelSequence | None = None,
    constraint: Constraint | None = None,
    logprobs: int = 0,
    should_stop: Callable[[], bool] | None = None,
    make_room: Callable[[], list[int] | None] | None = None,
    recorder: Recorder | None = None,
    **sampling: Any,
) -> Generation:
    """Continues a prompt: text (its special tokens are parsed, BOS is added as the vocabulary says) or ids as they are.

    `max_tokens` None or negative: until the end or a full context. `params`, or single fields of it by name
    (`temperature=0`), set the sampling. A given `sequence` is continued from what it shares with the prompt, and
    stays the caller's. `logprobs`: how many alternatives each step lists. `should_stop` is asked between pieces of
    work and ends the generation when true. `make_room` is asked for a shorter prompt when the context is full.
    `recorder` is shown every stage of the sampling.

    Raises ContextFullError for a prompt that does not fit, InvalidParameterError for an empty one without a BOS token
    and for arguments that cannot be.
    """
    tokenizer = model.tokenizer
    ids = ids_of(prompt, tokenizer.encode)
    if not ids and tokenizer.add_bos and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id]
    if not ids:
        raise InvalidParameterError(
            "the prompt is empty and this model has no begin-of-text token to start from: give it text"
        )
    if not 0 <= min(ids) <= max(ids) < tokenizer.n_vocab:
        raise InvalidParameterError(
            f"token ids must lie between 0 and {tokenizer.n_vocab - 1}, not {min(ids)}..{max(ids)}"
        )
    if len(ids) > model.n_ctx:
        raise ContextFullError(
            f"the prompt has {len(ids)} tokens, the context holds {model.n_ctx}:"
            " shorten it or enlarge the context (n_ctx, -c)"
        )
    if constraint is not None:
        ignore_eos = False  # when it is finished, nothing but the end may come
    limit = -1 if max_tokens is None else _whole("max_tokens", max_tokens)
    sampler = Sampler(replace(params or SamplingParams(), **sampling), tokenizer.n_vocab, tokenizer, recorder)
    return Generation(
        model,
        ids,
        sampler,
        max_tokens=limit if limit >= 0 else None,
        stop=_as_stops(stop),
        ignore_eos=ignore_eos,
        sequence=sequence,
        constraint=constraint,
        logprobs=_whole("logprobs", logprobs),
        should_stop=should_stop,
        make_room=make_room,
    )


def chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: ChatTemplate | None = None,
    template_args: Mapping[str, Any] | None = None,
    sequence: ModelSequence | None = None,
    **options: Any,
) -> Generation:
    """Answers a conversation written by the model's chat template (or another `template`), whatever `generate` takes.

    `template_args` go to the template by name (`tools`, `enable_thinking`, `now`). With a `sequence` that holds the
    conversation so far, only what is new is computed, and replies stay tokenized as the model wrote them.
    """
    prompt = prepare_conversation(model, messages, template=template, template_args=template_args)
    if prompt.system_folded:
        log.warning(SYSTEM_FOLDED)
    ids = prompt.ids if sequence is None else keep_sampled(model.tokenizer, sequence.tokens, prompt.ids)
    return generate(model, ids, sequence=sequence, **options)


def prepare_conversation(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: ChatTemplate | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """A conversation in text and ids, ready for a reply.

    Raises ChatTemplateError where there is no template or it refuses, InvalidParameterError for what is none.
    """
    from tinyllm.chat_format import prepare_chat

    if isinstance(messages, Mapping | str | bytes) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidParameterError("messages are a list, as in [{'role': 'user', 'content': 'Hi'}]")
    if not messages:
        raise InvalidParameterError("there are no messages to answer")
    if "messages" in (template_args or {}):
        raise InvalidParameterError("messages cannot be a variable of the chat template: they are the conversation")
    template = template or model.chat_template
    if template is None:
        raise ChatTemplateError("this model has no chat template: continue raw text instead, or name a template")
    return prepare_chat(template, model.tokenizer, messages, **(template_args or {}))


def _as_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop or ()
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise InvalidParameterError(f"stop must be a text or a list of texts, not {stop!r}")
    if not all(stops):
        raise InvalidParameterError("a stop string cannot be empty")
    return tuple(stops)


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidParameterError(f"{name} must be a whole number, not {value!r}") from None
