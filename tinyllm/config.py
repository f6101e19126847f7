"""From metadata, the set of tensors, and one trait row per architecture to an immutable description of the network.

This is the only module that names architectures; per-layer facts are expanded into `LayerConfig` here, once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ModelFileError, UnsupportedModelError
from .gguf_file import GGUFFile
from .metadata.experts import ExpertsConfig, read_experts
from .metadata.hyperparameters import Hyperparameters
from .metadata.latent import LatentConfig, read_latent
from .metadata.positions import Warming, read_ropes, read_warming, read_windows
from .metadata.recurrent import RecurrentConfig, read_recurrent, recurrent_mixer
from .metadata.rope import Rope, RopeReader

log = logging.getLogger("tinyllm")

DEFAULT_CONTEXT = 4096
POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a GGUF file does not say about an architecture; metadata win over a trait where they speak of the same."""

    # Positions. `pairing`: dimensions that RoPE turns together, "adjacent" or "halves"; None: no RoPE at all.
    pairing: str | None = "adjacent"
    alibi_bias: float = 0.0
    unrotated_period: int = 0  # every n-th layer has no RoPE
    rotates: str = "all"  # or "windowed": where there are windows, only layers with a window have RoPE
    rotation_switch: str | None = None  # a metadata key that turns RoPE off

    # Windows: every `window_period`-th layer sees all positions, the others a window. 0: none, whatever the file says.
    window_period: int = 0
    window_layers: int | None = None  # windows only in models with this many layers
    window_default: int = 0
    window_rope_base: float | None = None  # base of the windowed layers' RoPE, which then is not scaled
    window_rope_plain: bool = False  # windowed layers' RoPE is not scaled

    # The block.
    norm: str = "rms"  # or "layer"
    activation: str = "silu"
    parallel_key: str | None = None  # a metadata key that says whether both halves of a block read the same input
    head_norm_after_rope: bool = False
    head_norm_weightless: bool = False  # q and k heads are normed without weights, if they are rotated
    head_norm_not_with: int | None = None  # … but not in models with this many experts
    gated_attention: bool = False  # attn_q has a gate beside each head
    keys_in_groups: bool = False  # in linear attention: neighbouring value heads share a key head
    warms: str | None = None  # "all" layers, or the "unrotated": scores grow with the position (`Warming`)
    wide_scale_layers: int | None = None  # models with this many layers scale scores by 1/sqrt(n_embd / n_heads)
    causal: bool = True

    # Factors.
    embedding_scale: float | None = 1.0  # None: sqrt(n_embd)
    residual_depth: float | None = None  # default of the residual scale, times 1/sqrt(n_layers)
    divides_logits: bool = False  # by logit_scale, instead of multiplying
    logit_width: int | None = None  # default of the logit divisor: n_embd / this

    # Experts.
    scoring: str = "softmax"
    normalises_weights: bool = True
    weighs_input: bool = False

    n_ctx_limit: int | None = None  # positions up to which the network is what is computed here


_LLAMA = Traits()
_NEOX = Traits(pairing="halves")
_GPT = Traits(pairing="halves", norm="layer", activation="gelu")
_GRANITE = Traits(divides_logits=True, rotation_switch="rope.scaling.finetuned")
_GEMMA3 = Traits(pairing="halves", activation="gelu", embedding_scale=None, window_period=6, window_rope_base=10000.0)
_QWEN35 = Traits(pairing="halves", gated_attention=True)

ARCHITECTURES: dict[str, Traits] = {
    "llama": _LLAMA,
    "arcee": Traits(activation="relu2"),
    "bailingmoe": Traits(normalises_weights=False),
    "bert": Traits(pairing=None, norm="layer", activation="gelu", causal=False),
    "bloom": Traits(pairing=None, norm="layer", activation="gelu", alibi_bias=8.0),
    "chatglm": _LLAMA,
    "codeshell": _GPT,
    "cohere2": Traits(norm="layer", window_period=4, rotates="windowed"),
    "command-r": Traits(norm="layer"),
    "deepseek": Traits(normalises_weights=False),
    "deepseek2": Traits(normalises_weights=False),
    "dots1": Traits(pairing="halves", normalises_weights=False),
    "ernie4_5": _LLAMA,
    "ernie4_5-moe": _LLAMA,
    "exaone": _NEOX,
    "exaone4": Traits(pairing="halves", window_period=4, window_layers=64, window_default=4096, rotates="windowed"),
    "falcon": _GPT,
    "gemma": Traits(pairing="halves", activation="gelu", embedding_scale=None),
    "gemma2": Traits(
        pairing="halves",
        activation="gelu",
        embedding_scale=None,
        window_period=2,
        window_default=4096,
        wide_scale_layers=46,
    ),
    "gemma3": replace(_GEMMA3, wide_scale_layers=62),
    "gemma-embedding": replace(_GEMMA3, causal=False),
    "glm4": _LLAMA,
    "glm4moe": Traits(pairing="halves", scoring="sigmoid", normalises_weights=False),
    "gpt2": Traits(pairing=None, norm="layer", activation="gelu"),
    "gpt-oss": Traits(pairing="halves", activation="clamped_swiglu", window_period=2, scoring="chosen"),
    "gptneox": replace(_GPT, parallel_key="use_parallel_residual"),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitehybrid": _GRANITE,
    "hunyuan-dense": Traits(pairing="halves", head_norm_after_rope=True),
    "hunyuan-moe": Traits(pairing="halves", head_norm_after_rope=True),
    "internlm2": _LLAMA,
    "lfm2": _NEOX,
    "lfm2moe": _NEOX,
    "llama4": Traits(
        unrotated_period=4,
        head_norm_weightless=True,
        head_norm_not_with=128,
        scoring="sigmoid",
        normalises_weights=False,
        weighs_input=True,
        warms="unrotated",
        n_ctx_limit=8192,
    ),
    "mamba": Traits(pairing=None),
    "mamba2": Traits(pairing=None),
    "minicpm": Traits(embedding_scale=12.0, residual_depth=1.4, divides_logits=True, logit_width=256),
    "minimax-m2": _NEOX,
    "mistral3": Traits(warms="all"),
    "mpt": Traits(pairing=None, norm="layer", activation="gelu"),
    "nemotron": Traits(pairing="halves", norm="layer", activation="relu2"),
    "nomic-bert": Traits(pairing="halves", norm="layer", causal=False),
    "nomic-bert-moe": Traits(pairing="halves", norm="layer", activation="gelu", causal=False, normalises_weights=False),
    "olmo2": Traits(pairing="halves", window_period=4, window_rope_plain=True),
    "olmoe": Traits(pairing="halves", normalises_weights=False),
    "orion": Traits(pairing="halves", norm="layer"),
    "pangu-embedded": _NEOX,
    "phi2": _GPT,
    "phi3": _NEOX,
    "phimoe": _NEOX,
    "qwen2": _NEOX,
    "qwen2moe": Traits(pairing="halves", normalises_weights=False),
    "qwen3": _NEOX,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3moe": _NEOX,
    "qwen3next": replace(_QWEN35, keys_in_groups=True),
    "refact": Traits(pairing=None, alibi_bias=8.0),
    "seed_oss": _NEOX,
    "smollm3": Traits(unrotated_period=4),
    "stablelm": Traits(pairing="halves", norm="layer"),
    "starcoder": Traits(pairing=None, norm="layer", activation="gelu"),
    "starcoder2": _GPT,
    "xverse": _LLAMA,
}


@dataclass(frozen=True)
class LayerConfig:
    """Facts of one layer. `rope` is an index into `ModelConfig.ropes`, or None; `window` 0 means all positions.

    `head_dim` and `v_dim` are what a position has in the cache, per KV head. `mixer` names what mixes the positions;
    a recurrent one has no heads here.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_dim: int
    rope: int | None
    window: int
    n_ff: int
    mixer: str = "attention"


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """The network of one file.

    Sizes count elements; `attention_scale` multiplies q·k; caps, clamps and biases of 0 mean none. `parallel`: both
    halves of a block read the stream at its beginning.
    """

    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_ctx: int
    norm: str
    norm_eps: float
    activation: str
    attention_scale: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    experts: ExpertsConfig | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    qkv_clamp: float = 0.0
    alibi_bias: float = 0.0
    causal: bool = True
    parallel: bool = False
    head_norm_after_rope: bool = False
    head_norm_weightless: bool = False
    gated_attention: bool = False
    warming: Warming | None = None
    pooling: str | None = None
    metadata: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @property
    def attention_layers(self) -> list[LayerConfig]:
        """The layers that have keys and values."""
        return [layer for layer in self.layers if layer.n_kv_heads]

    @property
    def state_bytes(self) -> list[int]:
        """Bytes of state that each layer keeps of a sequence: 0 for attention."""
        return [0 if layer.n_kv_heads else self.recurrent.state_bytes for layer in self.layers]

    @classmethod
    def from_file(cls, file: GGUFFile, n_ctx: int | None = None) -> ModelConfig:
        """Read the configuration of an open GGUF file; `n_ctx` None: the model's own context, at most 4096 positions.

        Raises UnsupportedModelError for an unknown architecture and ModelFileError for metadata that make no network.
        """
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelFileError(f"{file.path}: general.architecture is missing: this is no language model")
        if architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedModelError(
                f"{file.path}: architecture {architecture!r} is not supported (supported: {known})"
            )
        return _Reader(file, architecture).read(n_ctx)


class _Reader(Hyperparameters):
    def __init__(self, file: GGUFFile, architecture: str):
        super().__init__(file, architecture)
        self.traits = ARCHITECTURES[architecture]
        # Layers that predict further tokens at once follow the others; they take no part in the forward pass.
        n_layers = self.integer("block_count", maximum=10_000)
        self.n_layers = n_layers - self.integer("nextn_predict_layers", 0, minimum=0, maximum=n_layers - 1)
        self.n_embd = self.integer("embedding_length", maximum=2**20)
        self.n_ctx_train = self.integer("context_length")

    def read(self, n_ctx: int | None) -> ModelConfig:
        traits = self.traits
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelFileError(f"{self.file.path}: tensor token_embd.weight is missing or no matrix")
        n_ctx = self.context(n_ctx)
        windows = read_windows(self, traits, self.n_layers)
        latent = read_latent(self)
        mixers = [recurrent_mixer(self.file.tensors, layer) for layer in range(self.n_layers)]
        layers, ropes, head_dim = self.layers(windows, latent, mixers, n_ctx)
        experts = read_experts(self, self.n_layers, traits.scoring, traits.normalises_weights, traits.weighs_input)
        name = self.file.metadata.get("general.name")
        logit_scale = self.factor("logit_scale", self.n_embd / traits.logit_width if traits.logit_width else 1.0)
        return ModelConfig(
            architecture=self.architecture,
            name=name if isinstance(name, str) and name else self.file.path.stem,
            n_layers=self.n_layers,
            n_embd=self.n_embd,
            n_vocab=embedding.shape[0],
            n_ctx_train=self.n_ctx_train,
            n_ctx=n_ctx,
            norm=traits.norm,
            norm_eps=self.number(f"attention.layer_norm_{'rms_' if traits.norm == 'rms' else ''}epsilon"),
            activation=traits.activation,
            attention_scale=self.attention_scale(head_dim, layers[0].n_heads),
            layers=layers,
            ropes=ropes,
            latent=latent,
            recurrent=self.recurrent(mixers),
            experts=experts,
            embedding_scale=self.factor("embedding_scale", traits.embedding_scale or math.sqrt(self.n_embd)),
            residual_scale=self.factor("residual_scale", (traits.residual_depth or 1.0) / self.depth_root()),
            logit_scale=1.0 / logit_scale if traits.divides_logits else logit_scale,
            score_cap=self.number("attn_logit_softcapping", 0.0),
            logit_cap=self.number("final_logit_softcapping", 0.0),
            qkv_clamp=self.number("attention.clamp_kqv", 0.0),
            alibi_bias=self.number("attention.max_alibi_bias", traits.alibi_bias),
            causal=self.flag("attention.causal", traits.causal),
            parallel=bool(traits.parallel_key) and self.flag(traits.parallel_key, True),
            head_norm_after_rope=traits.head_norm_after_rope,
            head_norm_weightless=traits.head_norm_weightless
            and (experts is None or experts.n_experts != traits.head_norm_not_with),
            gated_attention=traits.gated_attention,
            warming=read_warming(self, traits.warms),
            pooling=self.pooling(),
            metadata=self.file.metadata,
        )

    def depth_root(self) -> float:
        return math.sqrt(self.n_layers) if self.traits.residual_depth else 1.0

    def context(self, n_ctx: int | None) -> int:
        """Positions of the context: never more than the network has learned positions for."""
        table = self.file.tensors.get("position_embd.weight")
        limits = [limit for limit in (table and table.shape[0], self.traits.n_ctx_limit) if limit]
        limit = min(limits, default=2**31 - 1)
        if n_ctx is not None and n_ctx > limit:
            log.warning("%s: the context is limited to %d positions, not %d", self.file.path.name, limit, n_ctx)
        return min(n_ctx or min(self.n_ctx_train, DEFAULT_CONTEXT), limit)

    def layers(
        self, windows: list[int], latent: LatentConfig | None, mixers: list[str | None], n_ctx: int
    ) -> tuple[tuple[LayerConfig, ...], tuple[Rope, ...], int]:
        """The layers, their ropes, and the size of a head that scores are scaled by (0 without attention)."""
        n_heads, n_kv_heads = self.heads(mixers)
        n_ff = self.per_layer("feed_forward_length", self.n_layers, minimum=0)
        attending = [layer for layer, mixer in enumerate(mixers) if mixer is None]
        if not attending:
            return tuple(LayerConfig(0, 0, 0, 0, None, 0, n_ff[i], mixers[i]) for i in range(self.n_layers)), (), 0
        some_heads = n_heads[attending[0]]
        if not self.has("attention.key_length") and self.n_embd % some_heads:
            raise self.fail("attention.head_count", f"{some_heads} does not divide {self.n_embd}")
        head_dim = self.integer("attention.key_length", self.n_embd // some_heads, maximum=2**16)
        v_dim = self.integer("attention.value_length", head_dim, maximum=2**16)
        if self.traits.gated_attention and v_dim != head_dim:
            raise self.fail("attention.value_length", f"is {v_dim}, but gates come with heads of {head_dim}")
        rotated_dim = head_dim
        if latent is not None:
            rotated_dim = latent.n_plain + latent.n_rot
            n_kv_heads = [1] * self.n_layers
            head_dim, v_dim = latent.kv_rank + latent.n_rot, latent.kv_rank
        reader = None if self.traits.pairing is None else RopeReader(self, self.traits.pairing, rotated_dim, n_ctx)
        ropes, rope_of_layer = read_ropes(self, self.traits, windows, reader, latent)
        mixer = "attention" if latent is None else "latent"
        layers = tuple(
            LayerConfig(n_heads[i], n_kv_heads[i], head_dim, v_dim, rope_of_layer[i], windows[i], n_ff[i], mixer)
            if mixers[i] is None
            else LayerConfig(0, 0, 0, 0, None, 0, n_ff[i], mixers[i])
            for i in range(self.n_layers)
        )
        return layers, ropes, rotated_dim

    def heads(self, mixers: list[str | None]) -> tuple[list[int], list[int]]:
        """Heads of queries and of keys of each layer; recurrent ones may have 0."""
        key = "attention.head_count_kv"
        n_heads = self.per_layer("attention.head_count", self.n_layers, minimum=0)
        n_kv_heads = self.per_layer(key, self.n_layers, minimum=0) if self.has(key) else n_heads
        for heads, kv_heads, mixer in zip(n_heads, n_kv_heads, mixers, strict=True):
            if mixer is not None:
                continue
            if not heads:
                raise self.fail("attention.head_count", "is 0 in a layer with attention")
            if not kv_heads or heads % kv_heads:
                raise self.fail(key, f"{kv_heads} does not divide {heads} heads")
        return n_heads, n_kv_heads

    def recurrent(self, mixers: list[str | None]) -> RecurrentConfig | None:
        kinds = sorted({mixer for mixer in mixers if mixer is not None})
        if len(kinds) > 1:
            raise UnsupportedModelError(f"{self.file.path}: layers of several kinds ({', '.join(kinds)}) in one model")
        return read_recurrent(self, kinds[0], self.n_embd, self.traits.keys_in_groups) if kinds else None

    def attention_scale(self, head_dim: int, n_heads: int) -> float:
        """The factor on q·k."""
        if not head_dim:
            return 1.0
        if self.traits.wide_scale_layers == self.n_layers:
            head_dim = self.n_embd // n_heads
        scale = self.factor("attention.scale", 1.0 / math.sqrt(head_dim))
        if self.has("attention.kv_lora_rank") and self.has("rope.scaling.yarn_log_multiplier"):
            stretch = math.log(self.factor("rope.scaling.factor"))
            scale *= (1.0 + self.number("rope.scaling.yarn_log_multiplier") * stretch) ** 2
        return scale

    def pooling(self) -> str | None:
        if not self.has("pooling_type"):
            return None
        code = self.integer("pooling_type", minimum=0)
        return POOLINGS.get(code, f"type {code}")
