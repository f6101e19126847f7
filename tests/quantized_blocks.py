"""Random blocks of every GGUF format, with scales of each kind."""

from __future__ import annotations

import numpy as np

from tinyllm.kernels.block_format import BlockFormat

# What the float scales of a block are set to: values of f16 and f32 fields, E8M0 bytes, UE4M3 bytes.
SCALES = {
    "ordinary": ([0.01, 0.0375, 1.0, 3.75], [118, 127, 130], [1, 8, 56, 100]),
    "negative": ([-0.01, -0.0375, -1.0, -3.75], [2, 100], [0x80, 0x88, 0xD0]),
    "zero": ([0.0, -0.0], [0], [0]),
    "subnormal": ([6e-8, -6e-8, 3e-5, 6.097e-5], [0, 1], [1, 7]),
    "largest": ([65504.0, -65504.0], [251, 252, 253, 254, 255], [0x7E, 0x7F, 0xFF]),
    "any bytes": (None, None, None),
}


def random_rows(form: BlockFormat, n_rows: int, n_blocks: int, scales: str = "ordinary", seed: int = 0) -> np.ndarray:
    """Rows of random blocks, uint8 [n_rows, n_blocks * n_bytes], whose float scales are as SCALES says."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n_rows, n_blocks * form.n_bytes), dtype=np.uint8)
    set_scales(form, data, scales, rng)
    return data


def set_scales(form: BlockFormat, data: np.ndarray, scales: str, rng: np.random.Generator) -> None:
    """Set the float scales of blocks to what SCALES says, at random."""
    floats, e8m0, ue4m3 = SCALES[scales]
    if floats is None:
        return
    blocks = data.view(form.layout)
    for field in form.layout.names:
        if form.layout[field].kind == "f":
            blocks[field] = rng.choice(floats, blocks.shape)
    if form.scale_type == "e8m0":
        blocks["e"] = rng.choice(e8m0, blocks.shape)
    if form.scale_type == "ue4m3":
        blocks["scales"] = rng.choice(ue4m3, blocks["scales"].shape)
    if form.name == "IQ1_M":
        set_iq1_m_scale(blocks, rng.choice(np.array(floats, dtype=np.float16), blocks.shape))


def set_iq1_m_scale(blocks: np.ndarray, d: np.ndarray) -> None:
    bits = d.view(np.uint16)
    for word in range(4):
        blocks["scales"][..., word] = blocks["scales"][..., word] & 0x0FFF | (bits >> 4 * word & 15) << 12
