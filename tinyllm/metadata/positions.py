"""What each layer knows of positions, read from metadata and traits: its window, its RoPE, and how its scores grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .hyperparameters import Hyperparameters
from .latent import LatentConfig
from .rope import Rope, RopeReader

if TYPE_CHECKING:
    from ..config import Traits


def read_windows(parameters: Hyperparameters, traits: Traits, n_layers: int) -> list[int]:
    """The window of each layer, 0 for all positions. Raises ModelFileError."""
    key = "attention.sliding_window"
    used = traits.window_period and traits.window_layers in (None, n_layers)
    if not used or not (parameters.has(key) or traits.window_default):
        return [0] * n_layers
    window = parameters.integer(key, traits.window_default)
    pattern = parameters.value(f"{key}_pattern")
    if isinstance(pattern, np.ndarray | list):
        if len(pattern) < n_layers:
            raise parameters.fail(f"{key}_pattern", f"has {len(pattern)} values for {n_layers} layers")
        windowed = [bool(value) for value in pattern[:n_layers]]
    else:
        period = parameters.integer(f"{key}_pattern", traits.window_period)
        windowed = [i % period < period - 1 for i in range(n_layers)]
    return [window if yes else 0 for yes in windowed]


def read_ropes(
    parameters: Hyperparameters,
    traits: Traits,
    windows: Sequence[int],
    reader: RopeReader | None,
    latent: LatentConfig | None,
) -> tuple[tuple[Rope, ...], list[int | None]]:
    """The ropes of the model, and which of them each layer uses. Raises ModelFileError."""
    n_layers = len(windows)
    if reader is None or (traits.rotation_switch and not parameters.flag(traits.rotation_switch, True)):
        return (), [None] * n_layers
    rope = reader.scaled()
    if latent is not None:
        # YaRN's amplitude is in the scale of the scores, and the rotated dimensions follow the latent ones.
        rope = replace(rope, amplitude=1.0, offset=latent.kv_rank)
    ropes, of_layer = [rope], [0] * n_layers
    plain = traits.window_rope_base or traits.window_rope_plain
    if any(windows) and (plain or parameters.has("rope.freq_base_swa")):
        base = parameters.factor("rope.freq_base_swa", traits.window_rope_base or reader.base)
        ropes.append(reader.plain(base) if plain else reader.scaled(base))
        of_layer = [int(window > 0) for window in windows]
    period = traits.unrotated_period
    windowed_only = traits.rotates == "windowed" and any(windows)
    return tuple(ropes), [
        None if (period and i % period == period - 1) or (windowed_only and not windows[i]) else of_layer[i]
        for i in range(n_layers)
    ]


@dataclass(frozen=True)
class Warming:
    """Queries grow with the position, so that attention stays sharp over long contexts.

    The factor is 1 + scale · ln(1 + floor((position + offset) / interval)); unless `everywhere`, only without RoPE.
    """

    scale: float
    interval: int
    offset: int
    everywhere: bool

    def factors(self, positions: np.ndarray) -> np.ndarray:
        """float32, one for each position."""
        return (1.0 + self.scale * np.log1p((positions + self.offset) // self.interval)).astype(np.float32)


def read_warming(parameters: Hyperparameters, which: str | None) -> Warming | None:
    """How scores grow with the position in "all" or in "unrotated" layers. Raises ModelFileError."""
    if which == "unrotated":
        return Warming(scale=0.1, interval=8192, offset=1, everywhere=False)
    if which is None or not parameters.has("attention.temperature_scale"):
        return None
    interval = parameters.integer("rope.scaling.original_context_length")
    return Warming(parameters.number("attention.temperature_scale"), interval, offset=0, everywhere=True)
