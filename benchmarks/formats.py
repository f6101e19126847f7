"""How fast each weight format is multiplied, against the machine's roofs, on random weights; prints a Markdown table.

    python benchmarks/formats.py [FORMAT ...] [-t 2] [--layers 4] [--rows 128] [--rounds 5] [--json]

The matrices have the shapes of a model with 1.2 billion parameters (n_embd 2048, n_ff 8192, 8 KV heads of 64). A few
layers are enough to be larger than any cache; they are run through the engine's own plan, with one row (decode) and
with many (prefill), and timed by the executor's stamps.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from tinyllm.kernels.formats import TILES, Tile
from tinyllm.measure.costs import Costs, StepShape, Work
from tinyllm.measure.roofs import Prober, RoofPair, Roofs
from tinyllm.measure.timeline import Clock, Recorder
from tinyllm.plan import Plan
from tinyllm.team import Team, default_threads
from tinyllm.weights import Matrix

N_EMBD, N_FF, KV_WIDTH = 2048, 8192, 512
SHAPES = (
    ("qkv", N_EMBD + 2 * KV_WIDTH, N_EMBD),
    ("resid_mid", N_EMBD, N_EMBD),
    ("ffn_gate_up", 2 * N_FF, N_EMBD),
    ("resid_post", N_EMBD, N_FF),
)
N_LAYERS = 16  # of the model that the times are extrapolated to
# Two bytes of this range are a positive normal number as f16, as bf16 and in f32: no format meets infinities or
# subnormals in its scales, and codes take many values.
BYTES = (0x20, 0x3B)


@dataclass(frozen=True)
class Row:
    """One format: `bits` per weight, and speeds of decode and prefill as shares of their roofs too."""

    name: str
    bits: float
    decode_gb_s: float
    decode_share: float
    decode_ms: float
    prefill_gop_s: float
    prefill_share: float
    prefill_t_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=list(TILES), metavar="FORMAT", help=f"of {', '.join(TILES)}")
    parser.add_argument("-t", type=int, default=default_threads(), help="threads")
    parser.add_argument("--layers", type=int, default=4, help="layers that are really there")
    parser.add_argument("--rows", type=int, default=128, help="tokens of prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead")
    args = parser.parse_args()
    if unknown := set(args.formats) - set(TILES):
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}")
    team = Team(args.t)
    prober = Prober(team)
    before = prober.measure()
    rows = [measure(TILES[name], team, before, args.layers, args.rows, args.rounds) for name in args.formats]
    roofs = RoofPair(before, prober.measure())
    prober.close()
    team.close()
    if args.json:
        print(
            json.dumps({"threads": args.t, "roofs": asdict(roofs), "formats": [asdict(row) for row in rows]}, indent=1)
        )
    else:
        print_markdown(rows, roofs, args.t)


def print_markdown(rows: list[Row], roofs: RoofPair, n_threads: int) -> None:
    worst, best = roofs.worst, roofs.best
    print(
        f"{n_threads} threads; roofs before and after: read {worst.read_gb_s:.1f}–{best.read_gb_s:.1f} GB/s,"
        f" int8 {worst.int8_gop_s:.0f}–{best.int8_gop_s:.0f} GOP/s, f32 {worst.f32_gflop_s:.0f}–{best.f32_gflop_s:.0f}"
        f" GFLOP/s{' (noisy machine)' if roofs.noisy else ''}\n"
    )
    print("| format | bits/weight | decode GB/s | of read | ms/token | prefill GOP/s | of peak | prefill t/s |")
    print("| ------ | ----------: | ----------: | ------: | -------: | ------------: | ------: | ----------: |")
    for row in rows:
        decode = f"{row.decode_gb_s:.1f} | {100 * row.decode_share:.0f} % | {row.decode_ms:.1f}"
        prefill = f"{row.prefill_gop_s:.0f} | {100 * row.prefill_share:.0f} % | {row.prefill_t_s:.0f}"
        print(f"| {row.name} | {row.bits:.2f} | {decode} | {prefill} |")


def measure(tile: Tile, team: Team, roofs: Roofs, n_layers: int, n_rows: int, rounds: int) -> Row:
    """Time all matrix products of the layers, `rounds` times each; medians."""
    with products(tile, team.n_threads, n_layers, n_rows) as plan:
        decode_s, decode_work = run(plan, team, 1, rounds)
        prefill_s, prefill_work = run(plan, team, n_rows, rounds)
    least = roofs.times(prefill_work)
    scale = N_LAYERS / n_layers
    return Row(
        name=tile.name,
        bits=tile.bits_per_weight,
        decode_gb_s=decode_work.n_bytes / decode_s / 1e9,
        decode_share=roofs.times(decode_work)["mem"] / decode_s,
        decode_ms=1e3 * decode_s * scale,
        prefill_gop_s=prefill_work.ops / prefill_s / 1e9,
        prefill_share=max(least["int8"], least["f32"]) / prefill_s,
        prefill_t_s=n_rows / (prefill_s * scale),
    )


@contextmanager
def products(tile: Tile, n_threads: int, n_layers: int, n_rows: int) -> Iterator[Plan]:
    """A plan of nothing but products, over random tiles in huge pages that are kept for as long as the context."""
    matrices = [Matrix(stage, tile, rows, columns, ()) for _ in range(n_layers) for stage, rows, columns in SHAPES]
    n_bytes = sum(-(-matrix.n_bytes // 256) * 256 for matrix in matrices)
    arena = mmap.mmap(-1, n_bytes + (4 << 20))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        arena.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(arena, np.uint8)
    pattern = np.random.default_rng(0).integers(BYTES[0], BYTES[1], 1 << 20, np.uint8, endpoint=True)
    for start in range(0, memory.size, pattern.size):
        memory[start : start + pattern.size] = pattern[: memory.size - start]
    address = memory.ctypes.data + -memory.ctypes.data % (2 << 20)
    plan = Plan(n_rows, n_threads)
    wide, narrow = plan.buffer("wide", 2 * N_FF), plan.buffer("narrow", N_EMBD)
    inputs = {N_EMBD: plan.buffer("x", N_EMBD), N_FF: plan.buffer("act", N_FF)}
    values = np.random.default_rng(1)
    for x in inputs.values():
        x.array[:] = values.standard_normal(x.array.shape, np.float32)
        plan.quantize("quantize", x)
    for index, matrix in enumerate(matrices):
        matrix.address = address
        address += -(-matrix.n_bytes // 256) * 256
        plan.layer(index // len(SHAPES))
        y = narrow if matrix.n_outputs == N_EMBD else wide.columns(0, matrix.n_outputs, matrix.name)
        plan.linear(matrix.name, inputs[matrix.n_inputs], matrix, y)
    plan.finish()
    yield plan
    del memory  # a view would keep the arena open
    arena.close()


def run(plan: Plan, team: Team, n_rows: int, rounds: int) -> tuple[float, Work]:
    """Seconds of all products of a step, the median of the rounds, and their work."""
    shape = StepShape(n_rows, n_rows, 0)
    indices = [index for index, op in enumerate(plan.ops) if op.stage != "quantize"]
    plan.set_rows(n_rows, n_rows)
    team.run(plan.table)
    recorder = Recorder(plan, lambda: shape)
    team.recorder = recorder
    clock = Clock(team)
    ticks = []
    for _ in range(rounds):
        team.run(plan.table)
        ticks.append(recorder.take().total[indices].sum())
    team.recorder = None
    clock.stop()
    costs = Costs(plan)
    work = sum((costs.of(plan.ops[index], shape) for index in indices), Work())
    return statistics.median(ticks) * clock.seconds_per_tick, work


if __name__ == "__main__":
    main()
