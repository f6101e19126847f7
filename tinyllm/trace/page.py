"""One self-contained HTML page of a trace: texts as JSON, numbers packed, attention maps within a size that opens fast.

The page needs no network and its policy forbids any. Prompts are hostile input: they enter as JSON and become text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.errors import InvalidParameterError
from tinyllm.trace import page_data
from tinyllm.trace.packing import MapCoding, code_maps, packed
from tinyllm.trace.summary import sentence
from tinyllm.trace.texts import DEFAULT, LANGUAGES, say

if TYPE_CHECKING:
    from tinyllm.trace.attention import LayerAttention
    from tinyllm.trace.record import Trace

LIMIT = 4_600_000
"""Bytes of a page; richer maps are tried first, poorer ones when they do not fit."""
_SCRIPTS = ("base", "frame", "lens", "layer", "attention", "sampling", "choices", "keys")
_SAMPLES = 3
_HOPEFUL = 1.05  # an estimate from samples may be that much too large


@dataclass(frozen=True)
class PageOptions:
    """What a page shows: `command` in its footer, its `language`, maps of some `layers` (None: all), some `heads` of
    the selected layer (None: all), and the position that is `selected` first (None: that of the first choice)."""

    command: str = ""
    language: str = DEFAULT
    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    selected: int | None = None

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise InvalidParameterError(f"there is no language {self.language!r}: choose from {', '.join(LANGUAGES)}")


def write_page(trace: Trace, path: str | Path, command: str = "", **options: Any) -> None:
    """Write the page; `options` are those of `PageOptions`. Raises OSError, and what `page` raises."""
    Path(path).write_text(page(trace, command, **options), encoding="utf-8")


def page(trace: Trace, command: str = "", **options: Any) -> str:
    """The page as one HTML text; `options` are those of `PageOptions`. Raises InvalidParameterError for a language that
    there is none of."""
    show = PageOptions(command, **options)
    language, folder = show.language, files("tinyllm.trace")
    template, style = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    with ThreadPoolExecutor() as pool:
        arrays = page_data.numbers(trace, pool)
        data = page_data.texts(trace, language, pool) | {
            "command": show.command,
            "selected": trace.positions[0] if show.selected is None else show.selected,
            "shown_heads": None if show.heads is None else sorted(show.heads),
            "shapes": page_data.shapes(trace),
        }
        parts = {
            "language": language,
            "style": style,
            "title": _escaped(say(language, "page_title", model=trace.model_name)),
            "sentence": _escaped(sentence(trace, 0, language)),
            "no_script": say(language, "page_no_script"),
            "piece": say(language, "page_piece"),
            "token_rows": "".join(
                f"<tr><td>{i}<td>{_escaped(token.text)}<td>{token.id}" for i, token in enumerate(trace.tokens)
            ),
            "data": _json(data),
            "blocks": _blocks(dict(zip(arrays, pool.map(packed, arrays.values()), strict=True))),
            "script": page_script(),
        }
        room = LIMIT - len(template) - sum(map(len, parts.values()))
        coding, maps = _fitting_maps(trace, show, room, pool)
    about = {"coding": asdict(coding), "about_maps": coding.words(language, show.layers is not None)}
    parts["data"] = f"{parts['data'][:-1]},{_json(about)[1:]}"
    parts["blocks"] += _blocks(maps)
    pieces = template.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def page_script() -> str:
    """The page's JavaScript, from its parts."""
    folder = files("tinyllm.trace")
    parts = (folder.joinpath(f"page.{name}.js").read_text("utf-8") for name in _SCRIPTS)
    return "".join(["'use strict';\n(() => {\n", *parts, "})();\n"])


def _blocks(texts: dict[str, str]) -> str:
    """Packed numbers as elements, by id."""
    return "".join(
        f'<script type="application/octet-stream" id="{name}">{text}</script>\n' for name, text in texts.items()
    )


_LADDER = (
    MapCoding(bits=6),
    MapCoding(bits=4),
    MapCoding(bits=4, least=0.004),
    MapCoding(bits=4, top=8),
    MapCoding(bits=4, top=8, every=2),
    MapCoding(bits=4, top=8, every=2, last_queries=64),
)
"""From the richest coding to the poorest."""


def _fitting_maps(
    trace: Trace, show: PageOptions, room: int, pool: ThreadPoolExecutor
) -> tuple[MapCoding, dict[str, str]]:
    """Attention maps in the richest coding that fits, by element id."""
    shown = range(trace.n_layers) if show.layers is None else show.layers
    present = [(i, layer) for i, layer in enumerate(trace.attention) if layer is not None and i in shown]
    for coding in _LADDER:
        wanted = [(i, layer) for i, layer in present if (trace.n_layers - 1 - i) % coding.every == 0]

        def code(item: tuple[int, LayerAttention], coding: MapCoding = coding) -> str:
            return packed(code_maps(item[1], coding))

        # A few layers tell whether it is worth packing all.
        samples = wanted[:: max(1, len(wanted) // _SAMPLES)]
        estimate = sum(map(len, pool.map(code, samples))) * len(wanted) / max(1, len(samples))
        if estimate > _HOPEFUL * room and coding is not _LADDER[-1]:
            continue
        maps = dict(zip((f"attn-{i}" for i, _ in wanted), pool.map(code, wanted), strict=True))
        if sum(map(len, maps.values())) <= room:
            break
    return coding, maps


def _json(data: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _escaped(text: str) -> str:
    return html.escape(text)
