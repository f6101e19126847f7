"""Whether `bench --layers` can be trusted: what its stamps cost, whether they add up, and how steady the roofs are.

    python benchmarks/stamps.py MODEL [-t 2] [-p 512] [-n 64] [--rounds 11]

Runs with and without stamps are made in turn in one process, so that a busy machine slows both. The line "no work" is
the cost of the stamps alone: the same number of ops with nothing to do, the fastest of many runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

import tinyllm
from tinyllm.measure.costs import StepShape
from tinyllm.measure.roofs import Prober, RoofPair
from tinyllm.measure.timeline import Clock, Recorder
from tinyllm.model import Model

LARGEST_OVERHEAD, LARGEST_GAP = 0.02, 0.05


@dataclass(frozen=True)
class Timed:
    """Wall time of some steps, and the sum of their ops' times in ticks (0 without stamps)."""

    wall_ms: float
    ops_ticks: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", type=int, default=None, help="threads")
    parser.add_argument("-p", type=int, default=512, help="rows of a prompt")
    parser.add_argument("-n", type=int, default=64, help="tokens one by one")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    with tinyllm.load(args.model, n_threads=args.t, n_ctx=max(args.p, args.n)) as model:
        n_ops = len(model.network.plan.ops)
        print(f"{model.path.stem}: {n_ops} ops per step, {model.n_threads} threads, medians of {args.rounds} rounds\n")
        prober = Prober(model.team)
        before = prober.measure()
        print("| test | without stamps | with stamps | overhead | sum of ops | of the wall time |")
        print("| ---: | -------------: | ----------: | -------: | ---------: | ---------------: |")
        ids = np.random.default_rng(0).integers(0, model.config.n_vocab, max(args.p, args.n)).tolist()
        for name, runs in ((f"pp{args.p}", [ids[: args.p]]), (f"tg{args.n}", [[token] for token in ids[: args.n]])):
            compare(model, name, runs, args.rounds)
        plain, stamped = empty_plan(model, with_stamps=False), empty_plan(model, with_stamps=True)
        print(f"| no work | {plain:.4f} ms | {stamped:.4f} ms | {1e3 * (stamped - plain):+.1f} µs | | |")
        roofs = RoofPair(before, prober.measure())
        prober.close()
        print("\n| roof | before | after |\n| ---- | -----: | ----: |")
        for unit, (a, b) in zip(("read GB/s", "int8 GOP/s", "f32 GFLOP/s"), pairs_of(roofs), strict=True):
            print(f"| {unit} | {a:.1f} | {b:.1f} |")
        print(f"\nroofs: {'more than 10 % apart: the machine was not quiet' if roofs.noisy else 'within 10 %'}")


def compare(model: Model, name: str, runs: list[list[int]], rounds: int) -> None:
    """Print a line on the same steps with and without stamps."""
    recorder = Recorder(model.network.plan, lambda: StepShape(1, 1, 0))
    clock = Clock(model.team)
    pairs = []
    for i in range(rounds + 1):
        # In turn the one and the other first, as neighbours of this machine come and go.
        order = (None, recorder) if i % 2 else (recorder, None)
        found = {which: timed(model, runs, which) for which in order}
        pairs.append((found[None], found[recorder]))
    del pairs[0]
    clock.stop()
    n = len(runs)
    plain = statistics.median(without.wall_ms for without, _ in pairs) / n
    stamped = statistics.median(with_.wall_ms for _, with_ in pairs) / n
    overhead = statistics.median(with_.wall_ms / without.wall_ms - 1 for without, with_ in pairs)
    ticks_ms = 1e3 * clock.seconds_per_tick
    ops = statistics.median(with_.ops_ticks for _, with_ in pairs) * ticks_ms / n
    share = statistics.median(with_.ops_ticks * ticks_ms / with_.wall_ms for _, with_ in pairs)
    marks = ("" if overhead <= LARGEST_OVERHEAD else " (!)", "" if share >= 1 - LARGEST_GAP else " (!)")
    print(
        f"| {name} | {plain:.3f} ms | {stamped:.3f} ms | {100 * overhead:+.2f} %{marks[0]}"
        f" | {ops:.3f} ms | {100 * share:.1f} %{marks[1]} |"
    )


def timed(model: Model, runs: list[list[int]], recorder: Recorder | None) -> Timed:
    """Steps one after another."""
    sequence = model.new_sequence()
    model.team.recorder = recorder
    started = time.perf_counter()
    for ids in runs:
        sequence.evaluate(ids)
    wall_ms = 1e3 * (time.perf_counter() - started)
    model.team.recorder = None
    sequence.release()
    return Timed(wall_ms, 0.0 if recorder is None else float(recorder.take().total.sum()))


def empty_plan(model: Model, with_stamps: bool) -> float:
    """Milliseconds of a step whose ops have no rows: barriers, and stamps if wanted."""
    table = model.network.plan.table.copy()
    no_rows = np.zeros(1, np.int64)
    table[:, 3] = no_rows.ctypes.data
    stamps = np.zeros((model.n_threads, 2 * len(table) + 1), np.int64) if with_stamps else None
    best = float("inf")
    for _ in range(2000):
        started = time.perf_counter()
        model.team.run(table, stamps)
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


def pairs_of(roofs: RoofPair) -> list[tuple[float, float]]:
    """Each roof before and after."""
    return list(zip(roofs.before.as_dict().values(), roofs.after.as_dict().values(), strict=True))


if __name__ == "__main__":
    main()
