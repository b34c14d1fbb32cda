"""Train with a Trainer that has the user's callbacks, and say which of them a training can't go with."""

import logging
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from aespa_pl.errors import UserError

log = logging.getLogger(__name__)


def fit(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, checkpoint: Path | None
) -> None:
    """Train a module, or go on from a checkpoint.

    Raises UserError where a ModelCheckpoint monitors what the training does not log.
    """
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    except MisconfigurationException as error:
        monitored = {c.monitor for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)}
        logged = {*trainer.callback_metrics, "epoch", "step"}
        missing = sorted(name for name in monitored if name is not None and name not in logged)
        if not missing:
            raise
        raise UserError(
            f"trainer.callbacks has a ModelCheckpoint whose monitor is {missing[0]}, which this training "
            f"does not log: expected one of {', '.join(sorted(logged))}"
        ) from error


def refuse_early_end(trainer: Trainer, wanted: int, training: str, lower: str) -> None:
    """Accept that EarlyStopping ended a training, and refuse any other reason with a UserError.

    ``lower`` names the settings that make the ``training`` shorter than the ``wanted`` iterations.
    """
    done = trainer.global_step
    if done >= wanted:
        return
    if any(c.stopped_epoch for c in trainer.early_stopping_callbacks):
        log.info("%s was ended by EarlyStopping after %d iterations", training, done)
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Lightning's and ours end nothing early; the rest are the user's
    ours = ("lightning.pytorch.callbacks.model_checkpoint", "aespa_pl.")
    names = {type(c).__name__ for c in callbacks if not type(c).__module__.startswith(ours)}
    others = sorted(names - {"EarlyStopping"})
    raise UserError(
        f"{training} ended after {done} of {wanted} iterations, so one of trainer.callbacks ended it "
        f"({', '.join(others)}): remove the one that does, or lower {lower}"
    )
