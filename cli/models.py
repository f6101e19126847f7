"""`tinyllm list`, `pull`, `show` and `rm`: the models on this machine, and what is in them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm import hub
from tinyllm.errors import ModelNotFoundError
from tinyllm_cli import render, text
from tinyllm_cli.completion import complete_model
from tinyllm_cli.loading import tell_trained
from tinyllm_cli.usage import refuse

if TYPE_CHECKING:
    from tinyllm.gguf_file import GGUFFile
    from tinyllm.model_info import ModelInfo, Share

MODEL_HELP = "A catalogue name, user/repo[:QUANT] on the Hugging Face hub{}."
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def list_models(as_json: JsonFlag = False) -> None:
    """List the models on this machine, and on stderr those of the catalogue that can be pulled."""
    models = hub.installed()
    here = {model.name for model in models}
    missing = [entry for entry in hub.catalogue().values() if entry.name not in here]
    unfinished = hub.unfinished()
    if as_json:
        described = [
            {
                "name": model.name,
                "size": model.files.size,
                "modified": datetime.fromtimestamp(model.files.modified, UTC).isoformat(timespec="seconds"),
                "source": model.source,
                "path": str(model.path),
            }
            for model in models
        ]
        available = [
            {"name": entry.name, "title": entry.title, "size": entry.size, "licence": entry.licence}
            for entry in missing
        ]
        print(json.dumps({"models": described, "available": available, "unfinished": unfinished}, indent=2))
        return
    now = time.time()
    rows = [
        [model.name, text.size(model.files.size), text.age(now - model.files.modified), model.source]
        for model in models
    ]
    render.table(["NAME", "SIZE", "MODIFIED", "SOURCE"], rows, right=[1])
    for name, n_bytes in unfinished.items():
        render.note(f"{name} is here in part ({text.size(n_bytes)}): `tinyllm pull {name}` goes on")
    if missing:
        names = ", ".join(f"{entry.name} ({text.size(entry.size)})" for entry in missing)
        render.note(f"`tinyllm pull` also knows {names}")


def pull(
    models: Annotated[
        list[str],
        typer.Argument(help=MODEL_HELP.format(""), autocompletion=complete_model, show_default=False),
    ],
) -> None:
    """Fetch models, or check those that are here; prints the path of each.

    What was fetched is checked (size, SHA-256) before it gets its name, and an interrupted download is continued.
    """
    for name in models:
        with render.download_progress() as progress:
            path = hub.pull(name, progress)
        entry = hub.catalogue().get(name.casefold())
        if entry and entry.licence_url:
            render.note(f"{entry.name} is under the {entry.licence}: {entry.licence_url}")
        print(text.one_line(str(path)), flush=True)


def remove(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names as `tinyllm list` shows them.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ],
) -> None:
    """Delete models from the store, with what interrupted downloads of them have left."""
    for name in models:
        freed = hub.remove(name)
        render.note(f"deleted {name} ({text.size(freed)})")


def show(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=MODEL_HELP.format(", or a GGUF file"),
            autocompletion=complete_model,
            show_default=hub.DEFAULT_MODEL,
        ),
    ] = "",
    model_option: Annotated[
        str,
        typer.Option("--model", "-m", help="The same as an option.", metavar="MODEL", autocompletion=complete_model),
    ] = hub.DEFAULT_MODEL,
    ctx_size: Annotated[
        int,
        typer.Option(
            "--ctx-size", "-c", min=0, help="Context for the estimate of memory (0: the model's, at most 4096)."
        ),
    ] = 0,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template instead.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="Print every key of the file instead.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print every tensor instead.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Tell what is in a model file: its shape, its tensors by type and component, and the memory it takes."""
    if model:
        refuse(ctx, f"beside {model}: name one model", "model_option")
    if sum((template, metadata, tensors)) > 1 and not as_json:
        raise typer.BadParameter("choose one of --template, --metadata and --tensors, or have all with --json")
    if (template or metadata or tensors) and not as_json:
        refuse(ctx, "without the estimate of memory", "ctx_size")
    name = model or model_option
    path = hub.find(name)
    if path is None:
        raise ModelNotFoundError(f"{name} is not on this machine yet: fetch it with `tinyllm pull {name}`")
    from tinyllm.gguf_file import open_gguf
    from tinyllm.model_info import describe

    with open_gguf(path) as file:
        info = describe(file)
        tell_trained(path.stem, ctx_size, info.n_ctx)
        if as_json:
            answer = _as_json(file, info, ctx_size, template, metadata, tensors)
            print(json.dumps(answer, indent=2, ensure_ascii=False, default=str))
        elif template:
            _print_template(file)
        elif metadata:
            render.table(["KEY", "VALUE"], [[key, _abbreviated(file.metadata[key])] for key in file.metadata])
        elif tensors:
            rows = [
                [t.name, " × ".join(map(str, t.shape)), t.type.name, text.size(t.n_bytes)]
                for t in file.tensors.values()
            ]
            render.table(["TENSOR", "SHAPE", "TYPE", "SIZE"], rows, right=[3])
        else:
            _print_summary(file.path, info, ctx_size)


def _print_summary(path: Path, info: ModelInfo, ctx_size: int) -> None:
    experts = f"{info.n_experts}, {info.n_experts_used} per token" if info.n_experts else None
    active = f", {text.count(info.active_parameters)} per token" if info.active_parameters != info.parameters else ""
    facts = {
        "name": info.name,
        "file": str(path) + (f" and {info.n_files - 1} more" if info.n_files > 1 else ""),
        "architecture": info.architecture,
        "parameters": text.count(info.parameters) + active,
        "size": f"{text.size(info.n_bytes)} (GGUF v{info.gguf_version})",
        "quantization": info.quantization,
        "context": _spelled(info.n_ctx, "tokens")
        + (f", window {info.sliding_window:,}" if info.sliding_window else ""),
        "layers": _spelled(info.n_layers),
        "width": _spelled(info.n_embd),
        "heads": f"{_spelled(info.n_heads)} of {_spelled(info.head_dim)}, KV {_spelled(info.n_kv_heads)}",
        "feed-forward": _spelled(info.n_ff),
        "experts": experts,
        "vocabulary": _spelled(info.n_vocab),
        "tokenizer": ", ".join(filter(None, (info.tokenizer, info.pre_tokenizer))),
        "chat template": "yes" if info.has_chat_template else "no",
        "licence": info.licence,
    }
    render.table(["", ""], [[key, value] for key, value in facts.items() if value])
    print()
    _print_shares("TYPE", info.types)
    print()
    components = [["output", "(the embedding)"]] if info.tied_output else []
    _print_shares("COMPONENT", info.components, components)
    print()
    n_ctx = ctx_size or info.default_ctx()
    render.table(
        [f"MEMORY at {n_ctx:,} tokens", "SIZE"],
        [
            ["weights", text.size(info.packed_bytes)],
            ["KV cache (f16)", text.size(info.kv_bytes(n_ctx))],
            ["together", text.size(info.memory(n_ctx))],
        ],
        right=[1],
    )


def _print_shares(title: str, shares: tuple[Share, ...], more: list[list[str]] | None = None) -> None:
    rows = [
        [
            s.name,
            str(s.n_tensors),
            text.count(s.parameters),
            text.size(s.n_bytes),
            f"{s.bits_per_weight:.2f}",
            f"{s.packed_bits_per_weight:.2f}",
        ]
        for s in shares
    ]
    rows += [[name, "", remark, "", "", ""] for name, remark in more or []]
    render.table([title, "TENSORS", "PARAMETERS", "SIZE", "BITS/WEIGHT", "IN MEMORY"], rows, right=[1, 2, 3, 4, 5])


def _print_template(file: GGUFFile) -> None:
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        raise ModelNotFoundError(f"{file.path}: this model has no chat template")
    print(text.harmless(template))


def _as_json(
    file: GGUFFile, info: ModelInfo, ctx_size: int, template: bool, metadata: bool, tensors: bool
) -> dict[str, Any]:
    n_ctx = ctx_size or info.default_ctx()
    answer = asdict(info) | {"path": str(file.path)}
    for key in ("types", "components"):
        answer[key] = [
            asdict(share)
            | {"bits_per_weight": share.bits_per_weight, "packed_bits_per_weight": share.packed_bits_per_weight}
            for share in getattr(info, key)
        ]
    answer["memory"] = {
        "n_ctx": n_ctx,
        "weight_bytes": info.packed_bytes,
        "kv_bytes": info.kv_bytes(n_ctx),
        "total_bytes": info.memory(n_ctx),
    }
    if template:
        answer["chat_template"] = file.metadata.get("tokenizer.chat_template")
    if metadata:
        answer["metadata"] = {key: _as_plain(file.metadata[key]) for key in file.metadata}
    if tensors:
        answer["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "type": t.type.name, "n_bytes": t.n_bytes}
            for t in file.tensors.values()
        ]
    return answer


def _as_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _abbreviated(value: Any) -> str:
    """A metadata value on one line of bearable length."""
    value = _as_plain(value)
    if isinstance(value, list):
        shown = ", ".join(json.dumps(item, ensure_ascii=False) for item in value[:6])
        return f"[{shown}{', ...' if len(value) > 6 else ''}] ({len(value):,})"
    line = str(value)
    return line if len(line) <= 100 else f"{line[:100]}... ({len(line):,} characters)"


def _spelled(value: int | list[int] | None, unit: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"{min(value):,} to {max(value):,}"
    return f"{value:,} {unit}".strip()
