"""Softmax attention over the cache: a block's tensors are asked for here, and its ops are recorded.

Full and windowed layers, with the optional steps around the scores: norms of heads, ALiBi, caps, sinks, gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..buffers import Buffer, aligned_zeros, padded
from ..config import LayerConfig, ModelConfig
from ..kernels import abi
from ..kv_cache import KVCache
from ..plan_writer import PlanWriter
from ..step import StepInputs
from ..weights import Vector, Weights, vector_of


@dataclass(eq=False)
class Norm:
    """Weight and bias of a norm of the residual stream, or of each head."""

    weight: Vector | None
    bias: Vector | None = None
    weight_stride: int = 0  # bytes from one head's weights to the next one's
    per_head: bool = True

    @classmethod
    def load(cls, weights: Weights, name: str, n: int, optional: bool = True) -> Norm | None:
        """The norm with this name over n values; None if it is optional and the file has none."""
        if optional and not weights.expects(f"{name}.weight"):
            return None
        return cls(weights.vector(f"{name}.weight", n), weights.vector(f"{name}.bias", n, optional=True))

    @classmethod
    def load_heads(cls, weights: Weights, name: str, n_heads: int, head_dim: int) -> Norm | None:
        """A norm of heads: with the same weights for each, with weights per head, or over all heads at once."""
        match weights.shape(f"{name}.weight"):
            case ():
                return None
            case (n,) if n == n_heads * head_dim != head_dim:
                bias = weights.vector(f"{name}.bias", n, optional=True)
                return cls(weights.vector(f"{name}.weight", n), bias, per_head=False)
            case (_, _):
                weight = vector_of(weights.floats(f"{name}.weight", n_heads, head_dim))
                return cls(weight, weight_stride=4 * head_dim)
            case _:
                bias = weights.vector(f"{name}.bias", head_dim, optional=True)
                return cls(weights.vector(f"{name}.weight", head_dim), bias)


class AttentionWorkspace:
    """What all attention layers of a plan share: how rows are dealt out, and memory for partial results."""

    def __init__(self, config: ModelConfig, plan: PlanWriter, inputs: StepInputs, cache: KVCache):
        self.plan, self.inputs, self.cache = plan, inputs, cache
        group = max((layer.n_heads // layer.n_kv_heads for layer in config.attention_layers), default=1)
        self.max_rows = max(48, group)
        # Tokens of a sequence that one unit of work attends for: their rows share each page that is read.
        self.block_tokens = max(1, self.max_rows // group)
        self.max_partitions = -(-cache.n_pages * abi.PAGE // abi.PARTITION)
        sizes = [
            64 * layer.n_kv_heads + layer.n_heads * self.max_partitions * (64 + 4 * padded(layer.v_dim))
            for layer in config.attention_layers
        ]
        self.partials = aligned_zeros(max(sizes, default=0))

    def rotate_and_store(
        self,
        config: ModelConfig,
        index: int,
        q: Buffer,
        k: Buffer,
        v: Buffer | None,
        rotated: bool = True,
        stored: bool = True,
    ) -> None:
        """Rotate the heads of q and k, and write k and v into the cache."""
        layer, inputs = config.layers[index], self.inputs
        rope = config.ropes[layer.rope] if rotated and layer.rope is not None else None
        table = inputs.ropes[layer.rope] if rope else None
        shape = self._shape(layer, index)
        if v is None:
            shape["v_dim"] = 0
        if not stored:
            shape["pool"] = 0
        self.plan.add(
            "rope",
            f"rope.rotate_and_store:{rope.pairing if rope else 'halves'}-{self.cache.kv_type}",
            abi.ROPE,
            q,
            row_table=inputs.rows.ctypes.data,
            **q.at("q"),
            **k.at("k"),
            v=v.address if v else 0,
            v_stride=v.stride if v else 0,
            n_rot=rope.n_rot if rope else 0,
            offset=rope.offset if rope else 0,
            cos_sin=table.ctypes.data if rope else 0,
            table_stride=table.strides[0] if rope else 0,
            **shape,
        )

    def attend(
        self,
        config: ModelConfig,
        index: int,
        q: Buffer,
        out: Buffer,
        slopes: Vector | None = None,
        sinks: Vector | None = None,
    ) -> None:
        """out = softmax(q·K · scale) V."""
        layer, rows = config.layers[index], self.max_rows
        v_padded = padded(layer.v_dim)
        self.plan.need_scratch(
            4 * ((layer.head_dim + v_padded) * abi.PAGE + rows * (layer.head_dim + abi.PAGE + 2 * v_padded + 16))
            + 4 * 6 * (rows + 15)
        )
        everything = 2**30
        left = right = everything
        if layer.window:
            left, right = (layer.window - 1, everything) if config.causal else (layer.window // 2, layer.window // 2)
        latent = "-latent" if layer.mixer == "latent" else ""
        group = layer.n_heads // layer.n_kv_heads
        self.plan.add(
            "attn_out",
            (
                f"attention_one.attend:{self.cache.kv_type}-{group}{latent}",
                f"attention.attend:{self.cache.kv_type}{latent}",
            ),
            abi.ATTEND,
            out,
            blocks=self.inputs.blocks.ctypes.data,
            n_blocks=self.inputs.n_blocks.ctypes.data,
            **q.at("q"),
            **out.at("out"),
            scale=float(config.attention_scale),
            softcap=float(config.score_cap),
            window_left=left,
            window_right=right,
            causal=int(config.causal),
            slopes=slopes.address if slopes else 0,
            sinks=sinks.address if sinks else 0,
            scratch=0,
            scratch_stride=0,
            partials=self.partials.ctypes.data,
            max_rows=rows,
            max_partitions=self.max_partitions,
            **self._shape(layer, index),
        )

    def _shape(self, layer: LayerConfig, index: int) -> dict[str, int]:
        pool = self.cache.layers[index]
        return {
            "n_heads": layer.n_heads,
            "n_kv_heads": layer.n_kv_heads,
            "head_dim": layer.head_dim,
            "v_dim": layer.v_dim,
            "pool": pool.address,
            "page_bytes": pool.page_bytes,
            "head_bytes": pool.head_bytes,
            "v_offset": pool.v_offset,
            "pages": pool.group,
        }


def alibi_slopes(n_heads: int, bias: float) -> np.ndarray:
    """ALiBi (Press et al. 2022): a geometric series of slopes, interleaved where heads are no power of two."""
    power = 2 ** (n_heads.bit_length() - 1)
    heads = np.arange(n_heads)
    exponents = np.where(heads < power, (heads + 1) / power, (2 * (heads - power) + 1) / (2 * power))
    return (2.0 ** (-bias * exponents)).astype(np.float32)


class Attention:
    """Attention with keys and values per head."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str):
        self.config, self.index = config, index
        self.layer = layer = config.layers[index]
        widths = (layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim, layer.n_kv_heads * layer.v_dim)
        n_embd = config.n_embd

        def bias(name: str, n: int) -> Vector | None:
            return weights.vector(f"{prefix}{name}.bias", n, optional=True)

        if weights.has(prefix + "attn_qkv.weight"):
            names = ((prefix + "attn_qkv.weight", sum(widths), "qkv"),)
            self.qkv = weights.fused(names, n_embd, (bias("attn_qkv", sum(widths)),))
            starts = (0, widths[0], widths[0] + widths[1])
        else:
            if config.gated_attention:
                widths = (2 * widths[0], *widths[1:])
            names = tuple((f"{prefix}attn_{part}.weight", n, part) for part, n in zip("qkv", widths, strict=True))
            biases = tuple(bias(f"attn_{part}", n) for part, n in zip("qkv", widths, strict=True))
            self.qkv = weights.fused(names, n_embd, biases)
            starts = self.qkv.columns
        self.columns = tuple(zip(starts, widths, "qkv", strict=True))
        self.q_norm = Norm.load_heads(weights, prefix + "attn_q_norm", layer.n_heads, layer.head_dim)
        self.k_norm = Norm.load_heads(weights, prefix + "attn_k_norm", layer.n_kv_heads, layer.head_dim)
        if config.head_norm_weightless and layer.rope is not None:
            self.q_norm = self.k_norm = Norm(None)
        self.sinks = weights.vector(prefix + "attn_sinks.weight", layer.n_heads, optional=True)
        self.slopes = vector_of(alibi_slopes(layer.n_heads, config.alibi_bias)) if config.alibi_bias else None
        self.output = weights.matrix(
            prefix + "attn_output.weight", n_embd, layer.n_heads * layer.v_dim, bias("attn_output", n_embd)
        )

    def record(self, plan: PlanWriter, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = attention of h; `onto` as in `PlanWriter.linear`."""
        config, layer, index = self.config, self.layer, self.index
        qkv = plan.buffer("qkv", self.qkv.width)
        out = plan.buffer("attn_out", layer.n_heads * layer.v_dim)
        plan.linear("qkv", h, self.qkv, qkv)
        if config.qkv_clamp:
            plan.limit("qkv", "clamp", config.qkv_clamp, qkv)
        q, k, v = (qkv.columns(*part) for part in self.columns)
        gated_q = q
        if config.gated_attention:
            q = plan.buffer("q", layer.n_heads * layer.head_dim)
            plan.copy_heads("q", gated_q, 2 * layer.head_dim, q, layer.head_dim, layer.head_dim, layer.n_heads)
        norm_first = not config.head_norm_after_rope
        if norm_first:
            self._norm_heads(plan, q, k)
            workspace.rotate_and_store(config, index, q, k, v)
        else:
            workspace.rotate_and_store(config, index, q, k, v, stored=False)
            self._norm_heads(plan, q, k)
            workspace.rotate_and_store(config, index, q, k, v, rotated=False)
        if config.warming is not None and (config.warming.everywhere or layer.rope is None):
            plan.weigh("q", q, workspace.inputs.warmth.ctypes.data)
        workspace.attend(config, index, q, out, self.slopes, self.sinks)
        if config.gated_attention:
            self._gate(plan, gated_q, out)
        plan.quantize("attn_out", out)
        plan.linear("attn_output", out, self.output, y, **onto)

    def _gate(self, plan: PlanWriter, gated_q: Buffer, out: Buffer) -> None:
        """out = out · sigmoid(gate), where each head's gate lies behind its query."""
        dim = self.layer.head_dim
        plan.add(
            "attn_gate",
            "gating.sigmoid_gate",
            abi.SIGMOID_GATE,
            out,
            n=dim,
            segments=self.layer.n_heads,
            x=out.address,
            x_stride=out.stride,
            gate=gated_q.address + 4 * dim,
            gate_stride=gated_q.stride,
            gate_segment=8 * dim,
        )

    def _norm_heads(self, plan: PlanWriter, q: Buffer, k: Buffer) -> None:
        config, layer = self.config, self.layer
        for stage, norm, x, n_heads in (("q", self.q_norm, q, layer.n_heads), ("k", self.k_norm, k, layer.n_kv_heads)):
            if norm is not None:
                plan.norm(
                    stage,
                    config.norm,
                    config.norm_eps,
                    x,
                    norm.weight,
                    x,
                    bias=norm.bias,
                    segments=n_heads if norm.per_head else 1,
                    weight_stride=norm.weight_stride,
                )
