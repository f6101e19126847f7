"""Recurrent layers and their networks in float64 NumPy, row by row: what kernels and models are held to.

Arrays are [rows, …]; a GGUF file goes into `Reference`, which knows the architectures with recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyllm.gguf_file import GGUFFile
from tinyllm.kernels.dequantize import decode


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def rms_norm(x: np.ndarray, eps: float, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def causal_conv(x: np.ndarray, taps: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Each channel's own convolution: x [rows, channels], taps [channels, kernel]; the last tap meets the row."""
    kernel = taps.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, x.shape[1])), x])
    return bias + sum(padded[i : i + len(x)] * taps[:, i] for i in range(kernel))


def selective_scan(
    x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray
) -> np.ndarray:
    """Mamba (Gu & Dao 2023): x, dt [rows, channels], a [channels, state], b, c [rows, state], d [channels]."""
    state, y = np.zeros(a.shape), np.empty(x.shape)
    for t in range(len(x)):
        state = state * np.exp(dt[t][:, None] * a) + (dt[t] * x[t])[:, None] * b[t]
        y[t] = state @ c[t] + d * x[t]
    return y


def ssd_scan(x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Mamba-2 (Dao & Gu 2024): x [rows, heads, dim], dt [rows, heads], a, d [heads], b, c [rows, groups, state]."""
    n_rows, n_heads, head_dim = x.shape
    b, c = (np.repeat(v, n_heads // v.shape[1], axis=1) for v in (b, c))
    state, y = np.zeros((n_heads, head_dim, b.shape[2])), np.empty(x.shape)
    for t in range(n_rows):
        state *= np.exp(dt[t] * a)[:, None, None]
        state += (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        y[t] = np.einsum("hpn,hn->hp", state, c[t]) + d[:, None] * x[t]
    return y


def delta_rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Gated delta rule (Yang et al. 2024): q, k [rows, heads, k_dim], v [… v_dim], decay, beta [rows, heads]."""
    n_rows, n_heads, k_dim = k.shape
    state, out = np.zeros((n_heads, k_dim, v.shape[2])), np.empty(v.shape)
    for t in range(n_rows):
        state *= decay[t][:, None, None]
        delta = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state += k[t][:, :, None] * delta[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out


class Reference:
    """A file's tensors as float64, and the layers of its network."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture = file.metadata["general.architecture"]
        self.eps = float(self.get("attention.layer_norm_rms_epsilon"))

    def get(self, key: str, default: object = None) -> object:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int = 0) -> int:
        return int(self.get(key, default))

    def per_layer(self, key: str, layer: int, default: int = 0) -> int:
        value = self.get(key, default)
        return int(value[layer]) if isinstance(value, np.ndarray | list) else int(value)

    def __call__(self, name: str) -> np.ndarray:
        tensor = self.file.tensors[name]
        row_bytes = tensor.data.size // int(np.prod(tensor.shape[:-1], dtype=int))
        values = decode(tensor.type.name, tensor.data.reshape(-1, row_bytes), tensor.shape[-1])
        return values.reshape(tensor.shape).astype(np.float64)

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits at every position: [len(ids), n_vocab]."""
        x = self("token_embd.weight")[ids] * float(self.get("embedding_scale", 1.0))
        residual_scale = float(self.get("residual_scale", 1.0))
        for layer in range(self.integer("block_count")):
            mixer, feed_forward = self.mixer(layer), self.feed_forward(layer)
            prefix = f"blk.{layer}."
            x = x + residual_scale * mixer(prefix, rms_norm(x, self.eps, self(prefix + "attn_norm.weight")))
            if feed_forward is not None:
                names = ("ffn_norm.weight", "post_attention_norm.weight")
                norm = next(prefix + name for name in names if prefix + name in self.file.tensors)
                x = x + residual_scale * feed_forward(prefix, rms_norm(x, self.eps, self(norm)))
        names = ("output_norm.weight", "token_embd_norm.weight")
        x = rms_norm(x, self.eps, self(next(name for name in names if name in self.file.tensors)))
        head = "output.weight" if "output.weight" in self.file.tensors else "token_embd.weight"
        return x @ self(head).T / float(self.get("logit_scale", 1.0))

    def mixer(self, layer: int) -> Callable[[str, np.ndarray], np.ndarray]:
        names = {
            "shortconv.conv.weight": self.short_conv,
            "ssm_x.weight": self.mamba,
            "ssm_in.weight": self.mamba2,
            "ssm_out.weight": self.delta_net,
            "attn_output.weight": self.attention,
        }
        return next(mixer for name, mixer in names.items() if f"blk.{layer}.{name}" in self.file.tensors)

    def short_conv(self, prefix: str, h: np.ndarray) -> np.ndarray:
        """LFM2: c · conv(b · x), gated on both sides."""
        b, c, x = np.split(h @ self(prefix + "shortconv.in_proj.weight").T, 3, axis=-1)
        return (c * causal_conv(b * x, self(prefix + "shortconv.conv.weight"))) @ self(
            prefix + "shortconv.out_proj.weight"
        ).T

    def mamba(self, prefix: str, h: np.ndarray) -> np.ndarray:
        x, z = np.split(h @ self(prefix + "ssm_in.weight").T, 2, axis=-1)
        x = silu(causal_conv(x, self(prefix + "ssm_conv1d.weight"), self(prefix + "ssm_conv1d.bias")))
        rank, n_state = self.integer("ssm.time_step_rank"), self.integer("ssm.state_size")
        dt, b, c = np.split(x @ self(prefix + "ssm_x.weight").T, [rank, rank + n_state], axis=-1)
        if self.get("ssm.dt_b_c_rms"):
            dt, b, c = (rms_norm(v, self.eps) for v in (dt, b, c))
        dt = softplus(dt @ self(prefix + "ssm_dt.weight").T + self(prefix + "ssm_dt.bias"))
        y = selective_scan(x, dt, self(prefix + "ssm_a"), b, c, self(prefix + "ssm_d"))
        return (y * silu(z)) @ self(prefix + "ssm_out.weight").T

    def mamba2(self, prefix: str, h: np.ndarray) -> np.ndarray:
        inner, n_state = self.integer("ssm.inner_size"), self.integer("ssm.state_size")
        n_groups, n_heads = self.integer("ssm.group_count"), self.integer("ssm.time_step_rank")
        zxbc = [inner, 2 * inner + 2 * n_groups * n_state]
        z, xbc, dt = np.split(h @ self(prefix + "ssm_in.weight").T, zxbc, axis=-1)
        xbc = silu(causal_conv(xbc, self(prefix + "ssm_conv1d.weight"), self(prefix + "ssm_conv1d.bias")))
        x, b, c = np.split(xbc, [inner, inner + n_groups * n_state], axis=-1)
        y = ssd_scan(
            x.reshape(len(h), n_heads, -1),
            softplus(dt + self(prefix + "ssm_dt.bias")),
            self(prefix + "ssm_a").ravel(),
            b.reshape(len(h), n_groups, -1),
            c.reshape(len(h), n_groups, -1),
            self(prefix + "ssm_d").ravel(),
        ).reshape(len(h), -1)
        y = y * silu(z)
        if prefix + "ssm_norm.weight" in self.file.tensors:
            y = rms_norm(y.reshape(len(h), n_groups, -1), self.eps, self(prefix + "ssm_norm.weight"))
        return y.reshape(len(h), -1) @ self(prefix + "ssm_out.weight").T

    def delta_net(self, prefix: str, h: np.ndarray) -> np.ndarray:
        n_rows, dim = len(h), self.integer("ssm.state_size")
        n_keys, n_values = self.integer("ssm.group_count"), self.integer("ssm.time_step_rank")
        qkv = silu(causal_conv(h @ self(prefix + "attn_qkv.weight").T, self(prefix + "ssm_conv1d.weight")))
        q, k, v = np.split(qkv, [n_keys * dim, 2 * n_keys * dim], axis=-1)
        q, k = (v.reshape(n_rows, n_keys, dim) for v in (q, k))
        q, k = (v / np.sqrt((v * v).sum(-1, keepdims=True) + self.eps) for v in (q, k))
        if self.architecture == "qwen3next":
            key_of = np.arange(n_values) // (n_values // n_keys)
            ba = (h @ self(prefix + "ssm_ba.weight").T).reshape(n_rows, n_keys, 2, -1)
            beta, alpha = ba[:, :, 0].reshape(n_rows, -1), ba[:, :, 1].reshape(n_rows, -1)
        else:
            key_of = np.arange(n_values) % n_keys
            beta, alpha = (h @ self(f"{prefix}ssm_{name}.weight").T for name in ("beta", "alpha"))
        decay = np.exp(self(prefix + "ssm_a") * softplus(alpha + self(prefix + "ssm_dt.bias")))
        v = v.reshape(n_rows, n_values, -1)
        out = delta_rule(q[:, key_of] / np.sqrt(dim), k[:, key_of], v, decay, sigmoid(beta))
        out = rms_norm(out, self.eps, self(prefix + "ssm_norm.weight")).reshape(n_rows, -1)
        return (out * silu(h @ self(prefix + "attn_gate.weight").T)) @ self(prefix + "ssm_out.weight").T

    def attention(self, prefix: str, h: np.ndarray) -> np.ndarray:
        n_rows, layer = len(h), int(prefix.split(".")[1])
        n_heads, n_kv_heads = (self.per_layer(f"attention.{key}", layer) for key in ("head_count", "head_count_kv"))
        dim = self.integer("attention.key_length", h.shape[1] // n_heads)
        q, k, v = ((h @ self(f"{prefix}attn_{name}.weight").T).reshape(n_rows, -1, dim) for name in "qkv")
        gate = None
        if q.shape[1] == 2 * n_heads:
            q, gate = q[:, 0::2], q[:, 1::2]
        if prefix + "attn_q_norm.weight" in self.file.tensors:
            q = rms_norm(q, self.eps, self(prefix + "attn_q_norm.weight"))
            k = rms_norm(k, self.eps, self(prefix + "attn_k_norm.weight"))
        if self.get("rope.scaling.finetuned", True):
            q, k = self.rotate(q), self.rotate(k)
        k, v = (np.repeat(u, n_heads // n_kv_heads, axis=1) for u in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * float(self.get("attention.scale", 1.0 / np.sqrt(dim)))
        scores = np.where(np.tri(n_rows, dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hij,jhd->ihd", probs / probs.sum(-1, keepdims=True), v)
        if gate is not None:
            out = out * sigmoid(gate)
        return out.reshape(n_rows, -1) @ self(prefix + "attn_output.weight").T

    def rotate(self, x: np.ndarray) -> np.ndarray:
        n_rot = self.integer("rope.dimension_count", x.shape[-1])
        frequencies = float(self.get("rope.freq_base", 10000.0)) ** (-np.arange(0, n_rot, 2) / n_rot)
        angles = (np.arange(len(x))[:, None] * frequencies)[:, None]
        a, b, rest = np.split(x, [n_rot // 2, n_rot], axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles), rest], -1
        )

    def feed_forward(self, layer: int) -> Callable[[str, np.ndarray], np.ndarray] | None:
        names = {"ffn_gate_inp.weight": self.experts, "ffn_gate.weight": self.swiglu}
        return next((ffn for name, ffn in names.items() if f"blk.{layer}.{name}" in self.file.tensors), None)

    def swiglu(self, prefix: str, h: np.ndarray, suffix: str = "") -> np.ndarray:
        gate, up, down = (self(f"{prefix}ffn_{name}{suffix}.weight") for name in ("gate", "up", "down"))
        return (silu(h @ gate.T) * (h @ up.T)) @ down.T

    def experts(self, prefix: str, h: np.ndarray) -> np.ndarray:
        """The best experts, their weights renormalised, beside a shared expert with a sigmoid gate if there is one."""
        scores = h @ self(prefix + "ffn_gate_inp.weight").T
        scores = sigmoid(scores) if self.get("expert_gating_func") == 2 else np.exp(scores)
        biased = prefix + "exp_probs_b.bias" in self.file.tensors
        choice = scores + self(prefix + "exp_probs_b.bias") if biased else scores
        chosen = np.argsort(-choice, axis=-1, kind="stable")[:, : self.integer("expert_used_count")]
        weights = np.take_along_axis(scores, chosen, -1)
        weights /= weights.sum(-1, keepdims=True)
        gates, ups, downs = (self(f"{prefix}ffn_{name}_exps.weight") for name in ("gate", "up", "down"))
        out = np.zeros_like(h)
        if prefix + "ffn_gate_inp_shexp.weight" in self.file.tensors:
            out += self.swiglu(prefix, h, "_shexp") * sigmoid(h @ self(prefix + "ffn_gate_inp_shexp.weight"))[:, None]
        for t, (row, experts) in enumerate(zip(h, chosen, strict=True)):
            for e, weight in zip(experts, weights[t], strict=True):
                out[t] += weight * (downs[e] @ (silu(gates[e] @ row) * (ups[e] @ row)))
        return out
