"""The end of a model's plan on rows of one's own: states of the residual stream go in, what their logits say comes out.

Kernels read the logits as they lie in the plan's buffer, so that only the few numbers wanted of each row are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinyllm.kernels import abi
from tinyllm.kernels.jit import kernel_addresses
from tinyllm.kernels.lens_words import BEST, N_TOP, RANKS, SUMS

if TYPE_CHECKING:
    from tinyllm.model import Model

# Rows that go through the output matrix together: more are no faster, and their logits lie in the cache no more.
_CHUNK = 96
_KERNELS = ("lens.best", "lens.sums", "lens.ranks")


class OutputHead:
    """Rows are those of the last call of `logits`. Use it within `model.team.steps`: the buffers are the plan's."""

    def __init__(self, model: Model):
        plan = model.network.plan
        self.model, self.plan = model, plan
        gather = max(i for i, op in enumerate(plan.ops) if op.layer is None and op.arguments is abi.GATHER)
        self._source = plan.ops[gather].output
        self._table = plan.table[gather + 1 :]
        self.n_vocab = model.network.logits.width
        # All states of a position at once, so that they can be compared.
        n = self.max_rows = min(max(_CHUNK, 2 * model.config.n_layers + 1), plan.max_rows)
        self._kernels = kernel_addresses(_KERNELS)
        self._n_rows = np.zeros(1, np.int64)
        self._values, self._columns = np.empty((n, N_TOP), np.float32), np.empty((n, N_TOP), np.int64)
        self._sums, self._ranks = np.empty((n, 4), np.float32), np.empty(n, np.int64)

    def logits(self, states: np.ndarray) -> np.ndarray:
        """float32 [n, n_vocab] of states [n, n_embd], n ≤ max_rows: a view that the next call overwrites."""
        n = self._n_rows[0] = len(states)
        self._source.array[:n] = states
        self.plan.set_rows(n, n)
        self.model.team.run(self._table)
        return self.model.network.logits.array[:n]

    def best(self, sign: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """The five tokens with the largest logits (for `sign` -1 the smallest), equal ones by id, best first: ids int64
        [n, 5], and sign · logits float32. Of smaller vocabularies the last ids are -1."""
        self._run("lens.best", BEST, sign=sign, values=self._values, columns=self._columns)
        n = self._n_rows[0]
        return self._columns[:n], self._values[:n]

    def sums(self, finals: np.ndarray) -> np.ndarray:
        """Sums over the vocabulary, with x a row's logits less their maximum: float32 [n, 4], Σ e^x, Σ e^x · x,
        Σ e^(x of row `finals[row]`) · x, Σ logits. `best()` must have been called before; `finals`: int64 [n]."""
        self._run("lens.sums", SUMS, values=self._values, finals=finals, sums=self._sums)
        return self._sums[: self._n_rows[0]]

    def ranks(self, answers: np.ndarray) -> np.ndarray:
        """How many tokens are likelier than each row's answer, or as likely with a smaller id: int64 [n].

        `answers`: int64 [n].
        """
        self._run("lens.ranks", RANKS, answers=answers, ranks=self._ranks)
        return self._ranks[: self._n_rows[0]]

    def _run(self, kernel: str, words: abi.Arguments, **values: np.ndarray | float) -> None:
        rows = self._n_rows.ctypes.data
        pointers = {name: v.ctypes.data if isinstance(v, np.ndarray) else v for name, v in values.items()}
        arguments = np.array(
            words.pack(n_rows=rows, n=self.n_vocab, **self.model.network.logits.at("x"), **pointers), np.int64
        )
        table = np.zeros((1, abi.OP_BYTES // 8), np.int64)
        table[0, :4] = self._kernels[kernel], self._kernels[kernel], arguments.ctypes.data, rows
        self.model.team.run(table)
