"""Refuse another method beside a run's configuration, which has the values of all that a method decides."""

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import get_args

from aespa_pl.commands.arguments import KEYS, Arguments, leaves, read_configuration
from aespa_pl.errors import UserError
from aespa_pl.settings import QuantizationSettings

METHOD = "quantization.method"
DECIDED = {
    key
    for key, kind in KEYS.items()
    if key.startswith("quantization.") and NoneType in get_args(kind)
} - {"quantization.group_size"}
"""Keys that a method decides where they are null; group_size means something else by it."""


def refuse_other_methods(arguments: Arguments, methods: Sequence[str] = ()) -> None:
    """Raise UserError where a configuration sets all that another method would decide.

    The run would have the other method's name and the same result. A configuration that sets some of these
    keys alone, such as paper.yaml, is laid over a method on purpose.

    Args:
        arguments: Options with the paths of their configurations, already checked.
        methods: Methods that are run; none: the one that the options choose.
    """
    wanted, complete = QuantizationSettings().method, dict[str, str]()
    for option in arguments.options:
        if option.key == METHOD and option.value:
            wanted = option.value
        elif option.key == "config" and option.value:
            given = dict(leaves(read_configuration(Path(option.value))))
            wanted = given.get(METHOD, wanted)
            if METHOD in given and all(given.get(key) is not None for key in DECIDED):
                complete[option.value] = given[METHOD]
    for file, method in complete.items():
        others = [other for other in methods or (wanted,) if other != method]
        if others:
            raise UserError(
                f"config: {file} is the configuration of a run and sets all that {METHOD} decides, so "
                f"{', '.join(others)} would give {method}'s result: take the configuration that the run was "
                "begun with, or remove from its section quantization what the method should decide"
            )
