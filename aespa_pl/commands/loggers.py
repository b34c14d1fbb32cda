"""Make the loggers of each training and of the walk, and show a run's result in TensorBoard."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger

from aespa_pl.commands.sections import AespaCLI
from aespa_pl.errors import UserError
from aespa_pl.report.stored import flat
from aespa_pl.report.tensorboard import LossesFirst, show_configuration, show_result
from aespa_pl.run.journal import Run

log = logging.getLogger(__name__)

Made = TypeVar("Made", bound=Logger)
WALK = "walk"
"""Name of the curves over the blocks, beside those of each block."""


class Loggers:
    """Gives each logger the names of the run and of what is trained."""

    def __init__(self, parsed: AespaCLI) -> None:
        """Keep ``trainer.logger``. Raises UserError where a logger can't be given the name of a block."""
        chosen = parsed.config.trainer.logger
        self._default = chosen in (None, True)
        listed = chosen if isinstance(chosen, Sequence) else [chosen]
        self._chosen = [each for each in listed if isinstance(each, Namespace)]
        self._parsed = parsed
        self._walk: list[LossesFirst] = []
        for each in self._chosen:
            _names(each, "", "")

    def of(self, run: Run, curves: str) -> list[Logger]:
        """Return new loggers of a run's curves: ``walk``, or ``block_NNN``, where the curves overlay."""
        parent, version = run.folder.parent, run.folder.name
        if self._default:
            return [_forgiven(LossesFirst(parent.parent, parent.name, version, sub_dir=curves))]
        named = [each.clone() for each in self._chosen]
        for each in named:
            for key, value in _names(each, parent.name, f"{version}/{curves}").items():
                each.init_args[key] = value
        return [_forgiven(logger) for logger in self._parsed.new_trainer_section(logger=named).logger]

    def begin(self, run: Run, configuration: str) -> list[Logger]:
        """Return the loggers of the curves over the blocks; TensorBoard shows the configuration too."""
        loggers = self.of(run, WALK)
        self._walk = [logger for logger in loggers if isinstance(logger, LossesFirst)]
        for logger in self._walk:
            show_configuration(logger.experiment, configuration)
        return loggers

    def show_result(self, quantization: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Add the run to the hparams tab of TensorBoard; one that was finished before is there already."""
        for logger in self._walk:
            show_result(logger.experiment, flat(quantization), metrics["perplexity"])
            logger.finalize("success")


def _forgiven(logger: Made) -> Made:
    """Return a logger whose failure at its end is only said, because what was learned is worth more."""
    finalize = logger.finalize

    def end(status: str) -> None:
        try:
            finalize(status)
        except Exception as error:  # noqa: BLE001 - the logger's own, of any class
            name = type(logger).__name__
            log.warning("%s failed at its end, so its curves may lack points: %s", name, error)

    logger.finalize = end  # type: ignore[method-assign]
    return logger


def _names(logger: Namespace, name: str, version: str) -> dict[str, str]:
    """Return the arguments that tell a logger the names of run and curves, such as version_0/block_000."""
    module, _, kind = logger.class_path.rpartition(".")
    made = getattr(import_module(module), kind)
    takes, given = inspect.signature(made).parameters, logger.get("init_args", {})
    if "name" in takes and given.get("name") not in (None, takes["name"].default):
        name = given["name"]  # the user's own
    if "run_name" in takes:  # MLflow
        return {"run_name": f"{name}/{version}"}
    if {"name", "project"} <= takes.keys():  # Weights & Biases, Comet
        return {"name": f"{name}/{version}"}
    if {"name", "version", "save_dir"} <= takes.keys():  # CSVLogger, TensorBoardLogger
        if issubclass(made, CSVLogger):  # which deletes what an earlier process has written
            version = _unused(Path(given["save_dir"], name), version)
        return {"name": name, "version": version}
    raise UserError(
        f"trainer.logger is {kind}, which can't be given the name of each block, because it takes neither "
        "name and version nor run_name: choose TensorBoardLogger, CSVLogger, MLFlowLogger or WandbLogger"
    )


def _unused(folder: Path, name: str) -> str:
    """Return the name, with a number behind it where the folder has something of that name."""
    numbered = (f"{name}.{number}" if number else name for number in count())
    return next(each for each in numbered if not (folder / each).exists())
