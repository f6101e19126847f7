"""Sizes of recurrent layers, read from `ssm.*` and `shortconv.*` metadata, and the state that such a layer keeps."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from .hyperparameters import Hyperparameters

LANES = 16

# The tensor that tells a recurrent mixer, the first that a layer has.
_TENSORS = {
    "shortconv.conv.weight": "short_conv",
    "ssm_x.weight": "mamba",
    "ssm_in.weight": "mamba2",
    "ssm_conv1d.weight": "delta_net",
}


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes of a model's recurrent layers; those that a mixer does not have are 0.

    `n_inner`: channels of the mixer's output, in `n_heads` heads. `n_conv`: channels that pass the convolution of
    `conv_kernel` taps. `n_state`: states per channel; in linear attention the size of a key. `n_groups`: heads of keys,
    or of b and c. `dt_rank`: of the step sizes. `norm_dt_b_c`: whether step sizes, b and c are normed.
    `keys_in_groups`: whether neighbouring heads share a key head, instead of every n_groups-th.
    """

    mixer: str
    conv_kernel: int
    n_inner: int
    n_conv: int
    n_heads: int = 0
    n_groups: int = 0
    n_state: int = 0
    dt_rank: int = 0
    norm_dt_b_c: bool = False
    keys_in_groups: bool = False

    @property
    def head_dim(self) -> int:
        return self.n_inner // self.n_heads

    @property
    def conv_bytes(self) -> int:
        """Bytes of the inputs that the convolution keeps; they come first in a layer's state."""
        return (self.conv_kernel - 1) * whole_panels(self.n_conv) * 4

    @property
    def state_bytes(self) -> int:
        """Bytes of a layer's state."""
        if not self.n_heads:
            return self.conv_bytes
        return self.conv_bytes + self.n_heads * whole_panels(self.head_dim) * self.n_state * 4


def recurrent_mixer(tensors: Container[str], layer: int) -> str | None:
    """Which recurrent mixer a layer's tensors are of; None for attention."""
    return next((mixer for name, mixer in _TENSORS.items() if f"blk.{layer}.{name}" in tensors), None)


def read_recurrent(hyper: Hyperparameters, mixer: str, n_embd: int, keys_in_groups: bool) -> RecurrentConfig:
    """The sizes. Raises ModelFileError for metadata that make no mixer."""
    if mixer == "short_conv":
        kernel = hyper.integer("shortconv.l_cache", maximum=64)
        return RecurrentConfig(mixer, kernel, n_inner=n_embd, n_conv=n_embd)
    kernel = hyper.integer("ssm.conv_kernel", maximum=64)
    n_inner = hyper.integer("ssm.inner_size", maximum=2**20)
    n_state = hyper.integer("ssm.state_size", maximum=2**16)
    rank = hyper.integer("ssm.time_step_rank", maximum=2**16)
    if mixer == "mamba":
        return RecurrentConfig(
            mixer,
            kernel,
            n_inner,
            n_conv=n_inner,
            n_heads=1,
            n_state=n_state,
            dt_rank=rank,
            norm_dt_b_c=hyper.flag("ssm.dt_b_c_rms", False),
        )
    n_groups = hyper.integer("ssm.group_count", maximum=2**16)
    if n_inner % rank:
        raise hyper.fail("ssm.time_step_rank", f"is {rank}, which does not divide {n_inner} channels")
    if rank % n_groups or n_inner % n_groups:
        raise hyper.fail("ssm.group_count", f"is {n_groups}, which does not divide {rank} heads of {n_inner} channels")
    return RecurrentConfig(
        mixer,
        kernel,
        n_inner,
        n_conv=n_inner + 2 * n_groups * n_state,
        n_heads=rank,
        n_groups=n_groups,
        n_state=n_state,
        keys_in_groups=keys_in_groups,
    )


def whole_panels(n: int) -> int:
    """Channels with room for whole panels of 16."""
    return -(-n // LANES) * LANES
