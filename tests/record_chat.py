"""Talks five turns with a model through a pseudo-terminal and prints the screen: the transcripts in docs/chat.md.

python tests/record_chat.py smollm2 [OPTIONS OF CHAT]
"""

from __future__ import annotations

import os
import sys

import pexpect
from test_chat import screen

QUESTIONS = (
    "My name is Ada. In one sentence, what is a prime number?",
    "Name three of them.",
    "Write a Python function that tells whether a number is prime.",
    "What is my name?",
    "Say goodbye in one short sentence.",
)


def record(model: str, *options: str) -> str:
    """What the terminal shows of the conversation, without colours."""
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    command = ["-m", "tinyllm_cli.main", "chat", "-m", model, "--no-history", *options]
    child = pexpect.spawn(sys.executable, command, env=environment, timeout=300, encoding="utf-8", dimensions=(50, 100))
    shown = ""
    child.expect(">>>")
    for question in QUESTIONS:
        shown += child.before + child.after
        child.send(question + "\r")
        child.expect(r"\| context \d+/\d+")
        shown += child.before + child.after
        child.expect(">>>")
    shown += child.before + child.after
    child.sendeof()
    child.expect(pexpect.EOF)
    return screen(shown)


if __name__ == "__main__":
    print(record(*sys.argv[1:]))
