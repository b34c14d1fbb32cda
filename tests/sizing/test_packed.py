"""Bits of a matrix, counted by hand."""

import gguf
import pytest

from aespa_pl.export.gguf_bytes import BLOCK_TYPES
from aespa_pl.settings import QuantizationSettings
from aespa_pl.sizing.matrices import packed_bits


@pytest.mark.parametrize(("symmetric", "of_group"), [(False, 16 + 3), (True, 16)])
def test_scales_and_zero_points_are_shared_by_their_group(symmetric: bool, of_group: int) -> None:
    settings = QuantizationSettings(group_size=32, symmetric=symmetric)
    assert packed_bits(4 * 64, 64, "3", settings) == 4 * 64 * 3 + 8 * of_group


def test_a_row_has_one_scale_without_groups() -> None:
    assert packed_bits(4 * 64, 64, "8", QuantizationSettings()) == 4 * 64 * 8 + 4 * (16 + 8)


@pytest.mark.parametrize("kind", sorted({kind.partition("_S")[0] for kind in BLOCK_TYPES} - {"Q2_0"}))
def test_a_block_type_has_the_bits_of_its_blocks(kind: str) -> None:
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert packed_bits(2 * weights, weights, kind, QuantizationSettings()) == 2 * 8 * size
