"""Put mistakes in the user's ``trainer`` section, which Lightning checks, into words."""

import re
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.callbacks import ProgressBar

from aespa_pl.commands.arguments import FREE
from aespa_pl.errors import UserError

CHANGE_STEPS = (
    "GradientAccumulationScheduler", "StochasticWeightAveraging", "LearningRateFinder", "BatchSizeFinder",
)  # fmt: skip
"""Lightning's callbacks that change the steps, the rates or the batches of a training."""
PRECISIONS = (None, 32, "32", "32-true")
"""Values of trainer.precision that mean what Lightning means by them here."""
TRAINER_DEFAULTS = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "log_every_n_steps": 20,
}
"""Defaults that differ from Lightning's."""
CLASSES = {
    f"{FREE}.callbacks": "the name of a class in lightning.pytorch.callbacks, such as LearningRateMonitor",
    f"{FREE}.logger": "the name of a class in lightning.pytorch.loggers, such as CSVLogger",
}
"""Keys that take classes, and what to give to them."""
SHOWN = 200
"""Largest number of characters that are shown of a library's message."""


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


def value_refused(error: ArgumentError) -> str:
    """Return the message for a key or value of the section that jsonargparse refuses."""
    key = re.search(r'key "([^"]*)"', str(error))
    if key is None:
        return f"{first_cause(error)}: aespa-pl fit --help {FREE} shows what it takes"
    # of the reasons of all types that a key may have, the one of the class that was named
    named = re.search(r"Problem with given class_path '(?:[^']*\.)?(\w+)':\s*(.*)", str(error))
    given = re.search(r"Given value: (.*)", str(error))
    cause = f"{named[1]}: {named[2]}" if named else given[1] if given else first_cause(error)
    advice = f"aespa-pl fit --help {FREE} shows what it can be"
    if key[1] in CLASSES:
        advice = f"give {CLASSES[key[1]]}, or the import path of yours, such as my_module.MyClass, with the "
        advice += "folder of my_module.py in the environment variable PYTHONPATH"
    return f"{key[1]} can't have this value ({cause}): {advice}"


def first_cause(error: BaseException) -> str:
    """Return the message of the error that all others were raised because of, in one line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
