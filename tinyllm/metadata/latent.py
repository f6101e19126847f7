"""Sizes of multi-head latent attention, read from metadata."""

from __future__ import annotations

from dataclasses import dataclass

from .hyperparameters import Hyperparameters


@dataclass(frozen=True)
class LatentConfig:
    """Ranks of the compressed q (0: not compressed) and kv, and the parts of a head.

    Of a query head `n_plain` values are compared with what is made of the latent vector, `n_rot` with the rotated key.
    """

    q_rank: int
    kv_rank: int
    n_rot: int
    n_plain: int
    v_dim: int


def read_latent(parameters: Hyperparameters) -> LatentConfig | None:
    """The sizes; None for a model without latent attention. Raises ModelFileError for metadata that make none."""
    if not parameters.has("attention.kv_lora_rank"):
        return None
    # Newer files give the sizes of the cached vectors in the usual keys, and those of a head here.
    suffix = "_mla" if parameters.has("attention.key_length_mla") else ""
    n_rot = parameters.integer("rope.dimension_count", maximum=2**16)
    kv_rank = parameters.integer("attention.kv_lora_rank", maximum=2**16)
    if kv_rank % 32:
        raise parameters.fail("attention.kv_lora_rank", f"is {kv_rank}, not a multiple of 32")
    return LatentConfig(
        q_rank=parameters.integer("attention.q_lora_rank", 0, minimum=0, maximum=2**20),
        kv_rank=kv_rank,
        n_rot=n_rot,
        n_plain=parameters.integer(f"attention.key_length{suffix}", minimum=n_rot + 1, maximum=2**16) - n_rot,
        v_dim=parameters.integer(f"attention.value_length{suffix}", maximum=2**16),
    )
