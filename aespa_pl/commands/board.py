"""Show a run's curves over its blocks, its configuration and its result in TensorBoard."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from aespa_pl.commands.trainers import tensorboard
from aespa_pl.report.stored import flat
from aespa_pl.report.tensorboard import show_configuration, show_result
from aespa_pl.run.journal import Run


class Board:
    """Fills the ``walk`` folder of a run, unless the user chose other loggers or none."""

    def __init__(self, chosen: Any, configuration: str) -> None:
        """Keep both arguments for the run, which is made later.

        Args:
            chosen: ``trainer.logger``.
            configuration: The content of ``config.yaml``.
        """
        self._wanted = chosen in (None, True)
        self._configuration = configuration
        self._opened: list[TensorBoardLogger] = []

    def open(self, run: Run) -> list[Logger]:
        """Return the logger of the curves over the blocks, where it is wanted."""
        if not self._wanted:
            return []
        logger = tensorboard(run, "walk")
        show_configuration(logger.experiment, self._configuration)
        self._opened.append(logger)
        return [logger]

    def show_result(self, quantization: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Add the run to the hparams tab; a run that was finished before is there already.

        Args:
            quantization: Settings of the run, without nulls that the method decides.
            metrics: Metrics as in ``metrics.json``.
        """
        for logger in self._opened:
            show_result(logger.experiment, flat(quantization), metrics["perplexity"])
            logger.finalize("success")
