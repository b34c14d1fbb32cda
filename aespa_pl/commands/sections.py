"""Parse the sections of a configuration, ours and Lightning's, in ``fit``, ``test`` and ``plan`` alike."""

from collections.abc import Callable
from typing import Any, cast

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import Trainer

from aespa_pl.commands.trainer_section import TRAINER_DEFAULTS, first_cause
from aespa_pl.commands.trainers import OWN_KEYS
from aespa_pl.errors import UserError
from aespa_pl.settings import SECTIONS


def add_sections(parser: ArgumentParser, trainer_class: Callable[..., Trainer] = Trainer) -> None:
    """Add the settings and the Trainer, without the keys that the walk decides."""
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_class_arguments(
        trainer_class,
        "trainer",
        fail_untyped=False,
        instantiate=False,
        sub_configs=True,
        skip=set(OWN_KEYS),
    )
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})


def instantiated(parser: ArgumentParser, config: Any) -> Namespace:
    """Return the settings as objects, with the user's callbacks and loggers.

    Raises:
        UserError: A callback or logger can't be made.
    """
    try:
        return cast(Namespace, parser.instantiate(config))
    # what the constructors of loggers and callbacks raise, and jsonargparse around it
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        raise UserError(f"trainer: {first_cause(error)}") from error
