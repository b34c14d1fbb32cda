"""Define the settings of the folder that the results go to."""

from dataclasses import dataclass, field

from jsonargparse.typing import PositiveInt

from aespa_pl.settings.types import (
    FinitePositive,
)


@dataclass(frozen=True)
class OutputSettings:
    """Folders of the results, and checkpoints on the way to them."""

    folder: str = "lightning_logs"
    """Folder of all runs; the one to give to tensorboard --logdir."""
    name: str = "aespa"
    """Name of the run. Every run gets a folder NAME/version_N of its own."""
    checkpoint_seconds: FinitePositive | None = 60.0
    """Seconds between two checkpoints of the learning under way; null: none by time. One takes 12 bytes for
    each weight whose rounding is learned, and 16 for each that is tuned: of a block, or end to end of the
    whole model. The next waits at least 20 times the time that one takes."""
    checkpoint_iterations: PositiveInt | None = None
    """Iterations between two checkpoints of the learning under way; null: none by iterations."""
    histograms: list[str] = field(default_factory=list)
    """Projections, such as [q_proj], whose h(B) TensorBoard and the report show over the iterations; one
    histogram takes milliseconds to a second, so name few. The result is the same."""
