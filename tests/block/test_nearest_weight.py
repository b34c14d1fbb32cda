"""Rounding to nearest takes the nearest value of the min-max grid."""

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.block.quantized import nearest_weight
from aespa_pl.models.weights import projection_weight
from tests.block.blocks import example, linear, rows_by_hand


def min_max_values(w: Tensor, bits: int, *, symmetric: bool) -> Tensor:
    """Return all values of the min-max grid of one row (or group)."""
    low, high, largest = min(float(w.min()), 0.0), max(float(w.max()), 0.0), 2**bits - 1
    if symmetric:
        high = max(-low, high)
        low = -high
    scale = (high - low) / largest
    zero = 2 ** (bits - 1) if symmetric else round(-low / scale)
    return torch.tensor([scale * (q - zero) for q in range(largest + 1)], dtype=torch.float64)


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_nearest_weight_is_the_nearest_value_of_the_min_max_grid(
    bits: int, group_size: int | None, *, symmetric: bool
) -> None:
    block, layout = example("bloom")
    form = GridFormat(bits, symmetric, group_size)
    fused = linear(block, "self_attention.query_key_value").weight
    fused[:12].abs_()  # rows without a negative weight: their range reaches down to 0 all the same
    for p in layout.projections:
        if p.name not in ("query", "value", "dense"):
            continue
        W = rows_by_hand(block, layout, p.name, p.module).flatten(0, 1).double()
        found = nearest_weight(block, layout, p, form).double()
        assert found.shape == W.shape
        size = group_size or W.shape[1]
        for row in range(W.shape[0]):
            for w, hat in zip(W[row].split(size), found[row].split(size), strict=True):
                values = min_max_values(w, bits, symmetric=symmetric)
                least = (w[:, None] - values).abs().amin(1)
                torch.testing.assert_close((hat - w).abs(), least, rtol=0, atol=1e-6)
                assert float((hat[:, None] - values).abs().amin(1).max()) < 1e-6


def test_nearest_weight_leaves_the_block_as_it_is() -> None:
    block, layout = example("llama")
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    for p in layout.projections:
        nearest = nearest_weight(block, layout, p, GridFormat(2))
        assert not torch.equal(nearest, projection_weight(block, layout, p))
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name])
