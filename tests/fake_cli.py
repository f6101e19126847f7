"""The `tinyllm` command line over a scripted model, for tests that need a process (terminals, pipes, signals).

python fake_cli.py '{"replies": ["Hello."], "seconds_per_step": 0.01}' run Hi
"""

from __future__ import annotations

import json
import sys
from typing import Any

from fake_model import FakeModel, answers, says

from tinyllm_cli import loading
from tinyllm_cli.main import main


def build(spec: dict[str, Any]) -> FakeModel:
    """A model from JSON: `replies` in a chat, or what it `says` behind any prompt, and the fields of FakeModel."""
    replies, said = spec.pop("replies", None), spec.pop("says", "")
    return FakeModel(answers(*replies) if replies else says(said), **spec)


if __name__ == "__main__":
    model = build(json.loads(sys.argv.pop(1)))
    loading.load_model = lambda options: model
    main()
