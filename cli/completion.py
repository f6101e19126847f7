"""Model names for the shell's completion."""

from __future__ import annotations


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """Names that begin with what was typed, each with what it is; the shell itself adds files."""
    from tinyllm import hub

    names = {model.name: model.source for model in hub.installed()}
    names |= {entry.name: entry.title for entry in hub.catalogue().values()}
    return [(name, help_) for name, help_ in names.items() if name.startswith(incomplete)]
