"""Name one training of a run: of a portion of a block's rounding, of a block, or of the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """Names what one Trainer trains; a checkpoint is continued by the training of the same name only."""

    block: int
    """Number of the block; the number of blocks for the model."""
    name: str
    """Text that tells one training from another: head ranges of projections, or a unit of a tuning."""
    curves: str
    """Folder of its curves in the folder of the run."""
    number: int = 0
    """Place among the trainings of the block whose results are kept until the block is complete."""
    processes: int = 1
    """Number of processes that train it together, where the result depends on that."""

    @property
    def key(self) -> str:
        """Return the name that a checkpoint has to have in common with the training that continues it."""
        together = f", {self.processes} processes" if self.processes > 1 else ""
        return self.name + together


def block_curves(block: int, unit: str = "") -> str:
    """Return the folder of the curves of a block, or of a unit of it that is tuned by itself."""
    return f"block_{block:03}_{unit}" if unit else f"block_{block:03}"
