"""A conversation with a chat model: messages go in turn by turn, each answer comes out as a Generation.

It owns the messages and one Sequence, so that a turn computes only what is new, and it decides what happens when the
context is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinyllm.errors import ContextFullError
from tinyllm.generate import SYSTEM_FOLDED, Generation, generate, log, prepare_conversation
from tinyllm.prefix import keep_sampled

if TYPE_CHECKING:
    from tinyllm.chat_format import ChatTemplate
    from tinyllm.model import Model

Message = dict[str, Any]


class Conversation:
    """Messages between a user and a model, and the sequence that holds what the model has read of them.

    `context_shift`: when the context is full, forget the oldest turns (never the system message nor the last question)
    instead of refusing; `forgotten` counts the messages that went that way.
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        template: ChatTemplate | None = None,
        template_args: Mapping[str, Any] | None = None,
        context_shift: bool = False,
    ) -> None:
        self.model = model
        self.template = template
        self.template_args = dict(template_args or {})
        self.context_shift = context_shift
        self.messages: list[Message] = []
        self.forgotten = 0
        self.system = system
        self._told_folded = False
        self._sequence = model.new_sequence()

    @property
    def system(self) -> str | None:
        """The system message, or None to leave it to the template."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        turns = self.turns
        self.messages = turns if text is None else [{"role": "system", "content": text}, *turns]

    @property
    def turns(self) -> list[Message]:
        """The messages without the system message."""
        return self.messages[1:] if self.system is not None else list(self.messages)

    @property
    def n_tokens(self) -> int:
        """How many tokens of the context are in use."""
        return len(self._sequence)

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be computed without letting go of something."""
        return len(self._sequence) >= self.model.n_ctx

    @contextmanager
    def ask(self, text: str, **options: Any) -> Iterator[Generation]:
        """Puts a question; the body of the `with` iterates over the answer as far as it likes.

        Afterwards the answer is a part of the conversation as far as it came; a question without any answer is taken
        back. `options` are those of `generate`. Raises ContextFullError when there is no room.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            generation = self._generate(options)
            try:
                yield generation
            finally:
                generation.close()
                generation.take_held()
                answer = generation.text
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def undo(self) -> Message | None:
        """Takes the last question and its answer back and returns the question."""
        turns = self.turns
        last = max((at for at, message in enumerate(turns) if message["role"] == "user"), default=None)
        if last is None:
            return None
        del self.messages[len(self.messages) - len(turns) + last :]
        return turns[last]

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [] if self.system is None else self.messages[:1]
        self._sequence.truncate(0)

    def encode(self, messages: list[Message] | None = None) -> list[int]:
        """The ids of the conversation (or of other messages in its template), ready for an answer."""
        prompt = prepare_conversation(
            self.model,
            self.messages if messages is None else messages,
            template=self.template,
            template_args=self.template_args,
        )
        if prompt.system_folded and not self._told_folded:
            log.warning(SYSTEM_FOLDED)
            self._told_folded = True
        return prompt.ids

    def close(self) -> None:
        """Gives the sequence back."""
        self._sequence.release()

    def _generate(self, options: Mapping[str, Any]) -> Generation:
        ids = keep_sampled(self.model.tokenizer, self._sequence.tokens, self.encode())
        if len(ids) > self.model.n_ctx:
            kept = self._forget() if self.context_shift else None
            if kept is None:
                raise ContextFullError(
                    f"the conversation has {len(ids)} tokens, the context holds {self.model.n_ctx}: "
                    "take turns back (/undo, /clear), enlarge it (-c), or drop the oldest turns (--context-shift)"
                )
            ids = kept
        return generate(
            self.model,
            ids,
            sequence=self._sequence,
            make_room=self._forget if self.context_shift else None,
            **options,
        )

    def _forget(self) -> list[int] | None:
        """Drops the oldest turns until the rest takes half of the context at most; None, with all kept, if it can not.

        Half, because what stays has to be computed again behind its new beginning: better seldom than at each turn.
        """
        turns = self.turns
        start = len(self.messages) - len(turns)
        kept = None
        for at in range(1, len(turns)):
            if turns[at]["role"] != "user":
                continue
            messages = self.messages[:start] + turns[at:]
            ids = self.encode(messages)
            if len(ids) <= self.model.n_ctx:
                kept = messages, ids
            if len(ids) <= self.model.n_ctx // 2:
                break
        if kept is None:
            return None
        self.forgotten += len(self.messages) - len(kept[0])
        self.messages, ids = kept
        return ids
