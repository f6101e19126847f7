"""The options of `run` and `chat`: what was typed goes in, what the engine takes (parameters, constraints) comes out.

Names, defaults and off-values are llama.cpp's, and Ollama's where the two agree.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinyllm.errors import InvalidParameterError, TinyLLMError
from tinyllm_cli.prompt_input import clean, read_text, unescape

if TYPE_CHECKING:
    from tinyllm.sampler import SamplingParams

LEAST = {"temperature": 0.0, "top_k": 0, "seed": -1, "max_tokens": -1}
"""What the engine takes less of as well, with the same meaning: who types it means something else."""

DEFAULT_MODEL = "smollm2"  # as in tinyllm.hub, which need not be imported for a help text


def _option(*names: str, panel: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """One command-line option, listed under a heading of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, **more)


_model = partial(_option, panel="Model")
_text = partial(_option, panel="Text")
_constraint = partial(_option, panel="Constrained output")
_sampling = partial(_option, panel="Sampling", metavar="N")


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Annotated[
        str,
        _model(
            "--model", "-m", help="A GGUF file, a catalogue name, or user/repo[:QUANT] on the hub.", metavar="MODEL"
        ),
    ] = DEFAULT_MODEL
    threads: Annotated[
        int | None, _model("--threads", "-t", help="Threads (default: what the machine gives).", metavar="N", min=1)
    ] = None
    ctx_size: Annotated[
        int, _model("--ctx-size", "-c", help="Context in tokens (0: the model's, at most 4096).", metavar="N", min=0)
    ] = 0
    batch_size: Annotated[
        int, _model("--batch-size", "-b", help="Prompt tokens that are computed together.", metavar="N", min=1)
    ] = 512
    cache_type: Annotated[
        str, _model("--cache-type", help="Numbers of the KV cache: f32, f16 or q8_0.", metavar="TYPE")
    ] = "f16"


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; the fields are those of SamplingParams, with its defaults."""

    temperature: Annotated[
        float,
        _sampling(
            "--temp", "--temperature", help="Temperature (0: always the most probable).", min=LEAST["temperature"]
        ),
    ] = 0.8
    top_k: Annotated[
        int, _sampling("--top-k", help="Only the K most probable tokens (0: off).", min=LEAST["top_k"])
    ] = 40
    top_p: Annotated[float, _sampling("--top-p", help="Only the tokens that make up probability P (1: off).")] = 0.95
    min_p: Annotated[
        float, _sampling("--min-p", help="Only tokens with P times the best one's probability (0: off).")
    ] = 0.05
    typical_p: Annotated[float, _sampling("--typical-p", "--typical", help="Locally typical sampling (1: off).")] = 1.0
    top_n_sigma: Annotated[
        float, _sampling("--top-nsigma", "--top-n-sigma", help="Logits within N deviations of the best (-1: off).")
    ] = -1.0
    xtc_probability: Annotated[
        float, _sampling("--xtc-probability", help="Chance of excluding the top choices (0: off).")
    ] = 0.0
    xtc_threshold: Annotated[
        float, _sampling("--xtc-threshold", help="What counts as a top choice for XTC (above 0.5: off).")
    ] = 0.1
    dynatemp_range: Annotated[
        float,
        _sampling("--dynatemp-range", help="Let the temperature move by N up and down with the entropy (0: off)."),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, _sampling("--dynatemp-exp", "--dynatemp-exponent", help="How the temperature follows the entropy.")
    ] = 1.0
    repeat_penalty: Annotated[
        float, _sampling("--repeat-penalty", help="Penalty on tokens that occurred (1: off).")
    ] = 1.0
    repeat_last_n: Annotated[
        int, _sampling("--repeat-last-n", help="How far back penalties look (0: off, -1: all).")
    ] = 64
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", help="Subtracted once from tokens that occurred (0: off).")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", help="Subtracted for each occurrence (0: off).")
    ] = 0.0
    dry_multiplier: Annotated[
        float, _sampling("--dry-multiplier", help="Strength of the DRY penalty on repetitions (0: off).")
    ] = 0.0
    dry_base: Annotated[float, _sampling("--dry-base", help="Growth of the DRY penalty with the length repeated.")] = (
        1.75
    )
    dry_allowed_length: Annotated[
        int, _sampling("--dry-allowed-length", help="Repetitions up to this length are free.")
    ] = 2
    dry_penalty_last_n: Annotated[
        int, _sampling("--dry-penalty-last-n", help="How far back DRY looks (0: off, -1: all).")
    ] = -1
    dry_sequence_breakers: Annotated[
        list[str],
        _sampling(
            "--dry-sequence-breaker",
            help="Text that ends a repetition for DRY (repeatable).",
            show_default='newline : " *',
            metavar="TEXT",
        ),
    ] = field(default_factory=lambda: ["\n", ":", '"', "*"])
    mirostat: Annotated[int, _sampling("--mirostat", help="Mirostat version (0: off, 1 or 2).")] = 0
    mirostat_tau: Annotated[float, _sampling("--mirostat-ent", "--mirostat-tau", help="Mirostat's target entropy.")] = (
        5.0
    )
    mirostat_eta: Annotated[float, _sampling("--mirostat-lr", "--mirostat-eta", help="Mirostat's learning rate.")] = 0.1
    logit_bias: Annotated[
        list[str],
        _sampling("--logit-bias", "-l", help="ID+BIAS or ID-BIAS, as in 42-inf (repeatable).", metavar="ID±BIAS"),
    ] = field(default_factory=list)
    seed: Annotated[
        int, _sampling("--seed", help="Seed of the random numbers (-1: a new one).", min=LEAST["seed"])
    ] = -1

    def params(self) -> SamplingParams:
        """The parameters for the sampler, checked. Raises InvalidParameterError."""
        from tinyllm.sampler import SamplingParams

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["seed"] = None if self.seed < 0 else self.seed
        values["logit_bias"] = dict(parse_bias(text) for text in self.logit_bias)
        values["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        return SamplingParams(**values)


@dataclass(frozen=True)
class TextOptions:
    """What goes into the prompt beside the user's text, and where the answer ends."""

    max_tokens: Annotated[
        int,
        _text(
            "--max-tokens",
            "--predict",
            "-n",
            help="At most N tokens (-1: until the end).",
            metavar="N",
            min=LEAST["max_tokens"],
        ),
    ] = -1
    stop: Annotated[
        list[str], _text("--stop", "--reverse-prompt", "-r", help="End before this text (repeatable).", metavar="TEXT")
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _text("--ignore-eos", help="Go on behind end-of-generation tokens.")] = False
    system: Annotated[str | None, _text("--system", "--system-prompt", help="The system message.", metavar="TEXT")] = (
        None
    )
    chat_template: Annotated[
        str | None, _text("--chat-template", help="Another chat template than the model's.", metavar="NAME|FILE")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, _text("--chat-template-kwargs", help="Variables for the chat template.", metavar="JSON")
    ] = None
    think: Annotated[bool | None, _text("--think/--no-think", help="Ask the template for thinking, or for none.")] = (
        None
    )
    hide_thinking: Annotated[
        bool, _text("--hide-thinking", "--hidethinking", help="Do not show the model's thinking.")
    ] = False
    escape: Annotated[
        bool, _text("--escape", "-e", help=r"Read \n, \t, \\ in the prompt, --system and --stop as escapes.")
    ] = False

    def template_args(self) -> dict[str, Any]:
        """Variables for the chat template. Raises InvalidParameterError for what is no JSON object."""
        try:
            args = json.loads(self.chat_template_kwargs or "{}")
        except json.JSONDecodeError as error:
            raise InvalidParameterError(f"--chat-template-kwargs: not valid JSON: {error}") from None
        if not isinstance(args, dict):
            raise InvalidParameterError(
                "--chat-template-kwargs: write a JSON object, as in '{\"enable_thinking\": false}'"
            )
        return args if self.think is None else {"enable_thinking": self.think, **args}

    def stops(self) -> list[str]:
        """The stop strings. Raises InvalidParameterError for an empty one, which would end every answer."""
        if not all(self.stop):
            raise InvalidParameterError("--stop: a stop string cannot be empty")
        return [self.typed(text) for text in self.stop]

    def typed(self, text: str) -> str:
        """A text of the command line as it is meant: with --escape, escapes are read."""
        return unescape(text) if self.escape else clean(text)


@dataclass(frozen=True)
class ConstraintOptions:
    """What the output must look like."""

    json_schema: Annotated[
        str | None, _constraint("--json-schema", "-j", help="JSON that fits a schema.", metavar="JSON|FILE")
    ] = None
    json_object: Annotated[bool, _constraint("--json-object", help="Any JSON object.")] = False
    grammar: Annotated[
        str | None, _constraint("--grammar", "--grammar-file", help="A GBNF or Lark grammar.", metavar="TEXT|FILE")
    ] = None
    regex: Annotated[
        str | None, _constraint("--regex", help="Text that fits a regular expression.", metavar="REGEX")
    ] = None

    def given(self) -> list[str]:
        """The options that were given."""
        values = {"--json-schema": self.json_schema, "--grammar": self.grammar, "--regex": self.regex}
        return [name for name, value in values.items() if value is not None] + ["--json-object"] * self.json_object


def parse_bias(text: str) -> tuple[int, float]:
    """The id and the bias of llama.cpp's notation: `42+1.5`, `42-inf`."""
    match = re.fullmatch(r"(\d+)\s*([+-].+)", text)
    try:
        return int(match[1]), float(match[2])
    except (TypeError, ValueError):
        raise InvalidParameterError(
            f"--logit-bias {text}: write a token id and a signed number, as in 42+1.5 or 42-inf"
        ) from None


def text_or_file(option: str, value: str, marks: str) -> str:
    """The contents of the file of that name if there is one, else the value itself, which holds one of the `marks`.

    Raises InvalidParameterError for an empty value, TinyLLMError for a file that is missing, empty or cannot be read.
    """
    if not value.strip():
        raise InvalidParameterError(f"{option} is empty: give a text or a file")
    if name := existing_file(value):
        if content := read_text(name).strip():
            return content
        raise TinyLLMError(f"{name}: the file is empty")
    if not any(mark in value for mark in marks):
        raise TinyLLMError(f"{option} {value}: no such file")
    return value


def existing_file(value: str) -> Path | None:
    """The file (or folder) that a value names, if there is one."""
    path = Path(value).expanduser()
    try:
        return path if value and path.exists() else None
    except (OSError, ValueError):  # too long for a name, or with a zero byte: a text
        return None
