"""Texts to search in: a seed flows in, sentences without interest and facts to hide among them flow out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_WHO = """
    The baker|A tall gardener|The old ferryman|Our neighbour|The night guard|A quiet student|The postman|The
    librarian|A young carpenter|The bus driver|The head cook|A retired teacher|The lighthouse keeper|A travelling
    painter
"""
_DID = """
    repaired a wooden chair|counted the empty boxes|painted the garden gate|swept the stone steps|carried a basket
    of apples|read a long letter|watered the tomatoes|cleaned the brass lamps|drew a map of the valley|fed the
    grey geese|folded the blue curtains|sharpened two kitchen knives|measured the height of the wall|wrote a list
    of repairs
"""
_WHERE = """
    behind the market|near the old bridge|at the edge of the forest|beside the railway station|in the small
    courtyard|across from the school|on the upper floor|next to the town hall|below the watch tower|by the river
"""
_WHEN = """
    early in the morning|after a late lunch|before the rain began|on a cold Tuesday|during the long holiday|while
    the bells were ringing|at the end of the week|just before sunset
"""
_NAMES = "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Paula".split()
_WORDS = """lantern copper violin glacier pepper rocket marble cactus anchor pillow tunnel walnut candle falcon ribbon
saddle""".split()
N_FACTS = len(_NAMES)


@dataclass(frozen=True)
class Fact:
    """Somebody's code word: the sentence that is hidden, what is asked, and how an answer begins."""

    name: str
    word: str

    @property
    def sentence(self) -> str:
        return f"The code word of {self.name} is {self.word}."

    @property
    def question(self) -> str:
        return f"What is the code word of {self.name}?"

    @property
    def opening(self) -> str:
        return f"The code word of {self.name} is"


def facts(n: int, seed: int) -> list[Fact]:
    """n facts with different names and words. Raises ValueError for more than `N_FACTS`."""
    if n > N_FACTS:
        raise ValueError(f"there are {N_FACTS} facts, not {n}")
    random = np.random.default_rng(seed)
    chosen = zip(random.permutation(N_FACTS)[:n], random.permutation(N_FACTS)[:n], strict=True)
    return [Fact(_NAMES[i], _WORDS[j]) for i, j in chosen]


def filler(seed: int) -> Iterator[str]:
    """Sentences without an end; all of some 15,000 come before one comes again."""
    parts = [" ".join(text.split()).split("|") for text in (_WHO, _DID, _WHERE, _WHEN)]
    sentences = [f"{who} {did} {where} {when}." for who, did, where, when in itertools.product(*parts)]
    order = np.random.default_rng(seed).permutation(len(sentences))
    return (sentences[i] for i in itertools.cycle(order))
