"""What a user of Lightning knows works here as anywhere."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.rounding.problems import Learned, data_of, module_of, problems, trainer


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
@pytest.mark.parametrize("interrupted", [100, 130])
def test_epochs_end_where_they_would_have_without_an_interruption(tmp_path: Path, interrupted: int) -> None:
    class Ends(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            self.steps.append(trainer.global_step)

    given, ends = problems(), Ends()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=interrupted, save_on_train_epoch_end=False)
    trainer(interrupted, callbacks=[saving], enable_checkpointing=True).fit(
        module_of(given), datamodule=data_of(given)
    )
    trainer(250, callbacks=[ends, saving], enable_checkpointing=True).fit(
        module_of(given), datamodule=data_of(given), ckpt_path=saving.best_model_path, weights_only=True
    )
    assert ends.steps == [200, 250]


def test_learning_rate_and_loss_reach_loggers_and_callbacks(tmp_path: Path) -> None:
    given, logger, learned = problems(), CSVLogger(tmp_path), Learned()
    one = trainer(logger=logger, callbacks=[LearningRateMonitor("step"), learned])
    one.fit(module_of(given), datamodule=data_of(given))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert {float(row["lr-Adam"]) for row in rows if row["lr-Adam"]} == {0.02}
    assert float(one.callback_metrics["loss"]) == pytest.approx(learned.losses[60])
    parts = [v for k, v in one.callback_metrics.items() if k.startswith("loss_")]
    assert float(sum(parts)) == pytest.approx(learned.losses[60])
    assert list(learned.losses) == list(range(1, 61))  # global_step counts iterations one by one
