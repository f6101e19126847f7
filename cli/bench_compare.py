"""`bench --compare`: an earlier run's JSON and this run's results go in, differences with their noise come out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.errors import InvalidParameterError
from tinyllm_cli import render
from tinyllm_cli.bench_layers import milliseconds
from tinyllm_cli.bench_tables import speed
from tinyllm_cli.text import counted

if TYPE_CHECKING:
    from tinyllm.bench import Result

# What must be equal for two rows to be compared, and then what makes the better partner.
_SAME = ("n_threads", "n_prompt", "n_gen", "n_depth", "type_k")
_SAME_MODEL = ("model_type", "model_n_params")


@dataclass(frozen=True)
class Change:
    """A number before and now, each with its standard deviation and count of samples."""

    name: str
    before: float
    now: float
    noise: float

    @property
    def difference(self) -> float:
        return self.now - self.before

    @property
    def is_noise(self) -> bool:
        """Whether the difference is within twice the standard error of both runs."""
        return abs(self.difference) <= self.noise


def read_earlier(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier `bench --json`, or of llama-bench's `-o json`.

    Raises:
        InvalidParameterError: the file cannot be read or holds something else.
    """
    try:
        rows = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"--compare {path}: {error.strerror}") from None
    except ValueError:
        raise InvalidParameterError(f"--compare {path}: this is no JSON; write it with `bench --json`") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and _is_number(row.get("avg_ts")) for row in rows):
        raise InvalidParameterError(f"--compare {path}: this is no list of `bench --json`")
    if not rows:
        raise InvalidParameterError(f"--compare {path}: it holds no results")
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _noise(deviation_a: float, n_a: int, deviation_b: float, n_b: int) -> float:
    return 2 * math.hypot(deviation_a / math.sqrt(max(n_a, 1)), deviation_b / math.sqrt(max(n_b, 1)))


def _partner(row: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The earlier row of the same test: of the model of that name, else of as many parameters.

    Keys that the earlier run does not have are not asked for. llama-bench names some models in another way.
    """
    tests = [old for old in earlier if all(old.get(key, row[key]) == row[key] for key in _SAME)]
    named = [old for key in _SAME_MODEL for old in tests if old.get(key, row[key]) == row[key]]
    return named[0] if named else None


def speeds(result: Result, old: dict[str, Any]) -> Change:
    """Tokens per second."""
    samples = old.get("samples_ts")
    n_old = len(samples) if isinstance(samples, list) else 1
    deviation = old.get("stddev_ts")
    deviation = deviation if _is_number(deviation) else 0.0
    noise = _noise(deviation, n_old, result.stddev_ts, len(result.samples_ns))
    return Change(result.trial.name, old["avg_ts"], result.avg_ts, noise)


def stages(result: Result, old: dict[str, Any]) -> list[Change]:
    """Milliseconds by stage, the largest differences first; empty if one of the runs has no breakdown."""
    entries = old.get("per_layer")
    if result.breakdown is None or not isinstance(entries, list):
        return []
    before: dict[str, float] = {}
    squares: dict[str, float] = {}
    for entry in entries:
        stage, ms, deviation = entry.get("stage"), entry.get("ms"), entry.get("ms_stddev", 0.0)
        if isinstance(stage, str) and _is_number(ms):
            before[stage] = before.get(stage, 0.0) + ms
            squares[stage] = squares.get(stage, 0.0) + (deviation**2 if _is_number(deviation) else 0.0)
    samples = old.get("samples_ts")
    n_old = len(samples) if isinstance(samples, list) else 1
    changes = []
    for entry in result.breakdown.by_stage():
        if entry.stage in before:
            deviation = math.sqrt(squares[entry.stage])
            noise = _noise(deviation, n_old, entry.stddev_ms, len(entry.samples))
            changes.append(Change(entry.stage, before[entry.stage], entry.ms, noise))
    return sorted(changes, key=lambda change: -abs(change.difference))


def print_comparison(results: Sequence[Result], earlier: Sequence[dict[str, Any]], name: str) -> None:
    """What has changed, as text; differences within the noise are dim."""
    partners = [_partner(result.as_dict(), earlier) for result in results]
    if not any(partners):
        render.note(f"nothing is compared: {name} has none of these tests of these models")
        return
    console = render.out()
    console.print()
    console.print(f"compared with {name}", style="bold")
    for result, old in zip(results, partners, strict=True):
        label = f"{result.model_type}, {counted(result.n_threads, 'thread')}, {result.trial.name}"
        if old is None:
            console.print(f"{label}: not in it", style="dim")
            continue
        change = speeds(result, old)
        ratio = f"{change.now / change.before:.2f} x" if change.before else ""
        verdict = " (within noise)" if change.is_noise else ""
        now = speed(result.avg_ts, result.stddev_ts)
        console.print(
            f"{label}: {change.before:.1f} -> {now} t/s, {ratio}{verdict}", style="dim" if change.is_noise else ""
        )
        for part in stages(result, old):
            sign = "+" if part.difference >= 0 else "-"
            console.print(
                f"  {part.name:<16} {milliseconds(part.before):>8} -> {milliseconds(part.now):>8}"
                f"   {sign}{milliseconds(abs(part.difference)):>7}   noise {milliseconds(part.noise):>7}",
                style="dim" if part.is_noise else "",
            )
