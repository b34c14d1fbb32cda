"""Make the Trainers of blocks and tunings from the user's section and what the walk adds to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from aespa_pl.distributed.launch import LONGEST_WAIT, RowsStrategy, environment_plugins
from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError
from aespa_pl.planning.shape import Work
from aespa_pl.progress import IterationProgress, WalkProgress
from aespa_pl.rounding.data import epochs_of
from aespa_pl.rounding.histograms import RoundingHistograms
from aespa_pl.run.checkpointing import JournaledCheckpointIO, StopAtIteration, checkpoints
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.run.training import Training
from aespa_pl.settings import OutputSettings, TuningSettings
from aespa_pl.tuning.data import held_back_and_steps

OWN_KEYS = (
    "max_steps", "min_steps", "max_epochs", "min_epochs", "max_time",
    "limit_train_batches", "overfit_batches", "accumulate_grad_batches", "barebones",
)  # fmt: skip
"""Keys of the Trainer that would change the number of iterations, which the walk decides."""
DECIDED = (
    "is decided by the walk: set quantization.tuning.blocks.epochs and quantization.tuning.model.epochs, or "
    "quantization.rounding.iterations where the method learns the rounding"
)
"""Words about each of these keys."""
CHANGE_STEPS = (
    "GradientAccumulationScheduler", "StochasticWeightAveraging", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip
"""Lightning's callbacks that change the steps, the rates or the batches of a training."""
PRECISIONS = (None, 32, "32", "32-true")
"""Values of trainer.precision that mean what Lightning means by them here."""


@dataclass(frozen=True)
class BlockTrainers:
    """Makes the Trainer of each training of a run."""

    begin: Callable[[Run], Sequence[Logger]]
    """Returns the loggers of the curves over the blocks, when the run begins."""
    loggers: Callable[[Run, str], list[Logger]]
    """Makes the loggers of a run's curves of a name."""
    section: Callable[[], Any]
    """Makes new values of the ``trainer`` section, without loggers."""
    instantiate: Callable[..., Trainer]
    """Makes a Trainer of the section with other values for some keys."""
    first: Trainer
    """Trainer of the same section, which knows the processes and the device."""
    output: OutputSettings
    iterations: int
    interruption: Interruption
    progress: WalkProgress
    world: World

    def of_rounding(self, run: Run, training: Training) -> Trainer:
        """Return the Trainer that learns the rounding of a portion of a block."""
        own: list[Callback] = [IterationProgress(self.progress)]
        if self.output.histograms:
            own.append(RoundingHistograms(self.output.histograms))
        return self._make(
            run,
            training,
            own,
            folder=run.checkpoint_folder(training.block),
            max_steps=self.iterations,
            max_epochs=epochs_of(self.iterations),  # bars show it
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
        chosen = self.section()
        callbacks = _listed(chosen.callbacks)
        if chosen.enable_checkpointing:
            callbacks += checkpoints(self.output, folder)
        if isinstance(self.first.strategy, DDPStrategy):
            more["strategy"] = RowsStrategy(timeout=LONGEST_WAIT)
        return self.instantiate(
            logger=self.loggers(run, training.curves),
            callbacks=[*callbacks, *own, StopAtIteration(self.interruption, folder, self.world)],
            plugins=[
                *_listed(chosen.plugins),
                *environment_plugins(self.first),
                JournaledCheckpointIO(run, training),
            ],
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
            # where Lightning writes its checkpoint when SLURM requeues a job; a folder a block, or
            # the next block would start from it
            default_root_dir=folder,
            **more,
        )


def first_trainer(make: Callable[..., Trainer], section: Any) -> Trainer:
    """Return a Trainer that tells the processes and the device, none of which is started.

    Raises UserError where Lightning refuses the section, or it asks for what a walk can't do.
    """
    trainer = _made(make, section)
    check_strategy(trainer, section.strategy)
    if isinstance(trainer.strategy, DDPStrategy):
        trainer = _made(make, section, strategy=RowsStrategy(timeout=LONGEST_WAIT))
    check_device(trainer, section.accelerator)
    return trainer


def _made(make: Callable[..., Trainer], section: Any, **changes: Any) -> Trainer:
    """Return a Trainer of the section without loggers; UserError where Lightning refuses it."""
    try:
        return make(logger=False, **changes)
    # a RuntimeError is what Lightning makes of SLURM's variables that do not fit
    except (
        MisconfigurationException, ValueError, TypeError, ImportError, RuntimeError
    ) as error:  # fmt: skip
        advice = ""
        if section.accelerator not in ("auto", "cpu"):
            advice = (
                f" (trainer.accelerator is {section.accelerator}: set it to cpu, or install a torch that "
                "finds the device)"
            )
        raise UserError(f"trainer: {error}{advice}") from error


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise UserError where the trainer section asks for something that a walk can't do."""
    for callback in _listed(trainer["callbacks"]):
        if isinstance(callback, ProgressBar):
            raise UserError(
                f"trainer.callbacks has {type(callback).__name__}: remove it, because fit shows bars of its "
                "own"
            )
        if type(callback).__name__ in CHANGE_STEPS:
            raise UserError(
                f"trainer.callbacks has {type(callback).__name__}: remove it, because steps, learning "
                "rates and batches are decided by quantization.rounding and quantization.tuning"
            )
    if trainer["log_every_n_steps"] in (None, 0):
        raise UserError(
            f"trainer.log_every_n_steps is {trainer['log_every_n_steps']}: expected 1 or more steps"
        )
    if trainer["precision"] not in PRECISIONS:
        raise UserError(
            f"trainer.precision is {trainer['precision']}, but rounding variables are learned in "
            "32-true: set quantization.products for the matrix products, and model.dtype for the "
            "model's own passes"
        )
    if trainer["gradient_clip_val"] is not None:
        # each portion and each device would be clipped by a norm of its own
        raise UserError(
            f"trainer.gradient_clip_val is {trainer['gradient_clip_val']}: remove it, because the result "
            "would depend on the memory and the devices that learning is divided by"
        )


def check_tuning(trainer: Trainer, chosen: Any, settings: TuningSettings, work: Work) -> None:
    """Raise UserError where the trainer section asks for something that a tuning can't do."""
    if not settings.enabled:
        return
    _check_shares(trainer.world_size, settings, work)
    stopping = [c for c in _listed(chosen.callbacks) if isinstance(c, EarlyStopping)]
    if stopping:
        tuned = {"blocks": settings.blocks.enabled, "model": settings.model.enabled}
        epochs = [f"quantization.tuning.{name}.epochs" for name, on in tuned.items() if on]
        raise UserError(
            "trainer.callbacks has EarlyStopping, which a tuning doesn't need, because it keeps its best "
            f"epoch: remove it, or lower {' and '.join(epochs)} instead"
        )


def _check_shares(devices: int, settings: TuningSettings, work: Work) -> None:
    """Raise UserError where a device has too few segments for a mini-batch and the share held back."""
    last = World(devices - 1, devices)  # has the fewest
    fewest = len(last.segments(torch.empty(work.segments, 0), work.batch_size))
    if devices > 1 and not fewest:
        raise UserError(
            f"trainer.devices and trainer.num_nodes make {devices} devices, but {work.segments} segments in "
            f"batches of {work.batch_size} are enough for {-(-work.segments // work.batch_size)}: lower "
            "trainer.devices or data.batch_size"
        )
    for section in (settings.blocks, settings.model):
        if section.enabled and devices > 1:
            try:
                held_back_and_steps(fewest, section.batch_size, settings.held_back)
            except UserError as error:
                raise UserError(
                    f"{error}. One of {devices} devices has so few: {work.segments} segments are divided in "
                    f"batches of {work.batch_size}: lower trainer.devices or data.batch_size"
                ) from error


def check_device(trainer: Trainer, chosen: str) -> None:
    """Raise UserError where accelerator auto is a device that lacks the types that are needed."""
    kind = trainer.strategy.root_device.type
    if kind not in ("cpu", "cuda"):
        raise UserError(
            f"trainer.accelerator is {chosen}, which is {kind} here: only the CPU and CUDA devices are "
            "supported, so set it to cpu"
        )


def check_strategy(trainer: Trainer, chosen: Any) -> None:
    """Raise UserError where several devices are asked for with another strategy than ddp."""
    if trainer.world_size > 1 and chosen not in ("auto", "ddp"):
        raise UserError(
            f"trainer.strategy is {chosen}, but with several devices the rows of each matrix are divided "
            "over them: set it to ddp, or leave it out"
        )


def _listed(one_or_more: Any) -> list[Any]:
    """Return what Lightning takes alone or in a list as a list."""
    if one_or_more is None:
        return []
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]
