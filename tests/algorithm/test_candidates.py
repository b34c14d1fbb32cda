"""The bounds save products and never cost the best candidate; the oracle computes every loss."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aespa_pl.algorithm import candidates as candidates_module
from aespa_pl.algorithm.candidates import Candidates, every_loss, least_loss
from tests import reference

SPECTRA = {"identity": 0.0, "mild": 0.5, "typical": 1.0, "steep": 2.0, "nearly singular": 6.0}
"""Exponents of the eigenvalues' power law."""


def problem(
    spectrum: str, bits: int, rows: int = 6, columns: int = 40, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Candidates]:
    Q = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64))[0]
    eigenvalues = torch.arange(1, columns + 1, dtype=torch.float64) ** -SPECTRA[spectrum]
    H = (Q * (eigenvalues + 1e-2 * eigenvalues.mean())) @ Q.T  # damped, as all Hessians are
    V = torch.randn(rows, columns, dtype=torch.float64)
    full = (V.amax(1) - V.amin(1)) / (2**bits - 1)
    ratios = torch.arange(100, 0, -1, dtype=torch.float64) / 100
    zero = -V.amin(1) / full
    zeros = torch.stack([zero.floor(), zero.ceil()], 1).repeat_interleave(100, 1)
    scales = (full[:, None] * ratios).repeat(1, 2)
    return V.to(dtype), H.to(dtype), Candidates(scales.to(dtype), zeros.to(dtype), 2**bits - 1)


def loss_of(V: Tensor, H: Tensor, candidates: Candidates, row: int, c: int) -> float:
    """Return the loss of one candidate of one row, in float64."""
    scale, zero = float(candidates.scale[row, c]), float(candidates.zero[row, c])
    q = reference.nearest(V[row], scale, zero, candidates.levels)
    error = scale * (q - zero) - V[row].double()
    return float(error @ H.double() @ error)


class ProductCounter(TorchFunctionMode):
    """Counts the rows that are multiplied with one matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix, self.rows = matrix, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "matmul" in func.__name__ and args[1] is self.matrix:
            self.rows += len(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_no_candidate_is_better_than_the_one_chosen(spectrum: str, bits: int) -> None:
    V, H, candidates = problem(spectrum, bits, rows=3)
    chosen = least_loss(V, H, candidates).tolist()
    for row, choice in enumerate(chosen):
        losses = [loss_of(V, H, candidates, row, c) for c in range(200)]
        assert losses[choice] == pytest.approx(min(losses), rel=1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_choice_in_float32_is_the_best_up_to_rounding(spectrum: str, bits: int) -> None:
    """Wide enough for sums to round; every loss in float64, from float32 candidates."""
    V, H, candidates = problem(spectrum, bits, rows=40, columns=300, dtype=torch.float32)
    exact = Candidates(candidates.scale.double(), candidates.zero.double(), candidates.levels)
    losses = every_loss(V.double()[None], H.double()[None], exact[None])[0]
    chosen = losses.gather(1, least_loss(V, H, candidates)[:, None])[:, 0]
    computed = every_loss(V[None], H[None], candidates[None])[0].argmin(1)
    assert bool((chosen <= losses.gather(1, computed[:, None])[:, 0] * (1 + 1e-6)).all())


def test_every_loss_is_that_of_its_candidate() -> None:
    V, H, candidates = problem("typical", bits=3)
    losses = every_loss(V[None], H[None], candidates[None])[0]
    for row in range(len(V)):
        expected = [loss_of(V, H, candidates, row, c) for c in range(200)]
        torch.testing.assert_close(losses[row], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("spectrum", "most"), [("steep", 7), ("typical", 16), ("identity", 35)])
def test_few_of_the_candidates_are_multiplied(spectrum: str, most: int) -> None:
    V, H, candidates = problem(spectrum, bits=2, rows=20, columns=300)
    with ProductCounter(H) as counter:
        least_loss(V, H, candidates)
    assert 2 * len(V) <= counter.rows <= most * len(V)


def test_each_row_chooses_for_itself() -> None:
    """Rows are dropped and reordered on the way."""
    V, H, candidates = problem("mild", bits=2, rows=20)
    together = least_loss(V, H, candidates)
    alone = [least_loss(V[r : r + 1], H, candidates[r : r + 1]) for r in range(len(V))]
    assert torch.equal(together, torch.cat(alone))


def test_chunks_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    V, H, candidates = problem("typical", bits=2)
    whole = least_loss(V, H, candidates)
    monkeypatch.setattr(candidates_module, "CPU_CHUNK", 1)
    assert torch.equal(least_loss(V, H, candidates), whole)


def test_rounding_all_to_zero_is_no_candidate() -> None:
    """Here it would be the best: the weights add up to 0, and H sees nothing but their sum."""
    V = torch.tensor([[0.7, -0.4, -0.3]], dtype=torch.float64)
    H = torch.ones(3, 3, dtype=torch.float64) + 1e-3 * torch.eye(3, dtype=torch.float64)
    scale, zero = torch.tensor([[[0.9, 1.0]], [[1.0, 1.0]]], dtype=torch.float64)
    candidates = Candidates(scale, zero, 3)
    assert loss_of(V, H, candidates, 0, 0) < loss_of(V, H, candidates, 0, 1)
    assert least_loss(V, H, candidates).tolist() == [0]
    assert least_loss(V, H, candidates[:, [1, 0]]).tolist() == [1]


def test_single_candidate_and_rows_that_round_without_error() -> None:
    V, H, candidates = problem("typical", bits=2, rows=3)
    assert least_loss(V, H, candidates[:, :1]).tolist() == [0, 0, 0]
    V = torch.stack([torch.zeros_like(V[0]), torch.full_like(V[0], 2.0)])
    scale = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.5, 2.0]], dtype=torch.float64)
    exact = least_loss(V, H, Candidates(scale, torch.zeros_like(scale), 3))
    assert int(exact[1]) == 2
