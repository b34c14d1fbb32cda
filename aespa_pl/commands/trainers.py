"""Make the Trainers of blocks and tunings from the user's section and what the walk adds to it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from aespa_pl.commands.loggers import Loggers
from aespa_pl.commands.resuming import note_own
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.distributed.launch import LONGEST_WAIT, RowsStrategy, environment_plugins
from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError
from aespa_pl.planning.shape import Work
from aespa_pl.progress import IterationProgress, WalkProgress
from aespa_pl.rounding.data import epochs_of
from aespa_pl.rounding.histograms import RoundingHistograms
from aespa_pl.run.checkpointing import JournaledCheckpointIO, StopAtIteration, checkpoints
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.run.training import Training
from aespa_pl.settings import TuningSettings
from aespa_pl.sizing.choose import Mixture
from aespa_pl.storage.files import write_json, write_text
from aespa_pl.tuning.data import held_back_and_steps

CHANGE_STEPS = (
    "GradientAccumulationScheduler", "StochasticWeightAveraging", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip
"""Lightning's callbacks that change the steps, the rates or the batches of a training."""
PRECISIONS = (None, 32, "32", "32-true")
"""Values of trainer.precision that mean what Lightning means by them here."""


@dataclass(frozen=True)
class BlockTrainers:
    """Makes the Trainer of each training of a run."""

    parsed: AespaCLI
    saved: str
    """The configuration as it is run, in YAML."""
    first: Trainer
    """Trainer of the same section, which knows the processes and the device."""
    logger_maker: Loggers
    interruption: Interruption
    progress: WalkProgress
    world: World
    mixture: Mixture | None = None
    """What was chosen for a size, by this process."""

    def begin(self, run: Run) -> Sequence[Logger]:
        """Store the configuration in the run's folder; return the loggers of the curves over the blocks."""
        write_text(run.folder / "config.yaml", self.saved)
        if self.mixture is not None:
            write_json(run.mixture_file, asdict(self.mixture))
        note_own(run.folder)
        self.interruption.run_folder = run.folder
        self.interruption.how_to_continue = how_to_continue(run.folder)
        return self.logger_maker.begin(run, self.saved)

    def loggers(self, run: Run, curves: str) -> list[Logger]:
        """Return new loggers of a run's curves, by the name of their folder."""
        return self.logger_maker.of(run, curves)

    def of_rounding(self, run: Run, training: Training) -> Trainer:
        """Return the Trainer that learns the rounding of a portion of a block."""
        own: list[Callback] = [IterationProgress(self.progress)]
        settings = self.parsed.settings
        if settings.output.histograms:
            own.append(RoundingHistograms(settings.output.histograms))
        return self._make(
            run,
            training,
            own,
            folder=run.checkpoint_folder(training.block),
            max_steps=settings.quantization.rounding.iterations,
            max_epochs=epochs_of(settings.quantization.rounding.iterations),  # bars show it
        )

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
        chosen = self.parsed.new_trainer_section(logger=False)
        callbacks = listed(chosen.callbacks)
        if chosen.enable_checkpointing:
            callbacks += checkpoints(self.parsed.settings.output, folder)
        if isinstance(self.first.strategy, DDPStrategy):
            more["strategy"] = RowsStrategy(timeout=LONGEST_WAIT)
        return self.parsed.instantiate_trainer(
            logger=self.loggers(run, training.curves),
            callbacks=[*callbacks, *own, StopAtIteration(self.interruption, folder, self.world)],
            plugins=[
                *listed(chosen.plugins),
                *environment_plugins(self.first),
                JournaledCheckpointIO(run, training),
            ],
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            # where Lightning writes its checkpoint when SLURM requeues a job; a folder a block, or
            # the next block would start from it
            default_root_dir=folder,
            **more,
        )


def first_trainer(parsed: AespaCLI) -> Trainer:
    """Return a Trainer that knows the processes and the device, none of which is started."""
    check_trainer(parsed.trainer_section)
    trainer = _made(parsed)
    _check_processes(trainer, parsed.trainer_section)
    if isinstance(trainer.strategy, DDPStrategy):
        trainer = _made(parsed, strategy=RowsStrategy(timeout=LONGEST_WAIT))
    return trainer


def _made(parsed: AespaCLI, **changes: Any) -> Trainer:
    """Return a Trainer of the section without loggers; UserError where Lightning refuses it."""
    try:
        return parsed.instantiate_trainer(logger=False, **changes)
    # a RuntimeError is what Lightning makes of SLURM's variables that do not fit
    except (
        MisconfigurationException, ValueError, TypeError, ImportError, RuntimeError
    ) as error:  # fmt: skip
        raise UserError(f"trainer: {error}") from error


def check_trainer(trainer: Namespace) -> None:
    """Raise UserError where the trainer section asks for something that a walk can't do."""
    for callback in listed(trainer["callbacks"]):
        name = type(callback).__name__
        if isinstance(callback, ProgressBar) or name in CHANGE_STEPS:
            raise UserError(
                f"trainer.callbacks has {name}: remove it, because fit has bars of its own, and its settings "
                "decide steps, learning rates and batches"
            )
    steps, precision, clip = trainer.log_every_n_steps, trainer.precision, trainer.gradient_clip_val
    if steps in (None, 0):
        raise UserError(f"trainer.log_every_n_steps is {steps}: expected 1 or more steps")
    if precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision is {precision}, but rounding variables are learned in 32-true: set "
            "quantization.products for the matrix products, and model.dtype for the model's own passes"
        )
    if clip is not None:  # each portion and each device would be clipped by a norm of its own
        raise UserError(
            f"trainer.gradient_clip_val is {clip}: remove it, because the result would depend on the memory "
            "and the devices that learning is divided by"
        )


def listed(one_or_more: Any) -> list[Any]:
    """Return what Lightning takes alone or in a list as a list."""
    if one_or_more is None:
        return []
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def check_tuning(trainer: Trainer, chosen: Any, settings: TuningSettings, work: Work) -> None:
    """Raise UserError where the trainer section asks for something that a tuning can't do."""
    if not settings.enabled:
        return
    if any(isinstance(callback, EarlyStopping) for callback in listed(chosen.callbacks)):
        raise UserError(
            "trainer.callbacks has EarlyStopping, which a tuning doesn't need, because it keeps its best "
            "epoch: remove it, or lower quantization.tuning.blocks.epochs and "
            "quantization.tuning.model.epochs instead"
        )
    devices = trainer.world_size
    if devices == 1:
        return
    last = World(devices - 1, devices)  # has the fewest
    fewest = len(last.segments(torch.empty(work.segments, 0), work.batch_size))
    if not fewest:
        raise UserError(
            f"trainer.devices and trainer.num_nodes make {devices} devices, but {work.segments} segments in "
            f"batches of {work.batch_size} are enough for {-(-work.segments // work.batch_size)}: lower "
            "trainer.devices or data.batch_size"
        )
    for section in (settings.blocks, settings.model):
        if section.enabled:
            held_back_and_steps(fewest, section.batch_size, settings.held_back)


def _check_processes(trainer: Trainer, chosen: Any) -> None:
    """Raise UserError where the section asks for a device or a strategy that isn't supported."""
    if trainer.world_size > 1 and chosen.strategy not in ("auto", "ddp"):
        raise UserError(
            f"trainer.strategy is {chosen.strategy}, but with several devices the rows of each matrix are "
            "divided over them: set it to ddp, or leave it out"
        )
    kind = trainer.strategy.root_device.type
    if kind not in ("cpu", "cuda"):  # what auto finds may lack the types that are needed
        raise UserError(
            f"trainer.accelerator is {chosen.accelerator}, which is {kind} here: only the CPU and CUDA "
            "devices are supported, so set it to cpu"
        )
