"""A Trainer over BlockRounding does what a plain Adam loop on the closed-form gradient does."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from aespa_pl.algorithm.adaround import decide, penalty_exponent, rounding_loss, start
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.quantizer import GridFormat, quantize
from aespa_pl.rounding import BlockRounding, BlockStatistics, NonFiniteLossError, RoundingTask
from aespa_pl.settings import RoundingSettings

SETTINGS = RoundingSettings(
    iterations=60, learning_rate=0.02, warmup=0.3, beta_start=12.0, beta_end=3.0
)
Problem = tuple[dict[str, RoundingTask], dict[str, tuple[Tensor, Tensor | None]]]


def problem() -> Problem:
    tasks, batch = {}, {}
    for name, heads in (("query", 2), ("fc", 1)):
        W = torch.randn(heads, 4, 6)
        X = torch.randn(6, 50)
        H = (X @ X.T)[None] / 25
        grid = search_grid(W, H, torch.ones(6), GridFormat(2, symmetric=False, group_size=None))
        K = torch.randn(heads, 9, 4)
        tasks[name] = RoundingTask(*start(W, W, grid), quantize(W, grid), penalty=0.1 * heads)
        batch[name] = (H, K.transpose(1, 2) @ K if name == "query" else None)
    return tasks, batch


def trainer(iterations: int = SETTINGS.iterations, **more: object) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    defaults = {"logger": False, "enable_checkpointing": False, "log_every_n_steps": 10}
    return Trainer(max_steps=iterations, max_epochs=-1, **(quiet | defaults | more))


def plain_loop(
    tasks: dict[str, RoundingTask],
    batch: dict[str, tuple[Tensor, Tensor | None]],
    iterations: int = SETTINGS.iterations,
) -> dict[str, Tensor]:
    """Return the rounding variables after the first ``iterations`` of the schedule of SETTINGS."""
    learned = {}
    for name, task in tasks.items():
        B = task.start.clone().requires_grad_()
        adam = torch.optim.Adam([B], lr=0.02)
        for i in range(iterations):
            beta = penalty_exponent(i, 60, warmup=0.3, start=12.0, end=3.0)
            H, G = batch[name]
            B.grad = rounding_loss(
                B.detach(), task.rounding, H, G, weight=task.penalty, beta=beta
            ).gradient
            adam.step()
        learned[name] = B.detach()
    return learned


@pytest.fixture(params=[0.0, 3600.0], ids=["one-a-step", "many-a-step"])
def step_seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of one Lightning step: one, and as many as may be."""
    monkeypatch.setattr("aespa_pl.rounding.module.STEP_SECONDS", request.param)


@pytest.mark.usefixtures("step_seconds")
def test_training_equals_a_plain_adam_loop() -> None:
    tasks, batch = problem()
    before = {name: task.start.clone() for name, task in tasks.items()}
    expected = plain_loop(tasks, batch)
    module = BlockRounding(tasks, SETTINGS, "block 0")
    trainer().fit(module, datamodule=BlockStatistics(batch))
    integers = module.integers()
    for name, B in expected.items():
        torch.testing.assert_close(module.variables[name].detach(), B)
        assert torch.equal(integers[name], decide(B, tasks[name].rounding))
        assert not torch.equal(B, before[name])


@pytest.mark.usefixtures("step_seconds")
def test_curves_of_every_projection_are_logged(tmp_path: Path) -> None:
    tasks, batch = problem()
    logger = CSVLogger(tmp_path)
    trainer(logger=logger).fit(
        BlockRounding(tasks, SETTINGS, "block 0"), datamodule=BlockStatistics(batch)
    )
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    for curve in ("reconstruction_loss", "rounding_loss", "undecided", "differs_from_nearest"):
        for name in tasks:
            assert f"{curve}/{name}" in lines[0]
    steps = [int(row["step"]) for row in csv.DictReader(lines)]
    assert steps == [10, 20, 30, 40, 50, 60]


class Steps(Callback):
    """Remembers the iterations after which Lightning's steps ended."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.ends.append(trainer.global_step)


@pytest.mark.parametrize(
    ("seconds", "iterations", "ends"),
    [
        (3600.0, 60, [7, 14, 20, 21, 28, 35, 40, 42, 49, 56, 60]),
        (3600.0, 25, [7, 14, 20, 21, 25]),
        (0.0, 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_step_ends_where_something_has_to_be_done(
    seconds: float, iterations: int, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 7 iterations and its multiples a callback wants to do something, after 20 curves are logged."""
    monkeypatch.setattr("aespa_pl.rounding.module.STEP_SECONDS", seconds)
    tasks, batch = problem()
    steps = Steps()
    module = BlockRounding(tasks, replace(SETTINGS, iterations=iterations), "block 0")
    module.rhythms.append(7)
    trainer(iterations, callbacks=[steps], log_every_n_steps=20).fit(
        module, datamodule=BlockStatistics(batch)
    )
    assert steps.ends == ends


class Losses(Callback):
    """Remembers what the training steps return."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        self.seen[trainer.global_step] = float(arguments[1]["loss"])


@pytest.mark.usefixtures("step_seconds")
def test_curves_are_those_of_the_variables_at_their_iteration(tmp_path: Path) -> None:
    tasks, batch = problem()
    learned = {iteration: plain_loop(tasks, batch, iteration) for iteration in (9, 59)}
    logger, losses = CSVLogger(tmp_path), Losses()
    trainer(logger=logger, callbacks=[losses]).fit(
        BlockRounding(tasks, SETTINGS, "block 0"), datamodule=BlockStatistics(batch)
    )
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    for row, iteration, beta in ((rows[0], 9, None), (rows[-1], 59, 3 + 9 / 42)):
        assert int(row["step"]) == iteration + 1
        total = 0.0
        for name, B in learned[iteration].items():
            rounding, (H, G) = tasks[name].rounding, batch[name]
            h = torch.clamp(1.2 * torch.sigmoid(B) - 0.1, 0, 1)
            dW = rounding.base + rounding.gain * h
            inner = dW @ H @ dW.transpose(1, 2)
            products = inner if G is None else G @ inner
            penalty = 0.0
            if beta is not None:
                penalty = tasks[name].penalty * float((1 - (2 * h - 1).abs() ** beta).sum())
            integers = (rounding.lower + h.round()).clamp(0, 3)
            undecided = sum(0.1 < float(x) < 0.9 for x in h.flatten()) / h.numel()
            assert 0 < undecided < 1
            expected = {
                "reconstruction_loss": sum(float(torch.trace(one)) for one in products),
                "rounding_loss": penalty,
                "undecided": undecided,
                "differs_from_nearest": float((integers != tasks[name].nearest).sum()) / h.numel(),
            }
            for curve, value in expected.items():
                assert float(row[f"{curve}/{name}"]) == pytest.approx(value, rel=1e-4), curve
            total += expected["reconstruction_loss"] + expected["rounding_loss"]
        assert losses.seen[iteration + 1] == pytest.approx(total, rel=1e-4)


def test_checkpoints_hold_the_rounding_variables_only() -> None:
    tasks, _ = problem()
    module = BlockRounding(tasks, SETTINGS, "block 0")
    assert set(module.state_dict()) == {f"variables.{name}" for name in tasks}


@pytest.mark.usefixtures("step_seconds")
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    def learn(iterations: int, **more: Any) -> tuple[Trainer, BlockRounding]:
        torch.manual_seed(0)
        tasks, batch = problem()  # anew: learning changes what a task begins with
        module, one = BlockRounding(tasks, SETTINGS, "block 0"), trainer(iterations)
        one.fit(module, datamodule=BlockStatistics(batch), **more)
        return one, module

    _, whole = learn(60)
    first, half = learn(23)
    assert first.global_step == 23
    first.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = learn(60, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for name, B in whole.variables.items():
        assert torch.equal(resumed.variables[name], B)
        assert not torch.equal(half.variables[name], B)


@pytest.mark.parametrize("log_every_n_steps", [1, 1000])
def test_a_loss_that_is_not_finite_is_named(log_every_n_steps: int) -> None:
    tasks, batch = problem()
    batch["fc"] = (batch["fc"][0] * torch.inf, None)
    module = BlockRounding(tasks, SETTINGS, "block 7")

    def run() -> None:
        trainer(log_every_n_steps=log_every_n_steps).fit(module, datamodule=BlockStatistics(batch))
        assert log_every_n_steps > 1  # or it is noticed while learning
        module.integers()

    with pytest.raises(NonFiniteLossError, match=r"block 7.* fc "):
        run()
