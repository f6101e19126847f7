"""Writes traces for Perfetto and speedscope, in the format of Chrome's tracing: stamps of steps go in, JSON comes out.

One process per setting; a track of steps, one of layers, and one for each thread with step › layer › stage › wait.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from .costs import Costs, StepShape
from .timeline import Step, Trace

STEPS, LAYERS, FIRST_WORKER = 0, 1, 10


@dataclass(frozen=True)
class TracedResult:
    """A trace, the name of its process (model and threads), and what happened beside it: name → seconds or count."""

    process: str
    trace: Trace
    incidents: Mapping[str, float]


def write_trace(
    path: str | os.PathLike[str], results: Sequence[TracedResult], about: Mapping[str, Any], with_args: bool = True
) -> None:
    """Write the traces into one file, compressed if its name ends in .gz.

    `about`: what a reader must know of the run (model, cpu, roofs, command). `with_args` False leaves out the numbers
    of each slice, which speedscope would take for a part of its name.
    """
    text = json.dumps(trace_document(results, about, with_args), separators=(",", ":"))
    data = text.encode("ascii")
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)


def trace_document(results: Sequence[TracedResult], about: Mapping[str, Any], with_args: bool = True) -> dict[str, Any]:
    """The trace as a JSON object: slices sorted by time, parents before their children, times in µs from 0."""
    starts = [min(result.trace.marks) for result in results]
    origin = min(starts, default=0.0)
    processes = list(dict.fromkeys(result.process for result in results))
    named, slices = [], []
    for pid, process in enumerate(processes, 1):
        mine = [result for result in results if result.process == process]
        n_threads = max(result.trace.plan.n_threads for result in mine)
        named += _names(pid, process, n_threads)
        for number, result in enumerate(mine):
            slices += _Writer(pid, number, result.trace, origin, with_args).events(result.incidents)
    slices.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    for event in slices:
        event["ts"] /= 1000
        if "dur" in event:
            event["dur"] /= 1000
    return {"traceEvents": named + slices, "displayTimeUnit": "ns", "otherData": dict(about)}


def _names(pid: int, process: str, n_threads: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    tracks = {STEPS: "00 steps", LAYERS: "01 layers"}
    tracks |= {FIRST_WORKER + thread: f"{FIRST_WORKER + thread} worker {thread}" for thread in range(n_threads)}
    for tid, name in tracks.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


class _Writer:
    """Events of one trace; times are whole nanoseconds until the document is complete, so that slices nest exactly."""

    def __init__(self, pid: int, number: int, trace: Trace, origin: float, with_args: bool):
        self.pid, self.number, self.trace = pid, number, trace
        self.origin, self.with_args = origin, with_args
        self.costs = Costs(trace.plan)

    def events(self, incidents: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        first = self._ns(np.array(self.trace.marks[0]))
        for name, value in incidents.items():
            if value:
                yield {"ph": "i", "s": "p", "pid": self.pid, "tid": STEPS, "ts": int(first), "name": name,
                       "args": {"value": value}}  # fmt: skip
        bounds = self._bounds()
        for index, step in enumerate(self.trace.steps):
            category = "decode" if step.shape.n_rows == 1 else "prefill"
            yield from self._step(step, category, *bounds[index])
            yield from self._counters(step, *bounds[index])
            for thread in range(len(step.stamps)):
                yield from self._worker(step, thread, category)
            if index and category == "decode":
                yield from self._flow(index, bounds[index - 1], bounds[index])

    def _ns(self, seconds: np.ndarray) -> np.ndarray:
        return np.rint((seconds - self.origin) * 1e9).astype(np.int64)

    def _moments(self, ticks: np.ndarray) -> np.ndarray:
        return self._ns(self.trace.clock.moment(ticks))

    def _bounds(self) -> list[tuple[int, int, int, int]]:
        """Of each step: begin of Python's preparation, begin and end of the ops, end of Python's work behind them.

        A call of the engine may take several steps: then one begins where the ops of the one before have ended.
        """
        marks = self._ns(np.array(self.trace.marks))
        runs = [self._moments(step.stamps[0, [0, -1]]) for step in self.trace.steps]
        result = []
        for index, (start, end) in enumerate(runs):
            begin = max(int(marks[marks <= start].max(initial=0)), int(runs[index - 1][1]) if index else 0)
            behind = marks[marks >= end]
            finish = int(behind.min(initial=int(end))) if len(behind) else int(end)
            if index + 1 < len(runs) and runs[index + 1][0] < finish:
                finish = int(end)
            result.append((min(begin, int(start)), int(start), int(end), max(finish, int(end))))
        return result

    def _slice(self, tid: int, name: str, category: str, start: int, end: int, args: dict | None) -> dict[str, Any]:
        event = {"ph": "X", "pid": self.pid, "tid": tid, "name": name, "cat": category, "ts": int(start),
                 "dur": int(end) - int(start)}  # fmt: skip
        if args and self.with_args:
            event["args"] = args
        return event

    def _step(self, step: Step, category: str, begin: int, start: int, end: int, finish: int) -> Iterator[dict]:
        shape = step.shape
        args = {"rows": shape.n_rows, "position": shape.position}
        yield self._slice(STEPS, category, category, begin, finish, args)
        yield self._slice(STEPS, "prepare", category, begin, start, None)
        yield self._slice(STEPS, "ops", category, start, end, None)
        yield self._slice(STEPS, "collect", category, end, finish, None)
        bounds = self._moments(step.bounds)
        for layer, indices in self._layers():
            yield self._slice(LAYERS, _name(layer), category, bounds[indices[0]], bounds[indices[-1] + 1], None)

    def _layers(self) -> Iterator[tuple[int | None, list[int]]]:
        ops = self.trace.plan.ops
        for layer, indices in groupby(range(len(ops)), key=lambda index: ops[index].layer):
            yield layer, list(indices)

    def _worker(self, step: Step, thread: int, category: str) -> Iterator[dict[str, Any]]:
        starts = self._moments(step.starts[thread])
        own_ends = self._moments(step.own_ends[thread])
        ends = self._moments(step.ends[thread])
        spans = np.diff(self._moments(step.bounds))
        tid = FIRST_WORKER + thread
        ops = self.trace.plan.ops
        yield self._slice(tid, category, category, starts[0], ends[-1], None)
        for layer, indices in self._layers():
            yield self._slice(tid, _name(layer), category, starts[indices[0]], ends[indices[-1]], None)
            for i in indices:
                if ops[i].done_before:
                    continue  # a moment behind the op that does its work, and part of it
                if ops[i].then is not None:
                    ends[i] = ends[i + 1]
                args = self._facts(i, step.shape, int(spans[i])) if thread == 0 else None
                yield self._slice(tid, ops[i].stage, category, starts[i], ends[i], args)
                yield self._slice(tid, "wait", category, own_ends[i], ends[i], None)

    def _facts(self, index: int, shape: StepShape, ns: int) -> dict[str, Any]:
        """Numbers of a slice."""
        if not self.with_args:
            return {}
        op = self.trace.plan.ops[index]
        work = self.costs.of(op, shape)
        times = self.trace.roofs.times(work)
        limit = max(times, key=times.__getitem__)
        ns = max(ns, 1)
        return {
            "layer": op.layer,
            "kernel": (op.calls or (op.one, op.many))[0 if shape.n_rows == 1 else 1],
            "bytes": round(work.n_bytes),
            "ops": round(work.ops),
            "gbs": round(work.n_bytes / ns, 2),
            "gops": round(work.ops / ns, 2),
            "roof_pct": round(100 * times[limit] * 1e9 / ns, 1),
            "limit": limit,
        }

    def _counters(self, step: Step, begin: int, start: int, end: int, finish: int) -> Iterator[dict[str, Any]]:
        n_bytes = self.costs.total([step.shape]).n_bytes
        waited = float((step.ends - step.own_ends).sum() / max(1, (step.ends - step.starts).sum()))
        values = {
            "t/s": step.shape.n_rows * 1e9 / max(1, finish - begin),
            "GB/s": n_bytes / max(1, end - start),
            "wait %": 100 * waited,
        }
        for name, value in values.items():
            yield {"ph": "C", "pid": self.pid, "tid": STEPS, "ts": begin, "name": name,
                   "args": {"value": round(value, 2)}}  # fmt: skip

    def _flow(self, index: int, before: tuple, after: tuple) -> Iterator[dict[str, Any]]:
        """The chain of tokens: from the logits of one step to the inputs of the next."""
        common = {"pid": self.pid, "tid": STEPS, "cat": "token", "name": "next token"}
        common["id"] = f"{self.pid}.{self.number}.{index}"
        yield {"ph": "s", "ts": before[2], **common}
        yield {"ph": "f", "bp": "e", "ts": after[0], **common}


def _name(layer: int | None) -> str:
    return "outside layers" if layer is None else f"layer {layer}"
