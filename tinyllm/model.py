"""A model in memory and its sequences: the place where file, tokenizer, weights, cache and plan come together.

Token ids go in through `Sequence.evaluate`, logits come out; everything else (sampling, text) is built on that.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from functools import cached_property
from typing import Any

import numpy as np

from .config import ModelConfig
from .errors import ContextFullError, InvalidParameterError, UnsupportedModelError
from .gguf_file import GGUFFile, open_gguf
from .kernels.abi import PAGE
from .kernels.jit import kernel_addresses
from .kv_cache import KVCache, PageTable
from .sampling.candidates import SUM_EXP_KERNEL
from .state_cache import PROMPT_ROWS, StateHistory
from .step import Run
from .team import TEAM_KERNELS, Team, default_threads
from .transformer import load_weights, record
from .weights import Weights

# Steps of more rows take long enough that Ctrl-C must be able to end them in the middle.
_INTERRUPTIBLE_ROWS = 8


def load(
    path_or_name: str | os.PathLike[str],
    n_ctx: int | None = None,
    n_threads: int | None = None,
    kv_type: str = "f16",
    n_batch: int = 256,
) -> Model:
    """Load a model from a GGUF file, a catalogue name, or a name on the Hugging Face hub.

    `n_ctx`: positions of the context (default: the model's, at most 4096). `n_threads`: default all cores that the
    process may use. `kv_type`: numbers of the cache, f32, f16 or q8_0. `n_batch`: most tokens that are computed at a
    time.

    Raises TinyLLMError (ModelFileError, UnsupportedModelError, ModelNotFoundError…) with a line for the user.
    """
    from .hub import resolve

    if isinstance(path_or_name, bytes):
        path_or_name = os.fsdecode(path_or_name)
    if not isinstance(path_or_name, str | os.PathLike):
        raise InvalidParameterError(f"a model is named by a path or a name, not by {path_or_name!r}")
    return Model(open_gguf(resolve(os.fspath(path_or_name))), n_ctx, n_threads, kv_type, n_batch)


class Model:
    """Immutable after loading; sequences hold what changes. One step runs at a time, others wait."""

    def __init__(
        self,
        file: GGUFFile,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kv_type: str = "f16",
        n_batch: int = 256,
    ):
        started = time.perf_counter()
        self.file, self.path = file, file.path
        self.n_threads = _positive("n_threads", default_threads() if n_threads is None else n_threads, 1024)
        self.n_batch = _positive("n_batch", n_batch, 2**16)
        self.config = ModelConfig.from_file(file, None if n_ctx is None else _positive("n_ctx", n_ctx, 2**31 - 1))
        self.n_ctx = self.config.n_ctx
        # Where tokens see those behind them, all are computed in one step.
        self.n_batch = min(self.n_batch, self.n_ctx) if self.config.causal else self.n_ctx
        self.kv_type = kv_type
        # Room for several sequences at a time; memory is committed as it is written.
        self.cache = KVCache(self.config, 4 * -(-self.n_ctx // PAGE), kv_type)
        weights = Weights(file)
        tensors = load_weights(self.config, weights)
        weights.place()
        self.weights = weights
        self.network = record(self.config, tensors, self.cache, self.n_batch, self.n_threads)
        # All at once, so that what is missing is compiled side by side.
        kernel_addresses(TEAM_KERNELS | weights.packers() | self.network.plan.kernels() | {SUM_EXP_KERNEL})
        self.team = Team(self.n_threads)
        weights.pack(self.team)
        self.network.plan.finish()
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

        return ChatTemplate.from_metadata(self.file.metadata, self.tokenizer)

    def new_sequence(self, whole: bool = False) -> Sequence:
        """An empty sequence with a share of the cache. `whole`: windowed layers keep all positions, to be looked at."""
        return Sequence(self, whole)

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

    def embed(self, text: str | Ids[int], pooling: str | None = None, normalize: bool = False) -> np.ndarray:
        """The meaning of a text as a vector: float32 [n_embd]; see `tinyllm.embed.embed`."""
        from .embed import embed

        return embed(self, text, pooling, normalize)

    def trace(self, prompt: Any, **options: Any) -> Any:
        """Run a prompt op by op and keep what happens inside; see `tinyllm.trace.trace`."""
        from .trace import trace

        return trace(self, prompt, **options)

    def close(self) -> None:
        """End the threads and unmap the file."""
        self.team.close()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, runs: list[Run], out: list[int], hidden: bool = False) -> np.ndarray | None:
        """Run one step; `out` are the numbers of the rows whose logits (or `hidden` states) are wanted.

        float32 [len(out), n_vocab or n_embd], None if none are wanted.

        Raises KeyboardInterrupt if Ctrl-C came during a long step.
        """
        network = self.network
        positions = network.inputs.fill(runs, out, network.attention.block_tokens)
        n = len(positions)
        network.plan.set_rows(n, len(out))
        if not network.weights.embedding.by_kernel:
            tokens = [token for run in runs for token in run.tokens]
            network.x.array[:n] = network.weights.embedding.rows(tokens, positions)
        run = self.team.run
        if n > _INTERRUPTIBLE_ROWS and threading.current_thread() is threading.main_thread():
            run = self.team.run_interruptible
        if n == 1 and out and not hidden and not self.team.is_observed:
            return network.single_logits.fill(lambda: run(network.plan.table))
        run(network.hidden_table if hidden else network.plan.table)
        # The next step, perhaps another thread's, overwrites the buffer.
        return (network.hidden if hidden else network.logits).array[: len(out)].copy() if out else None


class Sequence:
    """Tokens and their keys and values in the cache. Grows by `evaluate`, shrinks by `truncate`, copies by `fork`."""

    def __init__(self, model: Model, whole: bool = False):
        self.model = model
        self.tokens: list[int] = []
        self.pages = PageTable(model.cache, model.n_ctx, whole)
        self.states = StateHistory(model.cache.states) if model.cache.states else None

    @property
    def n_computed(self) -> int:
        """Tokens whose keys, values and states are there: after a truncation it may be fewer than all (see there), and
        the next evaluation computes the others anew."""
        return self.pages.position

    def __len__(self) -> int:
        return len(self.tokens)

    def evaluate(
        self, ids: Ids[int], want: str = "last", should_stop: Callable[[], bool] | None = None
    ) -> np.ndarray | None:
        """Compute `ids` behind what is there, in chunks.

        `want`: logits of the "last" token (float32 [1, n_vocab]), of "all" ([len(ids), n_vocab]), "hidden" states of
        all ([len(ids), n_embd], normed), or "none" (None).
        A KeyboardInterrupt ends the step within an op; the sequence then holds the chunks that were complete.

        Raises ContextFullError if the ids do not fit, InvalidParameterError for an id that is no token,
        UnsupportedModelError if logits are wanted of an encoder.
        """
        model = self.model
        if want not in ("last", "all", "hidden", "none"):
            raise InvalidParameterError(f'want is "last", "all", "hidden" or "none", not {want!r}')
        ids = _token_ids(ids, model.config.n_vocab)
        first = len(self.tokens)
        if first + len(ids) > model.n_ctx:
            raise ContextFullError(
                f"{first + len(ids)} tokens do not fit into the context of {model.n_ctx}"
                f" ({first} in the cache, {len(ids)} new); use a larger context size"
            )
        hidden = want == "hidden"
        if model.network.logits is None and not hidden:
            raise UnsupportedModelError(f"{model.path.name} is an encoder: it makes embeddings, not text")
        if not model.config.causal and self.tokens:
            raise InvalidParameterError("an encoder reads a text at once: it cannot be continued")
        result = []
        with model.team.steps:
            base = self.pages.position
            pending = self.tokens[base:] + ids if base < first else ids
            n_total = base + len(pending)
            if self.states is not None and len(pending) >= PROMPT_ROWS:
                self.states.mark_prompt()
            while (start := self.pages.position) < n_total:
                chunk = pending[start - base : start - base + model.n_batch]
                end = start + len(chunk)
                if want in ("all", "hidden"):
                    out = list(range(max(first - start, 0), len(chunk)))
                else:
                    out = [len(chunk) - 1] if end == n_total and want == "last" else []
                if should_stop is not None and should_stop():
                    return None
                rows = self._run(start, chunk, out, hidden)
                self.tokens += pending[len(self.tokens) - base : end - base]
                if out:
                    result.append(rows)
        if not result:
            return None
        return result[0] if len(result) == 1 else np.concatenate(result)

    def _run(self, start: int, chunk: list[int], out: list[int], hidden: bool) -> np.ndarray | None:
        """One step; a failed one leaves the sequence as it was."""
        try:
            self.pages.reserve(start + len(chunk), start)
            states = self.states.begin(len(chunk)) if self.states is not None else (0, 0)
            rows = self.model._step([Run(start, chunk, self.pages.address, states)], out, hidden)
        except BaseException:
            self.pages.truncate(start)
            if self.states is not None:
                self.states.abort()
            raise
        if self.states is not None:
            self.states.commit()
        self.pages.commit(start + len(chunk))
        return rows

    def truncate(self, n: int) -> None:
        """Keep the first n tokens. Raises InvalidParameterError if n is negative.

        Recurrent states cannot forget single tokens: they go back to one that was kept (see `StateHistory`). Windowed
        layers have given back what lies far before their last position: without it, they go back to the beginning. What
        then is missing up to n is computed with the next tokens.
        """
        if n < 0:
            raise InvalidParameterError(f"a sequence cannot be cut to {n} tokens")
        del self.tokens[n:]
        if self.states is not None:
            self.states.truncate(n)
            n = self.states.position
        self.pages.truncate(n)
        if self.states is not None:
            self.states.truncate(self.pages.position)

    def fork(self) -> Sequence:
        """A copy that shares the pages of the cache."""
        copy = Sequence(self.model)
        copy.tokens = list(self.tokens)
        self.pages.copy_to(copy.pages)
        if self.states is not None:
            self.states.copy_to(copy.states)
        return copy

    def release(self) -> None:
        """Give all pages back."""
        self.truncate(0)

    def __del__(self) -> None:
        # When the interpreter ends, modules may be gone already.
        if hasattr(self, "states") and not sys.is_finalizing():
            self.truncate(0)


def _token_ids(ids: Ids[int], n_vocab: int) -> list[int]:
    try:
        ids = list(map(operator.index, ids))
    except TypeError:
        raise InvalidParameterError("token ids are whole numbers; text is encoded by model.tokenizer.encode") from None
    if not ids:
        raise InvalidParameterError("there are no tokens to evaluate")
    if not 0 <= min(ids) <= max(ids) < n_vocab:
        raise InvalidParameterError(f"a token id is outside the vocabulary of {n_vocab}")
    return ids


def _positive(name: str, value: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise InvalidParameterError(f"{name} must be a whole number from 1 to {maximum}, not {value!r}")
    return value
