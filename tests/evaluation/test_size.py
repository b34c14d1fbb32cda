"""Bits per weight, counted by hand."""

import pytest

from aespa_pl.evaluation.size import bits_per_weight, projection_weights

SHAPES = {
    "0.q_proj.integers": (4, 64),
    "0.q_proj.scale": (4, 2),
    "0.q_proj.zero_point": (4, 2),
    "0.k_proj.integers": (2, 64),
    "0.k_proj.scale": (2, 2),
    "0.attention_input.zeta": (64,),
}


def test_scales_and_zero_points_are_shared_by_their_group() -> None:
    # groups of 32 weights of 3 bits, each with 16 bits of scale and 3 of zero point
    assert bits_per_weight(SHAPES, lambda *_: 3) == pytest.approx((32 * 3 + 16 + 3) / 32)
    assert bits_per_weight(SHAPES, lambda *_: 3, symmetric=True) == pytest.approx((32 * 3 + 16) / 32)
    assert projection_weights(SHAPES) == 4 * 64 + 2 * 64


def test_projections_may_have_bits_of_their_own() -> None:
    # q_proj: 256 weights of 3 bits in 8 groups; k_proj: 128 weights of 8 bits in 4 groups
    total = 256 * 3 + 8 * (16 + 3) + 128 * 8 + 4 * (16 + 8)
    found = bits_per_weight(SHAPES, lambda _, name: 3 if name == "q_proj" else 8)
    assert found == pytest.approx(total / (256 + 128))
