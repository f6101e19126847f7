"""The chat cases of `data/chat/cases.json`, and a tokenizer of single characters to write them with.

The file is a part of the reference collection: renderings by Hugging Face's code, each template with its source.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

DATA = json.loads((Path(__file__).parent / "data/chat/cases.json").read_text())
NOW = datetime.fromisoformat(DATA["now"])
USER = [{"role": "user", "content": "Hello"}]
TURNS = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you?"},
]


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """What a case gives to `render` beside the messages."""
    extra = {key: case[key] for key in ("enable_thinking", "date_string") if key in case}
    return {"add_generation_prompt": case["add_generation_prompt"], "tools": case.get("tools"), "now": NOW, **extra}


class CharacterTokenizer:
    """Each character is a token, and so is each control token's text; `strip` tokens take away white space behind them,
    and with `prefix` a space is put before text that follows a control token, as SentencePiece vocabularies do."""

    unk_id = eos_id = None

    def __init__(self, controls, bos: str | None = None, add_bos: bool = False, strip=(), prefix: bool = False) -> None:
        self.texts = sorted(set(controls), key=lambda text: (-len(text), text))
        self.strip = set(strip)
        self.prefix = prefix
        self.add_bos = add_bos
        self.bos_id = None if bos is None else self.control(bos)

    def control(self, text: str) -> int:
        return 0x200000 + self.texts.index(text)

    def is_control(self, token: int) -> bool:
        return token >= 0x200000

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token - 0x200000].encode() if self.is_control(token) else chr(token).encode()

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = [self.bos_id] if add_special and self.add_bos else []
        pieces = re.split(f"({'|'.join(map(re.escape, self.texts))})", text) if parse_special and self.texts else [text]
        for piece in pieces:
            if parse_special and piece in self.texts:
                ids.append(self.control(piece))
                continue
            if ids and ids[-1] >= 0x200000 and self.texts[ids[-1] - 0x200000] in self.strip:
                piece = piece.lstrip()
            ids += map(ord, " " + piece if piece and self.prefix else piece)
        return ids

    def controls_in(self, ids: list[int]) -> list[str]:
        return [self.texts[token - 0x200000] for token in ids if self.is_control(token)]
