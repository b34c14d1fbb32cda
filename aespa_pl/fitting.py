"""Train with a Trainer that has the user's callbacks, and say which of them a training can't go with."""

import logging
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from aespa_pl.errors import UserError

log = logging.getLogger(__name__)


def fit(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, checkpoint: Path | None
) -> None:
    """Train a module, or go on from a checkpoint.

    Raises UserError where a callback monitors what the training does not log.
    """
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    # ModelCheckpoint raises the first, EarlyStopping the second
    except (MisconfigurationException, RuntimeError) as error:
        logged = {*trainer.callback_metrics, "epoch", "step"}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            monitor = getattr(callback, "monitor", None)
            if monitor not in (None, *logged) and str(monitor) in str(error):
                raise UserError(
                    f"trainer.callbacks has {type(callback).__name__}, whose monitor is {monitor}, which "
                    f"this training does not log: expected one of {', '.join(sorted(logged))}"
                ) from error
        raise


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
