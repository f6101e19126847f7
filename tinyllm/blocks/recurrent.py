"""Mixers that keep a state instead of a cache: Mamba, Mamba-2, short convolution, gated delta net.

A block's tensors are asked for here, and its ops are recorded; the formulas are in the kernels. The weights of a
convolution are called taps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ..buffers import Buffer
from ..config import ModelConfig
from ..kernels import abi
from ..metadata.recurrent import RecurrentConfig, whole_panels
from ..plan_writer import PlanWriter
from ..weights import Vector, Weights, vector_of
from .attention import AttentionWorkspace


class _Recurrent(ABC):
    """What the mixers have in common: where a layer's state lies, and the convolution."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str):
        self.sizes: RecurrentConfig = config.recurrent
        self.index, self.norm_eps = index, config.norm_eps
        self.load(weights, prefix, config.n_embd)

    @abstractmethod
    def load(self, weights: Weights, prefix: str, n_embd: int) -> None:
        """Ask for the tensors."""

    def load_taps(self, weights: Weights, name: str) -> None:
        """Taps [channels, kernel] as [kernel][channels], padded to whole panels; and their bias, if there is one."""
        n, kernel = self.sizes.n_conv, self.sizes.conv_kernel
        lanes = np.zeros((kernel, whole_panels(n)), np.float32)
        lanes[:, :n] = weights.floats(f"{name}.weight", n, kernel).T
        self.taps = vector_of(lanes)
        self.conv_bias = weights.vector(f"{name}.bias", n, optional=True)

    def walk(
        self,
        workspace: AttentionWorkspace,
        stage: str,
        kernel: str,
        arguments: abi.Arguments,
        y: Buffer,
        state: int = 0,
        **values: Any,
    ) -> None:
        """Record a kernel that walks along the sequences; `state`: where its part of the layer's state begins."""
        inputs = workspace.inputs
        workspace.plan.add(
            stage,
            kernel,
            arguments,
            y,
            **y.at("y"),
            runs=inputs.runs.ctypes.data,
            n_runs=inputs.n_runs.ctypes.data,
            state=workspace.cache.states.offsets[self.index] + state,
            **values,
        )

    def convolve(self, workspace: AttentionWorkspace, x: Buffer) -> Buffer:
        """silu(bias + convolution of x)."""
        y = workspace.plan.buffer("ssm_conv", self.sizes.n_conv)
        self.walk(
            workspace,
            "ssm_conv",
            f"convolution.convolve:silu-{self.sizes.conv_kernel}",
            abi.CONVOLVE,
            y,
            n=self.sizes.n_conv,
            taps=self.taps.address,
            bias=self.conv_bias.address if self.conv_bias else 0,
            **x.at("x"),
            gate_in=0,
            gate_out=0,
        )
        return y


class ShortConvolution(_Recurrent):
    """LFM2: b, c and x by one projection; c · conv(b · x)."""

    def load(self, weights: Weights, prefix: str, n_embd: int) -> None:
        self.in_proj = weights.matrix(prefix + "shortconv.in_proj.weight", 3 * n_embd, n_embd)
        self.load_taps(weights, prefix + "shortconv.conv")
        self.output = weights.matrix(prefix + "shortconv.out_proj.weight", n_embd, n_embd)

    def record(self, plan: PlanWriter, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = mixer of h; `onto` as in `PlanWriter.linear`."""
        n = self.sizes.n_inner
        bcx, out = plan.buffer("shortconv_in", 3 * n), plan.buffer("shortconv", n)
        plan.linear("shortconv_in", h, self.in_proj, bcx)
        self.walk(
            workspace,
            "shortconv",
            f"convolution.convolve:gated-{self.sizes.conv_kernel}",
            abi.CONVOLVE,
            out,
            n=n,
            taps=self.taps.address,
            bias=self.conv_bias.address if self.conv_bias else 0,
            x=bcx.address + 8 * n,
            x_stride=bcx.stride,
            gate_in=bcx.address,
            gate_out=bcx.address + 4 * n,
        )
        plan.quantize("shortconv", out)
        plan.linear("shortconv_out", out, self.output, y, **onto)


class Mamba(_Recurrent):
    """x and z by one projection; x through a convolution; step sizes, b and c by another projection; a scan."""

    def load(self, weights: Weights, prefix: str, n_embd: int) -> None:
        sizes = self.sizes
        n, rank, n_state = sizes.n_inner, sizes.dt_rank, sizes.n_state
        self.ssm_in = weights.matrix(prefix + "ssm_in.weight", 2 * n, n_embd)
        self.load_taps(weights, prefix + "ssm_conv1d")
        self.ssm_x = weights.matrix(prefix + "ssm_x.weight", rank + 2 * n_state, n)
        self.ssm_dt = weights.matrix(prefix + "ssm_dt.weight", n, rank, weights.vector(prefix + "ssm_dt.bias", n))
        self.a = vector_of(_panels(weights.floats(prefix + "ssm_a", n, n_state)))
        self.d = weights.vector(prefix + "ssm_d", n)
        self.output = weights.matrix(prefix + "ssm_out.weight", n_embd, n)

    def record(self, plan: PlanWriter, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = mixer of h; `onto` as in `PlanWriter.linear`."""
        sizes = self.sizes
        n, rank, n_state = sizes.n_inner, sizes.dt_rank, sizes.n_state
        xz, dt_b_c = plan.buffer("ssm_in", 2 * n), plan.buffer("ssm_x", rank + 2 * n_state)
        steps, out = plan.buffer("ssm_dt", n), plan.buffer("ssm_scan", n)
        plan.linear("ssm_in", h, self.ssm_in, xz)
        x = self.convolve(workspace, xz.columns(0, n, "x"))
        plan.quantize("ssm_conv", x)
        plan.linear("ssm_x", x, self.ssm_x, dt_b_c)
        dt, b, c = (
            dt_b_c.columns(0, rank, "dt"),
            dt_b_c.columns(rank, n_state, "b"),
            dt_b_c.columns(rank + n_state, n_state, "c"),
        )
        if sizes.norm_dt_b_c:
            dt, b, c = (self._norm(plan, part) for part in (dt, b, c))
        else:
            plan.quantize("ssm_x", dt)
        plan.linear("ssm_dt", dt, self.ssm_dt, steps)
        self.walk(
            workspace,
            "ssm_scan",
            f"scan.selective:{_unroll(n_state)}",
            abi.SELECTIVE_SCAN,
            out,
            state=sizes.conv_bytes,
            n=n,
            n_state=n_state,
            **x.at("x"),
            dt=steps.address,
            dt_stride=steps.stride,
            b=b.address,
            c=c.address,
            bc_stride=b.stride,
            a=self.a.address,
            d=self.d.address,
            z=xz.address + 4 * n,
            z_stride=xz.stride,
        )
        plan.quantize("ssm_scan", out)
        plan.linear("ssm_out", out, self.output, y, **onto)

    def _norm(self, plan: PlanWriter, x: Buffer) -> Buffer:
        """FalconMamba norms the step sizes, b and c, without weights."""
        normed = plan.buffer(f"ssm_{x.name}_norm", x.width)
        plan.norm(normed.name, "rms", self.norm_eps, x, None, normed)
        return normed


class Mamba2(_Recurrent):
    """z, x, b, c and steps by one projection; x, b and c through a convolution; a scan by heads; a grouped norm."""

    def load(self, weights: Weights, prefix: str, n_embd: int) -> None:
        sizes = self.sizes
        n, n_heads, n_groups = sizes.n_inner, sizes.n_heads, sizes.n_groups
        self.ssm_in = weights.matrix(prefix + "ssm_in.weight", n + sizes.n_conv + n_heads, n_embd)
        self.load_taps(weights, prefix + "ssm_conv1d")
        self.dt_bias = weights.vector(prefix + "ssm_dt.bias", n_heads)
        self.a, self.d = (vector_of(weights.floats(prefix + name, n_heads, 1)) for name in ("ssm_a", "ssm_d"))
        self.norm = None
        if weights.has(prefix + "ssm_norm.weight"):
            self.norm = vector_of(weights.floats(prefix + "ssm_norm.weight", n_groups, n // n_groups))
        self.output = weights.matrix(prefix + "ssm_out.weight", n_embd, n)

    def record(self, plan: PlanWriter, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = mixer of h; `onto` as in `PlanWriter.linear`."""
        sizes = self.sizes
        n, n_state, n_groups = sizes.n_inner, sizes.n_state, sizes.n_groups
        projected, out = plan.buffer("ssm_in", n + sizes.n_conv + sizes.n_heads), plan.buffer("ssm_scan", n)
        plan.linear("ssm_in", h, self.ssm_in, projected)
        xbc = self.convolve(workspace, projected.columns(n, sizes.n_conv, "xbc"))
        self.walk(
            workspace,
            "ssm_scan",
            f"scan.head:{_unroll(n_state)}",
            abi.HEAD_SCAN,
            out,
            state=sizes.conv_bytes,
            n_heads=sizes.n_heads,
            head_dim=sizes.head_dim,
            n_groups=n_groups,
            n_state=n_state,
            x=xbc.address,
            b=xbc.address + 4 * n,
            c=xbc.address + 4 * (n + n_groups * n_state),
            xbc_stride=xbc.stride,
            dt=projected.address + 4 * (n + sizes.n_conv),
            dt_stride=projected.stride,
            dt_bias=self.dt_bias.address,
            a=self.a.address,
            d=self.d.address,
            z=projected.address,
            z_stride=projected.stride,
        )
        if self.norm is None:
            plan.quantize("ssm_scan", out)
        else:
            step = 4 * n // n_groups
            plan.norm("ssm_norm", "rms", self.norm_eps, out, self.norm, out, segments=n_groups, weight_stride=step)
        plan.linear("ssm_out", out, self.output, y, **onto)


class DeltaNet(_Recurrent):
    """Qwen3-Next, Qwen3.5: q, k and v through a convolution; the gated delta rule by heads of values; a gated norm."""

    def load(self, weights: Weights, prefix: str, n_embd: int) -> None:
        sizes = self.sizes
        n, n_heads = sizes.n_inner, sizes.n_heads
        # beta and alpha are two matrices, or one with rows for each key head: beta of its value heads, then alpha.
        self.paired = weights.has(prefix + "ssm_ba.weight")
        gates = (("ssm_ba", 2 * n_heads),) if self.paired else (("ssm_beta", n_heads), ("ssm_alpha", n_heads))
        inputs = (("attn_qkv", sizes.n_conv), ("attn_gate", n), *gates)
        self.inputs = weights.fused([(f"{prefix}{name}.weight", width, name) for name, width in inputs], n_embd)
        self.load_taps(weights, prefix + "ssm_conv1d")
        self.dt_bias = weights.vector(prefix + "ssm_dt.bias", n_heads)
        self.a = weights.vector(prefix + "ssm_a", n_heads)
        self.norm = weights.vector(prefix + "ssm_norm.weight", sizes.head_dim)
        self.output = weights.matrix(prefix + "ssm_out.weight", n_embd, n)
        self.qk_factors = self._qk_factors()

    def _qk_factors(self) -> Vector:
        """Weights that make an RMS norm an L2 norm: x / sqrt(Σx² + eps) = x / sqrt(mean x² + eps/n) / sqrt(n).

        Those of q have the scale of scores, 1/sqrt(n), as well.
        """
        n = self.sizes.n_state
        factors = np.repeat([1.0 / n, 1.0 / math.sqrt(n)], self.sizes.n_groups * n)
        return vector_of(factors.astype(np.float32))

    def record(self, plan: PlanWriter, workspace: AttentionWorkspace, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = mixer of h; `onto` as in `PlanWriter.linear`."""
        sizes = self.sizes
        n, key, n_heads, n_keys = sizes.n_inner, sizes.n_state, sizes.n_heads, sizes.n_groups
        projected, out = plan.buffer("delta_in", self.inputs.width), plan.buffer("delta_rule", n)
        plan.linear("delta_in", h, self.inputs, projected)
        qkv_at, z_at, beta_at, *alpha_at = self.inputs.columns
        group = n_heads // n_keys if self.paired else n_heads
        alpha_at = alpha_at[0] if alpha_at else beta_at + group
        qkv = self.convolve(workspace, projected.columns(qkv_at, sizes.n_conv, "qkv"))
        qk = qkv.columns(0, 2 * n_keys * key, "qk")
        plan.norm(
            "qk_norm", "rms", self.norm_eps / key, qk, self.qk_factors, qk, segments=2 * n_keys, weight_stride=4 * key
        )
        self.walk(
            workspace,
            "delta_rule",
            f"delta_rule.delta_rule:{_unroll(key)}",
            abi.DELTA_RULE,
            out,
            state=sizes.conv_bytes,
            n_heads=n_heads,
            k_dim=key,
            v_dim=sizes.head_dim,
            n_key_heads=n_keys,
            key_div=n_heads // n_keys if sizes.keys_in_groups else 1,
            q=qkv.address,
            k=qkv.address + 4 * n_keys * key,
            v=qkv.address + 8 * n_keys * key,
            qkv_stride=qkv.stride,
            beta=projected.address + 4 * beta_at,
            alpha=projected.address + 4 * alpha_at,
            gate_stride=projected.stride,
            group=group,
            group_bytes=8 * group,
            a=self.a.address,
            dt_bias=self.dt_bias.address,
        )
        z = projected.columns(z_at, n, "z")
        plan.add(
            "ssm_norm",
            "gating.gated_norm",
            abi.GATED_NORM,
            out,
            n=sizes.head_dim,
            segments=n_heads,
            eps=float(self.norm_eps),
            weight=self.norm.address,
            x=out.address,
            x_stride=out.stride,
            gate=z.address,
            gate_stride=z.stride,
            y=out.address,
            y_stride=out.stride,
        )
        plan.quantize("ssm_norm", out)
        plan.linear("ssm_out", out, self.output, y, **onto)


MIXERS = {"short_conv": ShortConvolution, "mamba": Mamba, "mamba2": Mamba2, "delta_net": DeltaNet}


def _panels(values: np.ndarray) -> np.ndarray:
    """[channels, n_state] as [panels of 16 channels][n_state][16]."""
    lanes = np.zeros((whole_panels(len(values)), values.shape[1]), np.float32)
    lanes[: len(values)] = values
    return lanes.reshape(len(lanes) // 16, 16, -1).transpose(0, 2, 1)


def _unroll(n: int) -> int:
    """States or keys that a scan takes at a time."""
    return 1 if n % 4 else 4
