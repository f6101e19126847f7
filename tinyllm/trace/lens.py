"""The logit lens: what each state of the residual stream would predict if the model ended there (nostalgebraist 2020).

States go through the plan's own final norm, with their own statistics, and its own output matrix, so a last state gives
the model's logits bit for bit. Out come the likeliest tokens, ranks, entropies and distances to the final prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tinyllm.kernels import abi

if TYPE_CHECKING:
    from tinyllm.model import Model

N_TOP = 5
RECENT = 32
"""The last tokens get every layer, whatever the budget."""
_CHUNK = 128  # rows that go through the output matrix together
_BITS = 1 / np.log(2)


@dataclass(eq=False)
class Leaders:
    """Every token that was ever first at one position: `ids` int [m]; `ranks` and `probs` [S, m] along the states."""

    ids: np.ndarray
    ranks: np.ndarray
    probs: np.ndarray


@dataclass(eq=False)
class Lens:
    """Readings of S = 2 · n_layers + 1 states (embedding, then behind each half layer) at T positions.

    `read` [S, T] says which were taken; elsewhere ids and ranks are -1 and numbers NaN. `answer` [T]: the token that
    ranks and `answer_probs` are of: the one that was chosen there, or else the final first one. `entropy` and `kl`
    (final ‖ state) are in bits. `mean_logit` is over the vocabulary. `log_probs` [T]: natural logarithm of the final
    probability of the token that really came next (NaN where none did).
    """

    read: np.ndarray
    top_ids: np.ndarray  # int32 [S, T, 5]
    top_probs: np.ndarray  # float32 [S, T, 5]
    answer: np.ndarray
    ranks: np.ndarray
    answer_probs: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    mean_logit: np.ndarray
    log_probs: np.ndarray
    leaders: dict[int, Leaders] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every whole layer was read at every position."""
        return bool(self.read[2::2].all())

    def leads_from(self, position: int) -> int | None:
        """The first state from which on the answer stays first; None if it is not first at the end."""
        states = np.flatnonzero(self.read[:, position])
        lost = np.flatnonzero(self.ranks[states, position] != 0)
        if not len(lost):
            return int(states[0])
        return int(states[lost[-1] + 1]) if lost[-1] + 1 < len(states) else None


class OutputHead:
    """Runs the end of a model's plan, from the residual stream to logits, on rows of one's own."""

    def __init__(self, model: Model):
        plan = model.network.plan
        self.model, self.plan = model, plan
        gather = max(i for i, op in enumerate(plan.ops) if op.layer is None and op.arguments is abi.GATHER)
        self.source = plan.ops[gather].output
        self.table = plan.table[gather + 1 :]
        self.max_rows = min(_CHUNK, plan.max_rows)

    def logits(self, states: np.ndarray) -> np.ndarray:
        """float32 [n, n_vocab] of states [n, n_embd], n ≤ max_rows: a view that the next call overwrites."""
        n = len(states)
        self.source.array[:n] = states
        self.plan.set_rows(n, n)
        self.model.team.run(self.table)
        return self.model.network.logits.array[:n]


def read_lens(
    head: OutputHead, states: np.ndarray, ids: Sequence[int], chosen: dict[int, int], budget_s: float | None = None
) -> Lens:
    """Read the states: float32 [S, T, n_embd] of the positions of `ids` (T of them, or more: what came behind).

    `chosen`: the tokens that were sampled, by the position whose logits they came from; these positions get all half
    layers and a curve of every token that ever led. With a `budget_s` older positions get fewer layers where
    reading all would take longer, and half layers are read as far as it lasts; the last `RECENT` and the final state of
    every position always are.
    """
    n_states, n_tokens = states.shape[:2]
    reader = _Reader(head, states, ids, chosen)
    started = perf_counter()
    everything = set(range(n_states))
    whole = {0, *range(2, n_states, 2)}
    reader.read(sorted(chosen), everything)
    recent = [t for t in range(max(0, n_tokens - RECENT), n_tokens) if t not in chosen]
    reader.read(recent, whole)
    older = [t for t in range(n_tokens - RECENT) if t not in chosen]
    if budget_s is None:
        reader.read(recent + older, everything)
    else:
        spent = perf_counter() - started
        cost = len(older) * (n_states // 2 + 1) * spent / max(1, reader.n_rows)
        # Every layer if there is time, else every second one, else (huge vocabularies, slow machines) every fourth.
        stride = 2 if cost < budget_s - spent else 4 if cost < 4 * budget_s else 8
        reader.read(older, set(range(n_states - 1, -1, -stride)))
        if (budget_s - (perf_counter() - started)) > len(recent) * n_states * spent / max(1, reader.n_rows):
            reader.read(recent, everything)
    reader.lens.seconds = perf_counter() - started
    return reader.lens


class _Reader:
    def __init__(self, head: OutputHead, states: np.ndarray, ids: Sequence[int], chosen: dict[int, int]):
        self.head, self.states, self.chosen = head, states, chosen
        n_states, n_tokens = states.shape[:2]
        self.following = list(ids[1 : n_tokens + 1]) + [-1] * (n_tokens + 1 - len(ids))
        self.n_rows = 0
        numbers = {name: np.full((n_states, n_tokens), np.nan, np.float32) for name in _NUMBERS}
        self.lens = Lens(
            read=np.zeros((n_states, n_tokens), bool),
            top_ids=np.full((n_states, n_tokens, N_TOP), -1, np.int32),
            top_probs=np.full((n_states, n_tokens, N_TOP), np.nan, np.float32),
            answer=np.full(n_tokens, -1, np.int64),
            ranks=np.full((n_states, n_tokens), -1, np.int32),
            log_probs=np.full(n_tokens, np.nan),
            **numbers,
        )

    def read(self, positions: Sequence[int], wanted: set[int]) -> None:
        """Read the wanted states at these positions; the final one is always among them, for comparison."""
        last = self.states.shape[0] - 1
        with ThreadPoolExecutor(self.head.model.n_threads) as pool:
            for group in self._groups(positions, sorted({*wanted, last})):
                rows = np.concatenate([self.states[some, t] for t, some in group])
                logits = self.head.logits(rows)
                self.n_rows += len(rows)
                at = np.cumsum([0, *(len(some) for _, some in group)])
                parts = [(t, some, logits[a:b]) for (t, some), a, b in zip(group, at, at[1:], strict=False)]
                for _ in pool.map(lambda part: self._take(*part), parts):
                    pass

    def _groups(self, positions: Sequence[int], wanted: list[int]) -> Iterator[list[tuple[int, list[int]]]]:
        """Positions and their states, in groups that go through the output matrix together."""
        group: list[tuple[int, list[int]]] = []
        n_rows, limit = 0, self.head.max_rows
        for t in positions:
            # A position's states lie in one group with its final state; many layers take several such groups.
            for start in range(0, max(1, len(wanted) - 1), limit - 1):
                some = [*wanted[:-1][start : start + limit - 1], wanted[-1]]
                if n_rows + len(some) > limit and group:
                    yield group
                    group, n_rows = [], 0
                group.append((t, some))
                n_rows += len(some)
        if group:
            yield group

    def _take(self, t: int, some: list[int], logits: np.ndarray) -> None:
        lens = self.lens
        top = logits.max(axis=1)
        shifted = logits - top[:, None]
        weights = np.exp(shifted)
        total = weights.sum(axis=1)
        log_total = np.log(total)
        final = weights[-1] / total[-1]
        entropy = log_total - np.einsum("ij,ij->i", weights, shifted) / total
        # KL(final ‖ state) = Σ p (log p − log q), and log q = shifted − log_total.
        cross = log_total - np.einsum("ij,j->i", shifted, final)
        best = best_of_rows(logits, N_TOP)
        if t not in self.chosen:
            lens.answer[t] = best[-1, 0]
        else:
            lens.answer[t] = self.chosen[t]
        answer = int(lens.answer[t])
        lens.read[some, t] = True
        lens.top_ids[some, t] = best
        lens.top_probs[some, t] = np.take_along_axis(weights, best, 1) / total[:, None]
        lens.ranks[some, t] = _ranks(logits, np.array([answer]))[:, 0]
        lens.answer_probs[some, t] = weights[:, answer] / total
        lens.entropy[some, t] = entropy * _BITS
        lens.kl[some, t] = np.maximum(0, cross - entropy[-1]) * _BITS
        lens.mean_logit[some, t] = logits.mean(axis=1, dtype=np.float64)
        if self.following[t] >= 0:
            lens.log_probs[t] = float(shifted[-1, self.following[t]]) - float(log_total[-1])
        if t in self.chosen and len(some) == self.states.shape[0]:
            ids = np.unique(np.append(best[:, 0], answer))
            lens.leaders[t] = Leaders(ids, _ranks(logits, ids), weights[:, ids] / total[:, None])


def best_of_rows(values: np.ndarray, k: int) -> np.ndarray:
    """Columns of each row's k largest values, largest first, equal ones by column: int [n, k].

    The k largest lie in the k blocks whose maxima are largest, so that all rows are searched in a few passes.
    """
    n, width = values.shape
    size = max(1, int(np.sqrt(width)))
    n_blocks = width // size
    if n_blocks <= k:
        return np.argsort(-values, axis=1, kind="stable")[:, :k]
    body = values[:, : n_blocks * size].reshape(n, n_blocks, size)
    blocks = np.sort(np.argsort(-body.max(axis=2), axis=1, kind="stable")[:, :k], axis=1)
    columns = (blocks[:, :, None] * size + np.arange(size)).reshape(n, -1)
    tail = np.broadcast_to(np.arange(n_blocks * size, width), (n, width - n_blocks * size))
    columns = np.concatenate([columns, tail], axis=1)
    order = np.argsort(-np.take_along_axis(values, columns, 1), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(columns, order, 1)


def _ranks(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """How many tokens are likelier, or as likely with a smaller id: int [n, len(ids)]."""
    ranks = np.empty((len(logits), len(ids)), np.int32)
    for column, token in enumerate(ids):
        own = logits[:, token, None]
        ranks[:, column] = np.count_nonzero(logits > own, axis=1)
        ranks[:, column] += np.count_nonzero(logits[:, :token] == own, axis=1).astype(np.int32)
    return ranks


_NUMBERS = ("answer_probs", "entropy", "kl", "mean_logit")
