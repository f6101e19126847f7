"""What a model file holds, for people: an open GGUF file goes in, sizes and counts by type and by component come out.

Works for any architecture, known to the engine or not, and for any metadata: a field that is missing or of the wrong
kind is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyllm.kernels.abi import CACHE_TYPES
from tinyllm.kernels.formats import TILE_OF

if TYPE_CHECKING:
    from tinyllm.gguf_file import GGUFFile, TensorInfo

FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S"},
    **{27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0"},
    38: "MXFP4_MOE",
}
"""Names of `general.file_type`: the recipe by which the whole file was quantized."""

_COMPONENTS = (
    ("norms", r"norm"),
    ("embedding", r"^(token_embd|position_embd|token_types|per_layer_token_embd)\b"),
    ("output", r"^(output|cls)\b"),
    ("experts", r"ffn_.*exps|ffn_(gate|up|down)\.\d+\.|ffn_gate_inp|exp_probs|shexp"),
    ("attention", r"attn|attention"),
    ("ffn", r"ffn"),
    ("recurrent", r"ssm|time_mix|channel_mix|shortconv"),
)
"""Components in the order in which a tensor's name is tried; `other` takes the rest."""

_ORDER = ("embedding", "attention", "ffn", "experts", "recurrent", "norms", "output", "other")


@dataclass(frozen=True)
class Share:
    """A part of the model's tensors: those of one type, or of one component."""

    name: str
    n_tensors: int
    parameters: int
    n_bytes: int
    packed_bytes: int
    """Bytes in memory, where each type is repacked into a tile that holds it without loss."""

    @property
    def packed_bits_per_weight(self) -> float:
        return 8 * self.packed_bytes / self.parameters if self.parameters else 0.0

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a model file. What the file does not say is None.

    `n_heads`, `n_kv_heads` and `n_ff` are lists where they differ from layer to layer. `active_parameters` are those
    that one token touches: fewer than `parameters` in models with experts. `kv_values_per_token` is how many numbers a
    token adds to the KV cache.
    """

    architecture: str | None
    name: str | None
    licence: str | None
    quantization: str | None
    gguf_version: int
    n_files: int
    n_bytes: int
    parameters: int
    active_parameters: int
    n_ctx: int | None
    n_layers: int | None
    n_embd: int | None
    n_heads: int | list[int] | None
    n_kv_heads: int | list[int] | None
    head_dim: int | None
    n_ff: int | list[int] | None
    n_experts: int | None
    n_experts_used: int | None
    sliding_window: int | None
    n_vocab: int | None
    tokenizer: str | None
    pre_tokenizer: str | None
    has_chat_template: bool
    tied_output: bool
    kv_values_per_token: int
    types: tuple[Share, ...]
    components: tuple[Share, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(share.n_bytes for share in self.types)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all tensors in memory."""
        return sum(share.packed_bytes for share in self.types)

    def kv_bytes(self, n_ctx: int, kv_type: str = "f16") -> int:
        """Bytes of the KV cache of `n_ctx` tokens: 2 · layers · KV heads · head size · tokens · bytes per number."""
        return round(self.kv_values_per_token * n_ctx * CACHE_TYPES[kv_type].block_bytes / 32)

    def memory(self, n_ctx: int, kv_type: str = "f16") -> int:
        """Bytes that weights and KV cache take together with a context of `n_ctx` tokens."""
        return self.packed_bytes + self.kv_bytes(n_ctx, kv_type)

    def default_ctx(self) -> int:
        """The context that is used when none is asked for: the model's, but at most 4096."""
        return min(self.n_ctx or 4096, 4096)


def describe(file: GGUFFile) -> ModelInfo:
    """The facts about an open GGUF file, from its metadata and the list of its tensors; no tensor's data is read."""
    metadata, tensors = file.metadata, file.tensors
    architecture = _text(metadata, "general.architecture")

    def of_arch(key: str) -> int | list[int] | None:
        return _number(metadata, f"{architecture}.{key}")

    components = _shares(tensors, lambda tensor: component_of(tensor.name))
    parameters = sum(share.parameters for share in components)
    n_embd, n_heads = of_arch("embedding_length"), of_arch("attention.head_count")
    n_kv_heads = of_arch("attention.head_count_kv")
    n_experts, n_used = _single(of_arch("expert_count")), _single(of_arch("expert_used_count"))
    head_dim = _single(of_arch("attention.key_length")) or _quotient(n_embd, n_heads)
    value_dim = _single(of_arch("attention.value_length")) or head_dim
    return ModelInfo(
        architecture=architecture,
        name=_text(metadata, "general.name"),
        licence=_text(metadata, "general.license"),
        quantization=FILE_TYPES.get(_single(_number(metadata, "general.file_type"))),
        gguf_version=file.version,
        n_files=len(file.paths),
        n_bytes=file.n_bytes,
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(tensors, n_experts, n_used),
        n_ctx=_single(of_arch("context_length")),
        n_layers=_single(of_arch("block_count")),
        n_embd=_single(n_embd),
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=head_dim,
        n_ff=of_arch("feed_forward_length"),
        n_experts=n_experts or None,
        n_experts_used=n_used or None,
        sliding_window=_single(of_arch("attention.sliding_window")) or None,
        n_vocab=_vocabulary_size(metadata, tensors, architecture),
        tokenizer=_text(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=_text(metadata, "tokenizer.ggml.pre"),
        has_chat_template=_text(metadata, "tokenizer.chat_template") is not None,
        tied_output="token_embd.weight" in tensors and "output.weight" not in tensors,
        kv_values_per_token=_kv_values(
            tensors, n_heads if n_kv_heads is None else n_kv_heads, (head_dim or 0) + (value_dim or 0)
        )
        if metadata.get(f"{architecture}.attention.causal", True) is not False
        else 0,
        types=tuple(sorted(_shares(tensors, lambda tensor: tensor.type.name), key=lambda share: -share.n_bytes)),
        components=tuple(sorted(components, key=lambda share: _ORDER.index(share.name))),
    )


def component_of(name: str) -> str:
    """The component to which a tensor of this name belongs: embedding, attention, ffn, experts, norms, output, ..."""
    return next((component for component, pattern in _COMPONENTS if re.search(pattern, name)), "other")


def _shares(tensors: Mapping[str, TensorInfo], key: Any) -> list[Share]:
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors.values():
        groups.setdefault(key(tensor), []).append(tensor)
    return [
        Share(
            name, len(group), sum(t.n_elements for t in group), sum(t.n_bytes for t in group), sum(map(_packed, group))
        )
        for name, group in groups.items()
    ]


def _packed(tensor: TensorInfo) -> int:
    """Bytes of a tensor in memory: matrices in tiles, the rest as it is."""
    if len(tensor.shape) < 2 or tensor.type.name not in TILE_OF:
        return tensor.n_bytes
    return math.ceil(tensor.n_elements * TILE_OF[tensor.type.name].bits_per_weight / 8)


def _idle_parameters(tensors: Mapping[str, TensorInfo], n_experts: int | None, n_used: int | None) -> int:
    """Parameters of the experts that the router leaves out."""
    if not n_experts or not n_used or n_used > n_experts:
        return 0
    routed = re.compile(r"ffn_(gate_up|gate|up|down)_exps\.|ffn_(gate|up|down)\.\d+\.")
    in_experts = sum(tensor.n_elements for tensor in tensors.values() if routed.search(tensor.name))
    return in_experts - in_experts * n_used // n_experts


def _kv_values(tensors: Mapping[str, TensorInfo], n_kv_heads: int | list[int] | None, dims: int) -> int:
    """Numbers that one token adds to the KV cache: over the layers that have keys, KV heads · (key + value size)."""
    total = 0
    for layer in _layers_with_keys(tensors):
        if isinstance(n_kv_heads, list):
            total += dims * (n_kv_heads[layer] if layer < len(n_kv_heads) else 0)
        else:
            total += dims * (n_kv_heads or 0)
    return total


def _layers_with_keys(tensors: Mapping[str, TensorInfo]) -> set[int]:
    """Layers that keep keys and values: recurrent ones, whose q, k and v are one matrix as well, do not."""
    found: dict[str, set[int]] = {"k": set(), "qkv": set(), "recurrent": set()}
    for name in tensors:
        if match := re.match(r"blk\.(\d{1,9})\.(attn_(?P<kind>k|qkv|kv_a_mqa)\.weight$|ssm_)", name):
            kind = {None: "recurrent", "qkv": "qkv"}.get(match["kind"], "k")
            found[kind].add(int(match[1]))
    return found["k"] | (found["qkv"] - found["recurrent"])


def _vocabulary_size(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], architecture: str | None
) -> int | None:
    if (tensor := tensors.get("token_embd.weight")) is not None and len(tensor.shape) == 2:
        return tensor.shape[0]
    if stated := _single(_number(metadata, f"{architecture}.vocab_size")):
        return stated
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) and value else None


def _number(metadata: Mapping[str, Any], key: str) -> int | list[int] | None:
    """A whole number, or a list of them; one number when all in the list are the same."""
    value = metadata.get(key)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        if not value or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return None
        return value[0] if len(set(value)) == 1 else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _single(value: int | list[int] | None) -> int | None:
    return value if isinstance(value, int) else None


def _quotient(n_embd: int | list[int] | None, n_heads: int | list[int] | None) -> int | None:
    heads = max(n_heads) if isinstance(n_heads, list) else n_heads
    return n_embd // heads if isinstance(n_embd, int) and heads else None
