"""The update is OPTQ's, and its loss is that of the weights that are left."""

import pytest
import torch
from torch import Tensor

from aespa_pl.errors import NumericalError
from tests import reference
from tests.block.blocks import LEARNED, begin, example, make_block, make_statistics, next_zeta, updated


def test_optq_updates_each_head_with_its_own_hessian_on_the_exported_grid() -> None:
    problem = updated(make_block("llama", LEARNED), LEARNED)
    prepared = problem.projections
    for name in ("q_proj", "k_proj", "v_proj", "up_proj"):
        p = prepared[name]
        heads = p.weight.shape[0]
        H = p.hessian[:].double().expand(heads, -1, -1)
        scale = p.folded_grid.scale.double() / next_zeta(problem.layout, prepared, name)
        for head in range(heads):
            row = head + 1
            expected, integers = reference.optq_row(
                p.weight[head, row].double(),
                H[head],
                scale[head, row] * p.grid.zeta.double(),
                p.grid.zero_point[head, row].double().expand(24),
                3,
            )
            torch.testing.assert_close(p.updated[head, row].double(), expected, rtol=0, atol=1e-4)
            assert torch.equal(p.integers[head, row].double(), integers)
        assert not torch.equal(p.updated, p.weight)
    assert updated(make_block("llama")).projections["q_proj"].updated is None  # nothing is learned from it


def test_loss_is_the_quadratic_form_of_the_error() -> None:
    """Entry by entry, of any integers, against the original weights."""
    prepared = updated(make_block("llama-grouped")).projections
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        p = prepared[name]
        q = torch.randint(0, 4, p.weight.shape).float()
        found = p.loss(q)
        heads, rows, d_in = p.weight.shape
        assert found.shape == ((heads, 1) if p.other_side is not None else (heads, rows))
        dW = (p.grid.scale * p.grid.zeta * (q - p.grid.zero_point) - p.weight).double()
        H = p.hessian[:].double().expand(heads, -1, -1)
        for head in range(heads):
            # dw_i H dw_k for all pairs of rows
            pairs = torch.zeros(rows, rows, dtype=torch.float64)
            for j in range(d_in):
                for l in range(d_in):
                    pairs += H[head, j, l] * torch.outer(dW[head, :, j], dW[head, :, l])
            if p.other_side is None:
                expected = pairs.diagonal()
            else:
                G = p.other_side[head].double()
                terms = [G[i, k] * pairs[k, i] for i in range(rows) for k in range(rows)]
                expected = torch.stack(terms).sum()[None]
            torch.testing.assert_close(found[head].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_hessian_that_cannot_be_factored_is_named() -> None:
    block, layout = example("opt")

    def change(matrices: dict[str, Tensor]) -> None:
        matrices["mlp_hidden"][[3, 4], [4, 3]] = torch.nan

    problem = begin(block, layout, make_statistics(block, layout, change=change))
    with pytest.raises(NumericalError, match=r"^block 0, fc2: a matrix cannot be factored"):
        updated(problem)
