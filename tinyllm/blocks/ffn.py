"""The dense feed-forward half of a block: its tensors are asked for here, and its ops recorded."""

from __future__ import annotations

from ..buffers import Buffer
from ..config import ModelConfig
from ..plan_writer import PlanWriter
from ..weights import Weights


class FeedForward:
    """down(act(gate) · up), or down(act(up)) where the file has no gate; `suffix` distinguishes shared experts."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, n_ff: int, suffix: str = ""):
        self.config, self.n_ff = config, n_ff
        n_embd = config.n_embd
        gate, up, down = (f"{prefix}ffn_{part}{suffix}" for part in ("gate", "up", "down"))

        def bias(name: str, n: int):
            return weights.vector(f"{name}.bias", n, optional=True)

        self.gated = True
        if weights.expects(f"{gate}.weight"):
            names = ((f"{gate}.weight", n_ff, "ffn_gate"), (f"{up}.weight", n_ff, "ffn_up"))
            self.inner = weights.fused(names, n_embd, (bias(gate, n_ff), bias(up, n_ff)), twins=True)
            self.up_column = self.inner.columns[1]
        else:
            # Gate and up may be one matrix, the gate's rows first.
            self.gated = weights.shape(f"{up}.weight") == (2 * n_ff, n_embd)
            n_outputs = 2 * n_ff if self.gated else n_ff
            stage = "ffn_gate_up" if self.gated else "ffn_up"
            self.inner = weights.fused(((f"{up}.weight", n_outputs, stage),), n_embd, (bias(up, n_outputs),))
            self.up_column = n_ff
        self.down = weights.matrix(f"{down}.weight", n_embd, n_ff, bias(down, n_embd))

    def record(self, plan: PlanWriter, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = feed-forward of h; `onto` as in `PlanWriter.linear`."""
        inner, act = plan.buffer("ffn_gate_up", self.inner.width), plan.buffer("ffn_act", self.n_ff)
        plan.linear("ffn_gate_up" if self.gated else "ffn_up", h, self.inner, inner)
        gate = inner.columns(0, self.n_ff, "ffn_gate")
        up = inner.columns(self.up_column, self.n_ff, "ffn_up") if self.gated else None
        plan.activate("ffn_act", self.config.activation, gate, up, act)
        plan.linear("ffn_down", act, self.down, y, **onto)
