"""Grids of GGUF's block types: what is stored stands for the same weights, and each step lowers the loss."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as ggml_dequantize
from torch import Tensor

from aespa_pl.algorithm import refit as refits
from aespa_pl.algorithm.descent import descend
from aespa_pl.algorithm.grid import min_max_grid, search_grid
from aespa_pl.algorithm.grid_types import TYPES, Factors, GridType
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import Grid, GridFormat, dequantize, quantize
from aespa_pl.algorithm.refit import refit
from aespa_pl.export.gguf_bytes import BLOCK_TYPES

ROWS, COLUMNS = 3, 512
KINDS = list(TYPES.values())


def problem(*, heads: int = 1, own: bool = False, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """Return weights ``[heads, rows, columns]`` and a Hessian, one for each head where ``own``."""
    torch.manual_seed(0)
    X = torch.randn(heads if own else 1, columns, 2 * columns)
    X = X + 2 * torch.randn(len(X), columns, 1)
    return torch.randn(heads, ROWS, columns), X @ X.mT / (2 * columns)


def loss(integers: Tensor, W: Tensor, grid: Grid, H: Tensor, G: Tensor | None = None) -> Tensor:
    """Return the objective in float64."""
    dW = (dequantize(integers, grid) - W).double()
    product = dW @ H.double()
    return (dW * (product if G is None else G.double() @ product)).sum((1, 2))


def nearest(kind: GridType, columns: int = COLUMNS) -> tuple[Tensor, Tensor, Grid]:
    W, H = problem(columns=columns)
    return W, H, search_grid(W, H, torch.ones(columns), GridFormat.of(kind))[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nearest_integers_in_place_are_the_nearest_of_all(kind: GridType) -> None:
    steps = torch.cat([torch.randn(7, 32) * kind.largest, torch.tensor([[-1e6, 1e6, *[0.1] * 30]])])
    integers = torch.tensor(kind.levels or range(kind.largest + 1)).double() - kind.offset
    expected = integers[(steps.double()[..., None] - integers).abs().argmin(-1)]
    assert torch.equal(kind.nearest_(steps.clone()).double(), expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stored_numbers_stand_for_the_weights_of_the_grid(kind: GridType) -> None:
    W, _, grid = nearest(kind)
    factor = torch.rand(1, ROWS) + 0.5
    folded = grid.in_half(factor).folded(factor)
    integers = quantize(W * factor[..., None], folded)
    assert folded.factors is not None
    stored = folded.factors.stored(integers[0].to(torch.uint8))
    torch.testing.assert_close(stored.weight(), dequantize(integers, folded)[0], rtol=1e-5, atol=1e-6)
    tensors = {f"p.{field}": value for field, value in stored.tensors().items()}
    read = type(stored).read(tensors, "p", kind)
    assert torch.equal(read.weight(), stored.weight())


@pytest.mark.parametrize("name", [k.name for k in KINDS if k.name in GGMLQuantizationType.__members__])
def test_ggml_computes_the_same_weights_from_the_bytes(name: str) -> None:
    W, _, grid = nearest(TYPES[name])
    folded = grid.folded(torch.ones(1, ROWS))
    assert folded.factors is not None
    stored = folded.factors.stored(quantize(W, folded)[0].to(torch.uint8))
    packed = BLOCK_TYPES[name].encode(stored)
    values = ggml_dequantize(packed.view(np.uint8), GGMLQuantizationType[name])
    assert np.array_equal(values.reshape(ROWS, COLUMNS), stored.weight().numpy())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_zeros_stay_zeros(kind: GridType) -> None:
    W, H = problem()
    W[:, 0] = 0
    grid = search_grid(W, H, torch.ones(COLUMNS), GridFormat.of(kind))[0].in_half(torch.ones(1, ROWS))
    weight = dequantize(quantize(W, grid), grid)
    assert bool(weight.isfinite().all())
    assert float(weight[:, 0].abs().max()) < 1e-5


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("spread", [0.0, 0.1])
@pytest.mark.parametrize("kind", [k for k in KINDS if k.zero_point is None], ids=lambda kind: kind.name)
def test_weights_of_one_sign_use_all_integers(kind: GridType, spread: float, sign: int) -> None:
    W = sign * (1 + spread * torch.rand(1, ROWS, COLUMNS))
    grid = min_max_grid(W, torch.ones(COLUMNS), GridFormat.of(kind)).in_half(torch.ones(1, ROWS))
    error = float((dequantize(quantize(W, grid), grid) - W).abs().max())
    of_integers, of_minimums = spread / kind.largest, 0.0  # distances
    if kind.minimums != (1, 1):  # an integer times a factor of the block, which is subtracted
        of_minimums = (1 + spread) / kind.minimums[1]
        of_integers = of_integers if sign == -1 else (1 + spread) / kind.largest
    assert error < 0.9 * of_integers + 0.6 * of_minimums + 2e-3  # of float16


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_search_beats_equal_weights_of_all_columns(kind: GridType) -> None:
    W, _ = problem()
    H = torch.diag(torch.rand(COLUMNS) ** 8)[None]
    grid = search_grid(W, H, torch.ones(COLUMNS), GridFormat.of(kind))[0]
    other = min_max_grid(W, torch.ones(COLUMNS), GridFormat.of(kind))
    assert loss(quantize(W, grid), W, grid, H) < loss(quantize(W, other), W, other, H)


def test_incomplete_last_blocks_have_factors_of_their_own() -> None:
    W, H, grid = nearest(TYPES["Q2_K"], columns=192)
    W2, H2, _ = nearest(TYPES["Q2_K"], columns=448)
    assert grid.factors is not None
    assert grid.factors.d.shape == (1, ROWS, 1)
    wide = search_grid(W2, H2, torch.ones(448), GridFormat.of(TYPES["Q2_K"]))[0]
    assert wide.factors is not None
    assert wide.factors.d.shape == (1, ROWS, 2)
    assert wide.factors.a.shape == (1, ROWS, 28)
    assert loss(quantize(W, grid), W, grid, H) < loss(torch.zeros_like(W), W, grid, H)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("coupled", ["", "one after the other", "some at once"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_refit_lowers_the_loss_and_keeps_what_the_type_stores(
    kind: GridType, coupled: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refits, "LARGE_HEAD", 0 if coupled == "some at once" else ROWS)
    monkeypatch.setattr(refits, "COUPLED_ROWS", 3)
    W, H = problem(heads=2, own=own, columns=256)
    G = None
    if coupled:
        G = torch.randn(2, ROWS, ROWS)
        G = G @ G.mT
    zeta, factor = torch.rand(256) + 0.5, torch.rand(2, ROWS) + 0.5
    grid = search_grid(W, H, zeta, GridFormat.of(kind))[0].in_half(factor)
    _, integers, _ = update_weights(W, H, grid)
    moved, left = refit(integers, W, grid, H, G, row_factor=factor)
    of_bytes, _ = refit(integers.to(torch.uint8), W, grid, H, G, row_factor=factor)  # as the descent has them
    assert torch.equal(dequantize(integers, of_bytes), dequantize(integers, moved))
    before, after = loss(integers, W, grid, H, G), loss(integers, W, moved, H, G)
    assert bool((after <= before).all())  # of one head nothing may be gained
    assert after.sum() < before.sum()
    torch.testing.assert_close(left.sum(-1).double(), after, rtol=1e-4, atol=0)
    assert moved.factors is not None
    f = moved.factors
    for d in (f.d, f.d_min):
        stored = d * factor[..., None]
        torch.testing.assert_close(stored.half().float(), stored, rtol=1e-6, atol=0)
    for integer, (low, high) in ((f.a, kind.scales), (f.c, kind.minimums)):
        assert torch.equal(integer, integer.round())
        assert low <= int(integer.min())
        assert int(integer.max()) <= high
    assert not bool((f.a == 0).any())


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_columns_that_move_together_do_not_change_a_refit(
    name: str, coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    W, H = problem(heads=2, columns=256)
    G = torch.randn(2, ROWS, ROWS)
    G = G @ G.mT
    ones = torch.ones(2, ROWS)
    grid = search_grid(W, H, torch.ones(256), GridFormat.of(TYPES[name]))[0].in_half(ones)
    integers = quantize(W, grid)
    found = []
    for ahead in (32, 128, 256):
        monkeypatch.setattr(refits, "AHEAD", ahead)
        found.append(
            dequantize(integers, refit(integers, W, grid, H, G if coupled else None, row_factor=ones)[0])
        )
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


def test_refit_finds_the_best_scale_of_a_group() -> None:
    """All a and c of one group are tried in turn; its d and d_min are then a step of least squares."""
    kind = TYPES["Q2_K"]
    W, H = problem(columns=16)
    ones = torch.ones(1, ROWS)
    grid = search_grid(W, H, torch.ones(16), GridFormat.of(kind))[0].in_half(ones)
    integers = quantize(W, grid)
    moved, _ = refit(integers, W, grid, H, row_factor=ones)
    assert grid.factors is not None
    for row in range(ROWS):
        d, d_min = (float(x[0, row, 0]) for x in (grid.factors.d, grid.factors.d_min))
        best = torch.inf
        for a in range(1, 16):
            for c in range(16):
                dW = (d * a * integers[0, row] - d_min * c - W[0, row]).double()
                best = min(best, float(dW @ H[0].double() @ dW))
        dW = (dequantize(integers, moved) - W)[0, row].double()
        assert float(dW @ H[0].double() @ dW) <= best * (1 + 1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_optq_and_descent_lower_the_loss(kind: GridType) -> None:
    W, H, grid = nearest(kind)
    first = quantize(W, grid)
    _, second, _ = update_weights(W, H, grid)
    third = descend(second, W, grid, H, passes=5).integers
    losses = [float(loss(q, W, grid, H)) for q in (first, second, third)]
    assert losses[2] <= losses[1] < losses[0]
    kept = reconstruction_loss(dequantize(third, grid) - W, H).sum()
    assert float(kept) == pytest.approx(losses[2], rel=1e-3)


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_groups_whose_minimum_is_held_at_zero_keep_their_range(name: str) -> None:
    """Such groups, of weights near one number above 0, stand beside others in a block."""
    torch.manual_seed(0)
    kind = TYPES[name]
    centres = torch.randn(1, 16, COLUMNS // kind.group, 1).expand(-1, -1, -1, kind.group)
    groups = centres + 0.01 * torch.randn(centres.shape)
    W, H, ones = groups.flatten(2), torch.eye(COLUMNS)[None], torch.ones(COLUMNS)
    found = search_grid(W, H, ones, GridFormat.of(kind))[0]
    # the plain way: each group from its least weight, or 0, to its largest, or 0
    low, high = -groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    of_blocks = [x.unflatten(-1, (-1, kind.groups)) for x in ((low + high) / kind.largest, low)]
    d, d_min = (
        x.amax(-1) / limits[1] for x, limits in zip(of_blocks, (kind.scales, kind.minimums), strict=True)
    )
    a, c = ((x / f[..., None]).round().flatten(2) for x, f in zip(of_blocks, (d, d_min), strict=True))
    plain = Grid.of(Factors(kind, d, a.clamp(min=1), d_min, c), ones)
    assert loss(quantize(W, found), W, found, H) < 0.6 * loss(quantize(W, plain), W, plain, H)
