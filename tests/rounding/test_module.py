"""A Trainer over BlockRounding does what a plain Adam loop on the closed-form gradient does."""

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from aespa_pl.algorithm.adaround import decide, penalty_exponent, rounding_loss
from aespa_pl.algorithm.quantizer import quantize
from aespa_pl.errors import NumericalError
from tests.rounding.problems import SETTINGS, Learned, Problem, data_of, module_of, problems, trainer


def plain_loop(given: Mapping[str, Problem], iterations: int = SETTINGS.iterations) -> dict[str, Tensor]:
    """Return the rounding variables after the first ``iterations`` of the schedule of SETTINGS."""
    variables = {name: p.start[1].requires_grad_() for name, p in given.items()}
    adam = torch.optim.Adam(variables.values(), lr=0.02)
    for i in range(iterations):
        beta = penalty_exponent(i, 60, warmup=0.3, start=12.0, end=3.0)
        for name, p in given.items():
            B = variables[name]
            B.grad = rounding_loss(B.detach(), p.start[0], p.H, p.G, weight=p.penalty, beta=beta).gradient
        adam.step()
    return {name: B.detach() for name, B in variables.items()}


def test_training_equals_a_plain_adam_loop() -> None:
    given, learned = problems(), Learned()
    expected = plain_loop(given)
    module = module_of(given)
    trainer(callbacks=[learned]).fit(module, datamodule=data_of(given))
    for name, B in expected.items():
        torch.testing.assert_close(learned.variables[name], B)
        assert torch.equal(module.integers()[name], decide(B, given[name].start[0]))
        assert not torch.equal(B, given[name].start[1])


def test_curves_of_every_projection_are_logged_with_the_losses_first(tmp_path: Path) -> None:
    given, logger = problems(), CSVLogger(tmp_path)
    trainer(logger=logger).fit(module_of(given), datamodule=data_of(given))
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    names = sorted(name for name in lines[0].split(",") if "/" in name)
    assert names == [
        f"{curve}/{name}"
        for curve in (
            "loss_reconstruction", "loss_rounding", "share_not_nearest", "share_undecided"
        )
        for name in ("fc", "query")
    ]  # fmt: skip
    steps = {int(row["step"]) for row in csv.DictReader(lines) if row["loss_rounding/fc"]}
    assert steps == {9, 19, 29, 39, 49, 59}  # Lightning counts from 0


def test_curves_are_those_of_the_variables_at_their_iteration(tmp_path: Path) -> None:
    given = problems()
    variables = {iteration: plain_loop(given, iteration) for iteration in (9, 59)}
    logger, learned = CSVLogger(tmp_path), Learned()
    trainer(logger=logger, callbacks=[learned]).fit(module_of(given), datamodule=data_of(given))
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(text) if row["loss_rounding/fc"]]
    for row, iteration, beta in ((rows[0], 9, None), (rows[-1], 59, 3 + 9 / 42)):
        assert int(row["step"]) == iteration
        total = 0.0
        for name, B in variables[iteration].items():
            p, rounding = given[name], given[name].start[0]
            h = torch.clamp(1.2 * torch.sigmoid(B) - 0.1, 0, 1)
            assert rounding.gain is not None
            dW = rounding.base + rounding.gain * h
            inner = dW @ p.H @ dW.transpose(1, 2)
            products = inner if p.G is None else p.G @ inner
            penalty = 0.0
            if beta is not None:
                penalty = p.penalty * float((1 - (2 * h - 1).abs() ** beta).sum())
            integers = (rounding.lower + h.round()).clamp(0, 3)
            undecided = sum(0.1 < float(x) < 0.9 for x in h.flatten()) / h.numel()
            nearest = quantize(p.weight, p.grid)
            assert 0 < undecided < 1
            expected = {
                "loss_reconstruction": sum(float(torch.trace(one)) for one in products),
                "loss_rounding": penalty,
                "share_undecided": undecided,
                "share_not_nearest": float((integers != nearest).sum()) / h.numel(),
            }
            for curve, value in expected.items():
                assert float(row[f"{curve}/{name}"]) == pytest.approx(value, rel=1e-4), curve
            total += expected["loss_reconstruction"] + expected["loss_rounding"]
        assert learned.losses[iteration + 1] == pytest.approx(total, rel=1e-4)


def test_checkpoints_hold_the_rounding_variables_only() -> None:
    given = problems()
    keys = {f"projections.{name}.variables" for name in given}
    assert set(module_of(given).state_dict()) == keys


def test_memory_is_free_once_training_has_ended() -> None:
    given = problems()
    module, one = module_of(given), trainer()
    one.fit(module, datamodule=data_of(given))
    assert list(module.parameters()) == list(module.buffers()) == []
    assert not one.optimizers[0].state
    assert {name: q.shape for name, q in module.integers().items()} == {
        name: p.weight.shape for name, p in given.items()
    }


@pytest.mark.parametrize("log_every_n_steps", [1, 1000])
def test_a_loss_that_is_not_finite_is_named(log_every_n_steps: int) -> None:
    given = problems()
    fc = given["fc"]
    given["fc"] = Problem(fc.weight, fc.grid, fc.penalty, fc.H * torch.inf, None)
    module = module_of(given, "block 7")

    def run() -> None:
        trainer(log_every_n_steps=log_every_n_steps).fit(module, datamodule=data_of(given))
        assert log_every_n_steps > 1  # or it is noticed while learning
        module.integers()

    with pytest.raises(NumericalError, match=r"block 7.* fc"):
        run()
