"""One chat on the terminal: its conversation and settings, and how a question is put and its answer shown."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tinyllm_cli import render
from tinyllm_cli.interrupts import StopOnCtrlC
from tinyllm_cli.markdown_reply import MarkdownReply
from tinyllm_cli.reply import PlainReply
from tinyllm_cli.text import counted
from tinyllm_cli.thinking import opened_by

if TYPE_CHECKING:
    from tinyllm.conversation import Conversation
    from tinyllm.generate import Generation, Statistics
    from tinyllm.sampler import SamplingParams
    from tinyllm.sampling.grammar import Constraint


class Reply(Protocol):
    """What shows an answer while it comes."""

    def show(self, text: str) -> None:
        """Takes the text of a step."""
        ...

    def finish(self) -> None:
        """Shows the rest."""
        ...


@dataclass
class Session:
    """What a chat knows besides its messages. `attachments` are texts that go in front of the next question."""

    conversation: Conversation
    params: SamplingParams
    max_tokens: int = -1
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    constraint: Constraint | None = None
    markdown: bool = False
    hide_thinking: bool = False
    show_stats: bool = True
    attachments: list[str] = field(default_factory=list)
    last: Generation | None = None
    totals: list[Statistics] = field(default_factory=list)
    retries: int = 0
    interrupted: bool = False

    def ask(self, question: str) -> None:
        """Puts a question, behind what is attached to it, and shows the answer.

        `interrupted` tells whether Ctrl-C cut it short. Raises TinyLLMError, with all as it was before, when there is
        no room or the template refuses.
        """
        self.retries = 0
        self._answer("\n\n".join([*self.attachments, question]))
        if self.last is not None and self.last.text:  # else the question was taken back
            self.attachments.clear()

    def ask_again(self) -> bool:
        """Puts the last question again, with other random numbers; False when there is none.

        When no new answer comes, the old one stays.
        """
        before = list(self.conversation.messages)
        question = self.conversation.undo()
        if question is None:
            return False
        self.retries += 1
        try:
            self._answer(question["content"])
        finally:
            if len(self.conversation.messages) < len(before):
                self.conversation.messages = before
        return True

    def _answer(self, text: str) -> None:
        forgotten = self.conversation.forgotten
        shown = 0
        with StopOnCtrlC() as ctrl_c, self.conversation.ask(text, **self._options()) as generation:
            self.last = generation
            self.totals.append(generation.statistics)
            reply = self._new_reply(generation)
            try:
                for step in ctrl_c.steps(generation):
                    reply.show(step.text)
                    shown += len(step.text)
                generation.take_held()
                reply.show(generation.text[shown:])
            finally:
                reply.finish()
        self.interrupted = generation.finish_reason is None
        self._tell(generation, self.conversation.forgotten - forgotten)

    def _options(self) -> dict[str, object]:
        params = self.params
        if params.seed is not None and self.retries:
            params = replace(params, seed=params.seed + self.retries)
        return {
            "params": params,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "constraint": self.constraint.copy() if self.constraint is not None else None,
        }

    def _new_reply(self, generation: Generation) -> Reply:
        opened = opened_by(self.conversation.model.tokenizer.decode(generation.prompt_ids[-8:]))
        if self.markdown:
            return MarkdownReply(render.out(), opened, self.hide_thinking)
        return PlainReply(opened, self.hide_thinking)

    def _tell(self, generation: Generation, forgotten: int) -> None:
        sys.stdout.flush()
        if forgotten:
            render.note(
                f"[the context was full: the {counted(forgotten, 'oldest message')} "
                f"{'is' if forgotten == 1 else 'are'} forgotten]"
            )
        if not generation.text:
            render.note("[no answer came; the question is taken back]")
        elif generation.finish_reason is None:
            render.note("[stopped; Ctrl-C again leaves]")
        elif generation.finish_reason == "length" and self.conversation.is_full:
            render.note(
                f"[the context of {self.conversation.model.n_ctx} tokens is full: /undo, /clear, "
                "a larger one (-c), or --context-shift]"
            )
        elif generation.finish_reason == "length" and self.constraint is not None:
            render.note("[cut off by the limit of tokens: the answer is not complete in its form]")
        if self.show_stats:
            render.note(stats_line(generation.statistics, self.conversation.n_tokens, self.conversation.model.n_ctx))


def stats_line(s: Statistics, used: int, n_ctx: int) -> str:
    """The line below an answer."""
    prompt = f"prompt {s.computed_tokens} new + {s.reused_tokens} reused tokens, {s.prompt_tok_s:.1f} tok/s"
    return f"[{prompt} | answer {counted(s.generated, 'token')}, {s.decode_tok_s:.1f} tok/s | context {used}/{n_ctx}]"
