"""`tinyllm embed --neighbours` and `--analogy`: words go in, the tokens near them in the embedding table come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinyllm_cli import render
from tinyllm_cli.loading import find_file, usage_errors
from tinyllm_cli.prompt_input import clean

if TYPE_CHECKING:
    from tinyllm.embedding_table import Near, Neighbourhood
    from tinyllm.tokenizer import Tokenizer


def show_neighbours(model: str, text: str, k: int, as_json: bool) -> None:
    """Print the tokens nearest to a word of a model's vocabulary."""
    from tinyllm.embedding_table import word_neighbours

    _show(model, lambda table, tokenizer: word_neighbours(table, tokenizer, clean(text), k), as_json)


def show_analogy(model: str, words: tuple[str, str, str], k: int, as_json: bool) -> None:
    """Print the tokens nearest to the first word minus the second plus the third."""
    from tinyllm.embedding_table import word_analogy

    _show(model, lambda table, tokenizer: word_analogy(table, tokenizer, *map(clean, words), k=k), as_json)


def _show(model: str, find: Callable[..., Neighbourhood], as_json: bool) -> None:
    from tinyllm.embedding_table import EmbeddingTable
    from tinyllm.gguf_file import open_gguf
    from tinyllm.tokenizer import Tokenizer

    path = find_file(model)
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, source=str(path))
        table = EmbeddingTable(file)
        with usage_errors():
            found = find(table, tokenizer)
    if as_json:
        print(json.dumps(as_object(path.name, tokenizer, found), ensure_ascii=False))
    else:
        _print(tokenizer, found, table.n_vocab, table.width)


def as_object(model: str, tokenizer: Tokenizer, found: Neighbourhood) -> dict[str, Any]:
    """What `--json` prints."""

    def described(tokens: list[Near]) -> list[dict[str, Any]]:
        return [
            {**asdict(near), "text": tokenizer.token_text(near.id), "bytes": list(tokenizer.token_bytes(near.id))}
            for near in tokens
        ]

    return {
        "model": model,
        "words": [asdict(word) for word in found.words],
        "nearest": described(found.nearest),
        "own": described(found.own),
        "special": described(found.special),
        "mean_cosine": found.mean,
        "deviation": found.deviation,
    }


def _print(tokenizer: Tokenizer, found: Neighbourhood, n_vocab: int, width: int) -> None:
    from tinyllm.trace.tokens import display

    def piece(token: int) -> str:
        return display(tokenizer.token_bytes(token))

    def row(near: Near, note: str) -> list[str]:
        return [str(near.rank), piece(near.id), str(near.id), f"{near.cosine:.3f}", note]

    words = [word.text.strip().casefold() for word in found.words]
    names = [display(word.text.encode("utf-8", "surrogateescape")) for word in found.words]
    for word, name in zip(found.words, names, strict=True):
        if len(word.ids) > 1:
            pieces = " ".join(map(piece, word.ids))
            render.note(f"{name} is {len(word.ids)} tokens ({pieces}): their mean is looked for")
    sought = names[0] if len(names) == 1 else f"{names[0]} - {names[1]} + {names[2]}"
    print(f"{sought} in the embedding table of {n_vocab} tokens by {width} numbers")
    rows = [
        row(near, "the same word" if tokenizer.token_text(near.id).strip().casefold() in words else "")
        for near in found.nearest
    ]
    rows += [row(near, "set apart: asked for") for near in found.own]
    rows += [row(near, "set apart: special") for near in found.special]
    render.table(["RANK", "TOKEN", "ID", "COSINE", ""], rows, right=[0, 2, 3])
    print(f"the whole table: cosine {found.mean:.3f} ± {found.deviation:.3f}")
