"""What the same text costs in several languages: a tokenizer and parallel texts go in, counts of tokens come out.

The built-in text is Article 1 of the Universal Declaration of Human Rights (United Nations, 1948), in 14 languages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from tinyllm.errors import InvalidParameterError

from .axes import Axis
from .chart import bar_chart

if TYPE_CHECKING:
    from tinyllm.tokenizer import Tokenizer


@dataclass(frozen=True)
class ParallelText:
    """One text in one language. `language`: its code or any other short name; `script` may be empty."""

    language: str
    name: str
    script: str
    text: str


@dataclass(frozen=True)
class Cost:
    """Tokens that a text takes (without BOS and EOS), its Unicode characters and its UTF-8 bytes.

    `n_unknown` tokens are the vocabulary's sign for what it cannot spell: where there are any, the text is lost on the
    model, and the count says nothing.
    """

    n_tokens: int
    n_characters: int
    n_bytes: int
    n_unknown: int

    @property
    def per_character(self) -> float:
        return self.n_tokens / self.n_characters

    @property
    def per_byte(self) -> float:
        return self.n_tokens / self.n_bytes


def article_1() -> list[ParallelText]:
    """The built-in text, English first."""
    rows = json.loads(resources.files(__package__).joinpath("article1.json").read_text("utf-8"))
    return [ParallelText(**row) for row in rows]


def cost_of(tokenizer: Tokenizer, text: str) -> Cost:
    """What a text costs. Raises InvalidParameterError for an empty one."""
    if not text:
        raise InvalidParameterError("an empty text has no cost")
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    unknown = ids.count(tokenizer.unk_id) if tokenizer.unk_id is not None else 0
    return Cost(len(ids), len(text), len(text.encode("utf-8", "surrogatepass")), unknown)


def picture(models: Sequence[str], texts: Sequence[ParallelText], costs: Sequence[Sequence[Cost]]) -> str:
    """An SVG of tokens by those of the first text; `costs` [n_models, n_texts]."""
    base = texts[0].name
    ratios = {
        model: [round(cost.n_tokens / row[0].n_tokens, 2) for cost in row]
        for model, row in zip(models, costs, strict=True)
    }
    worst = [max(range(len(texts)), key=row.__getitem__) for row in ratios.values()]
    said = "; ".join(
        f"{model}: most for {texts[at].name}, {row[at]:.1f} times"
        for (model, row), at in zip(ratios.items(), worst, strict=True)
    )
    return bar_chart(
        f"Tokens for the same text, by those for {base}",
        [text.name for text in texts],
        ratios,
        Axis(f"tokens / tokens for {base}"),
        f"Tokens that each tokenizer needs, relative to {base}. {said}.",
    )
