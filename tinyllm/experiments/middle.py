"""Lost in the middle: a model, lengths and depths go in, how well it finds a fact at each place of a text comes out.

After Liu et al. 2023 ("Lost in the Middle: How Language Models Use Long Contexts"), with one sentence as the fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.errors import InvalidParameterError
from tinyllm.generate import generate, prepare_conversation
from tinyllm.prefix import common_prefix

from .axes import Axis
from .chart import Series, line_chart
from .haystack import N_FACTS, Fact, facts, filler

if TYPE_CHECKING:
    from tinyllm.model import Model
    from tinyllm.model import Sequence as ModelSequence

REPLY_TOKENS = 24
ROOM = 64
"""Positions that answers need behind the longest text."""
_INTRODUCTION = "Read these notes. A question about them follows."
_MATTERS = 1.0
"""Nats by which a fact has to raise the log-probability of its word if it is to count as seen."""


@dataclass(frozen=True)
class Probe:
    """One question. `depth`: where the fact stood, 0 the beginning and 1 the end; None: it was not in the text.

    `log_prob`: of the word, in nats, behind the opening of the right answer; `rank`: the worst of its tokens' ranks
    (0: all would be written). `found`: whether the greedy `reply` contains the word.
    """

    fact: Fact
    length: int
    depth: float | None
    n_tokens: int
    log_prob: float
    rank: int
    found: bool
    reply: str


@dataclass(frozen=True)
class Cell:
    """Several probes together: mean tokens and log-probability, median rank, share of replies with the word."""

    n: int
    n_tokens: float
    log_prob: float
    rank: float
    found: float


def cell(probes: Sequence[Probe], length: int, depth: float | None) -> Cell:
    """The probes of one length and depth, over all facts."""
    some = [probe for probe in probes if probe.length == length and probe.depth == depth]
    return Cell(
        len(some),
        fmean(probe.n_tokens for probe in some),
        fmean(probe.log_prob for probe in some),
        median(probe.rank for probe in some),
        fmean(probe.found for probe in some),
    )


@dataclass(frozen=True)
class _Question:
    fact: Fact
    length: int
    depth: float | None
    ids: list[int]


def measure(
    model: Model,
    lengths: Sequence[int],
    depths: Sequence[float],
    n_facts: int = 3,
    n_others: int = 0,
    seed: int = 0,
    raw: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Probe]:
    """Ask for each fact at each depth of texts of so many tokens, and once without the fact in each text.

    `n_others`: facts of the same kind about other people, scattered in every text: then the right one is not found by
    its form alone. Questions come in the chat template, if the model has one and not `raw`. What prompts share is
    computed once. `progress` is told the questions done and those in all.

    Raises InvalidParameterError for a length that has no room for a sentence or does not fit into the model's context,
    a depth outside 0 to 1, and more facts than there are.
    """
    if any(not 0 <= depth <= 1 for depth in depths):
        raise InvalidParameterError("a depth is a number from 0, the beginning of the text, to 1, its end")
    if not 1 <= n_facts <= n_facts + n_others <= N_FACTS:
        raise InvalidParameterError(f"there are {N_FACTS} facts in all, not {n_facts} and {n_others} others")
    if max(lengths) + ROOM > model.n_ctx:
        raise InvalidParameterError(
            f"a text of {max(lengths)} tokens and its answer need a context of {max(lengths) + ROOM}, not {model.n_ctx}"
        )
    hidden = facts(n_facts + n_others, seed)
    texts = {length: _sentences(model, length, hidden, n_facts, seed, raw) for length in dict.fromkeys(lengths)}
    questions = {
        length: [
            _Question(fact, length, depth, _ids(model, _document(text, fact, depth), fact, raw))
            for depth in dict.fromkeys((*depths, None))
            for fact in hidden[:n_facts]
        ]
        for length, text in texts.items()
    }
    total = sum(map(len, questions.values()))
    probes: dict[int, Probe] = {}
    for group in questions.values():
        for question, sequence in _share_prefixes(model, group):
            if progress is not None:
                progress(len(probes), total)
            probes[id(question)] = _ask(model, question, sequence)
    return [probes[id(question)] for group in questions.values() for question in group]


def _sentences(model: Model, length: int, hidden: Sequence[Fact], n_facts: int, seed: int, raw: bool) -> list[str]:
    """As many sentences as fit beside the longest question, with the facts behind the first `n_facts` among them."""

    def cost(sentence: str) -> int:
        return len(model.tokenizer.encode(f" {sentence}", add_special=False))

    others = [fact.sentence for fact in hidden[n_facts:]]
    room = length - max(len(_ids(model, [fact.sentence], fact, raw)) for fact in hidden[:n_facts])
    room -= sum(map(cost, others))
    found: list[str] = []
    for sentence in filler(seed):
        room -= cost(sentence)
        if room < 0:
            break
        found.append(sentence)
    if not found:
        raise InvalidParameterError(f"{length} tokens have no room for a text: the question alone takes nearly as many")
    places = np.random.default_rng(seed).uniform(0, len(found), len(others))
    for place, other in sorted(zip(places.tolist(), others, strict=True), reverse=True):
        found.insert(round(place), other)
    return found


def _document(sentences: Sequence[str], fact: Fact, depth: float | None) -> list[str]:
    if depth is None:
        return list(sentences)
    at = round(depth * len(sentences))
    return [*sentences[:at], fact.sentence, *sentences[at:]]


def _ids(model: Model, document: Sequence[str], fact: Fact, raw: bool) -> list[int]:
    text = f"{_INTRODUCTION}\n\n{' '.join(document)}\n\n{fact.question}"
    if raw or model.chat_template is None:
        return model.tokenizer.encode(f"{text}\n\nAnswer:", parse_special=False)
    messages = [{"role": "user", "content": f"{text} Answer with a short sentence."}]
    return prepare_conversation(model, messages, template_args={"enable_thinking": False}).ids


def _share_prefixes(model: Model, questions: Sequence[_Question]) -> Iterator[tuple[_Question, ModelSequence]]:
    """Each question about a text with a sequence that holds what its ids share with the text without a fact.

    One sequence grows along that text, and is forked wherever a prompt parts from it. It never has to be cut back,
    which windows and recurrent layers would pay for.
    """
    trunk_ids = next(question.ids for question in questions if question.depth is None)
    shared = {id(question): common_prefix(trunk_ids, question.ids[:-1]) for question in questions}
    trunk = model.new_sequence()
    try:
        for question in sorted(questions, key=lambda question: shared[id(question)]):
            if missing := trunk_ids[len(trunk) : shared[id(question)]]:
                trunk.evaluate(missing, want="none")
            branch = trunk.fork()
            try:
                yield question, branch
            finally:
                branch.release()
    finally:
        trunk.release()


def _ask(model: Model, question: _Question, sequence: ModelSequence) -> Probe:
    """Score the right answer and let the model write its own."""
    fact, ids = question.fact, question.ids
    if missing := ids[len(sequence) : -1]:
        sequence.evaluate(missing, want="none")
    log_prob, rank = _score(model, sequence.fork(), ids[-1], fact)
    reply = generate(model, ids, max_tokens=REPLY_TOKENS, temperature=0, sequence=sequence).read()
    return Probe(
        fact, question.length, question.depth, len(ids), log_prob, rank, fact.word in reply.casefold(), reply.strip()
    )


def _score(model: Model, sequence: ModelSequence, last: int, fact: Fact) -> tuple[float, int]:
    """The log-probability of the word behind the opening of an answer, and the worst rank of its tokens."""
    opening = model.tokenizer.encode(fact.opening, add_special=False)
    answer = model.tokenizer.encode(f"{fact.opening} {fact.word}", add_special=False)
    n_opening = common_prefix(opening, answer)
    before, word = [last, *answer[:n_opening]], answer[n_opening:]
    try:
        if len(before) > 1:
            sequence.evaluate(before[:-1], want="none")
        logits = sequence.evaluate([before[-1], *word[:-1]], want="all").astype(np.float64)
    finally:
        sequence.release()
    own = logits[np.arange(len(word)), word]
    top = logits.max(axis=1)
    log_probs = own - top - np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return float(log_probs.sum()), int(np.count_nonzero(logits > own[:, None], axis=1).max())


def verdict(probes: Sequence[Probe]) -> list[str]:
    """What the probes say, in sentences: whether the facts are found at all, and at which places less."""
    placed = [probe for probe in probes if probe.depth is not None]
    gain = fmean(probe.log_prob for probe in placed) - absent_log_prob(probes)
    n_found = sum(probe.found for probe in placed)
    found = f"{n_found} of {len(placed)} replies contain the word"
    change = f"the fact changes the word's log-probability by {gain:+.1f} nats on average"
    if gain < _MATTERS:
        return [f"the model fails everywhere: {found}, and {change}"]
    if not n_found:
        return [f"the model fails everywhere, though it sees the fact: {found}, but {change}"]
    return [f"{found}; {change}", *_ends_and_middles(probes)]


def absent_log_prob(probes: Sequence[Probe]) -> float:
    """The mean log-probability of the words where the facts are not in the text: what guessing gives."""
    return fmean(probe.log_prob for probe in probes if probe.depth is None)


def _ends_and_middles(probes: Sequence[Probe]) -> Iterator[str]:
    depths = sorted({probe.depth for probe in probes if probe.depth is not None})
    if len(depths) < 3:
        return
    for length in dict.fromkeys(probe.length for probe in probes):
        first, *inner, last = (cell(probes, length, depth) for depth in depths)
        middle = fmean(place.log_prob for place in inner)
        yield (
            f"{length} tokens: log-probability {first.log_prob:.2f} at the beginning, {middle:.2f} in between, "
            f"{last.log_prob:.2f} at the end"
        )


def picture(probes: Sequence[Probe], model_name: str) -> str:
    """An SVG of the word's log-probability by depth, a line for each length."""
    lengths = list(dict.fromkeys(probe.length for probe in probes))
    depths = sorted({probe.depth for probe in probes if probe.depth is not None})
    series = [
        Series(f"{length} tokens", [(100 * depth, cell(probes, length, depth).log_prob) for depth in depths])
        for length in lengths
    ]
    if depths[0] < depths[-1]:
        absent = absent_log_prob(probes)
        ends = [(100 * depths[0], absent), (100 * depths[-1], absent)]
        series.insert(0, Series("not in the text", ends, theory=True))
    return line_chart(
        f"Where {model_name} finds a fact",
        series,
        Axis("depth of the fact in the text (%)"),
        Axis("log-probability of the right word (nats)"),
        f"{'. '.join(verdict(probes))}.",
    )
