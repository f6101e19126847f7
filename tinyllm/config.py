"""From GGUF metadata, the set of tensors, and one trait row per architecture to an immutable description of the network.

This is the only module that names architectures; per-layer facts are expanded into `LayerConfig` here, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import ModelFileError, UnsupportedModelError


@dataclass(frozen=True)
class Traits:
    """What a GGUF file does not say about an architecture.

    `pairing`: which dimensions RoPE rotates together, "adjacent" (0,1), (2,3)… or "halves" (i, i + n/2).
    `activation`: of the feed-forward. `norm`: "rms" or "layer".
    """

    pairing: str = "adjacent"
    activation: str = "silu"
    norm: str = "rms"


ARCHITECTURES: dict[str, Traits] = {
    "llama": Traits(),
}


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions of some layers: angle = position · frequency, cosine and sine times `amplitude`."""

    n_rot: int
    pairing: str
    frequencies: np.ndarray  # float64 [n_rot / 2]
    amplitude: float = 1.0
    offset: int = 0  # first rotated dimension of a head

    def table(self, positions: np.ndarray) -> np.ndarray:
        """Cosine and sine per row and pair: float32 [n, n_rot / 2, 2]."""
        angles = positions[:, None].astype(np.float64) * self.frequencies
        return (np.stack((np.cos(angles), np.sin(angles)), axis=-1) * self.amplitude).astype(np.float32)


@dataclass(frozen=True)
class LayerConfig:
    """Facts of one layer. `rope` is an index into `ModelConfig.ropes`, or None; `window` 0 means all positions."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_dim: int
    rope: int | None
    window: int
    n_ff: int


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """The network of one file. Sizes count elements; `attention_scale` multiplies q·k."""

    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    norm: str
    norm_eps: float
    activation: str
    attention_scale: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    causal: bool = True
    metadata: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def from_file(cls, file: Any, n_ctx: int | None = None) -> ModelConfig:
        """Read the configuration of an open GGUF file; `n_ctx` decides between long and short RoPE factors.

        Raises UnsupportedModelError for an unknown architecture and ModelFileError for metadata that make no network.
        """
        return _Reader(file).read(n_ctx)


class _Reader:
    """Typed, checked access to `<architecture>.<key>`; every complaint names the file and the key."""

    def __init__(self, file: Any):
        self.file, self.metadata, self.tensors = file, file.metadata, file.tensors
        self.architecture = self.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise ModelFileError(f"{file.path}: general.architecture is missing: this is no language model")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedModelError(
                f"{file.path}: architecture {self.architecture!r} is not supported (supported: {known})"
            )
        self.traits = ARCHITECTURES[self.architecture]

    def fail(self, key: str, complaint: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {key} {complaint}")

    def value(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise self.fail(full, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(full, f"is {value!r}, not a whole number")
        if not minimum <= value <= maximum:
            raise self.fail(full, f"is {value}, not between {minimum} and {maximum}")
        return value

    def number(self, key: str, default: float | None = None, positive: bool = False) -> float:
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise self.fail(full, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(full, f"is {value!r}, not a finite number")
        if positive and value <= 0:
            raise self.fail(full, f"is {value}, not above zero")
        return float(value)

    def per_layer(self, key: str, n_layers: int, default: int | None = None, minimum: int = 0) -> list[int]:
        """A number for all layers, or an array with one for each."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if not isinstance(value, np.ndarray | list):
            return [self.integer(key, default, minimum)] * n_layers
        if len(value) < n_layers:
            raise self.fail(full, f"has {len(value)} values for {n_layers} layers")
        values = [int(v) for v in value[:n_layers]]
        if min(values) < minimum:
            raise self.fail(full, f"holds {min(values)}")
        return values

    def read(self, n_ctx: int | None) -> ModelConfig:
        n_layers = self.integer("block_count", maximum=10_000)
        n_embd = self.integer("embedding_length", maximum=2**20)
        n_ctx_train = self.integer("context_length")
        n_heads = self.per_layer("attention.head_count", n_layers, minimum=1)
        key = "attention.head_count_kv"
        n_kv_heads = self.per_layer(key, n_layers, minimum=1) if self.value(key) is not None else n_heads
        for heads, kv_heads in zip(n_heads, n_kv_heads, strict=True):
            if heads % kv_heads:
                raise self.fail(f"{self.architecture}.{key}", f"{kv_heads} does not divide {heads} heads")
        if self.value("attention.key_length") is None and n_embd % n_heads[0]:
            raise self.fail(f"{self.architecture}.attention.head_count", f"{n_heads[0]} does not divide {n_embd}")
        head_dim = self.integer("attention.key_length", n_embd // n_heads[0], maximum=2**16)
        v_dim = self.integer("attention.value_length", head_dim, maximum=2**16)
        n_ff = self.per_layer("feed_forward_length", n_layers, minimum=1)
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.fail("tensor token_embd.weight", "is missing")
        n_vocab = embedding.shape[0]
        norm_key = "attention.layer_norm_rms_epsilon" if self.traits.norm == "rms" else "attention.layer_norm_epsilon"
        rope = self.rope(n_layers, head_dim, n_ctx or n_ctx_train)
        layers = tuple(
            LayerConfig(n_heads[i], n_kv_heads[i], head_dim, v_dim, 0, 0, n_ff[i]) for i in range(n_layers)
        )
        name = self.metadata.get("general.name")
        return ModelConfig(
            architecture=self.architecture,
            name=name if isinstance(name, str) and name else self.file.path.stem,
            n_layers=n_layers,
            n_embd=n_embd,
            n_vocab=n_vocab,
            n_ctx_train=n_ctx_train,
            norm=self.traits.norm,
            norm_eps=self.number(norm_key),
            activation=self.traits.activation,
            attention_scale=self.number("attention.scale", 1.0 / math.sqrt(head_dim), positive=True),
            layers=layers,
            ropes=(rope,),
            metadata=self.metadata,
        )

    def rope(self, n_layers: int, head_dim: int, n_ctx: int) -> Rope:
        """Frequencies with the scaling that the file asks for."""
        n_rot = self.integer("rope.dimension_count", head_dim, minimum=2)
        if n_rot > head_dim or n_rot % 2:
            raise self.fail(f"{self.architecture}.rope.dimension_count", f"is {n_rot} with heads of {head_dim}")
        base = self.number("rope.freq_base", 10000.0, positive=True)
        frequencies = base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
        amplitude = 1.0
        factors = self.tensors.get("rope_freqs.weight")
        if factors is not None:
            values = np.frombuffer(factors.data, np.float32)
            if len(values) != n_rot // 2 or not np.all(values > 0):
                raise self.fail("tensor rope_freqs.weight", f"does not hold {n_rot // 2} factors above zero")
            frequencies = frequencies / values
        kind = self.value("rope.scaling.type", "linear" if self.value("rope.scale_linear") else "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0), positive=True)
        if kind == "linear":
            frequencies = frequencies / factor
        elif kind == "yarn":
            frequencies, amplitude = self.yarn(frequencies, n_rot, base, factor)
        elif kind not in ("none", "longrope"):
            raise UnsupportedModelError(
                f"{self.file.path}: {self.architecture}.rope.scaling.type {kind!r} is not supported"
            )
        return Rope(n_rot, self.traits.pairing, frequencies, amplitude)

    def yarn(
        self, frequencies: np.ndarray, n_rot: int, base: float, factor: float
    ) -> tuple[np.ndarray, float]:
        """YaRN (Peng et al. 2023): fast dimensions keep their frequency, slow ones are interpolated, with a ramp between."""
        original = self.integer("rope.scaling.original_context_length", self.integer("context_length"))
        beta_fast = self.number("rope.scaling.yarn_beta_fast", 32.0, positive=True)
        beta_slow = self.number("rope.scaling.yarn_beta_slow", 1.0, positive=True)

        def dimension(rotations: float) -> float:
            return n_rot * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(dimension(beta_fast)))
        high = min(n_rot - 1, math.ceil(dimension(beta_slow)))
        ramp = 1 - np.clip((np.arange(n_rot // 2) - low) / max(0.001, high - low), 0, 1)
        return frequencies * (ramp + (1 - ramp) / factor), 1.0 + 0.1 * math.log(factor)
