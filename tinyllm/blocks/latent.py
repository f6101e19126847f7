"""Multi-head latent attention: a block's tensors are asked for here, and its ops are recorded."""

from __future__ import annotations

import numpy as np

from ..buffers import Buffer, padded
from ..config import ModelConfig
from ..kernels.formats import PANEL_ROWS
from ..plan_writer import PlanWriter
from ..weights import Matrix, Weights
from .attention import AttentionWorkspace, Norm


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
            # Some files have the same values twice.
            weights.ignore(prefix + "attn_k_b.weight", prefix + "attn_v_b.weight")
        else:
            self.k_b = weights.stacked(prefix + "attn_k_b.weight", n_heads, latent.kv_rank, latent.n_plain)
            self.v_b = weights.stacked(prefix + "attn_v_b.weight", n_heads, latent.v_dim, latent.kv_rank)
        self.output = weights.matrix(prefix + "attn_output.weight", n_embd, n_heads * latent.v_dim)

    def _split(self, weights: Weights, name: str) -> tuple[Matrix, Matrix]:
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

    def record(self, plan: PlanWriter, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = attention of h; `onto` as in `PlanWriter.linear`."""
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
