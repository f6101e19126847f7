"""Softmax attention over the cache: a block's tensors are asked for here, and its ops are recorded, for full and windowed
layers with any of the steps around the scores (head norms, ALiBi, caps, sinks), and for latent attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .buffers import Buffer, aligned_zeros, padded
from .config import LayerConfig, ModelConfig
from .kernels import abi
from .kernels.formats import PANEL_ROWS
from .kv_cache import KVCache
from .plan import Plan
from .step import StepInputs
from .weights import Vector, Weights, vector_of


@dataclass(eq=False)
class Norm:
    """Weight and bias of a norm of the residual stream, or of each head."""

    weight: Vector | None
    bias: Vector | None = None
    weight_stride: int = 0  # bytes from one head's weights to the next one's
    per_head: bool = True

    @classmethod
    def load(cls, weights: Weights, name: str, n: int) -> Norm | None:
        """The norm with this name over n values; None if the file has none."""
        if not weights.expects(f"{name}.weight"):
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
                return cls(weights.vector(f"{name}.weight", head_dim))


class AttentionWorkspace:
    """What all attention layers of a plan share: how rows are dealt out, and memory for partial results."""

    def __init__(self, config: ModelConfig, plan: Plan, inputs: StepInputs, cache: KVCache):
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
            f"attention.rope:{rope.pairing if rope else 'halves'}-{self.cache.kv_type}",
            abi.ROPE,
            q,
            row_table=inputs.rows.ctypes.data,
            q=q.address,
            q_stride=q.stride,
            k=k.address,
            k_stride=k.stride,
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
            4 * ((layer.head_dim + v_padded) * abi.PAGE + rows * (layer.head_dim + abi.PAGE + 2 * v_padded + 4))
        )
        everything = 2**30
        left = right = everything
        if layer.window:
            left, right = (layer.window - 1, everything) if config.causal else (layer.window // 2, layer.window // 2)
        latent = "-latent" if layer.mixer == "latent" else ""
        self.plan.add(
            "attn_out",
            f"attention.attend:{self.cache.kv_type}{latent}",
            abi.ATTEND,
            out,
            blocks=self.inputs.blocks.ctypes.data,
            n_blocks=self.inputs.n_blocks.ctypes.data,
            q=q.address,
            q_stride=q.stride,
            out=out.address,
            out_stride=out.stride,
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

    def record(self, plan: Plan, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = attention of h; `onto` as in `Plan.linear`."""
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
        workspace.attend(config, index, q, out, self.slopes, self.sinks)
        if config.gated_attention:
            self._gate(plan, gated_q, out)
        plan.quantize("attn_out", out)
        plan.linear("attn_output", out, self.output, y, **onto)

    def _gate(self, plan: Plan, gated_q: Buffer, out: Buffer) -> None:
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

    def _norm_heads(self, plan: Plan, q: Buffer, k: Buffer) -> None:
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


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1) on the compressed cache.

    A position keeps its latent vector c and one rotated key for all heads. The matrices that would make keys and values
    from c are applied to q and to the result instead, so that attention runs on c itself.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str):
        self.config, self.index = config, index
        self.layer, self.latent = config.layers[index], config.latent
        latent, n_embd, n_heads = config.latent, config.n_embd, self.layer.n_heads
        q_width = n_heads * (latent.n_plain + latent.n_rot)
        self.q_a = None
        if weights.has(prefix + "attn_q_a.weight"):
            self.q_a = weights.matrix(prefix + "attn_q_a.weight", latent.q_rank, n_embd)
            self.q_a_norm = Norm.load(weights, prefix + "attn_q_a_norm", latent.q_rank)
            self.q = weights.matrix(prefix + "attn_q_b.weight", q_width, latent.q_rank)
        else:
            self.q = weights.matrix(prefix + "attn_q.weight", q_width, n_embd)
        self.kv_a = weights.matrix(prefix + "attn_kv_a_mqa.weight", latent.kv_rank + latent.n_rot, n_embd)
        self.kv_a_norm = weights.vector(prefix + "attn_kv_a_norm.weight", latent.kv_rank)
        if weights.has(prefix + "attn_kv_b.weight"):
            self.k_b, self.v_b = self._split(weights, prefix + "attn_kv_b.weight")
        else:
            self.k_b = weights.stacked(prefix + "attn_k_b.weight", n_heads, latent.kv_rank, latent.n_plain)
            self.v_b = weights.stacked(prefix + "attn_v_b.weight", n_heads, latent.v_dim, latent.kv_rank)
        self.output = weights.matrix(prefix + "attn_output.weight", n_embd, n_heads * latent.v_dim)

    def _split(self, weights: Weights, name: str) -> tuple:
        """Older files: one matrix makes the keys and values of all heads. The keys' part is needed transposed."""
        latent, n_heads = self.latent, self.layer.n_heads
        n_outputs = latent.n_plain + latent.v_dim
        values = weights.floats(name, n_heads * n_outputs, latent.kv_rank).reshape(n_heads, n_outputs, latent.kv_rank)
        kept_as = "F32" if weights.type_name(name) in ("F32", "BF16") else "F16"
        k_b = np.swapaxes(values[:, : latent.n_plain], 1, 2)
        return (
            weights.stacked_floats(name, k_b, kept_as, "k_b"),
            weights.stacked_floats(name, values[:, latent.n_plain :], kept_as, "v_b"),
        )

    def record(self, plan: Plan, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = attention of h; `onto` as in `Plan.linear`."""
        config, latent, n_heads = self.config, self.latent, self.layer.n_heads
        head, key = latent.n_plain + latent.n_rot, latent.kv_rank + latent.n_rot
        if self.q_a is not None:
            q_a = plan.buffer("q_a", latent.q_rank)
            plan.linear("q_a", h, self.q_a, q_a)
            plan.norm("q_a_norm", config.norm, config.norm_eps, q_a, self.q_a_norm.weight, q_a)
        q = plan.buffer("q", n_heads * head)
        plan.linear("q", h if self.q_a is None else q_a, self.q, q)
        kv = plan.buffer("kv", key)
        plan.linear("kv", h, self.kv_a, kv)
        c = kv.columns(0, latent.kv_rank, "kv")
        plan.norm("kv_a_norm", config.norm, config.norm_eps, c, self.kv_a_norm, c)
        # q in the space of c: each head's plain part times k_b, then its rotated part.
        plain_step = padded(latent.n_plain)
        plain, absorbed = plan.buffer("q_plain", n_heads * plain_step), plan.buffer("q_absorbed", n_heads * key)
        plan.copy_heads("q_plain", q, head, plain, plain_step, latent.n_plain, n_heads)
        plan.quantize("q_plain", plain)
        plan.linear_each("k_b", plain, self.k_b, absorbed, plain_step, key)
        rotated = q.columns(latent.n_plain, q.width - latent.n_plain, "q_rot")
        target = absorbed.columns(latent.kv_rank, absorbed.width - latent.kv_rank, "q_rot")
        plan.copy_heads("q_rot", rotated, head, target, key, latent.n_rot, n_heads)
        workspace.rotate_and_store(config, self.index, absorbed, kv, None)
        context = plan.buffer("attn_latent", n_heads * latent.kv_rank)
        workspace.attend(config, self.index, absorbed, context)
        plan.quantize("attn_latent", context)
        # Panels are written whole, so each head's values get room for whole panels first.
        v_step = -(-latent.v_dim // PANEL_ROWS) * PANEL_ROWS
        values, out = plan.buffer("attn_values", n_heads * v_step), plan.buffer("attn_out", n_heads * latent.v_dim)
        plan.linear_each("v_b", context, self.v_b, values, latent.kv_rank, v_step)
        plan.copy_heads("attn_out", values, v_step, out, latent.v_dim, latent.v_dim, n_heads)
        plan.quantize("attn_out", out)
        plan.linear("attn_output", out, self.output, y, **onto)


MIXERS = {"attention": Attention, "latent": LatentAttention}
