"""Make the Trainers and loggers of each training from the user's section and what the walk adds to it."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import DDPStrategy

from aespa_pl.commands.arguments import CONFIGURATION, note_own
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.trainer_limits import check_trainer, listed
from aespa_pl.distributed.launch import LONGEST_WAIT, RowsStrategy, environment_plugins
from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError
from aespa_pl.progress import IterationProgress, WalkProgress
from aespa_pl.report.stored import flat
from aespa_pl.report.tensorboard import LossesFirst, show_configuration, show_result
from aespa_pl.rounding import RoundingHistograms, epochs_of
from aespa_pl.run.checkpointing import JournaledCheckpointIO, StopAtIteration, checkpoints
from aespa_pl.run.folder import Training, how_to_continue
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.sizing.choose import Mixture
from aespa_pl.storage.files import write_json, write_text

log = logging.getLogger(__name__)


@dataclass
class BlockTrainers:
    """Makes Trainer and loggers of each training of a run."""

    parsed: AespaCLI
    saved: str  # the configuration as it is run, in YAML
    first: Trainer  # of the same section, which knows the processes and the device
    interruption: Interruption
    progress: WalkProgress
    world: World
    mixture: Mixture | None = None  # what was chosen for a size, by this process
    _walk: list[Logger] = field(default_factory=list)

    def begin(self, run: Run) -> Sequence[Logger]:
        """Store the configuration in the run's folder; return the loggers of the curves over the blocks."""
        self.store_configuration(run)
        if self.mixture is not None:
            write_json(run.mixture_file, self.mixture.model_dump())
        self.interruption.run_folder = run.folder
        self.interruption.how_to_continue = how_to_continue(run.folder)
        self._walk = self.loggers(run, "walk")
        for logger in self._walk:
            if isinstance(logger, LossesFirst):
                show_configuration(logger.experiment, self.saved)
        return self._walk

    def store_configuration(self, run: Run) -> None:
        """Write config.yaml into a run's folder, which needs no confirmation from now on."""
        write_text(run.folder / CONFIGURATION, self.saved)
        note_own(run.folder)

    def free(self) -> None:
        """Free objects that refer to each other."""
        self.interruption.free()

    def loggers(self, run: Run, curves: str) -> list[Logger]:
        """Return new loggers of a run's curves: ``walk``, or ``block_NNN``, where the curves overlay."""
        parent, version = run.folder.parent, run.folder.name
        chosen = chosen_loggers(self.parsed)
        if chosen is None:
            return [_forgiven(LossesFirst(parent.parent, parent.name, version, sub_dir=curves))]
        named = [each.clone() for each in chosen]
        for each in named:
            for key, value in _names(each, parent.name, f"{version}/{curves}").items():
                each.init_args[key] = value
        return [_forgiven(logger) for logger in self.parsed.new_trainer_section(named).logger]

    def show_result(self, quantization: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Add the run to the hparams tab of TensorBoard; one that was finished before is there already."""
        for logger in self._walk:
            if isinstance(logger, LossesFirst):
                show_result(logger.experiment, flat(quantization), metrics["perplexity"])
                logger.finalize("success")

    def of_rounding(self, run: Run, training: Training) -> Trainer:
        """Return the Trainer that learns the rounding of a portion of a block."""
        histograms = self.parsed.settings.output.histograms
        own = [IterationProgress(self.progress), *([RoundingHistograms(histograms)] if histograms else [])]
        iterations = self.parsed.settings.quantization.rounding.iterations
        folder, epochs = run.checkpoint_folder(training.block), epochs_of(iterations)  # bars show these
        return self._make(run, training, own, folder=folder, max_steps=iterations, max_epochs=epochs)

    def of_tuning(self, run: Run, training: Training, epochs: int) -> Trainer:
        """Return the Trainer of the tuning of a block, or of the model."""
        return self._make(
            run,
            training,
            [IterationProgress(self.progress, "tuning")],
            folder=run.checkpoint_folder(training.block) / "tuning",
            max_steps=-1,
            max_epochs=epochs,
            # the start is a candidate, and so is each epoch: whatever the section says of validation
            num_sanity_val_steps=-1,
            limit_val_batches=1.0,
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
            use_distributed_sampler=False,  # each process has segments of its own
        )

    def _make(
        self, run: Run, training: Training, own: Sequence[Callback], *, folder: Path, **more: Any
    ) -> Trainer:
        """Return a Trainer of the section, with our own callbacks."""
        chosen = self.parsed.new_trainer_section(logger=False)  # new callbacks: they keep a state
        callbacks, loggers = listed(chosen.callbacks), self.loggers(run, training.curves)
        for callback in callbacks:
            # where Lightning has no logger's folder it takes that of the block, which goes with the block
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None and not loggers:
                callback.dirpath = str(run.checkpoints_folder.absolute())
        if chosen.enable_checkpointing:
            callbacks += checkpoints(self.parsed.settings.output, folder)
        if isinstance(self.first.strategy, DDPStrategy):
            more["strategy"] = RowsStrategy(timeout=LONGEST_WAIT)
        return self.parsed.instantiate_trainer(
            logger=loggers,
            callbacks=[*callbacks, *own, StopAtIteration(self.interruption, folder, self.world)],
            plugins=[
                *listed(chosen.plugins),
                *environment_plugins(self.first),
                JournaledCheckpointIO(run, training, folder),
            ],
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            # where Lightning writes its checkpoint when SLURM requeues a job; a folder a block, or
            # the next block would start from it
            default_root_dir=folder,
            **more,
        )


def first_trainer(parsed: AespaCLI) -> Trainer:
    """Return a Trainer that knows processes and device, not started; UserError where these can't be had."""
    check_trainer(parsed.trainer_section)
    trainer, chosen = _made(parsed), parsed.trainer_section
    if trainer.world_size > 1 and chosen.strategy not in ("auto", "ddp"):
        raise UserError(
            f"trainer.strategy is {chosen.strategy}, but with several devices the rows of each matrix are "
            "divided over them: set it to ddp, or leave it out"
        )
    kind = trainer.strategy.root_device.type
    if kind not in ("cpu", "cuda"):  # it may lack the types that are needed
        raise UserError(
            f"trainer.accelerator is {chosen.accelerator}, which is {kind} here: only the CPU and CUDA "
            "devices are supported, so set it to cpu"
        )
    if isinstance(trainer.strategy, DDPStrategy):
        trainer = _made(parsed, strategy=RowsStrategy(timeout=LONGEST_WAIT))
    return trainer


def _made(parsed: AespaCLI, **changes: Any) -> Trainer:
    """Return a Trainer of the section without loggers; UserError where Lightning refuses it."""
    try:
        return parsed.instantiate_trainer(logger=False, **changes)
    # a RuntimeError is what Lightning makes of SLURM's variables that do not fit
    except (MisconfigurationException, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"trainer: {error}") from error


def chosen_loggers(parsed: AespaCLI) -> list[Namespace] | None:
    """Return ``trainer.logger``, None: ours. Raises UserError where one can't have the name of a block."""
    chosen = parsed.config.trainer.logger
    if chosen in (None, True):
        return None
    loggers = [each for each in listed(chosen) if isinstance(each, Namespace)]
    for each in loggers:
        _names(each, "", "")
    return loggers


def _forgiven(logger: Logger) -> Logger:
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
            names = (f"{version}.{number}" if number else version for number in count())
            version = next(each for each in names if not Path(given["save_dir"], name, each).exists())
        return {"name": name, "version": version}
    raise UserError(
        f"trainer.logger is {kind}, which can't be given the name of each block, because it takes neither "
        "name and version nor run_name: choose TensorBoardLogger, CSVLogger, MLFlowLogger or WandbLogger"
    )
