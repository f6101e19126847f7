"""`tinyllm embed`: texts go in, vectors come out, or how alike the texts are."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tinyllm_cli import render
from tinyllm_cli.loading import load_model, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL, ModelOptions
from tinyllm_cli.prompt_input import clean, read_prompt
from tinyllm_cli.text import one_line


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; none: standard input is one text.", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A GGUF file, a catalogue name, or user/repo[:QUANT] on the hub.")
    ] = DEFAULT_MODEL,
    pooling: Annotated[
        str | None,
        typer.Option("--pooling", help="mean, cls, last or none (default: as the file says).", metavar="KIND"),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1 (default: yes).")
    ] = True,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Print the cosine of each pair of texts instead of vectors.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", help="Threads (default: what the machine gives).", metavar="N", min=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn texts into vectors that stand for their meaning.

    Vectors are printed one per line, numbers apart by spaces. Encoders (bert, nomic-bert, gemma-embedding…) are made
    for this; a language model gives the mean of its last states.
    """
    if not texts:
        texts = [read_prompt(None, []) or ""]
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
