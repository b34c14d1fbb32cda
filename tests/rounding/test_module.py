"""A Trainer over BlockRounding does what a plain Adam loop on the closed-form gradient does."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from aespa_pl.algorithm.adaround import SoftRounding, decide, penalty_exponent, rounding_loss, start
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.quantizer import Grid, GridFormat, quantize
from aespa_pl.errors import NumericalError
from aespa_pl.rounding import BlockRounding, ProjectionRounding, StatisticsDataModule
from aespa_pl.settings import RoundingSettings

SETTINGS = RoundingSettings(
    iterations=60, learning_rate=0.02, warmup=0.3, beta_start=12.0, beta_end=3.0
)


@dataclass(frozen=True)
class Problem:
    """One projection, and what its loss needs."""

    weight: Tensor
    grid: Grid
    penalty: float
    H: Tensor
    G: Tensor | None

    @property
    def start(self) -> tuple[SoftRounding, Tensor]:
        return start(self.weight, self.weight, self.grid)


def problems() -> dict[str, Problem]:
    found = {}
    for name, heads in (("query", 2), ("fc", 1)):
        W = torch.randn(heads, 4, 6)
        X = torch.randn(6, 50)
        H = (X @ X.T)[None] / 25
        grid = search_grid(W, H, torch.ones(6), GridFormat(2))
        K = torch.randn(heads, 9, 4)
        G = K.transpose(1, 2) @ K if name == "query" else None
        found[name] = Problem(W, grid, 0.1 * heads, H, G)
    return found


def module_of(given: Mapping[str, Problem], label: str = "block 0") -> BlockRounding:
    projections = {
        name: ProjectionRounding(p.weight, p.weight, p.grid, penalty=p.penalty)
        for name, p in given.items()
    }
    return BlockRounding(projections, SETTINGS, label)


def data_of(given: Mapping[str, Problem]) -> StatisticsDataModule:
    return StatisticsDataModule({name: (p.H, p.G) for name, p in given.items()})


class Learned(Callback):
    """Remembers the rounding variables at the end of the training, and the losses on the way."""

    def __init__(self) -> None:
        self.variables: dict[str, Tensor] = {}
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        self.losses[trainer.global_step] = float(arguments[1]["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for key, value in pl_module.named_parameters():
            self.variables[key.split(".")[1]] = value.detach().clone()


def trainer(iterations: int = SETTINGS.iterations, **more: object) -> Trainer:
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 10,
    }
    return Trainer(max_steps=iterations, max_epochs=-1, **(quiet | defaults | more))


def plain_loop(
    given: Mapping[str, Problem], iterations: int = SETTINGS.iterations, clip: float | None = None
) -> dict[str, Tensor]:
    """Return the rounding variables after the first ``iterations`` of the schedule of SETTINGS."""
    variables = {name: p.start[1].requires_grad_() for name, p in given.items()}
    adam = torch.optim.Adam(variables.values(), lr=0.02)
    for i in range(iterations):
        beta = penalty_exponent(i, 60, warmup=0.3, start=12.0, end=3.0)
        for name, p in given.items():
            B = variables[name]
            B.grad = rounding_loss(
                B.detach(), p.start[0], p.H, p.G, weight=p.penalty, beta=beta
            ).gradient
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(variables.values(), clip)
        adam.step()
    return {name: B.detach() for name, B in variables.items()}


@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_equals_a_plain_adam_loop(clip: float | None) -> None:
    given, learned = problems(), Learned()
    expected = plain_loop(given, clip=clip)
    module = module_of(given)
    trainer(callbacks=[learned], gradient_clip_val=clip).fit(module, datamodule=data_of(given))
    for name, B in expected.items():
        torch.testing.assert_close(learned.variables[name], B)
        assert torch.equal(module.integers()[name], decide(B, given[name].start[0]))
        assert not torch.equal(B, given[name].start[1])
    if clip is not None:  # the clipping acts
        assert any(not torch.allclose(B, plain_loop(given)[name]) for name, B in expected.items())


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
    assert steps == {10, 20, 30, 40, 50, 60}


def test_curves_are_those_of_the_variables_at_their_iteration(tmp_path: Path) -> None:
    given = problems()
    variables = {iteration: plain_loop(given, iteration) for iteration in (9, 59)}
    logger, learned = CSVLogger(tmp_path), Learned()
    trainer(logger=logger, callbacks=[learned]).fit(module_of(given), datamodule=data_of(given))
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(text) if row["loss_rounding/fc"]]
    for row, iteration, beta in ((rows[0], 9, None), (rows[-1], 59, 3 + 9 / 42)):
        assert int(row["step"]) == iteration + 1
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


# What a user of Lightning knows works here as anywhere.


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")  # as on the command line
@pytest.mark.parametrize(
    "when", [{"every_n_train_steps": 23}, {"every_n_train_steps": 23, "monitor": "loss"}]
)
def test_a_training_resumed_from_modelcheckpoint_ends_with_the_same_bits(
    when: dict[str, Any], tmp_path: Path
) -> None:
    def learn(iterations: int, *callbacks: Callback, **more: Any) -> Learned:
        torch.manual_seed(0)
        given, learned = problems(), Learned()
        one = trainer(iterations, callbacks=[learned, *callbacks], enable_checkpointing=True)
        one.fit(module_of(given), datamodule=data_of(given), **more)
        assert one.global_step == iterations
        return learned

    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, save_on_train_epoch_end=False, **when)

    first = saving()
    whole = learn(60, first)
    path = first.best_model_path
    assert torch.load(path, weights_only=True)["global_step"] in (23, 46)
    resumed = learn(60, saving(), ckpt_path=path, weights_only=True)
    half = learn(23, ModelCheckpoint(tmp_path / "half"))
    for name, B in whole.variables.items():
        assert torch.equal(resumed.variables[name], B)
        assert not torch.equal(half.variables[name], B)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")  # as on the command line
def test_a_checkpoint_of_the_last_iteration_gives_the_same_integers(tmp_path: Path) -> None:
    given = problems()
    first, again = module_of(given), module_of(given)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=60, save_on_train_epoch_end=False)
    trainer(callbacks=[saving], enable_checkpointing=True).fit(first, datamodule=data_of(given))
    last: dict[str, Any] = {"ckpt_path": saving.best_model_path, "weights_only": True}
    same = ModelCheckpoint(tmp_path, every_n_train_steps=60, save_on_train_epoch_end=False)
    trainer(callbacks=[same], enable_checkpointing=True).fit(
        again, datamodule=data_of(given), **last
    )
    for name, expected in first.integers().items():
        assert torch.equal(again.integers()[name], expected)
    assert first.integers().keys() == again.integers().keys() == given.keys()


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")  # as on the command line
def test_epochs_end_where_they_would_have_without_an_interruption(tmp_path: Path) -> None:
    class Ends(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            self.steps.append(trainer.global_step)

    given, ends = problems(), Ends()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=130, save_on_train_epoch_end=False)
    trainer(130, callbacks=[saving], enable_checkpointing=True).fit(
        module_of(given), datamodule=data_of(given)
    )
    trainer(250, callbacks=[ends, saving], enable_checkpointing=True).fit(
        module_of(given),
        datamodule=data_of(given),
        ckpt_path=saving.best_model_path,
        weights_only=True,
    )
    assert ends.steps == [200, 250]


def test_early_stopping_ends_the_training_at_the_end_of_an_epoch() -> None:
    given = problems()
    stop = EarlyStopping("loss", patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    one = trainer(1000, callbacks=[stop])
    module = module_of(given)
    one.fit(module, datamodule=data_of(given))
    assert stop.stopped_epoch
    assert one.global_step == 200
    assert module.integers().keys() == given.keys()


def test_learning_rate_and_loss_reach_loggers_and_callbacks(tmp_path: Path) -> None:
    given, logger, learned = problems(), CSVLogger(tmp_path), Learned()
    one = trainer(logger=logger, callbacks=[LearningRateMonitor("step"), learned])
    one.fit(module_of(given), datamodule=data_of(given))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert {float(row["lr-Adam"]) for row in rows if row["lr-Adam"]} == {0.02}
    assert float(one.callback_metrics["loss"]) == pytest.approx(learned.losses[60])
    assert list(learned.losses) == list(range(1, 61))  # global_step counts iterations one by one
