"""How a mixture of experts is made up and chosen from, read from metadata."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedModelError
from .hyperparameters import Hyperparameters

_SCORINGS = {1: "softmax", 2: "sigmoid", 3: "chosen"}


@dataclass(frozen=True)
class ExpertsConfig:
    """How tokens choose experts, and what their choice weighs.

    `scoring`: "softmax" or "sigmoid" of all scores, or "chosen": softmax over the chosen experts' scores. `normalise`:
    the chosen ones' weights are made to sum to 1; then they are multiplied by `scale`. `n_groups`: experts are chosen
    within the best `n_groups_used` groups only. `weighs_input`: weights multiply what experts read, not their answer.
    """

    n_experts: int
    n_used: int
    n_ff: int
    scoring: str
    normalise: bool
    scale: float
    n_groups: int
    n_groups_used: int
    weighs_input: bool


def read_experts(
    parameters: Hyperparameters, n_layers: int, scoring: str, normalise: bool, weighs_input: bool
) -> ExpertsConfig | None:
    """The experts' configuration; None for a model without any. `scoring` and `normalise`: where the file says nothing.

    Raises ModelFileError and UnsupportedModelError.
    """
    n_experts = parameters.integer("expert_count", 0, minimum=0, maximum=2**16)
    if n_experts == 0:
        return None
    code = parameters.integer("expert_gating_func", 0, minimum=0)
    if code and code not in _SCORINGS:
        raise UnsupportedModelError(
            f"{parameters.file.path}: {parameters.architecture}.expert_gating_func {code} is not supported"
        )
    n_groups = parameters.integer("expert_group_count", 1, minimum=0, maximum=n_experts) or 1
    if n_experts % n_groups:
        raise parameters.fail("expert_group_count", f"{n_groups} does not divide {n_experts} experts")
    n_ff = "expert_feed_forward_length" if parameters.has("expert_feed_forward_length") else "feed_forward_length"
    return ExpertsConfig(
        n_experts=n_experts,
        n_used=parameters.integer("expert_used_count", maximum=n_experts),
        n_ff=max(parameters.per_layer(n_ff, n_layers)),
        scoring=_SCORINGS.get(code, scoring),
        normalise=parameters.flag("expert_weights_norm", normalise),
        scale=parameters.factor("expert_weights_scale"),
        n_groups=n_groups,
        n_groups_used=parameters.integer("expert_group_used_count", n_groups, minimum=0, maximum=n_groups) or n_groups,
        weighs_input=weighs_input,
    )
