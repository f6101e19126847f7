"""Constrained output: a JSON schema, a grammar or a regular expression flows in, masks of allowed tokens flow out.

The work is done by the library llguidance, which is imported when the first constraint is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from tinyllm.errors import InvalidParameterError, SamplingError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from tinyllm.tokenizer import Tokenizer

_JSON_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""Between the parts of JSON: a model that likes white space cannot fill the context with it."""

_compiled_vocabularies: WeakKeyDictionary[Tokenizer, LLTokenizer] = WeakKeyDictionary()


class Constraint:
    """What may still be generated. `mask()` and `accept()` alternate, from the first generated token on.

    `complete`: what came so far is whole. `finished`: nothing but an end-of-generation token may follow.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self._n_vocab = tokenizer.n_vocab
        self._end_ids = tokenizer.eog_ids
        self._bits = np.zeros((1, -(-tokenizer.n_vocab // 32)), np.int32)

    @classmethod
    def from_json_schema(cls, schema: str | Mapping[str, Any], tokenizer: Tokenizer) -> Constraint:
        """JSON that is valid against `schema` (text or object); `{}` stands for any object.

        Raises InvalidParameterError, as the other makers do, for what cannot be understood.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(f"the JSON schema is no JSON: {error}") from None
        if not isinstance(parsed, Mapping):
            raise InvalidParameterError("the JSON schema must be an object")
        text = json.dumps(parsed or {"type": "object"})
        options = {"whitespace_pattern": _JSON_SPACE}
        return cls._compiled(
            lambda matcher: matcher.grammar_from_json_schema(text, overrides=options), "JSON schema", tokenizer
        )

    @classmethod
    def from_grammar(cls, text: str, tokenizer: Tokenizer) -> Constraint:
        """Text of a grammar, in GBNF (llama.cpp's notation, with `::=`) or in Lark's notation (`start: ...`)."""

        def compiled(matcher: type[LLMatcher]) -> str:
            from llguidance.gbnf_to_lark import any_to_lark

            return matcher.grammar_from_lark(any_to_lark(text))

        return cls._compiled(compiled, "grammar", tokenizer)

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer) -> Constraint:
        """Text that a regular expression matches as a whole (syntax of Rust's `regex`: no look-around)."""
        return cls._compiled(lambda matcher: matcher.grammar_from_regex(pattern), "regular expression", tokenizer)

    @classmethod
    def _compiled(cls, make: Callable[[type[LLMatcher]], str], what: str, tokenizer: Tokenizer) -> Constraint:
        from llguidance import LLMatcher

        try:
            grammar = make(LLMatcher)
        except Exception as error:  # GbnfToLarkError, ValueError, RecursionError, by notation
            raise InvalidParameterError(f"the {what} cannot be used: {_reason(str(error))}") from None
        matcher = LLMatcher(_vocabulary(tokenizer), grammar, log_level=0)
        constraint = cls(matcher, tokenizer)
        if not matcher.is_error():
            constraint._fill()  # finds out whether anything can match at all
        if matcher.is_error():
            raise InvalidParameterError(f"the {what} cannot be used: {_reason(matcher.get_error())}")
        return constraint

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """The tokens that may come next: bool [n_vocab]. Raises SamplingError if the constraint becomes too complex."""
        if not self.finished:
            self._fill()
            self._check()
        if self.finished:
            mask = np.zeros(self._n_vocab, bool)
            mask[list(self._end_ids)] = True
            return mask
        return np.unpackbits(self._bits.view(np.uint8)[0], count=self._n_vocab, bitorder="little").view(bool)

    def accept(self, token: int) -> None:
        """Tell which token came. Raises SamplingError for one that the mask excluded."""
        if not self.finished:
            self._matcher.consume_token(token)
            self._check()

    def copy(self) -> Constraint:
        """An independent constraint in the same state, for another generation."""
        twin = object.__new__(Constraint)
        twin.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), _bits=self._bits.copy())
        return twin

    def _fill(self) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SamplingError(f"the constraint cannot go on: {_reason(self._matcher.get_error())}")


class _Vocabulary:
    """The tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
        self.special_token_ids = [token for token in range(tokenizer.n_vocab) if tokenizer.is_control(token)]
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(tokenizer.eog_ids)

    def __call__(self, data: bytes) -> list[int]:
        return self._tokenizer.encode(data, add_special=False, parse_special=False)


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Made once for each tokenizer: it takes a second for a large one."""
    known = _compiled_vocabularies.get(tokenizer)
    if known is None:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not tokenizer.eog_ids:
            raise InvalidParameterError("this model has no token that ends a text, so its output cannot be constrained")
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer))
        known = LLTokenizer(wrapper, n_vocab=tokenizer.n_vocab, eos_token=sorted(tokenizer.eog_ids))
        _compiled_vocabularies[tokenizer] = known
    return known


def _reason(message: str) -> str:
    """The line of a library's message that says what is wrong."""
    if "NoExtension" in message:
        return "nothing can match it"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    marked = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (marked or lines or ["it is not understood"])[0][:300]
