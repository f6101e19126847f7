"""The speed of decoding by the length of the context: a model and depths go in, times and bytes of a token come out.

Times are those of `tinyllm.bench`, with its stamps for the share of attention; what the cache costs to read is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..bench import Bench, Result, Trial
from ..config import ModelConfig
from ..errors import InvalidParameterError
from ..gguf_file import open_gguf
from ..kernels.abi import ATTEND, PAGE
from .memory import CacheDesign, page_bytes


@dataclass(frozen=True)
class Row:
    """Decoding behind `depth` tokens. `speed` and `deviation` in tokens per second.

    `attention`: the share of the time in which heads look at the cache (0 to 1), without the matrices around it.
    `cache_bytes`: of keys and values that a token reads; `token_bytes`: of all that it moves, weights with it.
    `predicted`: the speed at this depth if time went with the bytes, from the first row's speed.
    """

    depth: int
    speed: float
    deviation: float
    ms: float
    attention: float
    cache_bytes: float
    token_bytes: float
    predicted: float


@dataclass(frozen=True)
class Depths:
    """The depths that a model's context has room for, and those that it has not."""

    n_ctx: int
    inside: tuple[int, ...]
    beyond: tuple[int, ...]


def depths_of(path: str | os.PathLike[str], depths: Sequence[int], n_gen: int) -> Depths:
    """Sort depths by whether `n_gen` more tokens fit into the context that the model was trained for.

    Raises ModelFileError, UnsupportedModelError; InvalidParameterError if no depth fits.
    """
    with open_gguf(path) as file:
        n_ctx = ModelConfig.from_file(file).n_ctx_train
    inside = tuple(depth for depth in sorted(set(depths)) if depth + n_gen <= n_ctx)
    if not inside:
        raise InvalidParameterError(
            f"no depth fits: the model's context has {n_ctx} positions, and {n_gen} are written"
        )
    return Depths(n_ctx, inside, tuple(depth for depth in sorted(set(depths)) if depth not in inside))


def measure(
    path: str | os.PathLike[str],
    depths: Sequence[int],
    *,
    n_gen: int = 16,
    repetitions: int = 3,
    n_threads: int | None = None,
    kv_type: str = "f16",
    on_run: Callable[[Trial, int], None] = lambda trial, repetition: None,
) -> Iterator[tuple[Row, Result]]:
    """Decode `n_gen` random tokens at each depth; a row and the test behind it come out as each is done.

    Raises what `tinyllm.load` and `tinyllm.bench.Bench` raise.
    """
    trials = [Trial(0, n_gen, depth) for depth in depths]
    with Bench(
        path, trials, n_threads=n_threads, kv_type=kv_type, repetitions=repetitions, layers=True, on_run=on_run
    ) as bench:
        design = CacheDesign.of(bench.model.config, bench.model.path.stem)
        stages = {op.stage for op in bench.model.network.plan.ops if op.arguments is ATTEND}
        first: Row | None = None
        for result in bench.results():
            row = _row(result, design, stages, first)
            first = first or row
            yield row, result


def cache_bytes(design: CacheDesign, depth: int, n_gen: int, kv_type: str) -> float:
    """Bytes of keys and values that a token behind `depth` to `depth + n_gen − 1` others reads, on average.

    Σ over layers of the positions that it sees, itself among them, min(p + 1, window) · bytes of a position.
    """
    positions = range(depth, depth + n_gen)
    total = 0.0
    for layer in design.layers:
        seen = sum(min(p + 1, layer.window or p + 1) for p in positions)
        total += seen / n_gen * page_bytes(layer, kv_type) / PAGE
    return total


def _row(result: Result, design: CacheDesign, stages: set[str], first: Row | None) -> Row:
    trial = result.trial
    ms = 1e3 * result.seconds / trial.n_gen
    attending = sum(entry.ms for entry in result.breakdown.entries if entry.stage in stages)
    token_bytes = result.work.n_bytes / trial.n_gen
    predicted = first.speed * first.token_bytes / token_bytes if first else result.avg_ts
    return Row(
        trial.n_depth,
        result.avg_ts,
        result.stddev_ts,
        ms,
        attending / result.breakdown.wall_ms,
        cache_bytes(design, trial.n_depth, trial.n_gen, result.kv_type),
        token_bytes,
        predicted,
    )
