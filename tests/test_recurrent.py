"""Recurrent kernels against their float64 specification: whole prompts, pieces, several sequences at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import recurrent_reference as reference

from tinyllm.kernels import abi
from tinyllm.kernels.jit import kernel_addresses
from tinyllm.plan import aligned_zeros
from tinyllm.team import Team

N_ROWS = 21
# How the rows of two sequences are spread over steps: (sequence, rows) each.
STEPS = {
    "whole": [[(0, N_ROWS)], [(1, N_ROWS)]],
    "side by side": [[(0, N_ROWS), (1, N_ROWS)]],
    "row by row": [[(0, 1), (1, 1)]] * N_ROWS,
    "in chunks": [[(0, 5)], [(1, 16), (0, 15)], [(0, 1), (1, 5)]],
}


@dataclass
class Case:
    """A kernel with constant words, inputs [rows, columns] by the name of their words, and what should come out.

    `stride` names the stride words of the inputs. Constants that are arrays stand for their addresses.
    """

    kernel: str
    arguments: abi.Arguments
    n_out: int
    state_bytes: int
    constants: dict
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]
    strides: dict[str, str]
    expected: Callable[[dict[str, np.ndarray]], np.ndarray]


def padded(values: np.ndarray) -> np.ndarray:
    """Rows of float32 with zeros up to a multiple of 32 columns, and 64 bytes behind the last."""
    rows = np.atleast_2d(values)
    width = -(-rows.shape[1] // 32) * 32
    memory = aligned_zeros(len(rows) * width * 4 + 64)[:-64].view(np.float32).reshape(len(rows), width)
    memory[:, : rows.shape[1]] = rows
    return memory


def panels(values: np.ndarray) -> np.ndarray:
    """[channels, n_state] as [panels][n_state][16]."""
    lanes = np.zeros((-(-len(values) // 16) * 16, values.shape[1]), np.float32)
    lanes[: len(values)] = values
    return np.ascontiguousarray(lanes.reshape(-1, 16, values.shape[1]).transpose(0, 2, 1))


def launch(
    team: Team, kernel: str, arguments: abi.Arguments, n_rows: np.ndarray, words: dict[str, int | float]
) -> None:
    """Run one kernel as a plan of its own."""
    address = kernel_addresses([kernel])[kernel]
    block = np.array(arguments.pack(n_rows=n_rows.ctypes.data, **words), np.int64)
    op = np.zeros((1, abi.OP_BYTES // 8), np.int64)
    op[0, :4] = address, address, block.ctypes.data, n_rows.ctypes.data
    team.run(op)


def run(case: Case, inputs: list[dict[str, np.ndarray]], steps: list, n_threads: int) -> list[np.ndarray]:
    """The outputs of each sequence. Every step reads one state of a sequence and writes another."""
    outputs: list[list[np.ndarray]] = [[] for _ in inputs]
    states = [aligned_zeros(case.state_bytes) for _ in inputs]
    done = [0] * len(inputs)
    team = Team(n_threads)
    for step in steps:
        n_rows = sum(rows for _, rows in step)
        parts = [{k: v[done[s] : done[s] + rows] for k, v in inputs[s].items()} for s, rows in step]
        arrays = {k: padded(np.concatenate([part[k] for part in parts])) for k in parts[0]}
        y = padded(np.zeros((n_rows, case.n_out)))
        behind = {s: aligned_zeros(case.state_bytes) for s, _ in step}
        starts = np.cumsum([0] + [rows for _, rows in step])
        runs = np.array(
            [
                (start, rows, states[s].ctypes.data, behind[s].ctypes.data)
                for start, (s, rows) in zip(starts[:-1], step, strict=True)
            ],
            np.int64,
        )
        counters = np.array([n_rows, len(step)], np.int64)
        words = {
            "runs": runs.ctypes.data,
            "n_runs": counters.ctypes.data + 8,
            "state": 0,
            "y": y.ctypes.data,
            "y_stride": y.strides[0],
        }
        words |= {k: v.ctypes.data if isinstance(v, np.ndarray) else v for k, v in case.constants.items()}
        words |= {k: v.ctypes.data for k, v in arrays.items()}
        words |= {stride: arrays[k].strides[0] for stride, k in case.strides.items()}
        words = {k: v for k, v in words.items() if k in case.arguments.names}
        launch(team, case.kernel, case.arguments, counters, words)
        assert not y[:, case.n_out :].any(), "padding was written"
        for start, (s, rows) in zip(starts[:-1], step, strict=True):
            outputs[s].append(y[start : start + rows, : case.n_out].copy())
            states[s] = behind[s]
            done[s] += rows
    team.close()
    return [np.concatenate(rows) for rows in outputs]


def convolution(n: int, kernel: int, gated: bool, bias: bool = True) -> Case:
    rng = np.random.default_rng(n)
    taps, offset = rng.normal(size=(n, kernel)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    width = -(-n // 16) * 16
    lanes = np.zeros((kernel, width), np.float32)
    lanes[:, :n] = taps.T
    names = ("x", "gate_in", "gate_out") if gated else ("x",)

    def expected(v: dict[str, np.ndarray]) -> np.ndarray:
        if gated:
            return v["gate_out"] * reference.causal_conv(v["gate_in"] * v["x"], taps)
        return reference.silu(reference.causal_conv(v["x"], taps, offset if bias else 0.0))

    return Case(
        kernel=f"convolution.convolve:{'gated' if gated else 'silu'}-{kernel}",
        arguments=abi.CONVOLVE,
        n_out=n,
        state_bytes=(kernel - 1) * width * 4,
        constants={"n": n, "taps": lanes, "bias": padded(offset) if bias and not gated else 0}
        | ({} if gated else {"gate_in": 0, "gate_out": 0}),
        inputs=lambda rng: {name: rng.normal(size=(N_ROWS, n)).astype(np.float32) for name in names},
        strides={"x_stride": "x"},
        expected=expected,
    )


def mamba(n: int, n_state: int) -> Case:
    rng = np.random.default_rng(n + n_state)
    a = -rng.uniform(0.2, 1.5, (n, n_state)).astype(np.float32)
    d = rng.normal(size=n).astype(np.float32)
    widths = {"x": n, "dt": n, "b": n_state, "c": n_state, "z": n}
    return Case(
        kernel=f"scan.selective:{1 if n_state % 4 else 4}",
        arguments=abi.SELECTIVE_SCAN,
        n_out=n,
        state_bytes=-(-n // 16) * 64 * n_state,
        constants={"n": n, "n_state": n_state, "a": panels(a), "d": padded(d)},
        inputs=lambda rng: {k: rng.normal(size=(N_ROWS, w)).astype(np.float32) for k, w in widths.items()},
        strides={"x_stride": "x", "dt_stride": "dt", "bc_stride": "b", "z_stride": "z"},
        expected=lambda v: (
            reference.selective_scan(v["x"], reference.softplus(v["dt"]), a, v["b"], v["c"], d) * reference.silu(v["z"])
        ),
    )


def mamba2(n_heads: int, head_dim: int, n_groups: int, n_state: int) -> Case:
    rng = np.random.default_rng(n_heads * head_dim + n_state)
    a, d, bias = (rng.uniform(0.2, 1.5, n_heads).astype(np.float32) for _ in range(3))
    n = n_heads * head_dim
    split = [n, n + n_groups * n_state]

    def inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
        # b and c are columns of x's matrix; separate copies with its stride do as well.
        xbc = rng.normal(size=(N_ROWS, n + 2 * n_groups * n_state)).astype(np.float32)
        x, b, c = (np.zeros_like(xbc) for _ in range(3))
        for target, source in zip((x, b, c), np.split(xbc, split, axis=1), strict=True):
            target[:, : source.shape[1]] = source
        dt, z = (rng.normal(size=(N_ROWS, w)).astype(np.float32) for w in (n_heads, n))
        return {"x": x, "b": b, "c": c, "dt": dt, "z": z}

    def expected(v: dict[str, np.ndarray]) -> np.ndarray:
        b, c = (v[k][:, : n_groups * n_state].reshape(N_ROWS, n_groups, n_state) for k in "bc")
        dt = reference.softplus(v["dt"] + bias)
        y = reference.ssd_scan(v["x"][:, :n].reshape(N_ROWS, n_heads, head_dim), dt, -a, b, c, d)
        return y.reshape(N_ROWS, -1) * reference.silu(v["z"])

    return Case(
        kernel=f"scan.head:{1 if n_state % 4 else 4}",
        arguments=abi.HEAD_SCAN,
        n_out=n,
        state_bytes=n_heads * -(-head_dim // 16) * 64 * n_state,
        constants={
            "n_heads": n_heads, "head_dim": head_dim, "n_groups": n_groups, "n_state": n_state,
            "dt_bias": bias, "a": -a, "d": d,
        },
        inputs=inputs,
        strides={"xbc_stride": "x", "dt_stride": "dt", "z_stride": "z"},
        expected=expected,
    )  # fmt: skip


def gated_delta(n_heads: int, n_keys: int, k_dim: int, v_dim: int, interleaved: bool) -> Case:
    """`interleaved`: value head j has key head j // ratio, with beta and alpha in pairs of groups; else j mod keys."""
    rng = np.random.default_rng(n_heads * k_dim + v_dim)
    a, bias = (rng.uniform(0.2, 1.5, n_heads).astype(np.float32) for _ in range(2))
    ratio = n_heads // n_keys
    width = max(n_keys * k_dim, n_heads * v_dim)
    key_of = np.arange(n_heads) // ratio if interleaved else np.arange(n_heads) % n_keys
    group = ratio if interleaved else n_heads

    def inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
        q, k = (reference.rms_norm(rng.normal(size=(N_ROWS, n_keys, k_dim)), 0.0) / k_dim**0.5 for _ in range(2))
        arrays = {
            "q": q.reshape(N_ROWS, -1),
            "k": k.reshape(N_ROWS, -1),
            "v": rng.normal(size=(N_ROWS, n_heads * v_dim)),
        }
        arrays = {name: np.pad(v, ((0, 0), (0, width - v.shape[1]))) for name, v in arrays.items()}
        gates = rng.normal(size=(2, N_ROWS, n_heads // group, group))
        # With twice the distance between groups, each array could hold the other in its gaps.
        gates = np.pad(gates, ((0, 0), (0, 0), (0, 0), (0, group))).reshape(2, N_ROWS, -1)
        return {k: v.astype(np.float32) for k, v in (arrays | {"beta": gates[0], "alpha": gates[1]}).items()}

    def expected(v: dict[str, np.ndarray]) -> np.ndarray:
        q, k = (v[name][:, : n_keys * k_dim].reshape(N_ROWS, n_keys, k_dim)[:, key_of] for name in "qk")
        beta, alpha = (v[k].reshape(N_ROWS, -1, 2 * group)[:, :, :group].reshape(N_ROWS, -1) for k in ("beta", "alpha"))
        values = v["v"][:, : n_heads * v_dim].reshape(N_ROWS, n_heads, v_dim)
        decay = np.exp(-a * reference.softplus(alpha + bias))
        return reference.delta_rule(q, k, values, decay, reference.sigmoid(beta)).reshape(N_ROWS, -1)

    return Case(
        kernel=f"delta_rule.delta_rule:{1 if k_dim % 4 else 4}",
        arguments=abi.DELTA_RULE,
        n_out=n_heads * v_dim,
        state_bytes=n_heads * -(-v_dim // 16) * 64 * k_dim,
        constants={
            "n_heads": n_heads, "n_key_heads": n_keys, "k_dim": k_dim, "v_dim": v_dim,
            "key_div": ratio if interleaved else 1, "group": group, "group_bytes": 8 * group, "a": -a, "dt_bias": bias,
        },
        inputs=inputs,
        strides={"qkv_stride": "q", "gate_stride": "beta"},
        expected=expected,
    )  # fmt: skip


def gated_norm(n: int, segments: int) -> Case:
    weight = np.random.default_rng(n).normal(size=n).astype(np.float32)
    return Case(
        kernel="gating.gated_norm",
        arguments=abi.GATED_NORM,
        n_out=n * segments,
        state_bytes=0,
        constants={"n": n, "segments": segments, "eps": 1e-3, "weight": padded(weight)},
        inputs=lambda rng: {k: rng.normal(size=(N_ROWS, n * segments)).astype(np.float32) for k in ("x", "gate")},
        strides={"x_stride": "x", "gate_stride": "gate"},
        expected=lambda v: (
            reference.rms_norm(v["x"].reshape(N_ROWS, segments, n), 1e-3, weight).reshape(N_ROWS, -1)
            * reference.silu(v["gate"])
        ),
    )


CASES = {
    "convolution": lambda: convolution(64, 4, gated=False),
    "convolution, odd width": lambda: convolution(41, 2, gated=False, bias=False),
    "convolution, one tap": lambda: convolution(32, 1, gated=False),
    "gated convolution": lambda: convolution(48, 3, gated=True),
    "gated convolution, odd width": lambda: convolution(7, 5, gated=True),
    "mamba": lambda: mamba(64, 16),
    "mamba, odd sizes": lambda: mamba(23, 6),
    "mamba2": lambda: mamba2(8, 32, 2, 32),
    "mamba2, odd sizes": lambda: mamba2(6, 20, 3, 5),
    "delta rule": lambda: gated_delta(4, 2, 32, 32, interleaved=False),
    "delta rule, interleaved": lambda: gated_delta(6, 2, 16, 32, interleaved=True),
    "delta rule, odd sizes": lambda: gated_delta(6, 3, 10, 24, interleaved=True),
    "gated norm": lambda: gated_norm(32, 4),
    "gated norm, odd sizes": lambda: gated_norm(20, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_its_specification_bit_for_bit_however_rows_are_cut(name: str) -> None:
    case = CASES[name]()
    inputs = [case.inputs(np.random.default_rng(seed)) for seed in (1, 2)]
    whole = run(case, inputs, STEPS["whole"], n_threads=1)
    for y, values in zip(whole, inputs, strict=True):
        expected = case.expected({k: v.astype(np.float64) for k, v in values.items()})
        assert np.abs(y - expected).max() < 3e-6 * np.abs(expected).max()
    for steps in STEPS.values():
        for n_threads in (1, 3):
            for y, other in zip(whole, run(case, inputs, steps, n_threads), strict=True):
                assert np.array_equal(y.view(np.int32), other.view(np.int32))


def test_sigmoid_gate_takes_the_gate_that_lies_beside_each_head() -> None:
    rng = np.random.default_rng(5)
    n_heads, dim = 3, 20
    x = padded(rng.normal(size=(N_ROWS, n_heads * dim)))
    query_gate = padded(rng.normal(size=(N_ROWS, n_heads * 2 * dim)))
    gates = query_gate[:, : 2 * n_heads * dim].reshape(N_ROWS, n_heads, 2, dim)[:, :, 1]
    expected = x[:, : n_heads * dim] * reference.sigmoid(gates.astype(np.float64)).reshape(N_ROWS, -1)
    n_rows = np.array([N_ROWS], np.int64)
    words = {
        "n": dim, "segments": n_heads, "x": x.ctypes.data, "x_stride": x.strides[0],
        "gate": query_gate.ctypes.data + 4 * dim, "gate_stride": query_gate.strides[0], "gate_segment": 8 * dim,
    }  # fmt: skip
    team = Team(2)
    launch(team, "gating.sigmoid_gate", abi.SIGMOID_GATE, n_rows, words)
    team.close()
    assert np.allclose(x[:, : n_heads * dim], expected, rtol=1e-6, atol=0)
    assert not x[:, n_heads * dim :].any()
