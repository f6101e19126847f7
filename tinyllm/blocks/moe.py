"""A mixture of experts as the feed-forward half of a block: its tensors are asked for here, and its ops recorded.

A row and one of its experts make a pair; pairs are sorted by expert, so that each expert's matrices are read once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..buffers import Buffer, aligned_zeros
from ..config import ModelConfig
from ..kernels import abi
from ..plan_writer import PlanWriter
from ..weights import Matrix, Weights
from .ffn import FeedForward

# Models that were trained in these formats have exact weights and expect activations of 16 bits.
_EXACT_FORMATS = ("MXFP4", "NVFP4")


class ExpertChoice:
    """Which experts the rows of a step chose: memory that kernels fill (`kernels/moe.py`); the fields are addresses.

    Per row and choice: `ids` int64, `weights` float32, `places`: its pair's number. Per pair: `pair_rows` int64,
    `pair_weights` float32. Per expert: `counts` and `firsts` of its rows in products, of which a pair has `parts`.
    `active` lists the `n_active` chosen experts.
    """

    def __init__(self, plan: PlanWriter, n_experts: int, n_used: int, parts: int):
        n_pairs = plan.max_rows * n_used
        per_pair = ("ids", "weights", "places", "pair_rows", "pair_weights")
        sizes = dict.fromkeys(per_pair, n_pairs) | dict.fromkeys(("counts", "firsts", "active"), n_experts)
        self.n_used, self.parts = n_used, parts
        self._memory = {name: aligned_zeros(8 * n) for name, n in (sizes | {"n_active": 1, "n_pairs": 1}).items()}

    def __getattr__(self, name: str) -> int:
        return self._memory[name].ctypes.data


class Experts:
    """Each row's chosen experts, weighed and summed, plus an expert that all rows share."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str):
        self.config, self.experts = config, config.experts
        n_embd, n_experts, n_ff = config.n_embd, config.experts.n_experts, config.experts.n_ff
        router_bias = weights.vector(prefix + "ffn_gate_inp.bias", n_experts, optional=True)
        self.router = weights.matrix(prefix + "ffn_gate_inp.weight", n_experts, n_embd, router_bias)
        self.choice_bias = weights.vector(prefix + "exp_probs_b.bias", n_experts, optional=True)
        exact = weights.type_name(prefix + "ffn_down_exps.weight") in _EXACT_FORMATS
        self.parts = 2 if exact else 1

        def expert_matrices(part: str, n_outputs: int, n_inputs: int) -> Matrix:
            name = f"{prefix}ffn_{part}_exps"
            bias = None
            if weights.expects(f"{name}.bias"):
                # Every part of a pair gets its share.
                bias = weights.floats(f"{name}.bias", n_experts, n_outputs) / np.float32(self.parts)
            return weights.stacked(f"{name}.weight", n_experts, n_outputs, n_inputs, bias)

        self.gate = expert_matrices("gate", n_ff, n_embd) if weights.expects(f"{prefix}ffn_gate_exps.weight") else None
        self.up = expert_matrices("up", n_ff, n_embd)
        self.down = expert_matrices("down", n_embd, n_ff)
        self.shared = self.shared_gate = None
        if shape := weights.shape(prefix + "ffn_down_shexp.weight"):
            self.shared = FeedForward(config, weights, prefix, shape[-1], "_shexp")
            if weights.expects(prefix + "ffn_gate_inp_shexp.weight"):
                self.shared_gate = weights.row(prefix + "ffn_gate_inp_shexp.weight", n_embd)

    def record(self, plan: PlanWriter, h: Buffer, y: Buffer, accumulate: bool = False, scale: float = 1.0) -> None:
        """y = experts' answer to h; `accumulate` and `scale` as in `PlanWriter.linear`."""
        config, experts, n_embd = self.config, self.experts, self.config.n_embd
        choice = self._choose(plan, h)
        x = self._pairs(plan, "expert_in", n_embd)
        plan.gather("expert_in", h, choice.pair_rows, x, choice.n_pairs)
        if experts.weighs_input:
            plan.weigh("expert_in", x, choice.pair_weights, choice.n_pairs)
        plan.quantize("expert_in", x, choice.n_pairs)
        matrices = {"expert_gate": self.gate, "expert_up": self.up} if self.gate else {"expert_up": self.up}
        inner = self._products(plan, x, choice, **matrices)
        act = self._pairs(plan, "expert_act", experts.n_ff)
        plan.activate("expert_act", config.activation, inner[0], inner[1] if self.gate else None, act, choice.n_pairs)
        (z,) = self._products(plan, act, choice, expert_down=self.down)
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
            **self._record_shared(plan, h),
            **y.at("y"),
            accumulate=int(accumulate),
            scale=float(scale),
        )

    def _pairs(self, plan: PlanWriter, name: str, width: int, parts: int = 1) -> Buffer:
        return plan.buffer(name, width, self.experts.n_used * parts)

    def _choose(self, plan: PlanWriter, h: Buffer) -> ExpertChoice:
        """Each row's experts and their weights, then the pairs sorted by expert."""
        experts = self.experts
        choice = plan.shared(
            f"expert choice {self.parts}",
            lambda: ExpertChoice(plan, experts.n_experts, experts.n_used, self.parts),
        )
        scores, chosen_by = plan.buffer("router", experts.n_experts), plan.buffer("router_choice", experts.n_experts)
        plan.linear("router", h, self.router, scores)
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
            parts=self.parts,
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
        return choice

    def _products(self, plan: PlanWriter, x: Buffer, choice: ExpertChoice, **matrices: Matrix) -> list[Buffer]:
        """Rows of pairs times their experts' matrices, by stage."""
        if self.parts == 1:
            results = [self._pairs(plan, stage, matrix.n_outputs) for stage, matrix in matrices.items()]
            for (stage, matrix), y in zip(matrices.items(), results, strict=True):
                plan.linear_experts(stage, x, matrix, y, choice)
            return results
        x_parts = self._pairs(plan, f"{x.name}_parts", x.width, self.parts)
        plan.split(x.name, x, x_parts, choice.n_pairs)
        results = []
        for stage, matrix in matrices.items():
            y_parts = self._pairs(plan, f"{stage}_parts", matrix.n_outputs, self.parts)
            y = self._pairs(plan, stage, matrix.n_outputs)
            plan.linear_experts(stage, x_parts, matrix, y_parts, choice)
            plan.join(stage, y_parts, y, choice.n_pairs)
            results.append(y)
        return results

    def _record_shared(self, plan: PlanWriter, h: Buffer) -> dict[str, Any]:
        """The shared expert and its gate, as arguments of the op that puts all together."""
        shared = gate = None
        if self.shared is not None:
            shared = plan.buffer("shared_out", self.config.n_embd)
            self.shared.record(plan, h, shared)
        if self.shared_gate is not None:
            gate = plan.buffer("shared_gate", 1)
            plan.linear("shared_gate", h, self.shared_gate, gate)
        return {
            "shared": shared.address if shared else 0,
            "shared_stride": shared.stride if shared else 0,
            "gate": gate.address if gate else 0,
            "gate_stride": gate.stride if gate else 0,
        }
