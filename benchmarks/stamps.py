"""What `bench --layers` costs: the same tokens with and without stamps in turn; prints a Markdown table.

    python benchmarks/stamps.py MODEL [-t 2] [-n 64] [--rounds 11]

Both runs are made alternately in one process, so that a busy machine slows both. The last line is the cost of the
stamps alone: the same number of ops with nothing to do, the fastest of many runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import tinyllm
from tinyllm.measure.costs import StepShape
from tinyllm.measure.timeline import Recorder
from tinyllm.model import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", type=int, default=None, help="threads")
    parser.add_argument("-n", type=int, default=64, help="tokens per run")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    with tinyllm.load(args.model, n_threads=args.t, n_ctx=args.n) as model:
        recorder = Recorder(model.network.plan, lambda: StepShape(1, 1, 0))
        ids = np.random.default_rng(0).integers(0, model.config.n_vocab, args.n).tolist()
        print(
            f"{len(model.network.plan.ops)} ops per step, {model.n_threads} threads, medians of {args.rounds} rounds\n"
        )
        print("| rows | without stamps | with stamps | overhead |")
        print("| ---: | -------------: | ----------: | -------: |")
        for name, runs in (("1", [[token] for token in ids]), (str(args.n), [ids])):
            pairs = [(seconds(model, runs, None), seconds(model, runs, recorder)) for _ in range(args.rounds + 1)][1:]
            plain, stamped = (statistics.median(times) / len(runs) * 1e3 for times in zip(*pairs, strict=True))
            overhead = statistics.median(with_ / without - 1 for without, with_ in pairs)
            print(f"| {name} | {plain:.3f} ms | {stamped:.3f} ms | {100 * overhead:+.2f} % |")
        plain, stamped = empty_plan(model, with_stamps=False), empty_plan(model, with_stamps=True)
        print(f"| no work | {plain:.4f} ms | {stamped:.4f} ms | {1e3 * (stamped - plain):+.1f} µs |")


def seconds(model: Model, runs: list[list[int]], recorder: Recorder | None) -> float:
    """How long the runs take one after another."""
    sequence = model.new_sequence()
    model.team.recorder = recorder
    started = time.perf_counter()
    for ids in runs:
        sequence.evaluate(ids)
    elapsed = time.perf_counter() - started
    model.team.recorder = None
    if recorder is not None:
        recorder.take()
    sequence.release()
    return elapsed


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


if __name__ == "__main__":
    main()
