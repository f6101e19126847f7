"""A trace on a terminal: rows are layers, the answer comes first, and everything fits the width that there is."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tinyllm.trace.summary import check, funnel, layer_rows, sentence, stage_rows
from tinyllm.trace.texts import say
from tinyllm_cli import render
from tinyllm_cli.text import one_line

if TYPE_CHECKING:
    from tinyllm.trace import Trace

BARS = "▁▂▃▄▅▆▇█"
PLAIN = str.maketrans("▁▂▃▄▅▆▇█·…Σ−⏎⇥␍‖⟨⟩×≥（）：；，。", "12345678.~S-//r|<>x>():;,.")
WIDE = 112
"""From here on there is room for heads, contributions and times."""
FIRST, LAST, MOST = 2, 6, 18
MAX_HEADS = 16


def show(
    trace: Trace,
    position: int,
    layers_text: str | None,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    stages: Sequence[str],
    language: str,
) -> None:
    """Print a trace. `layers_text` None: layers between which nothing changes are left out."""
    console = render.out()
    width = console.width if sys.stdout is not None and sys.stdout.isatty() else 80
    page = _Page(width, language)
    say = page.say
    attention = next((layer for layer in trace.attention if layer is not None), None)
    facts = [f"{trace.model_name} {trace.quantization}", say("view_layers", n=trace.n_layers)]
    if attention is not None:
        facts.append(say("view_heads", n=attention.n_heads, kv=attention.n_kv_heads))
    facts.append(say("view_tokens", n=trace.n_prompt, m=len(trace.steps)))
    page.wrapped(" | ".join(facts), "bold")
    page.wrapped(sentence(trace, 0, language))
    _tokens(page, trace, position)
    rows = layer_rows(trace, position, layers, heads)
    page.line()
    page.line(_label(page, trace, position), "dim")
    _layers(page, trace, rows, cut=layers_text is None)
    if trace.steps:
        page.line()
        _steps(page, trace)
    if position in trace.positions:
        page.wrapped(check(trace, trace.positions.index(position), language), "dim")
    if stages:
        page.line()
        _stages(page, stage_rows(trace, position, stages, range(trace.n_layers) if layers is None else layers))
    for note in trace.notes:
        render.note(note.text(language))


class _Page:
    """Lines of a known width on stdout, in the characters that its encoding has."""

    def __init__(self, width: int, language: str):
        self.width = width
        self.say = partial(say, language)
        try:
            (BARS + "·Σ").encode(sys.stdout.encoding or "ascii")
            self.plain = False
        except (UnicodeError, LookupError):
            self.plain = True

    def line(self, text: str | Text = "", style: str = "") -> None:
        line = text if isinstance(text, Text) else Text(one_line(text), style=style)
        if self.plain:
            line = Text(line.plain.translate(PLAIN))
        line.rstrip()
        if cell_len(line.plain) > self.width:
            line.truncate(self.width, overflow="crop")
        render.out().print(line)

    def wrapped(self, text: str, style: str = "") -> None:
        for line in Text(one_line(text), style=style).wrap(render.out(), self.width):
            self.line(line)


def _label(page: _Page, trace: Trace, position: int) -> str:
    behind = trace.tokens[position + 1].text if position + 1 < len(trace.tokens) else ""
    following = f"{position + 1} {behind}".rstrip()
    return page.say("view_at", i=position, token=trace.tokens[position].text, next=following)


def _tokens(page: _Page, trace: Trace, position: int) -> None:
    """Index, piece and id of every token, as many to a line as fit; long prompts are cut in the middle."""
    cells: list[tuple[str, str]] = []
    shown = list(range(len(trace.tokens)))
    if len(shown) > 48:
        near = range(max(24, position - 8), min(len(shown) - 16, position + 8))
        shown = sorted({*shown[:24], *near, *shown[-16:]})
    before = -1
    for i in shown:
        if i != before + 1:
            cells.append((page.say("view_more", n=i - before - 1), "dim"))
        token, before = trace.tokens[i], i
        mark = "+" if token.generated else " "
        style = "bold" if i == position else "cyan" if token.control else "dim" if token.template else ""
        cells.append((f"{mark}{i} {token.text} {token.id}", style))
    line = Text()
    for cell, style in cells:
        cell = one_line(cell)
        if line and cell_len(line.plain) + cell_len(cell) + 2 > page.width:
            page.line(line)
            line = Text()
        line.append(cell + "  ", style)
    page.line(line)


def _layers(page: _Page, trace: Trace, rows: list[dict[str, Any]], cut: bool) -> None:
    wide = page.width >= WIDE
    writes = [value for row in rows[1:] for value in (row["attn_write"], row["ffn_write"])]
    largest = sorted(writes)[int(0.95 * (len(writes) - 1))] if writes else 1.0
    n_heads = max((len(row.get("entropy") or ()) for row in rows), default=0)
    heads = _head_width(rows) if wide and 0 < n_heads <= MAX_HEADS else 0
    say = page.say
    # Numbers are flush right, words flush left.
    front = [(say("layer"), -5), ("|h|", -5), ("+attn", -5), ("+ffn", -4)]
    if heads:
        heads = max(heads, cell_len(say("view_entropy")))
        front.append((say("view_entropy"), heads))
    tail = [(say("view_lens"), 12), *([(say("view_second"), 12)] if wide else []), ("p", -4), (say("view_rank"), -5)]
    tail += [("+logit", -7), ("ms", -6)] if wide else []
    look = max(16, page.width - sum(abs(w) + 1 for _, w in (*front, *tail)) - 1)
    header = [_cell(*column) for column in (*front, (f" {say('view_looks_at')}", look), *tail)]
    page.line(" ".join(header), "dim")
    shown = _selection(rows) if cut else list(range(len(rows)))
    before = -1
    for i in shown:
        if i != before + 1:
            n = i - before - 1
            page.line(f"    {say('view_cut_one' if n == 1 else 'view_cut', n=n)}", "dim")
        before, row = i, rows[i]
        line = Text()
        line.append(str(row["layer"]).rjust(max(5, cell_len(say("layer")))))
        line.append(f" {_size(row['norm']):>5}")
        for key, w in (("attn_write", 5), ("ffn_write", 4)):
            line.append(" " + (_bar(row[key] / largest) if key in row else "").rjust(w), "blue")
        if heads:
            line.append(" " + _heads(row).ljust(heads), "cyan")
        line.append("  " + _fit(_sources(page, row, look - 2), look - 1))
        _lens_cells(page, line, row, wide)
        page.line(line)


def _selection(rows: list[dict[str, Any]]) -> list[int]:
    """The rows that tell something: the ends, and where another token takes the lead."""
    lead = [row["lens"][0]["id"] if row["lens"] else None for row in rows]
    if len(rows) <= MOST:
        return list(range(len(rows)))
    keep = {*range(FIRST + 1), *range(len(rows) - LAST, len(rows))}
    changes = [i for i in range(1, len(rows)) if lead[i] != lead[i - 1] and i not in keep]
    keep.update(changes[-(MOST - len(keep)) :])
    return sorted(keep)


def _lens_cells(page: _Page, line: Text, row: dict[str, Any], wide: bool) -> None:
    if not row["lens"]:
        line.append(f" {page.say('not_read')}", "dim")
        return
    first = row["lens"][0]
    # Tied embeddings make the model "predict" its input before the first layer: no news.
    style = "dim" if row["layer"] == "embed" else "bold" if row["rank"] == 0 else ""
    line.append(" " + _fit(first["token"], 12), style)
    if wide:
        line.append(" " + _fit(row["lens"][1]["token"], 12), "dim")
    line.append(f" {_share(first['probability']):>4}")
    line.append(f" {_rank(row['rank']):>5}", "bold" if row["rank"] == 0 else "")
    if wide:
        parts = row.get("contribution")
        line.append(f" {sum(parts.values()):+7.2f}" if parts else " " * 8)
        line.append(f" {row['ms']:6.2f}" if "ms" in row else "", "dim")


def _sources(page: _Page, row: dict[str, Any], width: int) -> str:
    """Where attention looks, or what an embedding is near to, as much of it as fits."""
    if "looks_at" in row:
        text = "" if row["sink"] is None else page.say("view_sink", n=f"{100 * row['sink']:.0f}")
        if row.get("window"):
            text = f"w{row['window']} {text}".rstrip()
        found = [(source["token"], source["share"]) for source in row["looks_at"]]
    else:
        text = page.say("view_near") if row["nearest"] else ""
        found = [(near["token"], near["cosine"]) for near in row["nearest"]]
    for token, number in found:
        longer = f"{text} {_clip(token, 12)} {_share(number)}".lstrip()
        if cell_len(longer) > width:
            break
        text = longer
    return text


def _heads(row: dict[str, Any]) -> str:
    values = row.get("entropy_without_sinks") or ()
    group = max(1, len(values) // (row.get("kv_heads") or 1))
    bars = [" " if value is None else _bar(value) for value in values]
    return " ".join("".join(bars[i : i + group]) for i in range(0, len(bars), group))


def _head_width(rows: list[dict[str, Any]]) -> int:
    return max(cell_len(_heads(row)) for row in rows)


def _steps(page: _Page, trace: Trace) -> None:
    """Each generated token with its alternatives, and below it its way through the sampler."""
    for i, step in enumerate(trace.steps):
        line = Text(f"{trace.n_prompt + i:>5} ")
        line.append(_fit(trace.piece[step.token], 14), "bold")
        line.append(f" {_share(math.exp(step.logprob)):>4}  ")
        for token, logprob in step.top_logprobs:
            if token != step.token:
                cell = f"  {_clip(trace.piece[token], 14)} {_share(math.exp(logprob))}"
                if cell_len(line.plain) + cell_len(cell) <= page.width:
                    line.append(cell, "dim")
        page.line(line)
        page.line(f"      {_funnel_words(page, trace, i)}", "dim")


def _funnel_words(page: _Page, trace: Trace, step: int) -> str:
    """`top_k 40 > min_p .05 keeps 3 > temperature .8 > u=.31`."""
    found = funnel(trace, step, 1)
    words = []
    for stage in found["stages"]:
        setting = "" if stage["setting"] is None else f" {_plain_number(stage['setting'])}"
        cuts = stage["after"] < stage["before"] and stage["stage"] != "top_k"
        keeps = " " + page.say("view_keeps", n=stage["after"]) if cuts else ""
        words.append(f"{_stage_name(page, stage['stage'])}{setting}{keeps}")
    u = found["draw"]["u"]
    words.append(page.say("greedy") if u is None else f"u={_share(u)}")
    return " > ".join(words)


def _stage_name(page: _Page, stage: str) -> str:
    if stage == "temperature":
        return page.say("view_temperature")
    return page.say(stage) if stage == "penalties" else _SHORT.get(stage, stage)


_SHORT = {"top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "typ_p": "typical"}


def _stages(page: _Page, rows: list[dict[str, Any]]) -> None:
    say = page.say
    names = [(say("layer"), -5), (say("view_stage"), 11), (say("view_width"), -7)]
    names += [(say(f"view_{name}"), -10) for name in ("norm", "min", "max")] + [("ms", -7)]
    page.line(" ".join(_cell(*column) for column in names), "dim")
    for row in rows:
        layer = "" if row["layer"] is None else row["layer"]
        page.line(
            f"{layer:>5} {row['stage']:<12}{row['width']:>7}{row['norm']:>11.4g}{row['min']:>11.4g}{row['max']:>11.4g}"
            f"{row['ms']:>8.2f}"
        )


def _cell(text: str, width: int) -> str:
    """A text in a column of so many cells, flush right if the width is negative."""
    padding = " " * (abs(width) - cell_len(text))
    return padding + text if width < 0 else text + padding


def _bar(share: float) -> str:
    return BARS[max(0, min(7, int(share * 8)))]


def _share(p: float) -> str:
    return "1.00" if p >= 0.995 else f"{p:.2f}"[1:] if p >= 0.005 else ".00"


def _rank(rank: int) -> str:
    return str(rank) if rank < 1000 else f"{rank / 1000:.1f}k" if rank < 99_950 else f"{rank / 1000:.0f}k"


def _size(norm: float) -> str:
    return f"{norm:.1f}" if norm < 9.95 else f"{norm:.0f}" if norm < 99_999 else f"{norm / 1000:.0f}k"


def _plain_number(value: float) -> str:
    return f"{value:g}".removeprefix("0") if 0 < value < 1 else f"{value:g}"


def _clip(text: str, width: int) -> str:
    text = one_line(text)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _fit(text: str, width: int) -> str:
    return set_cell_size(_clip(text, width), width)
