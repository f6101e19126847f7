"""A stand-in for a loaded model: a byte-level tokenizer and a Sequence whose next token follows a script.

Everything above the engine (generation, `run`, `chat`) is tested on it in milliseconds; it keeps the engine's rules
about context, truncation and interruption, and records every id that was really evaluated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tinyllm.chat_format import ChatTemplate
from tinyllm.errors import ContextFullError

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = range(256, 260)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeTokenizer:
    """Ids 0–255 are bytes, 256–259 control tokens; behind them `pieces`, byte strings that no text is encoded to."""

    kind = "BPE"
    pre = None
    unk_id = pad_id = None
    add_eos = False
    bos_id, eos_id, eot_id = BOS, EOS, IM_END
    eog_ids = frozenset({EOS, IM_END})

    def __init__(self, pieces: Sequence[bytes] = (), add_bos: bool = False) -> None:
        self._bytes = [bytes([b]) for b in range(256)] + [t.encode() for t in SPECIAL_TOKENS] + list(pieces)
        self.n_vocab = len(self._bytes)
        self.add_bos = add_bos

    def encode(self, text: str | bytes, add_special: bool = True, parse_special: bool = True) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        ids = [BOS] if add_special and self.add_bos else []
        while data:
            special = next((i for i, t in enumerate(SPECIAL_TOKENS) if data.startswith(t.encode())), None)
            if parse_special and special is not None:
                ids.append(256 + special)
                data = data[len(SPECIAL_TOKENS[special]) :]
            else:
                ids.append(data[0])
                data = data[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        data = b"".join(self._bytes[i] for i in ids if not (skip_special and self.is_control(i)))
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        return self._bytes[token].decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        return 256 <= token < 260

    def stream_decoder(self) -> FakeStreamDecoder:
        return FakeStreamDecoder(self)


class FakeStreamDecoder:
    """Whole characters only, by Python's own incremental UTF-8 decoder."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokenizer = tokenizer

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeSequence:
    """Holds ids like a KV cache; the logits of each row say what the model's script wants next."""

    def __init__(self, model: FakeModel, tokens: Iterable[int] = ()) -> None:
        self._model = model
        self.tokens: list[int] = list(tokens)
        self.released = False

    def __len__(self) -> int:
        return len(self.tokens)

    def evaluate(
        self, ids: Sequence[int], want: str = "last", should_stop: Callable[[], bool] | None = None
    ) -> np.ndarray | None:
        assert not self.released and len(ids) > 0
        if len(self.tokens) + len(ids) > self._model.n_ctx:
            raise ContextFullError(f"{len(self.tokens) + len(ids)} tokens do not fit a context of {self._model.n_ctx}")
        rows = []
        for at in range(0, len(ids), self._model.n_batch):
            if should_stop is not None and should_stop():
                return None
            time.sleep(self._model.seconds_per_step)
            for token in ids[at : at + self._model.n_batch]:
                self.tokens.append(int(token))
                self._model.evaluated.append(int(token))
                if want == "all":
                    rows.append(self._model.logits_after(self.tokens))
        if want == "last":
            rows = [self._model.logits_after(self.tokens)]
        return np.stack(rows) if rows else None

    def truncate(self, n: int) -> None:
        del self.tokens[n:]

    def fork(self) -> FakeSequence:
        return FakeSequence(self._model, self.tokens)

    def release(self) -> None:
        self.released = True


@dataclass
class FakeModel:
    """`script(tokens)` names the token that follows them; its logit is 10, that of all others 0."""

    script: Callable[[list[int]], int]
    n_ctx: int = 2048
    n_batch: int = 512
    pieces: Sequence[bytes] = ()
    add_bos: bool = False
    template: str | None = CHATML
    seconds_per_step: float = 0.0
    evaluated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = FakeTokenizer(self.pieces, self.add_bos)
        self.chat_template = ChatTemplate(self.template) if self.template else None
        self.config = SimpleNamespace(architecture="fake", n_vocab=self.tokenizer.n_vocab, n_ctx_train=self.n_ctx)
        self.file = SimpleNamespace(metadata={"general.name": "Fake"})
        self.path = Path("fake.gguf")
        self.n_threads = 1
        self.load_s = 0.0
        self.sequences: list[FakeSequence] = []

    def logits_after(self, tokens: list[int]) -> np.ndarray:
        row = np.zeros(self.tokenizer.n_vocab, np.float32)
        row[self.script(tokens)] = 10.0
        return row

    def new_sequence(self) -> FakeSequence:
        self.sequences.append(FakeSequence(self))
        return self.sequences[-1]

    def close(self) -> None:
        pass


def says(*ids_or_texts: int | str | bytes, then: int = EOS) -> Callable[[list[int]], int]:
    """A script that goes through these tokens once, whatever the prompt, and then repeats `then`."""
    wanted = _ids(ids_or_texts)
    state = {"prompt": None}

    def script(tokens: list[int]) -> int:
        if state["prompt"] is None or len(tokens) < state["prompt"]:
            state["prompt"] = len(tokens)
        at = len(tokens) - state["prompt"]
        return wanted[at] if at < len(wanted) else then

    return script


def answers(*replies: str | bytes | Sequence[int], header: bytes = b"assistant\n") -> Callable[[list[int]], int]:
    """A script for chats in CHATML: behind the k-th assistant header comes reply k (the last one again and again)."""
    wanted = [[*_ids([r] if isinstance(r, str | bytes) else r), IM_END] for r in replies]

    def script(tokens: list[int]) -> int:
        starts = [at for at in range(len(tokens)) if bytes_at(tokens, at, header)]
        if not starts:
            return EOS
        reply = wanted[min(len(starts), len(wanted)) - 1]
        at = len(tokens) - (starts[-1] + len(header))
        return reply[at] if at < len(reply) else IM_END

    def bytes_at(tokens: list[int], at: int, header: bytes) -> bool:
        return at > 0 and tokens[at - 1] == IM_START and bytes(t & 255 for t in tokens[at : at + len(header)]) == header

    return script


def _ids(parts: Iterable[int | str | bytes]) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else (part.encode() if isinstance(part, str) else part)
    return ids


def write_chain_model(path: Path, pieces: Sequence[bytes], n_ctx: int = 512, template: str | None = CHATML) -> Path:
    """A real GGUF model that says `pieces` (of two bytes or more) one after the other behind a line break, then ends.

    Its ids are those of FakeTokenizer. One layer whose weights are zero leaves the embedding as it is; each token's
    embedding is a random code of ±1, and the row of a token in the output matrix is the code of the one before it.
    """
    from gguf_builders import write_model

    n_embd, n_ff, tokenizer = 256, 64, FakeTokenizer(pieces)
    follows = dict.fromkeys(range(tokenizer.n_vocab), IM_END)
    chain = [ord("\n"), *range(260, tokenizer.n_vocab), IM_END]
    follows |= dict(itertools.pairwise(chain))
    codes = np.random.default_rng(0).choice(np.float32([-1, 1]), (tokenizer.n_vocab, n_embd))
    output = np.zeros_like(codes)
    for token, following in follows.items():
        if token in chain:  # all others lead to the end: their codes together would drown the rest
            output[following] += codes[token]
    tensors = {"token_embd.weight": codes, "output.weight": output, "output_norm.weight": np.ones(n_embd, np.float32)}
    shapes = {"attn_q": (n_embd, n_embd), "attn_k": (n_embd, n_embd), "attn_v": (n_embd, n_embd)}
    shapes |= {"attn_output": (n_embd, n_embd), "ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd)}
    shapes |= {"ffn_down": (n_embd, n_ff)}
    tensors |= {f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {f"blk.0.{name}.weight": np.ones(n_embd, np.float32) for name in ("attn_norm", "ffn_norm")}
    byte_tokens = byte_characters()
    tokens = [*byte_tokens, *SPECIAL_TOKENS, *("".join(byte_tokens[b] for b in piece) for piece in pieces)]
    metadata = {
        "general.name": "chain",
        "llama.block_count": 1,
        "llama.context_length": n_ctx,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.vocab_size": tokenizer.n_vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 4 + [1] * len(pieces),
        "tokenizer.ggml.merges": [f"{byte_tokens[0]} {byte_tokens[1]}"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    write_model(path, tensors, metadata)
    return path


def byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
