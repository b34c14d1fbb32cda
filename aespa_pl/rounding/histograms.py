"""Log histograms of h(B) for TensorBoard: how the choices between two integers are made over time."""

from collections.abc import Collection
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from aespa_pl.algorithm.adaround import rectified_sigmoid
from aespa_pl.curve_names import ROUNDING_VARIABLES, tag
from aespa_pl.rounding.module import BlockRounding


class RoundingHistograms(Callback):
    """Logs h(B) of chosen projections as often as the curves; of several processes, the first one's rows."""

    def __init__(self, projections: Collection[str]) -> None:
        """Choose projections by name."""
        self.projections = projections

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, where curves are logged."""
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step
        if step % interval and step != 1:
            return
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        for name, projection in cast(BlockRounding, pl_module).named_projections():
            if name in self.projections:
                values = rectified_sigmoid(projection.variables.detach()).flatten()
                for board in boards if trainer.is_global_zero else ():
                    board.experiment.add_histogram(tag(ROUNDING_VARIABLES, name), values, step)
