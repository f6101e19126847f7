"""Measures a model as llama-bench does: trials (prompt, generation, depth) go in, tokens per second come out.

Random token ids without BOS, no sampling, one untimed warm-up. On request each op is timed in the same runs by the
executor's own clock.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from . import __version__
from .errors import InvalidParameterError
from .kernels.abi import PAGE
from .kernels.jit import compile_seconds
from .measure import machine
from .measure.breakdown import Breakdown, break_down
from .measure.costs import Costs, StepShape, Work
from .measure.roofs import Prober, RoofPair
from .measure.timeline import Clock, OpTicks, Recorder, Step, Trace
from .model import Model, Sequence, load
from .model_info import ModelInfo, describe

log = logging.getLogger("tinyllm")

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Trial:
    """What is measured: a prompt, then tokens one by one, behind `n_depth` tokens that are in the cache already."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    def __post_init__(self) -> None:
        if min(self.n_prompt, self.n_gen, self.n_depth) < 0 or self.n_tokens == 0:
            raise InvalidParameterError("a test needs prompt tokens or tokens to generate, and no number below 0")

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, pp512 @ d4096."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def unit(self) -> str:
        """What a breakdown's times are for."""
        return "run" if self.n_prompt and self.n_gen else "prompt" if self.n_prompt else "token"

    @property
    def n_units(self) -> int:
        """Units in a repetition."""
        return self.n_gen if self.unit == "token" else 1

    def steps(self, n_batch: int) -> list[StepShape]:
        """The steps in which the engine computes it, at most `n_batch` rows at a time."""
        chunks = [
            StepShape(min(n_batch, self.n_prompt - at), int(at + n_batch >= self.n_prompt), self.n_depth + at)
            for at in range(0, self.n_prompt, n_batch)
        ]
        return chunks + [StepShape(1, 1, self.n_depth + self.n_prompt + i) for i in range(self.n_gen)]


@dataclass(frozen=True)
class Result:
    """One trial on one setting. Times in nanoseconds as llama-bench has them; `load_s` is without compiling.

    `first_token_ns`: from the prompt's ids to the first token's id, greedily chosen. `work`: of one repetition.
    """

    trial: Trial
    model_filename: str
    model_type: str
    model_size: int
    n_params: int
    n_threads: int
    n_batch: int
    kv_type: str
    load_s: float
    compile_s: float
    test_time: str
    samples_ns: tuple[int, ...]
    first_token_ns: int | None
    work: Work
    disturbances: machine.Disturbances
    roofs: RoofPair | None = None
    breakdown: Breakdown | None = None
    trace: Trace | None = None

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second in each repetition."""
        return [1e9 * self.trial.n_tokens / ns for ns in self.samples_ns]

    @property
    def avg_ts(self) -> float:
        return statistics.mean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _stddev(self.samples_ts)

    @property
    def seconds(self) -> float:
        """Of an average repetition."""
        return statistics.mean(self.samples_ns) / 1e9

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of weights, cache and activations per second."""
        return self.work.n_bytes / self.seconds / 1e9

    @property
    def gop_per_s(self) -> float:
        """10^9 int8 and float operations per second; a multiplication and an addition are two."""
        return self.work.ops / self.seconds / 1e9

    def as_dict(self) -> dict[str, Any]:
        """llama-bench's keys, and behind them what it does not tell."""
        row = {
            "build_commit": f"tinyllm {__version__}",
            "cpu_info": machine.cpu_name(),
            "gpu_info": "",
            "backends": "CPU",
            "model_filename": self.model_filename,
            "model_type": self.model_type,
            "model_size": self.model_size,
            "model_n_params": self.n_params,
            "n_params": self.n_params,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_batch,
            "n_threads": self.n_threads,
            "type_k": self.kv_type,
            "type_v": self.kv_type,
            "n_prompt": self.trial.n_prompt,
            "n_gen": self.trial.n_gen,
            "n_depth": self.trial.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(statistics.mean(self.samples_ns)),
            "stddev_ns": round(_stddev(self.samples_ns)),
            "avg_ts": self.avg_ts,
            "stddev_ts": self.stddev_ts,
            "samples_ns": list(self.samples_ns),
            "samples_ts": self.samples_ts,
            "test": self.trial.name,
            "cpu_target": machine.cpu_target(),
            "governor": machine.governor(),
            "load_s": self.load_s,
            "compile_s": self.compile_s,
            "first_token_s": None if self.first_token_ns is None else self.first_token_ns / 1e9,
            "gb_s": self.gb_per_s,
            "gop_s": self.gop_per_s,
            **asdict(self.disturbances),
        }
        if self.roofs is not None:
            row["roofs"] = {"before": self.roofs.before.as_dict(), "after": self.roofs.after.as_dict()}
        if self.breakdown is not None:
            row["per_layer_unit"] = self.breakdown.unit
            row["per_layer"] = [entry.as_dict() for entry in self.breakdown.entries]
        return row


def _stddev(values: List[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Bench:
    """A model loaded for the trials, with the threads, batch size and cache type that are to be measured.

    `layers`: time each op. `trace_steps`: keep the stamps of that many steps of each trial. `on_run(trial, i)` is
    called before each repetition i (-1: warm-up). Use as a context manager, or close.

    Raises what `tinyllm.load` raises, and InvalidParameterError for numbers that cannot be.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        trials: List[Trial],
        *,
        n_threads: int | None = None,
        n_batch: int = 256,
        kv_type: str = "f16",
        repetitions: int = 5,
        warm_up: bool = True,
        layers: bool = False,
        trace_steps: int = 0,
        on_run: Callable[[Trial, int], None] = lambda trial, repetition: None,
    ):
        if repetitions < 1:
            raise InvalidParameterError(f"at least one repetition is needed, not {repetitions}")
        if not trials:
            raise InvalidParameterError("there is nothing to measure: no prompt and no tokens to generate")
        self.trials, self.n_batch = list(trials), n_batch
        self.repetitions, self.warm_up, self.trace_steps, self.on_run = repetitions, warm_up, trace_steps, on_run
        longest = max(trials, key=lambda trial: trial.n_depth + trial.n_tokens)
        compiled = compile_seconds()
        self.model = _load(model, longest, n_threads=n_threads, kv_type=kv_type, n_batch=n_batch)
        self.load_s = self.model.load_s - (compile_seconds() - compiled)
        observe = layers or trace_steps > 0
        if observe and not machine.has_steady_clock():
            log.warning("this CPU's counter changes its rate with the clock: times by op are rough")
        self._prober = Prober(self.model.team) if observe else None
        self.compile_s = compile_seconds() - compiled
        self._info = describe(self.model.file)
        self._random = np.random.default_rng(0)
        self._filled: Sequence | None = None

    def results(self) -> Iterator[Result]:
        """Run the trials one after another."""
        roofs = self._prober.measure() if self._prober else None
        for trial in self.trials:
            result = self._run(trial, roofs)
            if result.roofs is not None:
                roofs = result.roofs.after
            yield result

    def _run(self, trial: Trial, roofs_before: Any) -> Result:
        started = datetime.now(UTC)
        start = self._start_of(trial)
        if self.warm_up:
            self.on_run(trial, -1)
            self._warm_up(trial, start)
        observed = _Observed(self.model, self.trace_steps) if self._prober else None
        disturbances = machine.Disturbances.so_far()
        runs: list[_Run] = []
        for repetition in range(self.repetitions):
            self.on_run(trial, repetition)
            sequence = start.fork()
            ids = self._ids(trial.n_tokens)
            if observed:
                with observed:
                    runs.append(_timed(sequence, trial, ids))
            else:
                runs.append(_timed(sequence, trial, ids))
            sequence.release()
        disturbances = machine.Disturbances.so_far() - disturbances
        roofs = breakdown = trace = None
        if observed:
            observed.clock.stop()
            roofs = RoofPair(roofs_before, self._prober.measure())
            breakdown = break_down(
                self.model.network.plan,
                observed.repetitions,
                [run.ns / 1e9 for run in runs],
                observed.clock.seconds_per_tick,
                roofs.best,
                trial.unit,
                trial.n_units,
            )
            if self.trace_steps:
                trace = Trace(
                    self.model.network.plan, observed.first_steps(), runs[0].marks, observed.clock, roofs.best
                )
        return Result(
            trial=trial,
            model_filename=str(self.model.path),
            model_type=_model_type(self._info),
            model_size=self._info.weight_bytes,
            n_params=self._info.parameters,
            n_threads=self.model.n_threads,
            n_batch=self.n_batch,
            kv_type=self.model.kv_type,
            load_s=self.load_s,
            compile_s=self.compile_s,
            test_time=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            samples_ns=tuple(run.ns for run in runs),
            first_token_ns=round(statistics.mean(run.first_token_ns for run in runs)) if trial.n_prompt else None,
            work=self._work(trial),
            disturbances=disturbances,
            roofs=roofs,
            breakdown=breakdown,
            trace=trace,
        )

    def _ids(self, n: int) -> list[int]:
        return self._random.integers(0, self.model.config.n_vocab, n).tolist()

    def _start_of(self, trial: Trial) -> Sequence:
        """A sequence of `n_depth` random tokens, computed once for all trials of that depth that follow each other."""
        if self._filled is None or len(self._filled) != trial.n_depth:
            if self._filled is not None:
                self._filled.release()
            self._filled = self.model.new_sequence()
            if trial.n_depth:
                self._filled.evaluate(self._ids(trial.n_depth), want="none")
        return self._filled

    def _warm_up(self, trial: Trial, start: Sequence) -> None:
        """One chunk of the prompt and a few tokens: code, weights and buffers have been touched then."""
        short = Trial(min(trial.n_prompt, self.model.n_batch), min(trial.n_gen, _WARM_UP_TOKENS))
        sequence = start.fork()
        _timed(sequence, short, self._ids(short.n_tokens))
        sequence.release()

    def _work(self, trial: Trial) -> Work:
        return Costs(self.model.network.plan).total(trial.steps(self.model.n_batch))

    def close(self) -> None:
        """Give the model and the probes' memory back."""
        if self._filled is not None:
            self._filled.release()
        if self._prober is not None:
            self._prober.close()
        self.model.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load(path: str | os.PathLike[str], longest: Trial, **options: Any) -> Model:
    """The model, with room for the longest trial. Raises InvalidParameterError where there cannot be any."""
    n_ctx = longest.n_depth + longest.n_tokens
    try:
        model = load(path, n_ctx=n_ctx, **options)
    except MemoryError:
        raise InvalidParameterError(
            f"{longest.name}: there is no memory for {n_ctx} positions; measure fewer"
        ) from None
    if model.n_ctx < n_ctx:
        model.close()
        raise InvalidParameterError(
            f"{longest.name} needs {n_ctx} positions, and {model.path.name} has {model.n_ctx} at most; measure fewer"
        )
    # The cache is committed as it is filled: without this check, the system would end the process in the middle.
    window_end = model.n_batch + PAGE
    sizes = [
        pool.page_bytes * (n_ctx if not layer.window else min(n_ctx, layer.window + window_end)) / PAGE
        for layer, pool in zip(model.config.layers, model.cache.layers, strict=True)
    ]
    memory = machine.memory_bytes()
    if memory is not None and sum(sizes) > memory:
        model.close()
        raise InvalidParameterError(
            f"{longest.name}: {n_ctx} positions take {sum(sizes) / 1e9:.0f} GB of cache, and there are"
            f" {memory / 1e9:.0f} GB of memory; measure fewer"
        )
    return model


@dataclass(frozen=True)
class _Run:
    ns: int
    first_token_ns: int
    marks: tuple[float, ...]


def _timed(sequence: Sequence, trial: Trial, ids: list[int]) -> _Run:
    """One repetition: the prompt in one call, then token by token; every call returns the logits of its last token."""
    clock = time.perf_counter
    marks = [clock()]
    logits = None
    if trial.n_prompt:
        logits = sequence.evaluate(ids[: trial.n_prompt])
        marks.append(clock())
    for token in ids[trial.n_prompt :]:
        sequence.evaluate([token])
        marks.append(clock())
    first_token = 0.0
    if logits is not None:
        started = clock()
        logits[-1].argmax()
        first_token = marks[1] - marks[0] + clock() - started
    return _Run(round(1e9 * (marks[-1] - marks[0])), round(1e9 * first_token), tuple(marks))


class _Observed:
    """The stamps of a trial's repetitions, each of them run within this context."""

    def __init__(self, model: Model, keep: int):
        self._team, network = model.team, model.network
        plan, inputs = network.plan, network.inputs

        def shape() -> StepShape:
            return StepShape(*plan.step_rows, inputs.first_position)

        self._recorder = Recorder(plan, shape, keep)
        self.repetitions: list[OpTicks] = []
        self.clock = Clock(self._team)

    def __enter__(self) -> None:
        self._team.recorder = self._recorder

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._team.recorder = None
        if kind is None:
            self.repetitions.append(self._recorder.take())

    def first_steps(self) -> tuple[Step, ...]:
        """The steps that were kept of the first repetition."""
        return tuple(self._recorder.kept[: len(self.repetitions[0].shapes)])


def _model_type(info: ModelInfo) -> str:
    """Architecture, size and quantization, as llama-bench names models: `llama 135M Q4_1`."""
    n = info.parameters
    size = f"{n / 1e9:.2f}B" if n >= 9.995e8 else f"{n / 1e6:.0f}M" if n >= 9.995e5 else f"{n / 1e3:.0f}K"
    quantization = info.quantization or (info.types[0].name if info.types else "")
    return " ".join(filter(None, (info.architecture, size, quantization)))
