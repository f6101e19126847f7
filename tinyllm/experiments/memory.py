"""The memory of keys and values: what a model keeps of each position goes in, bytes by context length come out.

Nothing but sizes is needed, so no weights are loaded; the sizes of well-known models stand here from their papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..config import LayerConfig, ModelConfig
from ..errors import InvalidParameterError, UnsupportedModelError
from ..kernels.abi import CACHE_TYPES, PAGE
from ..metadata.latent import LatentConfig

DEFAULT_LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class CacheDesign:
    """What a model keeps of a sequence: keys and values of `layers` (those with attention), as `layout` says.

    `latent`: sizes of the heads behind a latent cache. `state_bytes`: of a state of the recurrent layers, whatever the
    length.
    """

    model: str
    layout: str
    layers: tuple[LayerConfig, ...]
    n_ctx_train: int
    latent: LatentConfig | None = None
    state_bytes: int = 0

    @classmethod
    def of(cls, config: ModelConfig, model: str) -> CacheDesign:
        """The design of a file. Raises UnsupportedModelError for an encoder, which keeps nothing between texts."""
        if not config.causal:
            raise UnsupportedModelError(f"{model} is an encoder: it keeps no keys and values")
        layers = tuple(config.attention_layers)
        state_bytes = sum(-(-n_bytes // 64) * 64 for n_bytes in config.state_bytes)  # each at a cache line
        return cls(model, layout_of(layers), layers, config.n_ctx_train, config.latent, state_bytes)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The numbers of KV heads that occur, in order of size."""
        return tuple(sorted({layer.n_kv_heads for layer in self.layers}))

    def fits(self, kv_type: str) -> bool:
        """Whether heads can be kept in this type: q8_0 has a scale for 32 numbers."""
        multiple = CACHE_TYPES[kv_type].multiple
        return all(layer.head_dim % multiple == 0 and layer.v_dim % multiple == 0 for layer in self.layers)

    def bytes_per_position(self, kv_type: str) -> int:
        """Bytes that one position takes in all layers together."""
        return sum(page_bytes(layer, kv_type) for layer in self.layers) // PAGE

    def bytes_at(self, n: int, kv_type: str) -> int:
        """Bytes of the pages of a sequence of n tokens, and of its recurrent state.

        Σ over layers of pages(n, window) · bytes of a page.
        """
        return self.state_bytes + sum(pages(n, layer.window) * page_bytes(layer, kv_type) for layer in self.layers)

    def alternatives(self) -> Iterator[CacheDesign]:
        """The same model with its keys and values kept in other ways: MHA, MQA, and without windows.

        MHA (Vaswani et al. 2017, arXiv:1706.03762) has a pair of key and value for each query head, MQA (Shazeer 2019,
        arXiv:1911.02150) one for all, GQA (Ainslie et al. 2023, arXiv:2305.13245) one for each group. Heads behind a
        latent cache (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1) have n_plain + n_rot numbers in a key.
        """
        if any(layer.window for layer in self.layers):
            yield replace(
                self, layout=f"{self.layout}, no windows", layers=tuple(replace(x, window=0) for x in self.layers)
            )
        heads = [_expanded(layer, self.latent) for layer in self.layers]
        for layout, one in (("MHA", False), ("MQA", True)):
            layers = tuple(replace(layer, n_kv_heads=1 if one else layer.n_heads) for layer in heads)
            if layers and layers != self.layers:
                yield replace(self, layout=layout, layers=layers)


@dataclass(frozen=True)
class Memory:
    """One line of results. `n_bytes`: for each of the lengths; `per_position`: written for each token."""

    design: CacheDesign
    kv_type: str
    per_position: int
    n_bytes: tuple[int, ...]


def pages(n: int, window: int) -> int:
    """Pages of 32 positions that a sequence of n tokens holds in a layer.

    ⌈n / 32⌉ without a window (0). A window of w keeps the pages from that on which the token 32 positions back sees
    first, ⌊(n − 32 − w + 1) / 32⌋: so the last tokens can be taken back.
    """
    first = max(0, n - PAGE - window + 1) // PAGE if window else 0
    return -(-n // PAGE) - first


def page_bytes(layer: LayerConfig, kv_type: str) -> int:
    """Bytes of a page of one layer: 32 positions · KV heads · (key numbers + value numbers) · bytes per number.

    A number takes 4 bytes in f32, 2 in f16, and 34/32 in q8_0: a byte, and two bytes of scale for 32 numbers. Values
    are padded to a multiple of 32 numbers; a latent cache has none, for they are part of its keys.
    """
    v_dim = 0 if layer.mixer == "latent" else -(-layer.v_dim // 32) * 32
    numbers = PAGE * layer.n_kv_heads * (layer.head_dim + v_dim)
    return numbers // 32 * CACHE_TYPES[kv_type].block_bytes


def measure(designs: Sequence[CacheDesign], lengths: Sequence[int], kv_types: Sequence[str]) -> list[Memory]:
    """The bytes of each design in each type that its heads can be kept in, at each length in tokens.

    Raises InvalidParameterError for a type that is unknown, or a length below 1.
    """
    if unknown := [kv_type for kv_type in kv_types if kv_type not in CACHE_TYPES]:
        raise InvalidParameterError(f"cache type {unknown[0]!r} is unknown: use one of {', '.join(CACHE_TYPES)}")
    if not lengths or min(lengths) < 1:
        raise InvalidParameterError("context lengths are numbers of tokens from 1 on")
    return [
        Memory(
            design,
            kv_type,
            design.bytes_per_position(kv_type),
            tuple(design.bytes_at(n, kv_type) for n in lengths),
        )
        for design in designs
        for kv_type in kv_types
        if design.fits(kv_type)
    ]


def default_lengths(designs: Sequence[CacheDesign]) -> list[int]:
    """The usual lengths up to the longest context that one of the designs was trained for, and that context."""
    longest = max(design.n_ctx_train for design in designs)
    return [n for n in DEFAULT_LENGTHS if n < longest] + [longest]


def layout_of(layers: Sequence[LayerConfig]) -> str:
    """The name of how keys and values are shared by heads: MHA, GQA, MQA or MLA; "none" without attention."""
    if not layers:
        return "none"
    if all(layer.mixer == "latent" for layer in layers):
        return "MLA"
    if all(layer.n_kv_heads == layer.n_heads for layer in layers):
        return "MHA"
    return "MQA" if all(layer.n_kv_heads == 1 for layer in layers) else "GQA"


def _expanded(layer: LayerConfig, latent: LatentConfig | None) -> LayerConfig:
    """A layer whose cache holds heads, also where it holds what they are made of."""
    if latent is None:
        return layer
    return replace(layer, head_dim=latent.n_plain + latent.n_rot, v_dim=latent.v_dim, mixer="attention")


def _published(
    model: str, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, n_ctx_train: int, window: int = 0
) -> CacheDesign:
    layers = (LayerConfig(n_heads, n_kv_heads, head_dim, head_dim, None, window, 0),) * n_layers
    return CacheDesign(model, layout_of(layers), layers, n_ctx_train)


def _deepseek_v3() -> CacheDesign:
    latent = LatentConfig(q_rank=1536, kv_rank=512, n_rot=64, n_plain=128, v_dim=128)
    layer = LayerConfig(128, 1, latent.kv_rank + latent.n_rot, latent.kv_rank, None, 0, 0, "latent")
    return CacheDesign("DeepSeek-V3 (671B)", "MLA", (layer,) * 61, 131072, latent)


PUBLISHED = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1.
    "gpt-3": _published("GPT-3 (175B)", 96, 96, 96, 128, 2048),
    # Jiang et al. 2023, arXiv:2310.06825, table 1.
    "mistral-7b": _published("Mistral 7B v0.1", 32, 32, 8, 128, 8192, window=4096),
    # Llama team 2024, arXiv:2407.21783, table 3; 128 = 16384 / 128 heads.
    "llama-3.1-405b": _published("Llama 3.1 (405B)", 126, 128, 8, 128, 131072),
    # DeepSeek-AI 2024, arXiv:2412.19437, section 4.2 (sizes) and 4.3 (context).
    "deepseek-v3": _deepseek_v3(),
}
"""Designs of models that are not here, from the sizes in their papers."""
