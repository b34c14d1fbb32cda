"""Equivalent transformations change weights and no logits, and their matrices can be inverted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aespa_pl.models import family_of
from aespa_pl.models.family import FoldIntoRows
from aespa_pl.models.weights import projection_weight
from aespa_pl.tuning.omniquant import DOMINANCE, STABILITY, ChannelFactors, HeadMatrices, transformations_of
from tests.models.examples import make_ids, make_ours

FOLDED = {
    "llama": 4,
    "llama-grouped": 4,
    "opt": 4,
    "opt-350m": 2,
    "opt-bare": 1,
    "bloom": 3,
    "qwen3": 4,
    "qwen3-moe": 9,  # the input of all experts, and of each the last matrix
    "qwen3.5": 4,
}
"""By example, input groups whose factors can be folded: the attention's output is one where there is one."""
DOUBLE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
SINGLE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
"""The library's linear attention is float32."""


def shaken(transforms: dict[str, nn.Module]) -> int:
    """Give all transformations random values; return how many there are."""
    found = {
        id(inner): inner
        for outer in transforms.values()
        for inner in outer.modules()
        if isinstance(inner, ChannelFactors | HeadMatrices)
    }
    for inner in found.values():
        inner.log_factor.data.normal_(std=0.5)
        if isinstance(inner, HeadMatrices):
            inner.mixing.data.normal_(std=4)
            inner.enter_epoch(2)
    return len(found)


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("name", FOLDED)
def test_logits_stay_in_float64(name: str, matrices: bool) -> None:
    model: Any = make_ours(name, torch.float64)
    family, ids = family_of(model.config), make_ids()
    with torch.no_grad():
        expected = model(ids).logits
    for index, block in enumerate(model.get_submodule(family.blocks_path)):
        layout = family.layout(model.config, index)
        before = {p.name: projection_weight(block, layout, p).clone() for p in layout.projections}
        transforms = transformations_of(block, layout, matrices=matrices, epochs=3)
        for transform in transforms.values():
            transform.double()
        count = shaken(transforms)
        assert count == FOLDED[name] if layout.attended_group else count == FOLDED[name] - 1
        for key, transform in transforms.items():
            path, _, kind = key.rpartition(".")
            parametrize.register_parametrization(block.get_submodule(path), kind, transform)
        with torch.no_grad():
            unchanged = {
                p.name
                for p in layout.projections
                if torch.allclose(projection_weight(block, layout, p), before[p.name])
            }
        folded = {p.name for g in layout.groups if g.fold or layout.values_before(g) for p in g.projections}
        rows = {p.name for p in layout.projections if p.role == "value"}
        rows |= {g.fold.projection for g in layout.groups if isinstance(g.fold, FoldIntoRows)}
        assert unchanged == set(before) - folded - rows
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, **(SINGLE if name == "qwen3.5" else DOUBLE))


def inverse_of_heads(A: Tensor, weight: Tensor, shared: int) -> Tensor:
    """Return ``W diag(A_h)^-1`` with one dense block-diagonal matrix, in float64."""
    blocks = [a.double() for a in A for _ in range(shared)]
    inverse: Tensor = torch.linalg.inv(torch.block_diag(*blocks))
    return weight.double() @ inverse


def test_heads_that_share_values_see_the_inverse_of_the_same_matrix() -> None:
    made = HeadMatrices(2, 4, shared=3, epochs=4)
    made.log_factor.data.normal_(std=0.3)
    made.mixing.data.normal_(std=5)
    made.enter_epoch(4)
    A, weight, value = made.matrices().detach(), torch.randn(5, 24), torch.randn(8, 3)
    torch.testing.assert_close(
        made.divide(weight).double(), inverse_of_heads(A, weight, 3), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(made.multiply(value), torch.block_diag(*A) @ value)
    torch.testing.assert_close(made.multiply(value[:, 0]), torch.block_diag(*A) @ value[:, 0])


def test_the_band_grows_and_the_diagonal_stays_dominant() -> None:
    size, epochs = 8, 4
    made = HeadMatrices(2, size, shared=1, epochs=epochs)
    made.mixing.data.normal_(std=0.1)
    made.log_factor.data.normal_()
    for epoch in range(epochs + 1):
        made.enter_epoch(epoch)
        A = made.matrices()
        for i in range(size):
            for j in range(size):
                near = i != j and abs(i - j) <= size * epoch / epochs
                scale = made.log_factor[:, i].exp()
                expected = scale * (1.0 if i == j else STABILITY * made.mixing[:, i, j] * near)
                torch.testing.assert_close(A[:, i, j], expected)
    made.mixing.data.normal_(std=1000)
    A = made.matrices().detach().abs()
    diagonal = A.diagonal(dim1=1, dim2=2)
    assert torch.allclose(A.sum(-1) - diagonal, DOMINANCE * diagonal)
