"""Know where everything lies in the folder of a run, and keep the folder for one process."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from aespa_pl.errors import UserError
from aespa_pl.run.find import version_number
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.run.training import Training
from aespa_pl.storage.files import MEND, disk_errors


@dataclass
class RunFolder:
    """Knows the paths of all files of a run."""

    folder: Path

    def __post_init__(self) -> None:
        """Name the files and folders that each run has once."""
        self.journal_file = self.folder / "journal.json"
        """Names what is complete."""
        self.model_folder = self.folder / "model"
        """Holds the quantized model."""
        self.description_file = self.model_folder / DESCRIPTION
        """Says how the quantized model was made."""
        self.metrics_file = self.folder / "metrics.json"
        """Holds measurements; they are written last, so a run that has them is finished."""
        self.tuned_file = self.folder / "tuned.safetensors"
        """Holds all that the end-to-end tuning has learned."""
        self.moved_folder = self.folder / "moved"
        """Holds how far it has moved the integers of blocks on disk, until these are rewritten."""
        self.mixture_file = self.folder / "mixture.json"
        """Holds what is predicted of the types or bits that were chosen for a size."""
        self.stem_file = self.folder / "blocks" / "stem.safetensors"
        """Holds integers and scales of embedding and head, where a format of llama.cpp has types for them."""
        self.checkpoints_folder = self.folder / "checkpoints"
        """Holds Lightning's checkpoints."""
        self.staging_folder = self.folder / "rewriting"
        """Holds files that will replace others."""
        self.portions_folder = self.folder / "portions"
        """Holds the integers of portions that are learned."""

    def block_file(self, index: int) -> Path:
        """Return the file with integers, scales, zero points and zeta of a block."""
        return self.folder / "blocks" / f"block_{index:03}.safetensors"

    def staged(self, file: Path) -> Path:
        """Return where the new content of a block's file waits until the journal knows it."""
        return self.staging_folder / file.relative_to(self.folder)

    def checkpoint_folder(self, index: int) -> Path:
        """Return the folder of Lightning's checkpoints of a block, while it is under way."""
        return self.checkpoints_folder / f"block_{index:03}"

    def portion_file(self, training: Training) -> Path:
        """Return the file with the result of a training, until its block is complete."""
        return self.portions_folder / f"block_{training.block:03}_{training.number:03}.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes off this run. Raises UserError where one has it; a dead one's lock is free."""
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


def next_version(folder: Path) -> Path:
    """Make and return ``folder/version_N`` for the smallest N above all that exist."""
    with disk_errors(folder, f"{MEND}, or choose another folder with --output.folder"):
        folder.mkdir(parents=True, exist_ok=True)
        taken = [version_number(path) for path in folder.glob("version_*")]
        while True:
            path = folder / f"version_{max(taken, default=-1) + 1}"
            try:
                path.mkdir()
            except FileExistsError:  # another process was faster
                taken.append(version_number(path))
                continue
            return path
