"""The feed-forward half of a block: dense, or a mixture of experts. Its tensors are asked for here, and its ops recorded."""

from __future__ import annotations

import numpy as np

from .config import ExpertsConfig, ModelConfig
from .kernels import abi
from .plan import Buffer, ExpertChoice, Plan
from .weights import Weights


class FeedForward:
    """down(act(gate) · up), or down(act(up)) where the file has no gate; `suffix` distinguishes shared experts."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, n_ff: int, suffix: str = ""):
        self.config, self.n_ff = config, n_ff
        n_embd = config.n_embd
        gate, up, down = (f"{prefix}ffn_{part}{suffix}" for part in ("gate", "up", "down"))

        def bias(name: str, n: int):
            return weights.vector(f"{name}.bias", n, optional=True)

        self.gated = True
        if weights.has(f"{gate}.weight"):
            names = ((f"{gate}.weight", n_ff, "ffn_gate"), (f"{up}.weight", n_ff, "ffn_up"))
            self.inner = weights.fused(names, n_embd, (bias(gate, n_ff), bias(up, n_ff)))
            self.up_column = self.inner.columns[1]
        else:
            # Gate and up may be one matrix, the gate's rows first.
            self.gated = weights.shape(f"{up}.weight") == (2 * n_ff, n_embd)
            n_outputs = 2 * n_ff if self.gated else n_ff
            stage = "ffn_gate_up" if self.gated else "ffn_up"
            self.inner = weights.fused(((f"{up}.weight", n_outputs, stage),), n_embd, (bias(up, n_outputs),))
            self.up_column = n_ff
        self.down = weights.matrix(f"{down}.weight", n_embd, n_ff, bias(down, n_embd))

    def record(self, plan: Plan, h: Buffer, y: Buffer, **onto: float) -> None:
        """y = feed-forward of h; `onto` as in `Plan.linear`."""
        inner, act = plan.buffer("ffn_gate_up", self.inner.width), plan.buffer("ffn_act", self.n_ff)
        plan.linear("ffn_gate_up" if self.gated else "ffn_up", h, self.inner, inner)
        gate = inner.columns(0, self.n_ff, "ffn_gate")
        up = inner.columns(self.up_column, self.n_ff, "ffn_up") if self.gated else None
        plan.activate("ffn_act", self.config.activation, gate, up, act)
        plan.linear("ffn_down", act, self.down, y, **onto)


class Experts:
    """A mixture of experts: each row's chosen ones, weighed and summed, plus an expert that all rows share."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str):
        self.config = config
        self.experts = experts = config.experts
        n_embd, n_experts, n_ff = config.n_embd, experts.n_experts, experts.n_ff

        def bias(name: str, n_outputs: int) -> np.ndarray | None:
            full = f"{prefix}ffn_{name}_exps.bias"
            return weights.floats(full, n_experts, n_outputs) if weights.has(full) else None

        router_bias = weights.vector(prefix + "ffn_gate_inp.bias", n_experts, optional=True)
        self.router = weights.matrix(prefix + "ffn_gate_inp.weight", n_experts, n_embd, router_bias)
        self.choice_bias = weights.vector(prefix + "exp_probs_b.bias", n_experts, optional=True)
        self.gate, self.up = (
            weights.stacked(f"{prefix}ffn_{name}_exps.weight", n_experts, n_ff, n_embd, bias(name, n_ff))
            for name in ("gate", "up")
        )
        self.down = weights.stacked(f"{prefix}ffn_down_exps.weight", n_experts, n_embd, n_ff, bias("down", n_embd))
        self.shared = self.shared_gate = None
        if shape := weights.shape(prefix + "ffn_down_shexp.weight"):
            self.shared = FeedForward(config, weights, prefix, shape[-1], "_shexp")
            if weights.has(prefix + "ffn_gate_inp_shexp.weight"):
                self.shared_gate = weights.row(prefix + "ffn_gate_inp_shexp.weight", n_embd)

    def record(self, plan: Plan, h: Buffer, y: Buffer, accumulate: bool = False, scale: float = 1.0) -> None:
        """y = experts' answer to h; `accumulate` and `scale` as in `Plan.linear`."""
        config, experts, n_embd = self.config, self.experts, self.config.n_embd
        choice = plan.shared("expert_choice", lambda: ExpertChoice(plan, experts.n_experts, experts.n_used))
        scores = plan.buffer("router", experts.n_experts)
        plan.linear("router", h, self.router, scores)
        self._choose(plan, experts, choice, scores)

        def pairs(name: str, width: int) -> Buffer:
            return plan.buffer(name, width, experts.n_used)

        x = pairs("expert_in", n_embd)
        plan.gather("expert_in", h, choice.pair_rows, x, choice.n_pairs)
        if experts.weighs_input:
            plan.add(
                "expert_in",
                "moe.weigh",
                abi.WEIGH,
                x,
                choice.n_pairs,
                n=n_embd,
                x=x.address,
                x_stride=x.stride,
                weights=choice.pair_weights,
            )
        plan.quantize("expert_in", x, choice.n_pairs)
        gate, up, act = (pairs(f"expert_{name}", experts.n_ff) for name in ("gate", "up", "act"))
        plan.linear_experts("expert_gate", x, self.gate, gate, choice)
        plan.linear_experts("expert_up", x, self.up, up, choice)
        plan.activate("expert_act", config.activation, gate, up, act, choice.n_pairs)
        z = pairs("expert_out", n_embd)
        plan.linear_experts("expert_down", act, self.down, z, choice)
        shared = gate_score = None
        if self.shared is not None:
            shared = plan.buffer("shared_out", n_embd)
            self.shared.record(plan, h, shared)
        if self.shared_gate is not None:
            gate_score = plan.buffer("shared_gate", 1)
            plan.linear("shared_gate", h, self.shared_gate, gate_score)
        plan.add(
            "ffn_out",
            "moe.combine",
            abi.COMBINE,
            y,
            n=n_embd,
            n_used=experts.n_used,
            places=choice.places,
            weights=0 if experts.weighs_input else choice.weights,
            z=z.address,
            z_stride=z.stride,
            shared=shared.address if shared else 0,
            shared_stride=shared.stride if shared else 0,
            gate=gate_score.address if gate_score else 0,
            gate_stride=gate_score.stride if gate_score else 0,
            y=y.address,
            y_stride=y.stride,
            accumulate=int(accumulate),
            scale=float(scale),
        )

    def _choose(self, plan: Plan, experts: ExpertsConfig, choice: ExpertChoice, scores: Buffer) -> None:
        """Each row's experts and their weights, then the rows sorted by expert."""
        chosen_by = plan.buffer("router_choice", experts.n_experts)
        plan.add(
            "router",
            f"moe.route:{experts.scoring}",
            abi.ROUTE,
            scores,
            n_experts=experts.n_experts,
            n_used=experts.n_used,
            n_groups=experts.n_groups,
            n_groups_used=experts.n_groups_used,
            scores=scores.address,
            scores_stride=scores.stride,
            choice=chosen_by.address,
            choice_stride=chosen_by.stride,
            bias=self.choice_bias.address if self.choice_bias else 0,
            ids=choice.ids,
            weights=choice.weights,
            normalise=int(experts.normalise),
            scale=float(experts.scale),
        )
        plan.add(
            "router",
            "moe.group",
            abi.GROUP,
            n_experts=experts.n_experts,
            n_used=experts.n_used,
            ids=choice.ids,
            counts=choice.counts,
            firsts=choice.firsts,
            active=choice.active,
            n_active=choice.n_active,
            n_pairs=choice.n_pairs,
            pair_rows=choice.pair_rows,
            pair_weights=choice.pair_weights,
            weights=choice.weights,
            places=choice.places,
        )
