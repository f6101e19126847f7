"""Packing: what has been packed is looked through, and tensors with infinities or NaN are named."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from quantized_blocks import random_rows, set_iq1_m_scale

from tinyllm.buffers import aligned_zeros
from tinyllm.kernels.block_format import BLOCK_FORMATS
from tinyllm.kernels.dequantize import PLAIN_TYPES, decode
from tinyllm.kernels.formats import TILE_OF, tile_of
from tinyllm.team import Team
from tinyllm.weights import Matrix, Part, Weights

# Two panels and a part of a third, two blocks of the largest formats.
N_OUTPUTS, N_INPUTS = 37, 512


@pytest.fixture(scope="module")
def team():
    team = Team(2)
    yield team
    team.close()


def rows_of(type_name: str) -> np.ndarray:
    if type_name in PLAIN_TYPES:
        return np.zeros((N_OUTPUTS, N_INPUTS * PLAIN_TYPES[type_name].itemsize), np.uint8)
    form = BLOCK_FORMATS[type_name]
    return random_rows(form, N_OUTPUTS, N_INPUTS // form.n_values)


def spoiled(type_name: str, rows: np.ndarray) -> list[np.ndarray]:
    """Copies of the rows with something that is not finite in one row, behind the first panel."""
    result = []

    def spoil(field: str, value: object) -> None:
        copy = rows.copy()
        copy.view(layout)[field][33, -1] = value
        result.append(copy)

    if type_name in PLAIN_TYPES:
        layout = np.dtype([("value", PLAIN_TYPES[type_name])])
        bits = np.array([0x7F80, 0xFFC0], np.uint16) if type_name == "BF16" else np.array([np.inf, np.nan])
        for value in bits:
            spoil("value", value)
        return result
    layout = BLOCK_FORMATS[type_name].layout
    for field in layout.names:
        # The sums that some types keep beside their codes are not read.
        if layout[field].kind == "f" and (type_name, field) != ("Q8_1", "s"):
            for value in (np.nan, -np.inf):
                spoil(field, value)
    if type_name == "IQ1_M":
        result.append(rows.copy())
        set_iq1_m_scale(result[-1].view(layout)[33, -1:], np.array([np.inf], np.float16))
    if type_name == "MXFP4":
        spoil("e", 255)
    return result


@pytest.mark.parametrize(
    ("type_name", "twin"),
    [(name, twin) for name, tile in TILE_OF.items() for twin in (0, 1) if not (twin and tile.is_float)],
)
def test_weights_that_are_not_finite_are_told(type_name, twin, team, caplog):
    caplog.set_level(logging.WARNING, "tinyllm")

    def warnings(rows: np.ndarray) -> list[str]:
        part = Part(type_name, N_OUTPUTS, rows.shape[1], rows)
        matrix = Matrix("one.weight", tile_of(type_name), N_OUTPUTS, N_INPUTS, (part,), twin=twin)
        memory = aligned_zeros(2 * matrix.n_bytes)
        matrix.address = memory.ctypes.data
        weights = Weights(SimpleNamespace(tensors={}))
        weights._matrices = [matrix]
        caplog.clear()
        weights.pack(team)
        return caplog.messages

    rows = rows_of(type_name)
    assert np.isfinite(decode(type_name, rows, N_INPUTS)).all()
    assert warnings(rows) == []
    cases = spoiled(type_name, rows)
    for case in cases:
        assert warnings(case) == ["tensor one.weight has infinite or NaN weights: answers will be broken"]
    assert cases or type_name == "NVFP4"
