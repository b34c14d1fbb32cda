"""A Trainer over BlockRounding does what a plain Adam loop on the closed-form gradient does."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from aespa_pl.algorithm.adaround import decide, penalty_exponent, rounding_loss, start
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.quantizer import quantize
from aespa_pl.rounding import BlockRounding, BlockStatistics, NonFiniteLossError, RoundingTask
from aespa_pl.settings import RoundingSettings

SETTINGS = RoundingSettings(iterations=60)
Problem = tuple[dict[str, RoundingTask], dict[str, tuple[Tensor, Tensor | None]]]


def problem() -> Problem:
    tasks, batch = {}, {}
    for name, heads in (("query", 2), ("fc", 1)):
        W = torch.randn(heads, 4, 6)
        X = torch.randn(6, 50)
        H = (X @ X.T)[None] / 25
        grid = search_grid(W, H, torch.ones(6), bits=2, symmetric=False, group_size=None)
        K = torch.randn(heads, 9, 4)
        tasks[name] = RoundingTask(*start(W, W, grid), quantize(W, grid), penalty=0.1 * heads)
        batch[name] = (H, K.transpose(1, 2) @ K if name == "query" else None)
    return tasks, batch


def trainer(iterations: int = SETTINGS.iterations, **more: object) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    defaults = {"logger": False, "enable_checkpointing": False, "log_every_n_steps": 10}
    return Trainer(max_steps=iterations, max_epochs=-1, **(quiet | defaults | more))


def plain_loop(
    tasks: dict[str, RoundingTask], batch: dict[str, tuple[Tensor, Tensor | None]]
) -> dict[str, Tensor]:
    learned = {}
    for name, task in tasks.items():
        B = task.start.clone().requires_grad_()
        adam = torch.optim.Adam([B], lr=SETTINGS.learning_rate)
        for i in range(SETTINGS.iterations):
            beta = penalty_exponent(i, SETTINGS.iterations, warmup=0.2, start=20.0, end=2.0)
            H, G = batch[name]
            B.grad = rounding_loss(
                B.detach(), task.rounding, H, G, weight=task.penalty, beta=beta
            ).gradient
            adam.step()
        learned[name] = B.detach()
    return learned


def test_training_equals_a_plain_adam_loop() -> None:
    tasks, batch = problem()
    module = BlockRounding(tasks, SETTINGS, "block 0")
    trainer().fit(module, datamodule=BlockStatistics(batch))
    expected = plain_loop(tasks, batch)
    integers = module.integers()
    for name, B in expected.items():
        torch.testing.assert_close(module.variables[name].detach(), B)
        assert torch.equal(integers[name], decide(B, tasks[name].rounding))
        assert not torch.equal(B, tasks[name].start)


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
    assert len(lines) == 1 + SETTINGS.iterations // 10


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    tasks, batch = problem()
    whole = BlockRounding(tasks, SETTINGS, "block 0")
    trainer().fit(whole, datamodule=BlockStatistics(batch))
    first = trainer(iterations=23)
    first.fit(BlockRounding(tasks, SETTINGS, "block 0"), datamodule=BlockStatistics(batch))
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = BlockRounding(tasks, SETTINGS, "block 0")
    trainer().fit(
        resumed,
        datamodule=BlockStatistics(batch),
        ckpt_path=tmp_path / "half.ckpt",
        weights_only=True,
    )
    for name in tasks:
        assert torch.equal(resumed.variables[name], whole.variables[name])


@pytest.mark.parametrize("log_every_n_steps", [1, 1000])
def test_a_loss_that_is_not_finite_is_named(log_every_n_steps: int) -> None:
    tasks, batch = problem()
    batch["fc"] = (batch["fc"][0] * torch.inf, None)
    module = BlockRounding(tasks, SETTINGS, "block 7")

    def run() -> None:
        trainer(log_every_n_steps=log_every_n_steps).fit(module, datamodule=BlockStatistics(batch))
        module.integers()

    with pytest.raises(NonFiniteLossError, match=r"block 7.* fc "):
        run()
