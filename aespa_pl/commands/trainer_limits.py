"""Refuse what the trainer section asks for and a walk can't do, before a run begins."""

from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar

from aespa_pl.curve_names import NOT_NEAREST, PENALTY, RECONSTRUCTION, TUNING, UNDECIDED
from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError
from aespa_pl.planning.shape import Work
from aespa_pl.settings import TuningSettings
from aespa_pl.tuning.data import held_back_and_steps

CHANGE_STEPS = (
    "GradientAccumulationScheduler", "StochasticWeightAveraging", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip
"""Lightning's callbacks that change the steps, the rates or the batches of a training."""
PRECISIONS = (None, 32, "32", "32-true")  # that mean here what Lightning means by them
WANT_LOGGERS = ("LearningRateMonitor", "DeviceStatsMonitor")
"""Lightning's callbacks that can't do without a logger."""
LOGGED = ("epoch", "step", "loss", RECONSTRUCTION, PENALTY, UNDECIDED, NOT_NEAREST, TUNING)
"""How the names of what trainings log begin, before a slash."""


def check_trainer(trainer: Namespace) -> None:
    """Raise UserError where the trainer section asks for something that a walk can't do."""
    callbacks = listed(trainer["callbacks"])
    # a user's own may log what another one monitors
    all_known = all(type(callback).__module__.startswith("lightning.") for callback in callbacks)
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ProgressBar) or name in CHANGE_STEPS:
            raise UserError(
                f"trainer.callbacks has {name}: remove it, because fit has bars of its own, and its settings "
                "decide steps, learning rates and batches"
            )
        if name in WANT_LOGGERS and trainer.logger in (False, []):
            raise UserError(f"trainer.callbacks has {name}, which needs a logger: leave trainer.logger out")
        monitor = getattr(callback, "monitor", None)
        if all_known and monitor is not None and str(monitor).partition("/")[0] not in LOGGED:
            raise UserError(
                f"trainer.callbacks has {name}, whose monitor is {monitor}, which no training here logs: the "
                f"names begin with {', '.join(LOGGED)}, such as {RECONSTRUCTION}/q_proj"
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
    return one_or_more if isinstance(one_or_more, list) else [] if one_or_more is None else [one_or_more]


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
