"""The options of `bench`: lists and ranges as llama-bench writes them go in, trials and settings come out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError
from tinyllm_cli.options import DEFAULT_MODEL
from tinyllm_cli.outputs import writable

if TYPE_CHECKING:
    from tinyllm.bench import Trial

FORMATS = ("text", "md", "csv", "json", "jsonl")
DEFAULT_BATCH, DEFAULT_CACHE_TYPE = 256, "f16"

_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?", re.ASCII)
_MAX_COUNT = 10_000


def _list(*names: str, panel: str, help: str, metavar: str = "LIST") -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False)


@dataclass(frozen=True)
class TestOptions:
    """What is measured. Every option takes a list: 128,512 or the option repeated, 1-8 or 1-8+2 or 1-64*2."""

    model: Annotated[
        list[str], _list("--model", "-m", panel="Tests", help=f"Models (default: {DEFAULT_MODEL}).", metavar="MODEL")
    ] = field(default_factory=lambda: [DEFAULT_MODEL])
    n_prompt: Annotated[
        list[str], _list("--n-prompt", "-p", panel="Tests", help="Prompt tokens (default: 512; 0: none).")
    ] = field(default_factory=lambda: ["512"])
    n_gen: Annotated[
        list[str], _list("--n-gen", "-n", panel="Tests", help="Generated tokens (default: 128; 0: none).")
    ] = field(default_factory=lambda: ["128"])
    prompt_gen: Annotated[
        list[str],
        _list("--prompt-gen", "-pg", panel="Tests", help="A prompt and then tokens, as one test.", metavar="P,N"),
    ] = field(default_factory=list)
    n_depth: Annotated[
        list[str], _list("--n-depth", "-d", panel="Tests", help="Tokens in the cache before each test (default: 0).")
    ] = field(default_factory=lambda: ["0"])
    threads: Annotated[
        list[str], _list("--threads", "-t", panel="Tests", help="Threads (default: what the machine gives).")
    ] = field(default_factory=list)
    batch_size: Annotated[
        list[str], _list("--batch-size", "-b", panel="Tests", help="Prompt tokens computed together (default: 256).")
    ] = field(default_factory=lambda: [str(DEFAULT_BATCH)])
    cache_type: Annotated[
        list[str],
        _list("--cache-type", "-ctk", panel="Tests", help="Numbers of the KV cache: f32, f16 or q8_0 (default: f16)."),
    ] = field(default_factory=lambda: [DEFAULT_CACHE_TYPE])
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", help="Times that each test is run.", rich_help_panel="Tests", min=1)
    ] = 5
    no_warmup: Annotated[
        bool, typer.Option("--no-warmup", help="Leave out the untimed run before each test.", rich_help_panel="Tests")
    ] = False


@dataclass(frozen=True)
class ShowOptions:
    """What is shown of it."""

    output: Annotated[
        str, typer.Option("--output", "-o", help=f"{', '.join(FORMATS)}.", metavar="FORMAT", rich_help_panel="Output")
    ] = "text"
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.", rich_help_panel="Output")] = False
    as_csv: Annotated[bool, typer.Option("--csv", help="The same as -o csv.", rich_help_panel="Output")] = False
    as_md: Annotated[bool, typer.Option("--md", help="The same as -o md.", rich_help_panel="Output")] = False
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Time each op, and compare with the machine's limits.", rich_help_panel="Output"),
    ] = False
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Draw speed against operations per byte.", rich_help_panel="Output")
    ] = False
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", help="Set beside an earlier run's --json.", metavar="FILE.json", rich_help_panel="Output"
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Write a trace for Perfetto or Chrome (compressed if named .gz).",
            metavar="FILE",
            rich_help_panel="Output",
            callback=writable,
        ),
    ] = None
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", help="Steps of each test in the trace.", rich_help_panel="Output", min=1)
    ] = 8
    no_trace_args: Annotated[
        bool,
        typer.Option(
            "--no-trace-args", help="No numbers at the trace's slices (for speedscope).", rich_help_panel="Output"
        ),
    ] = False

    @property
    def format(self) -> str:
        """The output format that was asked for.

        Raises:
            InvalidParameterError: there is no such format, or two different ones were asked for.
        """
        flags = [name for name, on in (("json", self.as_json), ("csv", self.as_csv), ("md", self.as_md)) if on]
        if self.output not in FORMATS:
            raise InvalidParameterError(f"-o {self.output!r} is unknown: use one of {', '.join(FORMATS)}")
        chosen = set(flags) | ({self.output} if self.output != "text" else set())
        if len(chosen) > 1:
            raise InvalidParameterError(f"only one output format at a time: {', '.join(sorted(chosen))}")
        return chosen.pop() if chosen else "text"


@dataclass(frozen=True)
class Setting:
    """How a model is loaded for some of the tests. `n_threads` None: the engine's own choice."""

    model: str
    n_threads: int | None
    n_batch: int
    kv_type: str


def settings_of(options: TestOptions) -> list[Setting]:
    """All combinations of models, threads, batch sizes and cache types.

    Raises:
        InvalidParameterError: a list cannot be read.
    """
    models = [name for text in options.model for name in ([text] if Path(text).exists() else text.split(","))]
    threads: Sequence[int | None] = numbers("-t", options.threads, minimum=1) or [None]
    kv_types = [name for text in options.cache_type for name in text.split(",")]
    combinations = product(models, numbers("-b", options.batch_size, minimum=1), kv_types, threads)
    return [Setting(model, n_threads, n_batch, kv_type) for model, n_batch, kv_type, n_threads in combinations]


def trials_of(options: TestOptions) -> list[Trial]:
    """All tests of a setting: prompts, then generations, then both together, at each depth; none of them twice.

    Raises:
        InvalidParameterError: a list cannot be read, or there is nothing to measure.
    """
    from tinyllm.bench import Trial

    trials = []
    for depth in numbers("-d", options.n_depth):
        trials += [Trial(n, 0, depth) for n in numbers("-p", options.n_prompt) if n]
        trials += [Trial(0, n, depth) for n in numbers("-n", options.n_gen) if n]
        trials += [Trial(*pair, depth) for pair in map(_pair, options.prompt_gen)]
    if not trials:
        raise InvalidParameterError("there is nothing to measure: -p and -n are 0")
    return list(dict.fromkeys(trials))


def _pair(text: str) -> tuple[int, int]:
    found = numbers("-pg", [text])
    if len(found) != 2:
        raise InvalidParameterError(f"-pg {text!r} must be two numbers, as in -pg 512,128")
    return found[0], found[1]


def numbers(option: str, texts: Sequence[str], minimum: int = 0) -> list[int]:
    """The numbers that lists and ranges mean: "128,512", "1-4", "0-4096+512", "1-64*2".

    Raises:
        InvalidParameterError: a text is no such list, or a number is too small; the message names the option.
    """
    found = [number for text in texts for part in text.split(",") for number in _expand(option, part.strip())]
    if len(found) > _MAX_COUNT:
        raise InvalidParameterError(f"{option} means {len(found)} numbers: give at most {_MAX_COUNT}")
    if found and min(found) < minimum:
        raise InvalidParameterError(f"{option} must be {minimum} or more, not {min(found)}")
    return found


def _expand(option: str, text: str) -> Iterator[int]:
    if text.isascii() and text.isdigit() and len(text) < 10:
        yield int(text)
        return
    match = _RANGE.fullmatch(text)
    if match is None or len(text) > 40:
        raise InvalidParameterError(f"{option} {text!r} is no number and no range like 1-8, 0-4096+512 or 1-64*2")
    number, last, sign, step = int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1)
    for _ in range(_MAX_COUNT):
        if number > last:
            return
        yield number
        following = number + step if sign == "+" else number * step
        if following <= number:
            raise InvalidParameterError(f"{option} {text!r} never ends")
        number = following
    raise InvalidParameterError(f"{option} {text!r} means more than {_MAX_COUNT} numbers")
