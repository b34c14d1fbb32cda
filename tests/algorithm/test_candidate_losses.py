"""Exact losses are those of an oracle in float64, and approximate ones those of ``A A^T + diag(D)``."""

import pytest
import torch

from aespa_pl.algorithm.candidates import approximate_losses, exact_losses, leading_part
from tests.algorithm.candidate_examples import SPECTRA, every_loss, loss_of, problem


def test_losses_of_all_candidates_are_those_of_each() -> None:
    """The oracle of these tests is right itself: loops over the weights give the same."""
    V, H, candidates = problem("typical", bits=3, rows=2, columns=12)
    for row in range(2):
        grids = zip(candidates.scale[0, row].tolist(), candidates.zero[0, row].tolist(), strict=True)
        one_by_one = [loss_of(V[0, row], H[0], *grid, candidates.largest) for grid in grids]
        torch.testing.assert_close(
            every_loss(V, H, candidates, row), torch.tensor(one_by_one, dtype=torch.float64)
        )


def test_exact_loss_is_that_of_its_candidate() -> None:
    V, H, candidates = problem("typical", bits=3)
    losses = exact_losses(V, H, candidates)
    for row in range(6):
        torch.testing.assert_close(losses[0, row], every_loss(V, H, candidates, row))


def test_approximate_loss_is_that_with_the_approximate_hessian() -> None:
    V, H, candidates = problem("typical", bits=3)
    A, D = leading_part(H)
    near = (A @ A.mT + torch.diag_embed(D)).double()
    losses = approximate_losses(V, A, D, candidates)
    for row in range(6):
        torch.testing.assert_close(losses[0, row], every_loss(V, near, candidates, row))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_leading_part_has_the_diagonal_and_never_exceeds_the_hessian(spectrum: str) -> None:
    _, H, _ = problem(spectrum, bits=2)
    A, D = leading_part(H)
    torch.testing.assert_close((A @ A.mT).diagonal(dim1=1, dim2=2) + D, H.diagonal(dim1=1, dim2=2))
    assert float(torch.linalg.eigvalsh(H - A @ A.mT).min()) > -1e-9


def test_leading_part_finds_what_few_directions_hold() -> None:
    X = torch.randn(1, 80, 5, dtype=torch.float64)
    H = X @ X.mT + torch.diag(torch.full((80,), 1e-6, dtype=torch.float64))
    A, _ = leading_part(H)
    torch.testing.assert_close(A @ A.mT, H, atol=1e-5, rtol=1e-5)
