"""Decide when Lightning's checkpoints inside a block are written, and write them whole."""

import errno
import time
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import UserError
from aespa_pl.run.folder import Training
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from aespa_pl.storage.files import write_whole

REST = 20  # durations of a save to wait before the next one, so that saving takes at most 5 % of a run


class JournaledCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all; names it in the run's journal, and removes the one before."""

    def __init__(self, run: Run, training: Training, folder: Path) -> None:
        """Take the folder of the training's checkpoints; those of others do not count."""
        super().__init__()
        self.run, self.training, self.folder = run, training, folder

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint. Raises UserError where the disk is full or the folder not writable."""
        path = Path(path)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                try:
                    torch.save(checkpoint, file)
                except RuntimeError as error:  # what torch makes of a write that failed
                    raise OSError(errno.EIO, "a write failed, the disk may be full") from error

        write_whole(path, write)
        if self.run.checkpoint is None:
            refuse_objects(path)
        if path.parent.resolve() != self.folder.resolve():  # of a callback of the user's
            return
        before, path = self.run.checkpoint, self.folder / path.name  # Lightning's path is absolute
        self.run.note_checkpoint(self.training, path, checkpoint["global_step"])
        if before is not None and self.run.folder / before.file != path:  # Lightning keeps what it began from
            (self.run.folder / before.file).unlink(missing_ok=True)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, *_: Any, **__: Any) -> Any:
        """Read a checkpoint (``read_checkpoint``), to the CPU, not to the device of its process."""
        return read_checkpoint(path, map_location=map_location or "cpu")


def read_checkpoint(path: str | Path, **options: Any) -> Any:
    """Read a checkpoint without unpickling objects. Raises UserError where it holds some."""
    try:
        return torch.load(path, weights_only=True, **options)
    except UnpicklingError as error:  # whose advice is to let the file run code
        raise UserError(
            f"{path} holds the state of a callback in objects, which are not read, because reading them "
            "may run code: remove it, and the training that it is of begins again"
        ) from error


def refuse_objects(path: Path) -> None:
    """Raise UserError for a checkpoint that can be written, but not read: it is removed."""
    if objects := get_unsafe_globals_in_checkpoint(path):
        path.unlink()
        raise UserError(
            f"a callback of the trainer section has {', '.join(objects)} in its state, which no run can be "
            "continued with, because reading it may run code: let its state_dict have numbers, texts, lists, "
            "dictionaries and tensors alone"
        )


class StopAtIteration(Callback):
    """Saves and stops at the end of the iteration in which a signal came to any of the processes."""

    def __init__(self, interruption: Interruption, folder: Path, world: World = ALONE) -> None:
        self.interruption, self.folder, self.world = interruption, folder, world

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals wait."""
        self.interruption.defer(active=True)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save and stop, if a signal came. Raises RunInterrupted once the checkpoint is on the disk."""
        self._save_and_stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and stop, if a signal came during a validation: end to end, a step more is long."""
        if not trainer.sanity_checking:  # before the training signals don't wait
            self._save_and_stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals through again, and stop if one has come after the last iteration."""
        self.interruption.defer(active=False)
        self._save_and_stop(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let signals through again."""
        self.interruption.defer(active=False)

    def _save_and_stop(self, trainer: Trainer) -> None:
        # what they agree on: a signal that comes now to one of them waits for the next iteration
        number = int(self.world.largest(self.interruption.received or 0))
        if number:
            self.interruption.received = number
            trainer.save_checkpoint(self.folder / f"step_{trainer.global_step}-interrupted.ckpt")
            self.interruption.check()


class TimedCheckpoint(ModelCheckpoint):
    """Saves by time as Lightning does, but less often where a save takes long."""

    _rest_until = 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save, if it is time. Raises UserError where the disk is full or the folder not writable."""
        start = time.monotonic()
        # one process decides for all, as Lightning does for the interval
        if trainer.strategy.broadcast(start < self._rest_until):
            return
        super().on_train_batch_end(trainer, *args, **kwargs)
        end = time.monotonic()
        self._rest_until = end + REST * (end - start)


def checkpoints(settings: OutputSettings, folder: Path) -> list[ModelCheckpoint]:
    """Return the callbacks that save the block under way by time and by iterations."""
    callbacks: list[ModelCheckpoint] = []
    more: dict[str, Any] = {
        "dirpath": folder, "auto_insert_metric_name": False, "save_on_train_epoch_end": False
    }  # fmt: skip
    seconds, steps = settings.checkpoint_seconds, settings.checkpoint_iterations
    if seconds is not None:
        interval = timedelta(seconds=seconds)
        callbacks.append(TimedCheckpoint(filename="step_{step}-timed", train_time_interval=interval, **more))
    if steps is not None:
        callbacks.append(ModelCheckpoint(filename="step_{step}", every_n_train_steps=steps, **more))
    return callbacks
