"""The table of tiles: every type has one that holds it without loss and costs about what the file does."""

from __future__ import annotations

import numpy as np
import pytest

from tinyllm.errors import UnsupportedModelError
from tinyllm.kernels.block_format import BLOCK_FORMATS
from tinyllm.kernels.dequantize import PLAIN_TYPES
from tinyllm.kernels.formats import BLOCK, FIELDS, PANEL_ROWS, TILE_OF, TILES, tile_of
from tinyllm.kernels.pack import kernel_of, table_of

LOSSLESS_INTEGERS = {"i8": range(-128, 128), "u8": range(256), "u4": range(16), None: range(0)}
EXACT_SIZE = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()

each_quantized = pytest.mark.parametrize("name", [name for name in TILE_OF if name in BLOCK_FORMATS])


def test_every_readable_weight_type_has_a_tile():
    assert set(TILE_OF) == set(BLOCK_FORMATS) | {"F32", "F16", "BF16"}
    assert set(TILES.values()) == set(TILE_OF.values())
    assert set(TILE_OF) - set(BLOCK_FORMATS) <= set(PLAIN_TYPES)


@each_quantized
def test_a_tile_holds_its_type(name: str):
    """Codes, scales and their spans fit the tile without loss."""
    form, tile = BLOCK_FORMATS[name], TILE_OF[name]
    if tile.levels:
        assert set(form.levels) <= set(tile.levels) and len(tile.levels) <= 2**tile.bits
    elif tile.bits == 8:
        assert form.lowest >= -128 and form.highest <= 127
    else:
        assert form.lowest + tile.zero >= 0 and form.highest + tile.zero < 2**tile.bits
    assert form.sub_block % (BLOCK // tile.halves) == 0
    assert form.scale_span % (tile.blocks * BLOCK // tile.floats) == 0
    assert form.n_values % (tile.blocks * BLOCK) == 0
    assert tile.scale == form.scale_type and tile.gain == form.gain
    assert tile.minimum == form.has_offset
    for integers in filter(None, (form.scales, form.mins)):
        assert set(integers) <= set(LOSSLESS_INTEGERS[tile.integers])
    if form.scales is None:
        assert tile.integers is None


@each_quantized
def test_size_in_memory(name: str):
    form, tile = BLOCK_FORMATS[name], TILE_OF[name]
    in_file = 8 * form.n_bytes / form.n_values
    limit = 1.04 if name in EXACT_SIZE else 1.15 if name in ("Q2_K", "Q3_K") else 2.3
    assert tile.bits_per_weight <= limit * in_file
    n = 1280
    assert tile.panel_bytes(n) * 8 / (PANEL_ROWS * n) == pytest.approx(tile.bits_per_weight)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_size_of_floats(name: str):
    tile = tile_of(name)
    assert tile.is_float and tile.bits_per_weight == 8 * PLAIN_TYPES[name].itemsize
    assert tile.panel_bytes(33) == 2 * tile.bytes == tile.panel_bytes(64)


@pytest.mark.parametrize("bits", FIELDS)
def test_fields_use_each_bit_once(bits: int):
    stored = np.zeros((bits, 8), dtype=int)
    for group, fields in enumerate(FIELDS[bits]):
        code_bits = 0
        for vector, shift, mask in fields:
            assert not code_bits & mask
            code_bits |= mask
            stored[vector] += (mask << shift) >> np.arange(8) & 1
        assert code_bits == 2**bits - 1, group
    assert (stored == 1).all()


def test_types_without_a_tile():
    for ask in (tile_of, kernel_of):
        with pytest.raises(UnsupportedModelError, match="I32"):
            ask("I32")


def test_codebook_tables_are_numbers_of_levels():
    tables = {name: table for name in TILE_OF if (table := table_of(name)) is not None}
    assert set(tables) == {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"}
    for name, table in tables.items():
        assert table.dtype == np.uint8 and table.shape[1] in (4, 8) and not table.flags.writeable
        assert table.max() < len(tile_of(name).levels)
