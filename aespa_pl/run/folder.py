"""Know where everything lies in the folder of a run, and keep the folder for one process."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from aespa_pl.errors import UserError
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.run.training import Training


@dataclass
class RunFolder:
    """Knows the paths of all files of a run."""

    folder: Path

    @property
    def journal_file(self) -> Path:
        """Return the file that names what is complete."""
        return self.folder / "journal.json"

    @property
    def model_folder(self) -> Path:
        """Return the folder of the quantized model."""
        return self.folder / "model"

    @property
    def description_file(self) -> Path:
        """Return the file that says how the quantized model was made."""
        return self.model_folder / DESCRIPTION

    @property
    def metrics_file(self) -> Path:
        """Return the file of measurements; they are written last, so a run that has them is finished."""
        return self.folder / "metrics.json"

    def block_file(self, index: int) -> Path:
        """Return the file with integers, scales, zero points and zeta of a block."""
        return self.folder / "blocks" / f"block_{index:03}.safetensors"

    @property
    def tuned_file(self) -> Path:
        """Return the file with all that the end-to-end tuning has learned."""
        return self.folder / "tuned.safetensors"

    def staged(self, file: Path) -> Path:
        """Return where the new content of a block's file waits until the journal knows it."""
        return self.staging_folder / file.relative_to(self.folder)

    def checkpoint_folder(self, index: int) -> Path:
        """Return the folder of Lightning's checkpoints of a block, while it is under way."""
        return self.checkpoints_folder / f"block_{index:03}"

    def portion_file(self, training: Training) -> Path:
        """Return the file with the result of a training, until its block is complete."""
        return self.portions_folder / f"block_{training.block:03}_{training.number:03}.safetensors"

    @property
    def checkpoints_folder(self) -> Path:
        """Return the folder of Lightning's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def staging_folder(self) -> Path:
        """Return the folder of files that will replace others."""
        return self.folder / "rewriting"

    @property
    def portions_folder(self) -> Path:
        """Return the folder with the integers of portions that are learned."""
        return self.folder / "portions"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes off this run; the operating system frees a dead process's lock.

        Raises:
            UserError: Another process has it.
        """
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"{self.folder} is in use by another process: wait for it, or start a new run "
                "without --ckpt_path"
            ) from error
        try:
            yield
        finally:
            lock.release()


def how_to_continue(folder: Path) -> str:
    """Return the command that continues a run, ready to be copied into a shell."""
    return f"aespa-pl fit --ckpt_path {shlex.quote(str(folder))}"
