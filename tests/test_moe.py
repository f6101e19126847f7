"""The kernels around experts' matrices, against NumPy: choice, weights, grouping, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tinyllm.kernels import abi
from tinyllm.kernels.jit import kernel_addresses
from tinyllm.team import Team

_ROUTES = ["softmax", "sigmoid", "chosen"]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


def run(team: Team, kernel: str, arguments: abi.Arguments, n_rows: int, **values: int | float | np.ndarray) -> None:
    """Run one op; arrays are passed by their address."""
    rows = np.array([n_rows], np.int64)
    words = {key: value.ctypes.data if isinstance(value, np.ndarray) else value for key, value in values.items()}
    block = np.array(arguments.pack(n_rows=rows.ctypes.data, **words), np.int64)
    address = kernel_addresses([kernel])[kernel]
    table = np.zeros((1, abi.OP_BYTES // 8), np.int64)
    table[0, :4] = address, address, block.ctypes.data, rows.ctypes.data
    team.run(table)


def route(
    team: Team, logits: np.ndarray, scoring: str, n_used: int, *, bias: np.ndarray | None = None, n_groups: int = 1,
    n_groups_used: int = 1, normalise: bool = False, scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    n, n_experts = logits.shape
    stride = -(-n_experts // 32) * 32
    scores = np.zeros((n, stride), np.float32)
    scores[:, :n_experts] = logits
    ids, weights = np.zeros((n, n_used), np.int64), np.zeros((n, n_used), np.float32)
    run(
        team, f"moe.route:{scoring}", abi.ROUTE, n, n_experts=n_experts, n_used=n_used, n_groups=n_groups,
        n_groups_used=n_groups_used, scores=scores, scores_stride=4 * stride, choice=np.zeros_like(scores),
        choice_stride=4 * stride, bias=0 if bias is None else bias, ids=ids, weights=weights, normalise=int(normalise),
        scale=scale,
    )  # fmt: skip
    return ids, weights


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def oracle(logits, scoring, n_used, *, bias=None, n_groups=1, n_groups_used=1, normalise=False, scale=1.0):
    logits = logits.astype(np.float64)
    scores = {"softmax": softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "chosen": lambda x: x}[scoring](logits)
    choice = scores + (0 if bias is None else bias)
    by_group = choice.reshape(len(choice), n_groups, -1)
    best = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
    for row, groups in enumerate(np.argsort(-best, axis=1, kind="stable")[:, n_groups_used:]):
        by_group[row, groups] = -np.inf
    ids = np.argsort(-by_group.reshape(choice.shape), axis=1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(scores, ids, axis=1)
    if scoring == "chosen":
        weights = softmax(weights)
    elif normalise:
        weights /= weights.sum(axis=1, keepdims=True)
    return ids, weights * scale


@pytest.mark.parametrize("scoring", _ROUTES)
@pytest.mark.parametrize(("n_experts", "n_used"), [(4, 2), (8, 8), (17, 3), (128, 8), (1, 1)])
@pytest.mark.parametrize("normalise", [False, True], ids=["as they are", "renormalised"])
def test_the_best_experts_are_chosen_and_weighed(team, scoring, n_experts, n_used, normalise) -> None:
    logits = np.random.default_rng(n_experts).normal(size=(37, n_experts)).astype(np.float32) * 3
    ids, weights = route(team, logits, scoring, n_used, normalise=normalise, scale=1.5)
    want_ids, want = oracle(logits, scoring, n_used, normalise=normalise, scale=1.5)
    assert np.array_equal(ids, want_ids)
    assert np.allclose(weights, want, rtol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_bias_changes_the_choice_but_not_the_weights(team, scoring) -> None:
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(size=(20, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    ids, weights = route(team, logits, scoring, 4, bias=bias)
    want_ids, want = oracle(logits, scoring, 4, bias=bias)
    assert np.array_equal(ids, want_ids)
    assert np.allclose(weights, want, rtol=1e-5)


@pytest.mark.parametrize(("n_groups", "n_groups_used"), [(4, 2), (8, 3), (2, 1)])
def test_experts_are_chosen_within_the_best_groups(team, n_groups, n_groups_used) -> None:
    logits = np.random.default_rng(2).normal(size=(50, 32)).astype(np.float32)
    options = {"n_groups": n_groups, "n_groups_used": n_groups_used, "normalise": True}
    ids, weights = route(team, logits, "sigmoid", 4, **options)
    want_ids, want = oracle(logits, "sigmoid", 4, **options)
    assert np.array_equal(ids, want_ids)
    assert np.allclose(weights, want, rtol=1e-5)


@pytest.mark.parametrize("scoring", _ROUTES)
def test_of_equal_scores_the_lower_number_wins(team, scoring) -> None:
    ids, weights = route(team, np.zeros((3, 8), np.float32), scoring, 3, normalise=True)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert np.allclose(weights, 1 / 3)


@pytest.mark.parametrize("parts", [1, 2])
def test_pairs_are_sorted_by_expert_and_rows_keep_their_order(team, parts) -> None:
    rng = np.random.default_rng(3)
    n_rows, n_used, n_experts = 23, 3, 8
    ids = np.stack([rng.permutation(n_experts)[:n_used] for _ in range(n_rows)]).astype(np.int64)
    ids[ids == 5] = 4  # nobody wants number 5
    weights = rng.random(ids.shape, np.float32)
    counts, firsts, active = (np.full(n_experts, -1, np.int64) for _ in range(3))
    n_active, n_pairs = np.zeros(1, np.int64), np.zeros(1, np.int64)
    pair_rows, places = np.full(ids.size, -1, np.int64), np.full(ids.size, -1, np.int64)
    pair_weights = np.zeros(ids.size, np.float32)
    run(
        team, "moe.group", abi.GROUP, n_rows, n_experts=n_experts, n_used=n_used, parts=parts, ids=ids, counts=counts,
        firsts=firsts, active=active, n_active=n_active, n_pairs=n_pairs, pair_rows=pair_rows,
        pair_weights=pair_weights, weights=weights, places=places,
    )  # fmt: skip
    order = np.argsort(ids.ravel(), kind="stable")
    assert n_pairs[0] == ids.size
    assert np.array_equal(pair_rows, order // n_used)
    assert np.array_equal(pair_weights, weights.ravel()[order])
    assert np.array_equal(places[order], np.arange(ids.size))
    want = np.bincount(ids.ravel(), minlength=n_experts)
    assert np.array_equal(counts, want * parts)
    assert np.array_equal(firsts, (np.cumsum(want) - want) * parts)
    assert active[: n_active[0]].tolist() == np.flatnonzero(want).tolist()
