"""What is compiled for an accelerator is one kernel, and does what the plain path does."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss, start
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.workspace import fused
from tests.device.simulated import simulated

COMPILER = shutil.which("g++") or shutil.which("clang++")


def given(heads: int = 2, rows: int = 6, columns: int = 32) -> tuple[SoftRounding, Tensor, Tensor, Tensor]:
    W, X, K = (torch.randn(heads, rows, columns), torch.randn(columns, 90), torch.randn(heads, 9, rows))
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
            rounding.scale.to(device), rounding.zeta.to(device), rounding.largest,
        )  # fmt: skip
        found = rounding_loss(
            B.to(device), there, H.to(device), G.to(device) if coupled else None,
            weight=1.5, beta=beta,
        )  # fmt: skip
        gradient, losses = found.gradient.cpu(), [float(found.reconstruction), float(found.penalty)]
    torch.testing.assert_close(gradient, expected.gradient)
    assert losses == pytest.approx([float(expected.reconstruction), float(expected.penalty)], rel=1e-5)
    assert 0 < int((expected.gradient == 0).sum()) < B.numel()  # the clamps act


VARIANTS = """
import json
import torch
from torch._dynamo.testing import CompileCounter
from aespa_pl.algorithm import adaround
from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss, start
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.quantizer import GridFormat

names = ("soft_error", "soft_gradient", "soft_penalty")
counters = {name: CompileCounter() for name in names}
fused = {name: getattr(adaround, name) for name in names}
for name, counter in counters.items():
    plain = fused[name].__wrapped__
    kernel = torch.compile(plain, fullgraph=True, dynamic=True, backend=counter)
    setattr(adaround, name, kernel)
for heads in (1, 2):
    for rows, columns in ((6, 32), (12, 64)):
        for group_size in (None, 16):
            W, bits = torch.randn(heads, rows, columns), 2 * heads
            grid = min_max_grid(W, torch.ones(columns), GridFormat(bits, group_size=group_size))
            r, B = start(W, W, grid)
            there = SoftRounding(r.lower, r.base, None, r.scale, r.zeta, r.largest)
            for beta in (None, 7.5):
                H = torch.eye(columns)[None]
                rounding_loss(B, there, H, None, weight=1.5 / heads, beta=beta)
print(max(counter.frame_count for counter in counters.values()))
torch._dynamo.reset()
"""
COMPILED = """
from torch._inductor import config, metrics
from aespa_pl.algorithm.workspace import compiled

torch.set_num_threads(1)
torch.manual_seed(0)
config.compile_threads = 1
W = torch.randn(2, 6, 32)
rounding, B = start(W, W, min_max_grid(W, torch.rand(32) + 0.5, GridFormat(2, group_size=16)))
product = torch.randn_like(B)
for call, given, more, out in (
    (fused["soft_error"], (B, rounding.base), {}, "out"),
    (fused["soft_gradient"], (B,), {"exponent": torch.tensor(7.5), "weight": 1.5}, "gradient"),
):
    more |= rounding.kernel_arguments()
    mine, theirs = product.clone(), product.clone()
    metrics.reset()
    call(*given, **more, **{out: mine})  # on a CPU it runs as it is
    compiled(call.__wrapped__)(*given, **more, **{out: theirs})
    error = float((theirs - mine).abs().max() / mine.abs().max())
    print(json.dumps([metrics.generated_kernel_count, error]))
"""


@pytest.fixture(scope="module")
def printed() -> list[Any]:
    """What a process of its own finds: the compiler can't look through the checks of shapes of the tests."""
    script = VARIANTS + (COMPILED if COMPILER else "")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_runs_of_all_formats_in_a_process_stay_below_the_limit_of_variants(printed: list[Any]) -> None:
    assert printed[0] <= 4


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler: on a CPU torch.compile makes C++ of a kernel")
def test_a_compiler_makes_one_kernel_of_each_function(printed: list[Any]) -> None:
    assert [kernels for kernels, _ in printed[1:]] == [1, 1]
    assert max(error for _, error in printed[1:]) < 1e-5


@pytest.mark.parametrize("kind", [RuntimeError, FailOnRecompileLimitHit])
def test_where_nothing_can_be_compiled_the_plain_path_goes_on(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    @fused
    def double(A: Tensor) -> Tensor:
        calls.append(A.device.type)
        return 2 * A

    def fail(*_: object, **__: object) -> object:
        raise kind("no compiler")

    with simulated(monkeypatch) as device:
        monkeypatch.setattr(torch, "compile", fail)
        A = torch.ones(2, device=device)
        assert (double(A) + double(A)).tolist() == [4, 4]
    assert calls == ["simulated"] * 2
    assert caplog.text.count("no compiler") == 1
