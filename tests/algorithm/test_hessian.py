from typing import Literal

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import corrected_weights, damp, damping_for, remaining_variances, unit_factor
from aespa_pl.errors import NumericalError


def hessian(heads: int = 1, columns: int = 6) -> Tensor:
    X = torch.randn(heads, columns, 40, dtype=torch.float64)
    return X @ X.transpose(1, 2)


def diagonal(H: Tensor) -> Tensor:
    return H.diagonal(dim1=-2, dim2=-1)


def test_damping_adds_a_share_of_each_heads_own_mean_diagonal() -> None:
    H = hessian(heads=2)
    H[1] *= 100
    damped = damp(diagonal(H), 0.01)
    for head in range(2):
        mean = sum(float(H[head, j, j]) for j in range(6)) / 6
        torch.testing.assert_close(damped[head], H[head].diagonal() + 0.01 * mean)


def test_dead_inputs_get_their_diagonal_before_damping() -> None:
    H = hessian()
    H[0, 2], H[0, :, 2] = 0, 0
    damped = damp(diagonal(H), 0.01)
    mean = (float(H[0].diagonal().sum()) + 1 / 2048) / 6
    assert float(damped[0, 2]) == pytest.approx(1 / 2048 + 0.01 * mean)
    assert float(damped[0, 3]) == pytest.approx(float(H[0, 3, 3]) + 0.01 * mean)


@pytest.mark.parametrize(
    ("damping", "inputs", "tokens", "share"),
    [
        ("auto", 4096, 262_144, 0.015625),
        ("auto", 576, 32_768, 0.017578125),
        ("auto", 256, 10**6, 0.01),
        ("auto", 4864, 8192, 0.3),
        ("auto", 8, 0, 0.3),  # an expert that no token reached
        (0.05, 4864, 8192, 0.05),
    ],
)
def test_damping_of_a_hessian_follows_its_tokens_unless_it_is_set(
    damping: float | Literal["auto"], inputs: int, tokens: int, share: float
) -> None:
    assert damping_for(damping, inputs, tokens) == share


def test_damping_leaves_its_argument_alone() -> None:
    H = hessian()
    before = H.clone()
    damp(diagonal(H), 0.5)
    assert torch.equal(H, before)


def whole(C: Tensor, D: Tensor) -> Tensor:
    return C @ torch.diag_embed(D) @ C.mT


@pytest.mark.parametrize("ordered", [False, True])
def test_factors_make_the_hessian_in_its_order(ordered: bool) -> None:
    H = hessian(heads=3)
    order = torch.stack([torch.randperm(6) for _ in range(3)]) if ordered else torch.arange(6).expand(3, 6)
    C, added = unit_factor(H, order if ordered else None)
    assert torch.equal(added, torch.zeros(3, dtype=H.dtype))
    assert torch.equal(C, C.triu())
    for head in range(3):
        one = H[head][order[head]][:, order[head]]
        torch.testing.assert_close(whole(C[head], remaining_variances(one)), one)


def test_factor_has_the_error_of_the_next_input_that_costs_least() -> None:
    H, errors = hessian()[0], torch.randn(3, dtype=torch.float64)
    C, _ = unit_factor(H[None])
    best = -torch.linalg.solve(H[3:, 3:], H[3:, :3] @ errors)  # of all inputs to come
    torch.testing.assert_close(-errors @ C[0, :3, 3], best[0])


@pytest.mark.parametrize(("lowest", "expected"), [(-0.005, 0.01), (-0.05, 0.1), (-0.5, 1)])
def test_extra_damping_is_the_first_power_of_ten_that_helps_times_each_heads_mean_diagonal(
    lowest: float, expected: float
) -> None:
    H = hessian(heads=2)
    vectors = torch.linalg.eigh(H[0]).eigenvectors
    values = torch.tensor([lowest, 1, 1, 1, 1, 1], dtype=torch.float64)
    H[0] = vectors @ torch.diag(values * 6 / values.sum()) @ vectors.T  # mean diagonal 1
    C, added = unit_factor(H)
    assert added.tolist() == pytest.approx([expected, 0])
    for head in range(2):
        mean = sum(float(H[head, j, j]) for j in range(6)) / 6
        damped = H[head] + float(added[head]) * mean * torch.eye(6, dtype=H.dtype)
        torch.testing.assert_close(whole(C[head], remaining_variances(damped)), damped)


def test_a_hessian_beyond_help_is_an_error() -> None:
    with pytest.raises(NumericalError, match="cannot be factored"):
        unit_factor(torch.full((1, 3, 3), torch.nan))


def test_a_matrix_whose_factor_has_a_zero_on_its_diagonal_is_damped() -> None:
    H = torch.diag(torch.tensor([1.0, 0.0, 2.0]))[None]
    C, added = unit_factor(H)
    assert added.tolist() == pytest.approx([0.01])
    torch.testing.assert_close(C, torch.eye(3)[None])
    torch.testing.assert_close(remaining_variances(H[0]), torch.tensor([1.01, 0.01, 2.01]))


def test_a_head_that_cannot_be_factored_leaves_the_heads_beside_it_alone() -> None:
    H = hessian(heads=3)
    H[1] -= 1.05 * torch.linalg.eigvalsh(H[1]).min() * torch.eye(6, dtype=H.dtype)
    B = torch.randn(3, 4, 6, dtype=H.dtype)
    C, added = unit_factor(H)
    solved, also_added = corrected_weights(torch.zeros_like(B), B, H, 1.0)
    assert added[1] > 0
    assert also_added[1] > 0
    assert bool(solved.isfinite().all())
    for head in (0, 2):
        alone = H[head : head + 1]
        assert added[head] == also_added[head] == 0
        assert torch.equal(C[head], unit_factor(alone)[0][0])
        torch.testing.assert_close(solved[head] @ H[head], B[head])


def test_remaining_variances_are_those_of_a_regression_on_later_inputs() -> None:
    H = hessian()[0]
    expected = [1 / torch.linalg.inv(H[j:, j:])[0, 0] for j in range(len(H))]
    torch.testing.assert_close(remaining_variances(H), torch.stack(expected))


def test_remaining_variances_of_a_singular_hessian_are_damped() -> None:
    x = torch.ones(5, 1)
    torch.testing.assert_close(
        remaining_variances(x @ x.T - 1e-3 * torch.eye(5)),
        remaining_variances(x @ x.T + (0.01 * 0.999 - 1e-3) * torch.eye(5)),
    )
    with pytest.raises(NumericalError, match="cannot be factored"):
        remaining_variances(torch.full((3, 3), torch.nan))
