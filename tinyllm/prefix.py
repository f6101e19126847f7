"""What a sequence holds already and a new prompt repeats: two lists of ids go in, the shared beginning comes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyllm.model import Sequence as ModelSequence
    from tinyllm.tokenizer import Tokenizer


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids (or bytes) two sequences share at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def reuse_prefix(sequence: ModelSequence, ids: list[int]) -> list[int]:
    """Cuts the sequence back to what it shares with `ids` and returns the ids still to run: the last one at least."""
    common = common_prefix(sequence.tokens, ids[:-1])
    if common < len(sequence):
        sequence.truncate(common)
    return ids[len(sequence) :]


def keep_sampled(tokenizer: Tokenizer, held: Sequence[int], ids: list[int]) -> list[int]:
    """`ids` with its beginning replaced by `held`, as far as both spell the same text.

    A model need not write its reply in the tokens that the tokenizer chooses for the same text, and a conversation's
    ids are made from its text: without this, the cache would be of no use behind such a reply. Control tokens only
    ever equal themselves.
    """
    at_held = at_ids = 0
    while True:
        shared = common_prefix(held[at_held:], ids[at_ids:])
        at_held, at_ids = at_held + shared, at_ids + shared
        held_bytes, held_ends = _spelling(tokenizer, held, at_held)
        ids_bytes, ids_ends = _spelling(tokenizer, ids, at_ids)
        same = common_prefix(held_bytes, ids_bytes)
        meeting = max((end for end in held_ends if end <= same and end in ids_ends), default=0)
        if not meeting:
            return [*held[:at_held], *ids[at_ids:]]
        at_held, at_ids = held_ends[meeting], ids_ends[meeting]


def _spelling(tokenizer: Tokenizer, ids: Sequence[int], start: int) -> tuple[bytes, dict[int, int]]:
    """The bytes from `start` to the next control token, and for each end of a token in them the index behind it."""
    spelled = bytearray()
    ends: dict[int, int] = {}
    for at in range(start, len(ids)):
        if tokenizer.is_control(ids[at]):
            break
        spelled += tokenizer.token_bytes(ids[at])
        ends[len(spelled)] = at + 1
    return bytes(spelled), ends
