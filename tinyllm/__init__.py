"""tinyllm: quantized LLM inference on ordinary CPUs, in readable Python compiled by Numba.

Importing this package loads neither numpy nor numba; every public name is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "load": "model",
    "Model": "model",
    "load_tokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "ChatTemplate": "chat_format",
    "SamplingParams": "sampler",
    "Step": "generate",
    "Conversation": "conversation",
    "TinyLLMError": "errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
