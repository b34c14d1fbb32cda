"""Bits per weight, counted by hand."""

import pytest

from aespa_pl.evaluation.size import bits_per_weight, packed_bytes, projection_weights

SHAPES = {
    "q_proj.integers": (4, 64),
    "q_proj.scale": (4, 2),
    "q_proj.zero_point": (4, 2),
    "k_proj.integers": (2, 64),
    "k_proj.scale": (2, 2),
    "attention_input.zeta": (64,),
}


def test_scales_and_zero_points_are_shared_by_their_group() -> None:
    # groups of 32 weights of 3 bits, each with 16 bits of scale and 3 of zero point
    assert bits_per_weight(SHAPES, 3) == pytest.approx((32 * 3 + 16 + 3) / 32)
    assert projection_weights(SHAPES) == 4 * 64 + 2 * 64


def test_only_quantized_weights_become_smaller() -> None:
    # 1,000 bytes of which 800 are 400 weights of 16 bits; packed to 4 bits they take 200
    assert packed_bytes(1000, 400, 16, 4.0) == 400
