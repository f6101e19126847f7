"""`tinyllm embed`: texts go in, vectors come out, or how alike the texts are, or what lies near a word in the table."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from tinyllm_cli import render
from tinyllm_cli.loading import load_model, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL, ModelOptions
from tinyllm_cli.prompt_input import clean, need_text
from tinyllm_cli.text import one_line
from tinyllm_cli.usage import refuse

_vectors = partial(typer.Option, rich_help_panel="Vectors of texts")
_table = partial(typer.Option, rich_help_panel="Embedding table")


def embed(
    ctx: typer.Context,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; none: standard input is one text.", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A GGUF file, a catalogue name, or user/repo[:QUANT] on the hub.")
    ] = DEFAULT_MODEL,
    pooling: Annotated[
        str | None,
        _vectors("--pooling", help="mean, cls, last or none (default: as the file says).", metavar="KIND"),
    ] = None,
    normalize: Annotated[
        bool, _vectors("--normalize/--no-normalize", help="Scale vectors to length 1 (default: yes).")
    ] = True,
    similarity: Annotated[
        bool, _vectors("--similarity", help="Print the cosine of each pair of texts instead of vectors.")
    ] = False,
    threads: Annotated[
        int | None,
        _vectors("--threads", "-t", help="Threads (default: what the machine gives).", metavar="N", min=1),
    ] = None,
    neighbours: Annotated[
        str | None, _table("--neighbours", help="Print the tokens nearest to a word.", metavar="TEXT")
    ] = None,
    analogy: Annotated[
        tuple[str, str, str] | None,
        _table("--analogy", help="Print the tokens nearest to A - B + C, as in: king man woman.", metavar="A B C"),
    ] = None,
    k: Annotated[int | None, _table("--top", "-k", help="How many tokens (default: 10).", metavar="N", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn texts into vectors that stand for their meaning.

    Vectors are printed one per line, numbers apart by spaces. Encoders (bert, nomic-bert, gemma-embedding…) are made
    for this; a language model gives the mean of its last states.

    --neighbours and --analogy look into the table of token embeddings, which every model has, before any layer.
    """
    if neighbours is not None or analogy is not None:
        if neighbours is not None and analogy is not None:
            raise typer.BadParameter("choose one of --neighbours and --analogy")
        if texts or similarity or pooling is not None:
            raise typer.BadParameter("--neighbours and --analogy take no texts, --similarity or --pooling")
        refuse(ctx, "on the embedding table", "normalize", "threads")
        from tinyllm_cli.embed_table import show_analogy, show_neighbours

        if neighbours is not None:
            show_neighbours(model, neighbours, k or 10, as_json)
        else:
            show_analogy(model, analogy, k or 10, as_json)
        return
    if k is not None:
        raise typer.BadParameter("--top counts the tokens of --neighbours and --analogy")
    if similarity and not normalize:
        refuse(ctx, "with --similarity, whose cosines need vectors of length 1", "normalize")
    if not texts:
        with usage_errors():
            texts = [need_text(None, files=None, what="text")]
    texts = [clean(text) for text in texts]
    if similarity and (pooling == "none" or len(texts) < 2):
        raise typer.BadParameter("--similarity compares pooled vectors of at least two texts")
    loaded = load_model(ModelOptions(model=model, threads=threads))
    with usage_errors():
        vectors = [loaded.embed(text, pooling=pooling, normalize=normalize or similarity) for text in texts]
    cosines = [[float(a @ b) for b in vectors] for a in vectors] if similarity else None
    if as_json:
        answer = {"model": loaded.path.name, "texts": texts}
        answer |= {"similarity": cosines} if similarity else {"embeddings": [v.tolist() for v in vectors]}
        print(json.dumps(answer, ensure_ascii=False))
    elif cosines is not None:
        names = [one_line(text)[:24] for text in texts]
        rows = [[name, *(f"{value:.3f}" for value in row)] for name, row in zip(names, cosines, strict=True)]
        render.table(["", *names], rows, right=list(range(1, len(names) + 1)))
    else:
        for vector in vectors:
            for row in vector if vector.ndim == 2 else [vector]:
                print(*(f"{value:.6g}" for value in row))
