"""Rotary positions (RoPE, Su et al. 2021): metadata and factor tensors go in, out come frequencies of rotated pairs.

Every way to stretch them over longer contexts is folded in here: linear, YaRN, factors per frequency, two sets of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import ModelFileError, UnsupportedModelError
from ..kernels.dequantize import decode
from .hyperparameters import Hyperparameters


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation by angle = position · frequency; cosine and sine are multiplied by `amplitude`.

    `pairing`: which dimensions turn together, "adjacent" (0,1), (2,3)… or "halves" (i, i + n_rot/2).
    `offset`: the first rotated dimension of a head.
    """

    n_rot: int
    pairing: str
    frequencies: np.ndarray  # float64 [n_rot / 2]
    amplitude: float = 1.0
    offset: int = 0

    def table(self, positions: np.ndarray) -> np.ndarray:
        """What the kernels multiply a head by at each position: float32 [n, 2, n_rot].

        A cosine and a sine per rotated dimension; of the two dimensions of a pair the first has a negative sine.
        """
        angles = positions[:, None].astype(np.float64) * self.frequencies
        cosines, sines = np.cos(angles) * self.amplitude, np.sin(angles) * self.amplitude
        if self.pairing == "halves":
            both = (np.concatenate((cosines, cosines), -1), np.concatenate((-sines, sines), -1))
        else:
            both = (np.repeat(cosines, 2, -1), np.stack((-sines, sines), -1).reshape(len(angles), -1))
        return np.stack(both, axis=1).astype(np.float32)


class RopeReader:
    """Reads the ropes of a file. `n_ctx`, the context that it is run with, chooses between long and short factors."""

    def __init__(self, parameters: Hyperparameters, pairing: str, head_dim: int, n_ctx: int):
        self.parameters, self.pairing = parameters, pairing
        self.n_rot = parameters.integer("rope.dimension_count", head_dim, maximum=2**16)
        if self.n_rot > head_dim or self.n_rot % 2:
            raise parameters.fail("rope.dimension_count", f"is {self.n_rot} with heads of {head_dim}")
        self.base = parameters.number("rope.freq_base", 10000.0)
        if self.base <= 1:
            raise parameters.fail("rope.freq_base", f"is {self.base:g}, not above 1")
        self.n_ctx_original = parameters.integer(
            "rope.scaling.original_context_length", parameters.integer("context_length")
        )
        self.n_ctx = n_ctx
        # Files from before rope.scaling.type say only by how much positions are divided.
        self.kind = parameters.text("rope.scaling.type", "linear")
        self.factor = parameters.factor("rope.scaling.factor", parameters.factor("rope.scale_linear"))
        if self.kind not in ("none", "linear", "yarn", "longrope"):
            raise UnsupportedModelError(
                f"{parameters.file.path}: {parameters.architecture}.rope.scaling.type {self.kind!r} is not supported"
            )

    def scaled(self, base: float | None = None) -> Rope:
        """The rope with the scaling that the file asks for, at another base if one is given."""
        amplitude = self.parameters.factor("rope.scaling.attn_factor")
        frequencies = self._frequencies(base or self.base)
        if self.kind == "yarn":
            frequencies = self._yarn(frequencies, base or self.base)
            multiplier = self.parameters.number("rope.scaling.yarn_log_multiplier", 0.0)
            stretch = math.log(self.factor)
            amplitude *= (1.0 + 0.1 * stretch) / (1.0 + 0.1 * multiplier * stretch)
        elif self.kind != "none":
            frequencies = frequencies / self.factor
        return Rope(self.n_rot, self.pairing, frequencies, amplitude)

    def plain(self, base: float | None = None) -> Rope:
        """The rope without scaling, at another base if one is given."""
        return Rope(self.n_rot, self.pairing, self._frequencies(base or self.base))

    def _frequencies(self, base: float) -> np.ndarray:
        frequencies = base ** (-np.arange(0, self.n_rot, 2, dtype=np.float64) / self.n_rot)
        factors = self._factors()
        return frequencies if factors is None else frequencies / factors

    def _factors(self) -> np.ndarray | None:
        """Divisors of each frequency, where the file has them."""
        long = self.n_ctx > self.n_ctx_original
        for name in ("rope_freqs.weight", f"rope_factors_{'long' if long else 'short'}.weight"):
            tensor = self.parameters.file.tensors.get(name)
            if tensor is None:
                continue
            if tensor.shape != (self.n_rot // 2,):
                raise self._bad_tensor(name, f"has shape {tensor.shape}, expected {(self.n_rot // 2,)}")
            factors = decode(tensor.type.name, tensor.data, self.n_rot // 2).ravel().astype(np.float64)
            if not (np.isfinite(factors) & (factors > 0)).all():
                raise self._bad_tensor(name, "holds factors that are not above zero")
            return factors
        return None

    def _bad_tensor(self, name: str, complaint: str) -> ModelFileError:
        return ModelFileError(f"{self.parameters.file.path}: tensor {name} {complaint}")

    def _yarn(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """YaRN (Peng et al. 2023): fast dimensions keep their frequency, slow ones are interpolated, a ramp between."""
        beta_fast = self.parameters.factor("rope.scaling.yarn_beta_fast", 32.0)
        beta_slow = self.parameters.factor("rope.scaling.yarn_beta_slow", 1.0)

        def dimension(rotations: float) -> float:
            """The dimension that turns this often within the original context."""
            return self.n_rot * math.log(self.n_ctx_original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(dimension(beta_fast)))
        high = min(self.n_rot - 1, math.ceil(dimension(beta_slow)))
        ramp = 1 - np.clip((np.arange(self.n_rot // 2) - low) / max(0.001, high - low), 0, 1)
        return frequencies * (ramp + (1 - ramp) / self.factor)
