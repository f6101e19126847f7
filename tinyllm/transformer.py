"""The network: `record` writes the forward pass of a model down as a plan, once.

This is where the network is written; the `blocks_…` modules hold the halves of a block. A step feeds tokens, positions
and page tables; out come the logits of the rows asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .blocks import recurrent as blocks_recurrent
from .blocks.attention import Attention, AttentionWorkspace, Norm
from .blocks.ffn import FeedForward
from .blocks.latent import LatentAttention
from .blocks.moe import Experts
from .buffers import Buffer
from .config import ModelConfig
from .gguf.ggml_types import BLOCK_SIZES
from .kernels import abi
from .kernels.dequantize import decode
from .kernels.formats import EMBEDDED_BY_KERNEL
from .kv_cache import KVCache
from .plan import Op
from .plan_writer import PlanWriter
from .results import SingleResult
from .step import StepInputs
from .weights import Matrix, Weights

MIXERS = {"attention": Attention, "latent": LatentAttention} | blocks_recurrent.MIXERS
_DENSE = ("dense_2.weight", "dense_3.weight")


@dataclass(eq=False)
class Layer:
    """One block. Norms are None where the file has none.

    `attn_norm` and `ffn_norm` are of a half's input, `post_…` of its output before it is added to the residual stream,
    `…_output_norm` of the stream behind it. In a parallel block both halves read the stream at the block's beginning.
    """

    attn_norm: Norm | None
    mixer: Any
    post_attention_norm: Norm | None
    attn_output_norm: Norm | None
    ffn_norm: Norm | None
    ffn: FeedForward | Experts | None
    post_ffw_norm: Norm | None
    layer_output_norm: Norm | None
    parallel: bool

    @classmethod
    def load(cls, config: ModelConfig, index: int, weights: Weights) -> Layer:
        """Ask for a block's tensors; which of them exist says how it is built."""
        prefix, n_embd = f"blk.{index}.", config.n_embd

        def norm(name: str) -> Norm | None:
            return Norm.load(weights, prefix + name, n_embd)

        mixer = MIXERS[config.layers[index].mixer](config, index, weights, prefix)
        attn_norm, attn_norm_2, attn_output_norm = norm("attn_norm"), norm("attn_norm_2"), norm("attn_output_norm")
        post_attention_norm, ffn_norm, post_ffw_norm = (
            norm("post_attention_norm"),
            norm("ffn_norm"),
            norm("post_ffw_norm"),
        )
        if ffn_norm is None and post_ffw_norm is None:
            # Without norms behind the halves, a norm behind attention is the one before the feed-forward.
            ffn_norm, post_attention_norm = post_attention_norm, None
        if attn_norm is None and post_attention_norm is None and attn_output_norm is None:
            raise weights.missing(prefix + "attn_norm.weight")
        if attn_norm_2 is not None:
            attn_norm, ffn_norm = attn_norm_2, attn_norm
        n_ff = config.layers[index].n_ff
        if weights.has(prefix + "ffn_gate_inp.weight"):
            ffn = Experts(config, weights, prefix)
        else:
            ffn = FeedForward(config, weights, prefix, n_ff) if n_ff else None
        alone = attn_norm is not None and ffn_norm is None and ffn is not None
        return cls(
            attn_norm,
            mixer,
            post_attention_norm,
            attn_output_norm,
            ffn_norm,
            ffn,
            post_ffw_norm,
            norm("layer_output_norm"),
            parallel=config.parallel or alone or attn_norm_2 is not None,
        )


class Embedding:
    """Token ids and positions to rows of the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights):
        n_embd = config.n_embd
        self.scale = np.float32(config.embedding_scale)
        self.tokens = weights.tensor("token_embd.weight", config.n_vocab, n_embd)
        self.positions = self.type = None
        if shape := weights.shape("position_embd.weight"):
            self.positions = weights.floats("position_embd.weight", *shape)
        if shape := weights.shape("token_types.weight"):
            # All tokens are of the first type: there is one text.
            self.type = weights.floats("token_types.weight", *shape)[0]
        self.norm = None
        if _output_norm(config, weights) != "token_embd_norm":
            self.norm = Norm.load(weights, "token_embd_norm", n_embd)

        values = max(16, BLOCK_SIZES[self.tokens.type][0])
        # Usually a kernel reads the rows; the other cases are filled in by `rows` before the step.
        self.by_kernel = (
            self.tokens.type.name in EMBEDDED_BY_KERNEL
            and n_embd % values == 0
            and self.positions is None
            and self.type is None
            and self.norm is None
        )
        self._n_blocks = n_embd // values
        self._table = self.tokens.data

    def record(self, plan: PlanWriter, inputs: StepInputs, x: Buffer) -> None:
        """x = scale · table[token]."""
        plan.add(
            "embed",
            f"embed.embed:{self.tokens.type.name}",
            abi.EMBED,
            row_table=inputs.rows.ctypes.data,
            table=self._table.ctypes.data,
            row_bytes=self.tokens.row_bytes,
            n_blocks=self._n_blocks,
            **x.at("x"),
            scale=float(self.scale),
        )

    def rows(self, tokens: list[int], positions: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd], before the norm."""
        rows = decode(self.tokens.type.name, self.tokens.rows(tokens), self.tokens.shape[1])
        if self.scale != 1.0:
            rows *= self.scale
        if self.positions is not None:
            rows = rows + self.positions[positions]
        if self.type is not None:
            rows = rows + self.type
        return rows


@dataclass(eq=False)
class ModelWeights:
    """All tensors of a model. `output` is None in encoders, whose result is the residual stream itself.

    `dense` are matrices that sentence encoders apply to the pooled result.
    """

    embedding: Embedding
    layers: list[Layer]
    output_norm: Norm | None
    output: Matrix | None
    dense: list[np.ndarray]


def load_weights(config: ModelConfig, weights: Weights) -> ModelWeights:
    """Ask for every tensor that the configuration needs; shapes are checked here.

    Raises ModelFileError if one is missing or misshapen, UnsupportedModelError if the file has one that is not known.
    """
    output = None
    if config.causal:
        name = "output.weight" if weights.has("output.weight") else "token_embd.weight"
        bias = weights.vector("output.bias", config.n_vocab, optional=True)
        output = weights.matrix(name, config.n_vocab, config.n_embd, bias)
    result = ModelWeights(
        embedding=Embedding(config, weights),
        layers=[Layer.load(config, index, weights) for index in range(config.n_layers)],
        output_norm=Norm.load(weights, _output_norm(config, weights), config.n_embd, optional=not config.causal),
        output=output,
        dense=[weights.floats(name, *weights.shape(name)) for name in _DENSE if weights.has(name)],
    )
    weights.refuse_unknown(config.n_layers)
    return result


def _output_norm(config: ModelConfig, weights: Weights) -> str:
    """The norm before the head; a language model's only one may be named after the embedding (LFM2)."""
    only_other = config.causal and not weights.has("output_norm.weight") and weights.has("token_embd_norm.weight")
    return "token_embd_norm" if only_other else "output_norm"


@dataclass(eq=False)
class Network:
    """A recorded plan with its ends, and all that its kernels point to."""

    plan: PlanWriter
    inputs: StepInputs
    x: Buffer
    hidden: Buffer
    logits: Buffer | None
    first_logits_op: Op | None
    attention: AttentionWorkspace
    weights: ModelWeights

    @cached_property
    def single_logits(self) -> SingleResult:
        """The logits of a single row."""
        return SingleResult(self.plan, self.logits)

    @cached_property
    def hidden_table(self) -> np.ndarray:
        """The table of the ops that lead to `hidden`."""
        table = self.plan.table
        return table if self.first_logits_op is None else table[: self.plan.ops.index(self.first_logits_op)]


def record(config: ModelConfig, weights: ModelWeights, cache: KVCache, max_rows: int, n_threads: int) -> Network:
    """Write the forward pass down."""
    plan = PlanWriter(max_rows, n_threads)
    inputs = StepInputs(config, plan, cache.n_pages * abi.PAGE)
    attention = AttentionWorkspace(config, plan, inputs, cache)
    x, h = plan.buffer("x", config.n_embd), plan.buffer("h", config.n_embd)

    def normed(stage: str, norm: Norm | None, source: Buffer, target: Buffer, **options: Any) -> Buffer:
        """What the norm makes of the source, for products; the source itself where there is no norm."""
        if norm is None:
            plan.quantize(stage, source)
            return source
        plan.norm(stage, config.norm, config.norm_eps, source, norm.weight, target, bias=norm.bias, **options)
        return target

    def add_to_stream(stage: str, half: Any, source: Buffer, post_norm: Norm | None, *workspace: Any) -> None:
        """x += what one half of a block makes of the source."""
        onto = {"accumulate": True, "scale": config.residual_scale}
        if post_norm is None:
            half.record(plan, *workspace, source, x, **onto)
        else:
            result = plan.buffer(f"{stage}_out", config.n_embd)
            half.record(plan, *workspace, source, result)
            normed(stage, post_norm, result, x, **onto)

    if weights.embedding.by_kernel:
        weights.embedding.record(plan, inputs, x)
    if weights.embedding.norm is not None:
        normed("embed", weights.embedding.norm, x, x)
    for index, layer in enumerate(weights.layers):
        plan.layer(index)
        ffn_in = None
        attn_in = normed("attn_norm", layer.attn_norm, x, h)
        if layer.parallel:
            ffn_in = (
                normed("ffn_norm", layer.ffn_norm, x, plan.buffer("h_ffn", config.n_embd))
                if layer.ffn_norm
                else attn_in
            )
        add_to_stream("resid_mid", layer.mixer, attn_in, layer.post_attention_norm, attention)
        if layer.attn_output_norm is not None:
            normed("attn_output_norm", layer.attn_output_norm, x, x)
        if layer.ffn is not None:
            if not layer.parallel:
                ffn_in = normed("ffn_norm", layer.ffn_norm, x, h)
            add_to_stream("resid_post", layer.ffn, ffn_in, layer.post_ffw_norm)
        if layer.layer_output_norm is not None:
            normed("layer_output_norm", layer.layer_output_norm, x, x)
    plan.layer(None)
    hidden = plan.buffer("x_out", config.n_embd)
    plan.gather("out_rows", x, inputs.out_index.ctypes.data, hidden)
    hidden = normed(
        "final_norm", weights.output_norm, hidden, plan.buffer("final_norm", config.n_embd), rows=plan.out_rows
    )
    logits = first_logits_op = None
    if weights.output is not None:
        logits = plan.buffer("logits", config.n_vocab)
        first_logits_op = plan.linear(
            "logits", hidden, weights.output, logits, rows=plan.out_rows, scale=config.logit_scale
        )
        if config.logit_cap:
            plan.limit("logits", "cap", config.logit_cap, logits, plan.out_rows)
    return Network(plan, inputs, x, hidden, logits, first_logits_op, attention, weights)
