"""A model in memory and its sequences: the place where file, tokenizer, weights, cache and plan come together.

Token ids go in through `Sequence.evaluate`, logits come out; everything else (sampling, text) is built on that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence as Ids
from functools import cached_property
from typing import Any

import numpy as np

from .config import ModelConfig
from .errors import ContextFullError, InvalidParameterError
from .gguf_file import GGUFFile, open_gguf
from .kernels.abi import PAGE
from .kernels.dequantize import decode
from .kernels.jit import kernel_addresses
from .kv_cache import KVCache, PageTable
from .team import TEAM_KERNELS, Team, default_threads
from .transformer import load_weights, record
from .weights import Weights

DEFAULT_CONTEXT = 4096
# Steps of more rows take long enough that Ctrl-C must be able to end them in the middle.
_INTERRUPTIBLE_ROWS = 8


def load(
    path_or_name: str | os.PathLike[str],
    n_ctx: int | None = None,
    n_threads: int | None = None,
    kv_type: str = "f16",
    n_batch: int = 512,
) -> Model:
    """Load a model from a GGUF file, a catalogue name, or a name on the Hugging Face hub.

    `n_ctx`: positions of the context (default: the model's, at most 4096). `n_threads`: default all cores that the
    process may use. `kv_type`: f16 or f32 cache. `n_batch`: most tokens that are computed at a time.

    Raises TinyLLMError (ModelFileError, UnsupportedModelError, ModelNotFoundError…) with a line for the user.
    """
    from .hub import resolve

    return Model(open_gguf(resolve(str(path_or_name))), n_ctx, n_threads, kv_type, n_batch)


class Model:
    """Immutable after loading; sequences hold what changes. One step runs at a time, others wait."""

    def __init__(
        self, file: GGUFFile, n_ctx: int | None = None, n_threads: int | None = None, kv_type: str = "f16", n_batch: int = 512
    ):
        started = time.perf_counter()
        self.file, self.path = file, file.path
        self.n_threads = _positive("n_threads", default_threads() if n_threads is None else n_threads, 1024)
        self.n_batch = _positive("n_batch", n_batch, 2**16)
        self.config = ModelConfig.from_file(file, n_ctx)
        if n_ctx is None:
            n_ctx = min(self.config.n_ctx_train, DEFAULT_CONTEXT)
        self.n_ctx = _positive("n_ctx", n_ctx, 2**31 - 1)
        self.n_batch = min(self.n_batch, self.n_ctx)
        self.kv_type = kv_type
        # Room for several sequences at a time; memory is committed as it is written.
        self.cache = KVCache(self.config, 4 * -(-self.n_ctx // PAGE), kv_type)
        weights = Weights(file)
        tensors = load_weights(self.config, weights)
        weights.place()
        self.weights = weights
        self.network = record(self.config, tensors, self.cache, self.n_batch, self.n_threads)
        # All at once, so that what is missing is compiled side by side.
        kernel_addresses(TEAM_KERNELS | weights.packers() | self.network.plan.kernels())
        self.team = Team(self.n_threads)
        weights.pack(self.team)
        self.network.plan.finish()
        self._embedding = file.tensors["token_embd.weight"]
        self._busy = threading.Lock()
        self.load_s = time.perf_counter() - started

    @cached_property
    def tokenizer(self) -> Any:
        """The file's tokenizer, built at first use."""
        from .tokenizer import Tokenizer

        return Tokenizer.from_metadata(self.file.metadata)

    @cached_property
    def chat_template(self) -> Any:
        """The file's chat template, or None for a base model."""
        from .chat_format import ChatTemplate

        source = self.file.metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            return None
        tokenizer = self.tokenizer

        def text(token: int | None) -> str:
            return "" if token is None else tokenizer.token_text(token)

        return ChatTemplate(source, bos_token=text(tokenizer.bos_id), eos_token=text(tokenizer.eos_id))

    def new_sequence(self) -> Sequence:
        """An empty sequence with a share of the cache."""
        return Sequence(self)

    def logits(self, ids: Ids[int]) -> np.ndarray:
        """Logits at every position of `ids` in a fresh sequence: float32 [len(ids), n_vocab]."""
        sequence = self.new_sequence()
        try:
            return sequence.evaluate(ids, want="all")
        finally:
            sequence.release()

    def generate(self, prompt: str | list[int], **options: Any) -> Iterator[Any]:
        """Continue a prompt; see `tinyllm.generate.generate`."""
        from .generate import generate

        return generate(self, prompt, **options)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Iterator[Any]:
        """Answer a conversation; see `tinyllm.generate.chat`."""
        from .generate import chat

        return chat(self, messages, **options)

    def close(self) -> None:
        """End the threads and unmap the file."""
        self.team.close()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, rows: list[tuple[Sequence, int, list[int]]], out: list[int]) -> np.ndarray:
        """Run one step: `rows` are (sequence, first position, tokens) runs, `out` the row numbers whose logits are wanted.

        float32 [len(out), n_vocab], a view that the next step overwrites.

        Raises KeyboardInterrupt if Ctrl-C came during a long step.
        """
        network, plan, inputs = self.network, self.network.plan, self.network.inputs
        tokens = [token for _, _, run in rows for token in run]
        n = len(tokens)
        block, at = 0, 0
        for sequence, position, run in rows:
            table = sequence.pages.address
            inputs.rows[at : at + len(run), 0] = range(position, position + len(run))
            inputs.rows[at : at + len(run), 1] = table
            for start in range(0, len(run), network.attention.block_tokens):
                size = min(network.attention.block_tokens, len(run) - start)
                inputs.blocks[block] = (at + start, size, position + start, position + len(run), table)
                block += 1
            at += len(run)
        inputs.n_blocks[0] = block
        positions = inputs.rows[:n, 0]
        for rope, table in zip(self.config.ropes, inputs.ropes, strict=True):
            table[:n] = rope.table(positions)
        inputs.out_index[: len(out)] = out
        plan.set_rows(n, len(out))
        embedded = decode(self._embedding.type.name, self._embedding.rows(tokens), self.config.n_embd)
        if self.config.embedding_scale != 1.0:
            embedded *= np.float32(self.config.embedding_scale)
        network.x.array[:n] = embedded
        if n > _INTERRUPTIBLE_ROWS and threading.current_thread() is threading.main_thread():
            self.team.run_interruptible(plan.table)
        else:
            self.team.run(plan.table)
        return network.logits.array[: len(out)]


class Sequence:
    """Tokens and their keys and values in the cache. Grows by `evaluate`, shrinks by `truncate`, copies by `fork`."""

    def __init__(self, model: Model):
        self.model = model
        self.tokens: list[int] = []
        self.pages = PageTable(model.cache, model.n_ctx)

    def __len__(self) -> int:
        return len(self.tokens)

    def evaluate(
        self, ids: Ids[int], want: str = "last", should_stop: Callable[[], bool] | None = None
    ) -> np.ndarray | None:
        """Compute `ids` behind what is there, in chunks.

        `want`: logits of the "last" token (float32 [1, n_vocab]), of "all" ([len(ids), n_vocab]), or "none" (None).
        A KeyboardInterrupt ends the step within an op; the sequence then holds the chunks that were complete.

        Raises ContextFullError if the ids do not fit, InvalidParameterError for an id that is no token.
        """
        model = self.model
        ids = [int(token) for token in ids]
        n_vocab = model.config.n_vocab
        if not ids:
            raise InvalidParameterError("there are no tokens to evaluate")
        if min(ids) < 0 or max(ids) >= n_vocab:
            raise InvalidParameterError(f"a token id is outside the vocabulary of {n_vocab}")
        if len(self) + len(ids) > model.n_ctx:
            raise ContextFullError(
                f"{len(self) + len(ids)} tokens do not fit into the context of {model.n_ctx}"
                f" ({len(self)} in the cache, {len(ids)} new); use a larger context size"
            )
        result = np.empty((len(ids), n_vocab), np.float32) if want == "all" else None
        logits = None
        with model._busy:
            for start in range(0, len(ids), model.n_batch):
                chunk = ids[start : start + model.n_batch]
                last_chunk = start + len(chunk) == len(ids)
                if want == "all":
                    out = list(range(len(chunk)))
                else:
                    out = [len(chunk) - 1] if last_chunk and want == "last" else []
                if should_stop is not None and should_stop():
                    return None
                try:
                    self.pages.reserve(len(self) + len(chunk), len(self))
                    logits = model._step([(self, len(self), chunk)], out)
                except BaseException:
                    self.pages.truncate(len(self))
                    raise
                self.tokens += chunk
                if result is not None:
                    result[start : start + len(chunk)] = logits
        if result is not None:
            return result
        return logits.copy() if want == "last" else None

    def truncate(self, n: int) -> None:
        """Keep the first n tokens."""
        del self.tokens[n:]
        self.pages.truncate(n)

    def fork(self) -> Sequence:
        """A copy that shares the pages of the cache."""
        copy = Sequence(self.model)
        copy.tokens = list(self.tokens)
        self.pages.copy_to(copy.pages)
        return copy

    def release(self) -> None:
        """Give all pages back."""
        self.truncate(0)

    def __del__(self) -> None:
        if hasattr(self, "pages"):
            self.pages.truncate(0)


def _positive(name: str, value: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise InvalidParameterError(f"{name} must be a whole number from 1 to {maximum}, not {value!r}")
    return value
