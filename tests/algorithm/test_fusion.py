"""What is compiled for an accelerator is one kernel, and does what the plain path does."""

import shutil

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import fusion
from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss, soft_error, soft_gradient, start
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.quantizer import GridFormat
from tests.device.simulated import simulated

COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="needs a C++ compiler: torch.compile makes C++ of a kernel on a CPU",
)


def given(heads: int = 2, rows: int = 6, columns: int = 32) -> tuple[SoftRounding, Tensor, Tensor, Tensor]:
    W, X, K = torch.randn(heads, rows, columns), torch.randn(columns, 90), torch.randn(heads, 9, rows)
    grid = min_max_grid(W, torch.rand(columns) + 0.5, GridFormat(2, group_size=16))
    rounding, B = start(W, W + torch.randn_like(W), grid)  # some weights leave the range
    return rounding, 3 * B, (X @ X.T)[None] / 90, K.mT @ K


@pytest.mark.parametrize("beta", [None, 2.0, 7.5])
@pytest.mark.parametrize("coupled", [False, True])
def test_two_kernels_give_the_loss_and_gradient_of_the_plain_path(
    coupled: bool, beta: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding, B, H, G = given()
    expected = rounding_loss(B, rounding, H, G if coupled else None, weight=1.5, beta=beta)
    with simulated(monkeypatch) as device:
        there = SoftRounding(
            rounding.lower.to(device), rounding.base.to(device), None,
            rounding.scale.to(device), rounding.zeta.to(device), rounding.levels,
        )  # fmt: skip
        found = rounding_loss(
            B.to(device), there, H.to(device), G.to(device) if coupled else None,
            weight=1.5, beta=beta,
        )  # fmt: skip
        gradient, losses = found.gradient.cpu(), [float(found.reconstruction), float(found.penalty)]
    torch.testing.assert_close(gradient, expected.gradient)
    assert losses == pytest.approx([float(expected.reconstruction), float(expected.penalty)], rel=1e-5)
    assert 0 < int((expected.gradient == 0).sum()) < B.numel()  # the clamps act


@COMPILER
@pytest.mark.parametrize("function", [soft_error, soft_gradient])
def test_a_compiler_makes_one_kernel(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, metrics  # noqa: PLC0415, PLC2701 - takes seconds

    monkeypatch.setattr(config, "compile_threads", 1)
    rounding, B, _, _ = given()
    fixed = rounding.lower, rounding.scale, rounding.zeta, rounding.levels
    product, exponent = torch.randn_like(B), torch.tensor(7.5)
    mine, theirs = product.clone(), product.clone()
    plain = function.__wrapped__  # type: ignore[attr-defined]
    first = (B, rounding.base, *fixed) if function is soft_error else (B, product, *fixed, exponent, 1.5)
    metrics.reset()
    expected = plain(*first, mine)
    found = fusion.compiled(plain)(*first, theirs)
    assert metrics.generated_kernel_count == 1
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    for a, b in zip(found or (), expected or (), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_where_nothing_can_be_compiled_the_plain_path_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    @fusion.fused
    def double(A: Tensor) -> Tensor:
        calls.append(A.device.type)
        return 2 * A

    def fail(*_: object, **__: object) -> object:
        raise RuntimeError("no compiler")

    with simulated(monkeypatch) as device:
        monkeypatch.setattr(torch, "compile", fail)
        A = torch.ones(2, device=device)
        assert (double(A) + double(A)).tolist() == [4, 4]
    assert calls == ["simulated"] * 2
    assert caplog.text.count("no compiler") == 1
