"""The network: `record` writes the forward pass of a model down as a plan, once.

This is the only place where the network is written. A step feeds `x` with embedding rows, rotary tables, and the rows'
positions and page tables; out come the logits of the rows that were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import LayerConfig, ModelConfig
from .kernels import abi
from .kv_cache import KVCache
from .plan import Buffer, Plan, aligned_zeros
from .weights import Matrix, Vector, Weights


@dataclass(eq=False)
class LayerWeights:
    """One block's tensors, under their GGUF names. Optional ones are None where the file has none."""

    attn_norm: Vector
    attn_qkv: list[Matrix]
    attn_output: Matrix
    ffn_norm: Vector
    ffn_gate_up: list[Matrix]
    ffn_down: Matrix


@dataclass(eq=False)
class ModelWeights:
    """All tensors of a model."""

    layers: list[LayerWeights]
    output_norm: Vector
    output: Matrix


def load_weights(config: ModelConfig, weights: Weights) -> ModelWeights:
    """Ask for every tensor that the configuration needs; shapes are checked here."""
    n_embd = config.n_embd
    layers = []
    for index, layer in enumerate(config.layers):
        block = f"blk.{index}."

        def vector(name: str, n: int, block: str = block) -> Vector | None:
            return weights.vector(block + name, n, optional=True)

        q_width, kv_width = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        v_width = layer.n_kv_heads * layer.v_dim
        layers.append(
            LayerWeights(
                attn_norm=weights.vector(block + "attn_norm.weight", n_embd),
                attn_qkv=weights.fused(
                    (
                        (block + "attn_q.weight", q_width, "q"),
                        (block + "attn_k.weight", kv_width, "k"),
                        (block + "attn_v.weight", v_width, "v"),
                    ),
                    n_embd,
                    (vector("attn_q.bias", q_width), vector("attn_k.bias", kv_width), vector("attn_v.bias", v_width)),
                ),
                attn_output=weights.matrix(
                    block + "attn_output.weight", n_embd, layer.n_heads * layer.v_dim, vector("attn_output.bias", n_embd)
                ),
                ffn_norm=weights.vector(block + "ffn_norm.weight", n_embd),
                ffn_gate_up=weights.fused(
                    ((block + "ffn_gate.weight", layer.n_ff, "ffn_gate"), (block + "ffn_up.weight", layer.n_ff, "ffn_up")),
                    n_embd,
                ),
                ffn_down=weights.matrix(block + "ffn_down.weight", n_embd, layer.n_ff),
            )
        )
    tied = not weights.has("output.weight")
    return ModelWeights(
        layers=layers,
        output_norm=weights.vector("output_norm.weight", n_embd),
        output=weights.matrix("token_embd.weight" if tied else "output.weight", config.n_vocab, n_embd),
    )


class StepInputs:
    """What a step is fed with, in memory that the plan's kernels read."""

    def __init__(self, config: ModelConfig, plan: Plan):
        n = plan.max_rows
        self.rows = aligned_zeros(n * abi.ROW_BYTES).view(np.int64).reshape(n, -1)
        self.blocks = aligned_zeros(n * abi.BLOCK_BYTES).view(np.int64).reshape(n, -1)
        self.n_blocks = np.zeros(1, np.int64)
        self.ropes = [np.zeros((n, rope.n_rot // 2, 2), np.float32) for rope in config.ropes]
        self.out_index = np.zeros(n, np.int64)


@dataclass(eq=False)
class Network:
    """A recorded plan with its ends, and all that its kernels point to."""

    plan: Plan
    inputs: StepInputs
    x: Buffer
    logits: Buffer
    buffers: dict[str, Buffer]
    attention: Attention
    weights: ModelWeights


def record(config: ModelConfig, weights: ModelWeights, cache: KVCache, max_rows: int, n_threads: int) -> Network:
    """Write the forward pass down."""
    plan = Plan(max_rows, n_threads)
    inputs = StepInputs(config, plan)
    widest = max(config.layers, key=lambda layer: layer.n_heads * layer.head_dim)
    n_embd, n_ff = config.n_embd, max(layer.n_ff for layer in config.layers)
    q_width = widest.n_heads * widest.head_dim
    k_width, v_width = widest.n_kv_heads * widest.head_dim, widest.n_kv_heads * widest.v_dim

    x = plan.buffer("x", n_embd)
    h = plan.buffer("h", n_embd)
    qkv = plan.buffer("qkv", q_width + k_width + v_width)
    attn_out = plan.buffer("attn_out", widest.n_heads * widest.v_dim)
    gate_up = plan.buffer("ffn_gate_up", 2 * n_ff)
    act = plan.buffer("ffn_act", n_ff)
    x_out = plan.buffer("x_out", n_embd)
    h_out = plan.buffer("final_norm", n_embd)
    logits = plan.buffer("logits", config.n_vocab)

    attention = Attention(config, plan, inputs, cache)
    for index, (layer, w) in enumerate(zip(config.layers, weights.layers, strict=True)):
        plan.layer(index)
        q, k, v = (
            qkv.columns(0, q_width, "q"),
            qkv.columns(q_width, k_width, "k"),
            qkv.columns(q_width + k_width, v_width, "v"),
        )
        plan.norm("attn_norm", config.norm, config.norm_eps, x, w.attn_norm, h)
        plan.linear("qkv", h, w.attn_qkv, qkv)
        attention.record(index, layer, q, k, v, attn_out)
        plan.quantize("attn_out", attn_out)
        plan.linear("resid_mid", attn_out, [w.attn_output], x, accumulate=True, scale=config.residual_scale)
        plan.norm("ffn_norm", config.norm, config.norm_eps, x, w.ffn_norm, h)
        plan.linear("ffn_gate_up", h, w.ffn_gate_up, gate_up)
        plan.activate("ffn_act", config.activation, gate_up.columns(0, n_ff, "ffn_gate"), gate_up.columns(n_ff, n_ff, "ffn_up"), act)
        plan.linear("resid_post", act, [w.ffn_down], x, accumulate=True, scale=config.residual_scale)
    plan.layer(None)
    plan.gather("out_rows", x, inputs.out_index.ctypes.data, x_out)
    plan.norm("final_norm", config.norm, config.norm_eps, x_out, weights.output_norm, h_out, rows=plan.out_rows)
    plan.linear("logits", h_out, [weights.output], logits, rows=plan.out_rows, scale=config.logit_scale)
    buffers = {b.name: b for b in (x, h, qkv, attn_out, gate_up, act, x_out, h_out, logits)}
    return Network(plan, inputs, x, logits, buffers, attention, weights)


class Attention:
    """Records rotary positions, cache writes and attention of each layer."""

    def __init__(self, config: ModelConfig, plan: Plan, inputs: StepInputs, cache: KVCache):
        self.config, self.plan, self.inputs, self.cache = config, plan, inputs, cache
        group = max(layer.n_heads // layer.n_kv_heads for layer in config.layers)
        self.max_rows = max(48, group)
        # Tokens of a sequence that one unit of work attends for: their rows share each page that is read.
        self.block_tokens = max(1, self.max_rows // group)
        self.max_partitions = -(-cache.n_pages * abi.PAGE // abi.PARTITION)
        sizes = [
            64 * layer.n_kv_heads + layer.n_heads * self.max_partitions * (64 + 4 * _padded(layer.v_dim))
            for layer in config.layers
        ]
        self.partials = aligned_zeros(max(sizes))

    def record(self, index: int, layer: LayerConfig, q: Buffer, k: Buffer, v: Buffer, out: Buffer) -> None:
        plan, pool, kv_type = self.plan, self.cache.layers[index], self.cache.kv_type
        rope = None if layer.rope is None else self.config.ropes[layer.rope]
        table = self.inputs.ropes[layer.rope or 0]
        shape = {
            "n_heads": layer.n_heads, "n_kv_heads": layer.n_kv_heads, "head_dim": layer.head_dim, "v_dim": layer.v_dim,
            "pool": pool.address, "page_bytes": pool.page_bytes, "head_bytes": pool.head_bytes, "v_offset": pool.v_offset,
            "pages": 0,
        }
        plan.add(
            "rope", f"attention.rope:{rope.pairing if rope else 'halves'}-{kv_type}", abi.ROPE, q,
            rows=plan.rows, row_table=self.inputs.rows.ctypes.data,
            q=q.address, q_stride=q.stride, k=k.address, k_stride=k.stride, v=v.address, v_stride=v.stride,
            n_rot=rope.n_rot if rope else 0, offset=rope.offset if rope else 0,
            cos_sin=table.ctypes.data, table_stride=table.strides[0], **shape,
        )
        rows = self.max_rows
        plan.need_scratch(4 * (
            (layer.head_dim + _padded(layer.v_dim)) * abi.PAGE + rows * (layer.head_dim + abi.PAGE + 2 * _padded(layer.v_dim) + 4)
        ))
        plan.add(
            "attn_out", f"attention.attend:{kv_type}", abi.ATTEND, out,
            blocks=self.inputs.blocks.ctypes.data, n_blocks=self.inputs.n_blocks.ctypes.data,
            q=q.address, q_stride=q.stride, out=out.address, out_stride=out.stride,
            scale=float(self.config.attention_scale), softcap=0.0,
            window_left=layer.window - 1 if layer.window else 2**30, window_right=2**30, causal=int(self.config.causal),
            slopes=0, sinks=0, scratch=0, scratch_stride=0, partials=self.partials.ctypes.data, max_rows=rows,
            max_partitions=self.max_partitions, **shape,
        )


def _padded(n: int) -> int:
    return -(-n // 32) * 32
