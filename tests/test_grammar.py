"""Constrained output: whatever a model would like to write, what comes out has the form asked for and ends there."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.fake_model import EOS, IM_END, FakeTokenizer
from tinyllm.errors import InvalidParameterError, SamplingError
from tinyllm.sampler import Sampler, SamplingParams
from tinyllm.sampling.grammar import Constraint

PIECES = [
    b'{"',
    b'":',
    b" " * 4,
    b"\n\n\n",
    b'"}',
    b"true",
    b"false",
    b"12",
    "é".encode(),
    b'", "',
    b"]}",
    "你".encode()[:2],
]
TOKENIZER = FakeTokenizer(pieces=PIECES)


def written(constraint: Constraint, wish: bytes = b"", seed: int = 0, limit: int = 300) -> tuple[str, bool]:
    """What comes from a model that writes at random but prefers some bytes; and whether it ended by itself."""
    made = Sampler(SamplingParams(temperature=1, seed=seed), TOKENIZER.n_vocab)
    random = np.random.default_rng(seed)
    favourites = [
        i for i in range(TOKENIZER.n_vocab) if TOKENIZER.token_bytes(i) and set(TOKENIZER.token_bytes(i)) <= set(wish)
    ]
    tokens: list[int] = []
    for _ in range(limit):
        logits = random.standard_normal(TOKENIZER.n_vocab).astype(np.float32) * 2
        logits[favourites] += 20
        token = made.sample(logits, constraint.mask()).token
        constraint.accept(token)
        if token in TOKENIZER.eog_ids:
            return TOKENIZER.decode(tokens), True
        tokens.append(token)
    return TOKENIZER.decode(tokens), False


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Zoë", 'a "b"', "\u0007"]},
        "digits": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
        "nested": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "none": {"type": "null"},
    },
    "required": ["name", "digits", "nested", "code", "none"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("wish", [b"", b" \n\t", b'}]"'], ids=["anything", "white space", "the end"])
def test_json_fits_its_schema(seed, wish):
    text, ended = written(Constraint.from_json_schema(PERSON, TOKENIZER), wish, seed)
    assert ended
    value = json.loads(text)
    assert list(value) == PERSON["required"]
    assert value["name"] in PERSON["properties"]["name"]["enum"]
    assert 2 <= len(value["digits"]) <= 4 and all(digit in range(10) for digit in value["digits"])
    assert value["nested"] in ({"x": True}, {"x": False})
    assert re.fullmatch("[a-c]{2,3}", value["code"]) and value["none"] is None


@pytest.mark.parametrize("schema", ["{}", '{"type": "object"}', {}])
def test_an_empty_schema_is_any_object(schema):
    constraint = Constraint.from_json_schema(schema, TOKENIZER)
    assert set(np.flatnonzero(constraint.mask()).tolist()) == {
        i for i in range(TOKENIZER.n_vocab) if TOKENIZER.token_bytes(i)[:1] == b"{"
    }
    text, ended = written(constraint, b'}"')
    assert ended and isinstance(json.loads(text), dict)


def test_white_space_between_the_parts_is_bounded():
    """However much the model likes it."""
    schema = {"type": "array", "items": {"type": "integer", "maximum": 3, "minimum": 1}, "minItems": 3, "maxItems": 3}
    text, ended = written(Constraint.from_json_schema(schema, TOKENIZER), b" \n")
    assert ended and len(json.loads(text)) == 3
    assert max(map(len, re.findall(r"\s+", text))) <= 22


def test_nothing_follows_the_value():
    constraint = Constraint.from_json_schema({"type": "boolean"}, TOKENIZER)
    assert not constraint.complete and not constraint.finished
    constraint.accept(256 + 4 + PIECES.index(b"true"))
    assert constraint.complete
    assert np.flatnonzero(constraint.mask()).tolist() == [EOS, IM_END]
    assert constraint.finished
    constraint.accept(EOS)
    assert np.flatnonzero(constraint.mask()).tolist() == [EOS, IM_END]


def test_output_that_was_cut_off_is_not_complete():
    constraint = Constraint.from_json_schema(PERSON, TOKENIZER)
    _, ended = written(constraint, limit=5)
    assert not ended and not constraint.complete


@pytest.mark.parametrize(
    "make, source, pattern",
    [
        (Constraint.from_regex, r"[0-9]{3}-(ab|cd)+é?", r"[0-9]{3}-(ab|cd)+é?"),
        (Constraint.from_regex, "", ""),
        (Constraint.from_grammar, 'root ::= "yes" | "no" space\nspace ::= " "{1,3}', "yes|no {1,3}"),
        (Constraint.from_grammar, 'root ::= item ("," item){2}\nitem ::= [a-c] [0-9]', "[a-c][0-9](,[a-c][0-9]){2}"),
        (Constraint.from_grammar, 'start: "hi " NAME\nNAME: /[A-Z][a-z]{2}/', "hi [A-Z][a-z]{2}"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_text_fits_its_grammar(make, source, pattern, seed):
    text, ended = written(make(source, TOKENIZER), seed=seed)
    assert re.match(pattern, text) if not ended else re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "make, source, message",
    [
        (Constraint.from_json_schema, "{bad", "the JSON schema is no JSON: "),
        (Constraint.from_json_schema, "[1]", "must be an object"),
        (Constraint.from_json_schema, "false", "must be an object"),
        (Constraint.from_json_schema, "[" * 100_000, "the JSON schema is no JSON: "),
        (Constraint.from_json_schema, {"type": "nonsense"}, "the JSON schema cannot be used: .*nonsense"),
        (Constraint.from_json_schema, {"type": "integer", "minimum": 5, "maximum": 3}, "cannot be used: "),
        (Constraint.from_json_schema, {"$ref": "#/nowhere"}, "cannot be used: .*nowhere"),
        (Constraint.from_regex, "(unclosed", "the regular expression cannot be used: unclosed group"),
        (Constraint.from_regex, r"[^\s\S]", "the regular expression cannot be used: nothing can match it"),
        (Constraint.from_grammar, 'root ::= "a" b', "the grammar cannot be used: Rule 'b' not found"),
        (Constraint.from_grammar, "", "the grammar cannot be used: "),
        (Constraint.from_grammar, "root ::= " + "(" * 5000, "the grammar cannot be used: "),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(make, source, message):
    with pytest.raises(InvalidParameterError, match=message) as error:
        make(source, TOKENIZER)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_token_against_the_mask_is_refused():
    constraint = Constraint.from_regex("[0-9]+", TOKENIZER)
    with pytest.raises(SamplingError, match="the constraint cannot go on"):
        constraint.accept(ord("x"))


def test_control_tokens_are_never_allowed_inside():
    constraint = Constraint.from_regex("(.|\n)*", TOKENIZER)
    allowed = set(np.flatnonzero(constraint.mask()).tolist())
    assert set(range(256, 260)) & allowed == {EOS, IM_END}


def test_copies_go_their_own_way():
    first = Constraint.from_regex("[0-9]{2}", TOKENIZER)
    second = first.copy()
    first.accept(ord("1"))
    first.accept(ord("2"))
    assert first.finished or first.complete
    assert not second.complete and second.mask()[ord("1")]


def test_a_vocabulary_without_an_end_cannot_be_constrained():
    tokenizer = FakeTokenizer()
    tokenizer.eog_ids = frozenset()
    with pytest.raises(InvalidParameterError, match="no token that ends a text"):
        Constraint.from_regex("a", tokenizer)


def test_importing_does_not_load_the_library():
    script = "import sys, tinyllm.sampling.grammar, tinyllm.sampler; print('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"
