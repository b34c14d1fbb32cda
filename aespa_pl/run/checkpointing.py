"""Lightning's checkpoints inside a block: what is in them is its own, when and how they are written ours."""

import errno
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.rounding import BlockRounding
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from aespa_pl.storage.files import write_whole


class JournaledCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all, and then names it in the run's journal."""

    def __init__(self, run: Run, index: int) -> None:
        """Write checkpoints of the block ``index``."""
        super().__init__()
        self.run = run
        self.index = index

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            UserError: The disk is full or the folder not writable.
        """
        path = Path(path)

        def write(temporary: Path) -> None:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # what torch makes of a write that failed
                raise OSError(errno.EIO, "a write failed, the disk may be full") from error

        write_whole(path, write)
        if path.is_relative_to(self.run.checkpoint_folder(self.index)):
            self.run.note_checkpoint(self.index, path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001  (Lightning's signature)
    ) -> dict[str, Any]:
        """Read a checkpoint without unpickling objects."""
        # to the CPU, as Lightning's own: not to the device of the process that wrote it
        content: dict[str, Any] = torch.load(
            path, map_location=map_location or "cpu", weights_only=True
        )
        return content


class StopAtIteration(Callback):
    """Saves and stops at the end of Lightning's step in which a signal came, to whatever process."""

    def __init__(self, interruption: Interruption, folder: Path, ranks: Ranks = ALONE) -> None:
        """Look at ``interruption`` of all ``ranks``; save under ``folder``."""
        self.interruption = interruption
        self.folder = folder
        self.ranks = ranks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals wait."""
        self.interruption.defer(active=True)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save and stop, if a signal came.

        Raises:
            RunInterrupted: The checkpoint is on the disk.
        """
        self._save_and_stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals through again; one may have come after the last iteration.

        Raises:
            RunInterrupted: The checkpoint is on the disk.
        """
        self.interruption.defer(active=False)
        self._save_and_stop(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let signals through again."""
        self.interruption.defer(active=False)

    def _save_and_stop(self, trainer: Trainer) -> None:
        # what they agree on: a signal that comes now to one of them waits for the next step
        number = int(self.ranks.largest(self.interruption.received or 0))
        if number:
            self.interruption.received = number
            trainer.save_checkpoint(self.folder / f"step_{trainer.global_step}-interrupted.ckpt")
            self.interruption.check()


class PeriodicCheckpoint(Callback):
    """Saves the block under way by time and by iterations; the newest checkpoint is the only one.

    Lightning's ModelCheckpoint does not save by time where a step is several iterations.
    """

    def __init__(self, settings: OutputSettings, folder: Path, ranks: Ranks = ALONE) -> None:
        """Save under ``folder`` as often as ``settings`` say; the first of ``ranks`` tells when."""
        self.seconds = settings.checkpoint_seconds
        self.iterations = settings.checkpoint_iterations
        self.folder = folder
        self.ranks = ranks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._saved = time.monotonic()
        if self.iterations is not None and isinstance(pl_module, BlockRounding):
            pl_module.rhythms.append(self.iterations)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save, if it is time.

        Raises:
            UserError: The disk is full or the folder not writable.
        """
        due = self.iterations is not None and trainer.global_step % self.iterations == 0
        if self.seconds is not None:
            late = time.monotonic() - self._saved >= self.seconds
            due = due or self.ranks.from_first(lambda: late)
        if due:
            self._saved = time.monotonic()
            path = self.folder / f"step_{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            if self.ranks.is_first:
                for other in self.folder.glob("*.ckpt"):
                    if other != path:
                        other.unlink()
