"""The logit lens: what each state of the residual stream would predict if the model ended there (nostalgebraist 2020).

States go through the plan's own final norm, with their own statistics, and its own output matrix, so a last state gives
the model's logits bit for bit. Out come the likeliest tokens, ranks, entropies and distances to the final prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from tinyllm.kernels.lens_words import N_TOP
from tinyllm.trace.output_head import OutputHead

RECENT = 32
"""The last tokens get every layer, whatever the budget."""
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
        per_row = spent / max(1, reader.n_rows)
        cost = len(older) * (n_states // 2 + 1) * per_row
        # Every layer if there is time, else every second one, else (huge vocabularies, slow machines) every fourth.
        stride = 2 if cost < budget_s - spent else 4 if cost < 2 * (budget_s - spent) else 8
        reader.read(older, set(range(n_states - 1, -1, -stride)))
        if budget_s - (perf_counter() - started) > len(recent) * n_states * per_row:
            reader.read(recent, everything)
    reader.lens.seconds = perf_counter() - started
    return reader.lens


class _Reader:
    def __init__(self, head: OutputHead, states: np.ndarray, ids: Sequence[int], chosen: dict[int, int]):
        self.head, self.states, self.chosen = head, states, chosen
        n_states, n_tokens = states.shape[:2]
        self.following = np.array([*ids[1 : n_tokens + 1], *[-1] * (n_tokens + 1 - len(ids))])
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
        for group in self._groups(positions, sorted({*wanted, last})):
            sizes = [len(some) for _, some in group]
            at_state = np.concatenate([some for _, some in group])
            at_token = np.repeat([t for t, _ in group], sizes)
            logits = self.head.logits(self.states[at_state, at_token])
            self.n_rows += len(at_state)
            self._take(at_state, at_token, np.repeat(np.cumsum(sizes) - 1, sizes), logits)

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

    def _take(self, at_state: np.ndarray, at_token: np.ndarray, finals: np.ndarray, logits: np.ndarray) -> None:
        """Keep the readings of rows: states and positions int [n], and the row of each one's final state."""
        lens = self.lens
        best, values = self.head.best()
        ends = np.flatnonzero(finals == np.arange(len(finals)))
        lens.answer[at_token[ends]] = [self.chosen.get(int(at_token[row]), int(best[row, 0])) for row in ends]
        answers = lens.answer[at_token]
        total, weighted, cross, sum_logits = self.head.sums(finals).T.astype(np.float64)
        top, log_total = values[:, 0], np.log(total)
        entropy = log_total - weighted / total
        rows = np.arange(len(logits))
        lens.read[at_state, at_token] = True
        lens.top_ids[at_state, at_token] = best
        lens.top_probs[at_state, at_token] = np.exp(values - top[:, None]) / total[:, None]
        lens.ranks[at_state, at_token] = self.head.ranks(answers)
        lens.answer_probs[at_state, at_token] = np.exp(logits[rows, answers] - top) / total
        lens.entropy[at_state, at_token] = entropy * _BITS
        # KL(final ‖ state) = Σ p (log p − log q), and log q = x − max − log_total.
        kl = log_total - cross / total[finals] - entropy[finals]
        lens.kl[at_state, at_token] = np.maximum(0, kl) * _BITS
        lens.mean_logit[at_state, at_token] = sum_logits / self.head.n_vocab
        known = ends[self.following[at_token[ends]] >= 0]
        came = logits[known, self.following[at_token[known]]]
        lens.log_probs[at_token[known]] = came.astype(np.float64) - top[known] - log_total[known]
        for t in set(at_token[ends].tolist()) & set(self.chosen):
            rows = np.flatnonzero(at_token == t)
            if len(rows) == self.states.shape[0]:
                ids = np.unique(np.append(best[rows, 0], lens.answer[t]))
                probs = np.exp(logits[np.ix_(rows, ids)] - top[rows, None]) / total[rows, None]
                ranks = [self.head.ranks(np.full(len(logits), token))[rows] for token in ids]
                lens.leaders[t] = Leaders(ids, np.stack(ranks, axis=1).astype(np.int32), probs)


_NUMBERS = ("answer_probs", "entropy", "kl", "mean_logit")
