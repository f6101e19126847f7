"""`tinyllm experiment memory`: models go in, the memory of their keys and values by context length comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.experiment_output import AsJson, ModelNames, SvgFile, numbers_of, print_json, write_picture
from tinyllm_cli.loading import find_file, tell_trained, usage_errors
from tinyllm_cli.options import DEFAULT_MODEL
from tinyllm_cli.text import one_line, size

if TYPE_CHECKING:
    from tinyllm.experiments.memory import CacheDesign, Memory

KV_TYPES = ("f32", "f16", "q8_0")


def memory(
    model: ModelNames = [DEFAULT_MODEL],  # noqa: B006 (Typer copies it)
    lengths: Annotated[
        list[str],
        typer.Option(
            "--lengths", "-l", help="Context lengths, as in 1024,8192 or 1k,128k.", metavar="LIST", show_default=False
        ),
    ] = [],  # noqa: B006
    cache_types: Annotated[
        list[str],
        typer.Option(
            "--cache-types",
            help=f"Numbers of the cache (default: {','.join(KV_TYPES)}).",
            metavar="LIST",
            show_default=False,
        ),
    ] = list(KV_TYPES),  # noqa: B006
    published: Annotated[
        list[str],
        typer.Option(
            "--published",
            help="A model by the sizes in its paper (repeatable): gpt-3, mistral-7b, llama-3.1-405b, deepseek-v3.",
            metavar="NAME",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare what keys and values cost by context length: as the model has them, and shared in other ways.

    Only the file's configuration is read. Bytes are those of the engine's pages of 32 positions, for one sequence.
    """
    from tinyllm.experiments.memory import default_lengths, measure

    with usage_errors():
        designs = [_design(name) for name in model] + [_published(name) for name in published]
        at = numbers_of("--lengths", lengths) or default_lengths(designs)
        kv_types = [name.strip() for text in cache_types for name in text.split(",")]
        rows = measure([each for design in designs for each in (design, *design.alternatives())], at, kv_types)
    if as_json:
        print_json({"experiment": "memory", "lengths": at, "rows": [_as_object(row) for row in rows]})
    else:
        _print_table(rows, at)
    for design in designs:
        tell_trained(one_line(design.model), max(at), design.n_ctx_train)
    for line in _notes(designs, kv_types):
        render.note(line)
    write_picture(svg, lambda: picture(rows, max(at)))


def _design(name: str) -> CacheDesign:
    from tinyllm.config import ModelConfig
    from tinyllm.experiments.memory import CacheDesign
    from tinyllm.gguf_file import open_gguf

    path = find_file(name)
    with open_gguf(path) as file:
        return CacheDesign.of(ModelConfig.from_file(file), path.stem)


def _published(name: str) -> CacheDesign:
    from tinyllm.experiments.memory import PUBLISHED

    if name not in PUBLISHED:
        raise InvalidParameterError(f"--published {name!r} is unknown: use one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def _as_object(row: Memory) -> dict[str, Any]:
    return {
        "model": row.design.model,
        "layout": row.design.layout,
        "layers": len(row.design.layers),
        "kv_heads": list(row.design.kv_heads),
        "cache_type": row.kv_type,
        "bytes_per_token": row.per_position,
        "state_bytes": row.design.state_bytes,
        "bytes": list(row.n_bytes),
    }


def _print_table(rows: Sequence[Memory], lengths: Sequence[int]) -> None:
    headers = ["model", "layout", "KV heads", "type", "per token", *map(_length, lengths)]
    cells, before = [], ("", "")
    for row in rows:
        design = row.design
        # Names that the line above has as well would only hide what differs.
        named = [
            text if text != above else "" for text, above in zip((design.model, design.layout), before, strict=True)
        ]
        if named[0]:
            named[1] = design.layout
        heads = ", ".join(map(str, design.kv_heads)) if named[1] else ""
        cells.append([*named, heads, row.kv_type, size(row.per_position), *map(size, row.n_bytes)])
        before = (design.model, design.layout)
    render.table(headers, cells, right=[2, *range(4, len(headers))])


def _length(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _notes(designs: Sequence[CacheDesign], kv_types: Sequence[str]) -> list[str]:
    lines = []
    for design in designs:
        if windows := [layer.window for layer in design.layers if layer.window]:
            among = f"{len(windows)} of {len(design.layers)} layers see a window of {windows[0]} positions"
            lines.append(f"{design.model}: {among}")
        if design.state_bytes:
            lines.append(
                f"{design.model}: of these, {size(design.state_bytes)} are recurrent state, whatever the length"
            )
        if misfits := [kv_type for kv_type in kv_types if not design.fits(kv_type)]:
            dims = sorted({size for layer in design.layers for size in (layer.head_dim, layer.v_dim)})
            lines.append(f"{design.model}: heads of {', '.join(map(str, dims))} numbers cannot be {misfits[0]}")
    return list(map(one_line, lines))


def picture(rows: Sequence[Memory], longest: int) -> str:
    """Memory by length on logarithmic axes, a line for each design, in the type that comes in the middle."""
    from tinyllm.experiments.axes import Axis
    from tinyllm.experiments.chart import Series, line_chart

    kv_type = "f16" if any(row.kv_type == "f16" for row in rows) else rows[0].kv_type
    shown = [row.design for row in rows if row.kv_type == kv_type]
    lengths = [n for n in (2**power for power in range(6, 40)) if n < longest] + [longest]
    several = len({design.model for design in shown}) > 1
    series = [
        Series(
            f"{design.model} {design.layout}" if several else design.layout,
            [(n, design.bytes_at(n, kv_type) / 1e6) for n in lengths],
        )
        for design in shown
    ]
    title = f"Keys and values of {'one sequence' if several else shown[0].model}, {kv_type}"
    description = "; ".join(f"{line.name}: {line.points[-1][1]:.4g} MB at {longest} tokens" for line in series)
    return line_chart(title, series, Axis("context (tokens)", base=2), Axis("memory (MB)", base=10), description)
