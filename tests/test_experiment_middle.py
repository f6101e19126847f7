"""`experiment middle`: scores against a plain computation, and scripted models that see all of a text or its ends."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest
from experiment_cases import Command, check_picture
from fake_model import IM_END, FakeModel, FakeTokenizer

from tinyllm.errors import InvalidParameterError
from tinyllm.experiments.haystack import N_FACTS, facts, filler
from tinyllm.experiments.middle import ROOM, cell, measure, verdict
from tinyllm_cli import experiment_middle

DEPTHS = (0, 0.5, 1)
TOKENIZER = FakeTokenizer()


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(map(TOKENIZER.token_bytes, tokens))


class Reader(FakeModel):
    """Answers with the code word that its prompt tells, if it stands within `sight` bytes of either end."""

    def __init__(self, sight: int = 10**6, **fields):
        super().__init__(self._next, n_ctx=8192, **fields)
        self.sight = sight

    def _next(self, tokens: list[int]) -> int:
        text = bytes_of(tokens)
        question = re.findall(rb"What is the code word of (\w+)\?", text)[-1]
        # What it wrote itself stands behind the last header, or "Answer:".
        start = max(text.rfind(b"assistant\n") + len("assistant\n"), text.rfind(b"Answer:") + len("Answer:"))
        seen = text[: self.sight] + b" " + text[max(0, start - self.sight) : start]
        told = re.search(rb"The code word of %s is (\w+)\." % question, seen)
        word = told[1] if told else b"unknown"
        written = text[start:].lstrip()
        sentence = b"The code word of %s is %s." % (question, word)
        reply = sentence if written.startswith(b"T") else word  # it goes on with what was begun, and is short by itself
        return reply[len(written)] if reply.startswith(written) and written != reply else IM_END


class Hashed(FakeModel):
    """Logits that depend on every token before."""

    def __init__(self):
        super().__init__(lambda tokens: IM_END, n_ctx=8192)

    def logits_after(self, tokens: list[int]) -> np.ndarray:
        seed = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
        return np.random.default_rng(seed).normal(0, 3, self.tokenizer.n_vocab).astype(np.float32)


@pytest.fixture
def middle(monkeypatch, capsys, tmp_path):
    command = Command(monkeypatch, capsys, tmp_path)

    def run(model, *arguments):
        monkeypatch.setattr(experiment_middle, "load_model", lambda options: model)
        return command("middle", *arguments)

    return run


def test_facts_have_names_and_words_of_their_own_and_filler_tells_none():
    everything = facts(N_FACTS, seed=3)
    assert len({fact.name for fact in everything}) == len({fact.word for fact in everything}) == N_FACTS
    assert facts(5, seed=1) == facts(5, seed=1) != facts(5, seed=2)
    sentences = [sentence for sentence, _ in zip(filler(0), range(3000), strict=False)]
    assert len(set(sentences)) == 3000 and sentences[:9] == [s for s, _ in zip(filler(0), range(9), strict=False)]
    words = {fact.word for fact in everything} | {fact.name for fact in everything}
    assert not words & set(re.findall(r"\w+", " ".join(sentences))) and "code" not in " ".join(sentences)
    with pytest.raises(ValueError, match="facts"):
        facts(N_FACTS + 1, 0)


@pytest.mark.parametrize("raw", [False, True], ids=["template", "raw"])
def test_a_model_that_reads_everything_finds_everything(raw):
    probes = measure(Reader(), [600, 1500], DEPTHS, n_facts=2, n_others=3, raw=raw)
    assert [(p.length, p.depth) for p in probes[::2]] == [(n, depth) for n in (600, 1500) for depth in (*DEPTHS, None)]
    for probe in probes:
        assert probe.length - 110 < probe.n_tokens <= probe.length
        assert probe.found == (probe.depth is not None)
        assert probe.reply == (probe.fact.word if probe.found else "unknown")
        if probe.found:
            assert probe.rank == 0
            n = len(f" {probe.fact.word}")  # for each a logit of 10, and 0 for all other bytes
            assert probe.log_prob == pytest.approx(n * (10 - np.log(np.exp(10) + 259)), rel=1e-4)
    assert cell(probes, 600, 0).found == 1 and cell(probes, 600, None).found == 0
    assert verdict(probes)[0].startswith("12 of 12 replies contain the word; the fact changes")


def test_a_model_that_sees_the_ends_alone_gets_lost_in_the_middle():
    probes = measure(Reader(sight=300), [3000], (0, 0.25, 0.5, 0.75, 1), n_facts=2)
    assert [cell(probes, 3000, depth).found for depth in (0, 0.25, 0.5, 0.75, 1, None)] == [1, 0, 0, 0, 1, 0]
    assert cell(probes, 3000, 0).log_prob > cell(probes, 3000, 0.5).log_prob + 10
    assert cell(probes, 3000, 0.5).rank > 0
    assert verdict(probes)[1].startswith("3000 tokens: log-probability")


def test_scores_are_those_of_each_prompt_by_itself_and_prefixes_are_shared():
    model = Hashed()
    probes = measure(model, [500, 900], (0, 0.3, 1), n_facts=3)
    computed = len(model.evaluated)
    assert all(sequence.released for sequence in model.sequences)
    alone = 0
    for probe in probes:
        single = Hashed()
        (again,) = [
            found
            for found in measure(single, [probe.length], [] if probe.depth is None else [probe.depth], n_facts=3)
            if (found.fact, found.depth) == (probe.fact, probe.depth)
        ]
        assert again == probe
        alone += probe.n_tokens
    assert computed < 0.75 * alone


def test_the_score_is_the_words_log_probability_behind_the_opening():
    model = Hashed()
    probe = measure(model, [500], [0.5], n_facts=1)[0]
    opening = f"The code word of {probe.fact.name} is"
    # The scored rows are the first ones behind this prompt's opening.
    text = bytes_of(model.evaluated)
    prompt_end = text.index(opening.encode(), text.index(b"assistant\n"))
    scored = text[prompt_end : prompt_end + len(opening) + len(probe.fact.word)]
    assert scored == f"{opening} {probe.fact.word}"[:-1].encode()


def test_a_model_that_sees_nothing_fails_everywhere():
    probes = measure(Reader(sight=0), [900], DEPTHS, n_facts=2)
    (said,) = verdict(probes)
    assert said.startswith("the model fails everywhere: 0 of 6 replies contain the word")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([100], DEPTHS), "no room"),
        (([9000], DEPTHS), f"a context of {9000 + ROOM}"),
        (([500], [1.5]), "depth"),
        (([500], DEPTHS, 0), "facts in all"),
        (([500], DEPTHS, 10, 10), "facts in all"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(InvalidParameterError, match=message):
        measure(Reader(), *arguments)


def test_the_tables_have_lengths_and_depths(middle, tmp_path):
    picture = tmp_path / "middle.svg"
    done = middle(Reader(sight=300), "-l", "1k,3000", "-d", "100,0,50", "-n", 2, "--svg", picture)
    assert done.code == 0 and done.err.startswith("wrote ")
    headers, *rows = done.table[1:4]
    assert headers == ["TOKENS", "0 %", "50 %", "100 %", "absent"]
    assert rows == [["1024", "2/2", "0/2", "2/2", "0/2"], ["3000", "2/2", "0/2", "2/2", "0/2"]]
    assert "8 of 12 replies contain the word" in done.out
    root = check_picture(picture, "1024 tokens", "3000 tokens", "not in the text", "depth of the fact in the text (%)")
    assert "8 of 12 replies" in root[1].text


def test_json_has_every_reply(middle):
    found = middle(Reader(), "-l", "700", "-d", "50", "-n", 1, "--json").answer
    assert found["experiment"] == "middle" and found["model"] == "fake.gguf"
    present, absent = found["probes"]
    assert present["found"] and present["depth"] == 0.5 and present["fact"]["word"] in present["reply"]
    assert absent["depth"] is None and not absent["found"]
    assert [c["length"] for c in found["cells"]] == [700, 700] and found["cells"][0]["log_prob"] == present["log_prob"]


@pytest.mark.parametrize(
    "arguments", [["-d", "101"], ["-d", "a"], ["-l", "x"], ["-l", "100"], ["-n", "17"]], ids=" ".join
)
def test_wrong_values_are_wrong_usage(middle, arguments):
    done = middle(Reader(), *arguments)
    assert done.code == 2 and "Invalid value" in done.err


def test_a_length_beyond_the_models_training_is_told(middle):
    model = Reader()
    model.config.n_ctx_train = 512
    done = middle(model, "-l", "600", "-d", "0", "-n", 1)
    assert done.code == 0 and "trained on contexts of 512" in done.err
