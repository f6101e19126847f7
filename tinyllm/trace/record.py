"""`trace`: runs a prompt op by op, generates, and gathers all that was seen into one `Trace` of arrays.

The kernels, their order and their inputs are those of an ordinary run, so observed values are bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyllm.errors import InvalidParameterError, UnsupportedModelError
from tinyllm.generate import Step, generate
from tinyllm.model_info import FILE_TYPES
from tinyllm.sampler import SamplingParams
from tinyllm.sampling.record import Recorder, TokenRecord
from tinyllm.tokenizer import ids_of
from tinyllm.trace.contributions import Contributions, contributions
from tinyllm.trace.lens import Lens, read_lens
from tinyllm.trace.neurons import NEIGHBOUR_LIMIT, Neurons, neighbours, strongest
from tinyllm.trace.observation import STAGES, Observation, Router
from tinyllm.trace.output_head import OutputHead
from tinyllm.trace.stage_rows import Activations, StageRange
from tinyllm.trace.texts import Note
from tinyllm.trace.tokens import TraceToken, describe_tokens, display

if TYPE_CHECKING:
    from tinyllm.model import Model
    from tinyllm.text.traced_text import TracedText
    from tinyllm.trace.attention import LayerAttention

SINK_NORM = 20.0  # times the median norm of a layer's states
SINK_MASS = 0.3  # of a layer's attention, over heads and the queries behind
N_ALTERNATIVES = 10


@dataclass(eq=False)
class Trace:
    """One run, seen from the inside. T is the number of positions that ran: all tokens but the last generated one.

    `residual`: float32 [2 · n_layers + 1, T, n_embd], the stream behind the embedding and each half layer.
    `attention`: one entry per layer, None where a layer has none. `choices`: steps of the sampling, one for each token
    generated; step i was chosen from the logits at position `n_prompt - 1 + i` (`logits` float32 [n, n_vocab]).
    `arrays`: stages that were kept, by (stage, layer). `piece`: any token of the vocabulary as it is shown.
    """

    model_name: str
    architecture: str
    quantization: str
    n_layers: int
    tokens: list[TraceToken]
    n_prompt: int
    residual: np.ndarray
    logits: np.ndarray
    attention: list[LayerAttention | None]
    stages: dict[tuple[str, int | None], StageRange]
    arrays: dict[tuple[str, int | None], np.ndarray]
    activations: dict[int, Activations]
    neurons: dict[int, list[Neurons]]
    routers: dict[int, Router]
    lens: Lens
    contributions: list[Contributions]
    steps: list[Step]
    choices: list[TokenRecord]
    params: SamplingParams
    seed: int
    neighbours: dict[int, list[tuple[int, float]]]
    tied: bool
    windows: list[int]
    piece: Mapping[int, str] = field(repr=False)
    saved_layers: Collection[int] | None = None
    notes: list[Note] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Positions that ran."""
        return self.residual.shape[1]

    @property
    def positions(self) -> list[int]:
        """The positions whose logits chose the generated tokens; the last one of the prompt if there are none."""
        return [self.n_prompt - 1 + i for i in range(max(1, len(self.steps)))]

    @cached_property
    def norms(self) -> np.ndarray:
        """Norms of the stream's states: float32 [2 · n_layers + 1, T]."""
        return np.sqrt(np.einsum("stn,stn->st", self.residual, self.residual))

    @cached_property
    def write_norms(self) -> np.ndarray:
        """Norms of what each half layer added: float32 [2 · n_layers, T]; attention and feed-forward in turn."""
        writes = np.diff(self.residual, axis=0)
        return np.sqrt(np.einsum("stn,stn->st", writes, writes))

    @cached_property
    def column_mass(self) -> np.ndarray:
        """Share of attention that a position draws from the queries behind it: float64 [n_layers, T]; NaN if none."""
        mass = np.full((self.n_layers, self.n_tokens), np.nan)
        for index, layer in enumerate(self.attention):
            if layer is None:
                continue
            queries = layer.first_query + np.arange(layer.probs.shape[1])
            behind = queries[:, None] > np.arange(self.n_tokens)
            total = (layer.probs.mean(axis=0) * behind).sum(axis=0)
            mass[index] = np.divide(total, behind.sum(axis=0), out=mass[index], where=behind.any(axis=0))
        return mass

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Positions that attention rests on without looking at them: by the norm of their states (above 20 × the median
        of a layer) or the attention that they draw (above 30 % of two layers, and twice an even share)."""
        states = self.norms[2:-1:2] if self.n_layers > 1 else self.norms[2:]
        large = (states > SINK_NORM * np.median(states, axis=1, keepdims=True)).any(axis=0)
        queries = np.arange(self.n_tokens)
        even = np.array([np.mean(1 / (queries[queries > t] + 1)) if t + 1 < self.n_tokens else 1 for t in queries])
        few = self.n_tokens - 1 - queries < 3
        drawn = (np.nan_to_num(self.column_mass) > np.maximum(SINK_MASS, 2 * even)).sum(axis=0) >= min(2, self.n_layers)
        return tuple(np.flatnonzero(large | (drawn & ~few)).tolist())

    @property
    def attention_error(self) -> float:
        """The largest relative RMS difference between recomputed and computed attention output, over the layers."""
        return max((layer.error for layer in self.attention if layer is not None), default=0.0)

    def save(self, path: str | Path) -> None:
        """Write all arrays to a NumPy archive: `blk.3.resid_post`, `blk.3.attn_scores` [heads, queries, T], …"""
        named = {stage if layer is None else f"blk.{layer}.{stage}": a for (stage, layer), a in self.arrays.items()}
        for index, layer in enumerate(self.attention):
            if layer is not None and (self.saved_layers is None or index in self.saved_layers):
                named[f"blk.{index}.attn_scores"] = layer.probs
        ids = np.array([token.id for token in self.tokens])
        lens = {f"lens.{name}": getattr(self.lens, name) for name in ("top_ids", "top_probs", "ranks", "entropy", "kl")}
        with open(path, "wb") as file:
            np.savez_compressed(file, tokens=ids, n_prompt=self.n_prompt, **named, **lens)


def trace(
    model: Model,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    *,
    max_tokens: int = 1,
    params: SamplingParams | None = None,
    stages: Collection[str] = (),
    layers: Collection[int] | None = None,
    lens_budget_s: float | None = None,
    find_neighbours: bool | None = None,
    template: Any = None,
    **sampling: Any,
) -> Trace:
    """Run a prompt and generate up to `max_tokens`, keeping what happened in between.

    `prompt`: text or ids, continued as they are, or messages, which go through the chat template. `stages`: more of
    `STAGES` to keep as arrays (the residual stream, attention and logits are kept in any case); `layers`: whose arrays
    are kept (default: all). `lens_budget_s`: seconds for the logit lens (None: read everything). `find_neighbours`: of
    the embeddings; None means where the table is small enough.

    Raises UnsupportedModelError for encoders, and what `generate` raises.
    """
    if model.network.logits is None:
        raise UnsupportedModelError(f"{model.path.name} is an encoder: it makes embeddings, and nothing to choose from")
    if unknown := set(stages) - set(STAGES):
        raise InvalidParameterError(f"there is no stage {min(unknown)!r}: choose from {', '.join(STAGES)}")
    if max_tokens < 0:
        raise InvalidParameterError(f"max_tokens must be 0 or more, not {max_tokens}")
    if layers is not None and (missing := set(layers) - set(range(model.config.n_layers))):
        raise InvalidParameterError(f"there is no layer {min(missing)}: they go from 0 to {model.config.n_layers - 1}")
    ids, traced = _prompt_ids(model, prompt, template)
    recorder = Recorder()
    sequence = model.new_sequence(whole=True)
    times = {}
    started = perf_counter()
    try:
        observation = Observation(model, sequence, stages, min(len(ids) + max_tokens, model.n_ctx))
        generation = generate(
            model, ids, max_tokens=max_tokens, params=params, sequence=sequence, recorder=recorder,
            logprobs=N_ALTERNATIVES, **sampling,
        )  # fmt: skip
        with model.team.observed(observation):
            steps = []
            for step in generation:
                steps.append(step)
                observation.start()
        times["run"] = perf_counter() - started
        attention = observation.attention.layers()
    finally:
        sequence.release()
    ids = generation.prompt_ids
    states = observation.residual()
    logits = observation.array("logits")
    chosen = {len(ids) - 1 + i: step.token for i, step in enumerate(steps)} or {len(ids) - 1: int(logits[-1].argmax())}
    times["attention"] = perf_counter() - started - times["run"]
    with model.team.steps:
        head = OutputHead(model)
        lens = read_lens(head, states, [*ids, *(step.token for step in steps)], chosen, lens_budget_s)
        times["lens"] = lens.seconds
        began = perf_counter()
        neurons = strongest(model, head, {i: a[-len(chosen) :] for i, a in observation.last_activations().items()})
    times["neurons"] = perf_counter() - began
    size = model.config.n_vocab * model.config.n_embd
    began = perf_counter()
    searched = size <= NEIGHBOUR_LIMIT if find_neighbours is None else find_neighbours
    near = neighbours(model, ids) if searched else {}
    times["neighbours"] = perf_counter() - began
    notes = []
    if not searched:
        notes.append(Note("note_neighbours", (("millions", size / 1e6),)))
    if not lens.complete:
        notes.append(Note("note_lens"))
    if cut := max((layer.first_query for layer in attention if layer is not None), default=0):
        notes.append(Note("note_maps", (("query", cut),)))
    kept = {
        key: value
        for key, value in observation.kept_stages().items()
        if layers is None or key[1] is None or key[1] in layers
    }
    pieces = describe_tokens(model.tokenizer, ids, [step.token for step in steps], traced)
    return Trace(
        model_name=model.path.stem,
        architecture=model.config.architecture,
        quantization=quantization(model),
        n_layers=model.config.n_layers,
        tokens=pieces,
        n_prompt=len(ids),
        residual=states,
        logits=logits,
        attention=attention,
        stages=observation.stages(),
        arrays=kept,
        activations=observation.activations(),
        neurons=neurons,
        routers=observation.routers(),
        lens=lens,
        contributions=[
            contributions(model, states, t, token, logits[i], lens) for i, (t, token) in enumerate(chosen.items())
        ],
        steps=steps,
        choices=recorder.tokens,
        params=replace(params or SamplingParams(), **sampling),
        seed=generation.seed,
        neighbours=near,
        tied="output.weight" not in model.file.tensors,
        windows=[layer.window for layer in model.config.layers],
        piece=_Pieces(model.tokenizer),
        saved_layers=layers,
        notes=notes,
        seconds=times,
    )


class _Pieces(dict[int, str]):
    """Tokens as they are shown, spelled when they are met."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = display(self._tokenizer.token_bytes(token))
        return self[token]


def _prompt_ids(model: Model, prompt: Any, template: Any) -> tuple[list[int], TracedText | None]:
    """The ids to run, and the text as a chat template wrote it."""
    if not (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)):
        return ids_of(prompt, model.tokenizer.encode), None
    from tinyllm.chat_format import fold_system
    from tinyllm.generate import prepare_conversation

    template = template or model.chat_template
    ids = prepare_conversation(model, prompt, template=template).ids
    messages, _ = fold_system(template, prompt, add_generation_prompt=True)
    return ids, template.render_traced(messages, add_generation_prompt=True)


def quantization(model: Model) -> str:
    """The recipe that the file names, or else the type that most of its bytes are in."""
    recipe = model.file.metadata.get("general.file_type")
    if recipe in FILE_TYPES:
        return FILE_TYPES[recipe]
    sizes: dict[str, int] = {}
    for tensor in model.file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.n_bytes
    return max(sizes, key=sizes.get)
