"""Know where everything lies in the folder of a run, and keep the folder for one process."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from aespa_pl.errors import UserError
from aespa_pl.run.find import JOURNAL, version_number
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.storage.files import MEND, disk_errors


@dataclass(frozen=True)
class Training:
    """Names what one Trainer trains: a portion of a block's rounding, a block, or the model."""

    block: int
    """Number of the block; the number of blocks for the model."""
    name: str
    """Text that tells one training from another: head ranges of projections, or a unit of a tuning, and the
    type that blocks run in."""
    curves: str
    """Folder of its curves in the folder of the run."""
    number: int = 0
    """Place among the trainings of the block whose results are kept until the block is complete."""
    division: str = ""
    """How processes divide the segments among them, where the result depends on that."""
    start: str = ""
    """Checksum of the grids and integers that it starts from, where they are computed again in a resume: what
    a checkpoint holds belongs to them."""

    @property
    def key(self) -> str:
        """Return the name that a checkpoint has to have in common with the training that continues it."""
        return self.name + self.division + (f", from {self.start}" if self.start else "")


def block_curves(block: int, unit: str = "") -> str:
    """Return the folder of the curves of a block, or of a unit of it that is tuned by itself."""
    return f"block_{block:03}_{unit}" if unit else f"block_{block:03}"


@dataclass
class RunFolder:
    """Knows the paths of all files of a run."""

    folder: Path

    def __post_init__(self) -> None:
        """Name the files and folders that each run has once."""
        self.journal_file = self.folder / JOURNAL
        self.model_folder = self.folder / "model"
        self.description_file = self.model_folder / DESCRIPTION
        self.metrics_file = self.folder / "metrics.json"  # is written last: a run that has it is finished
        self.tuned_file = self.folder / "tuned.safetensors"  # all that the end-to-end tuning has learned
        self.moved_folder = self.folder / "moved"  # how far it has moved integers, until blocks are rewritten
        self.mixture_file = self.folder / "mixture.json"  # prediction for types or bits chosen for a size
        self.stem_file = self.folder / "blocks" / "stem.safetensors"  # embedding and head, if they have types
        self.checkpoints_folder = self.folder / "checkpoints"  # Lightning's
        self.staging_folder = self.folder / "rewriting"  # files that will replace others
        self.portions_folder = self.folder / "portions"  # integers of portions that are learned
        self.couplings_folder = self.folder / "end_loss"  # how it depends on blocks, until they are complete

    def block_file(self, index: int) -> Path:
        """Return the file with integers, scales, zero points and zeta of a block."""
        return self.folder / "blocks" / f"block_{index:03}.safetensors"

    def coupling_file(self, index: int) -> Path:
        """Return the file that says how the end loss couples the rows of a block's projections."""
        return self.couplings_folder / f"block_{index:03}.safetensors"

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
        """Keep other processes off this run, as :func:`locked`."""
        with locked(self.folder, "start a new run without --ckpt_path"):
            yield


@contextmanager
def locked(folder: Path, advice: str) -> Iterator[None]:
    """Keep other processes off a folder. Raises UserError where one has it; a dead one's lock is free."""
    with disk_errors(folder):
        try:
            held = FileLock(folder / "lock").acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"{folder} is in use by another process: wait for it, or {advice}") from error
    with held:
        yield


def how_to_continue(folder: Path) -> str:
    """Return the command that continues a run, ready to be copied into a shell."""
    return f"aespa-pl fit --ckpt_path {shlex.quote(str(folder))}"


def next_version(folder: Path) -> Path:
    """Make and return ``folder/version_N`` for the smallest N above all that exist."""
    with disk_errors(folder, f"{MEND}, or choose another folder with --output.folder"):
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((version_number(path) for path in folder.glob("version_*")), default=-1)
        while True:
            path = folder / f"version_{number}"
            with suppress(FileExistsError):  # another process was faster
                path.mkdir()
                return path
            number += 1
