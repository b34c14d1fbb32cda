"""Refuse mistakes in the sections of a configuration before any large library is imported.

Each key and value of our own sections is checked here; Lightning's parser checks the section of its Trainer.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from aespa_pl.commands.arguments import (
    CELL_KEYS,
    FLAG,
    FREE,
    KEYS,
    OTHERS,
    OWN_KEYS,
    REQUIRED,
    WALK_KEYS,
    Arguments,
    Option,
    leaves,
    read_configuration,
)
from aespa_pl.errors import UserError
from aespa_pl.settings import EXPECTED, SECTIONS, QuantizationSettings

METHOD = "quantization.method"
DECIDED = {
    key
    for key, kind in KEYS.items()
    if key.startswith("quantization.") and NoneType in get_args(kind) and not key.endswith("_rate")
} - {"quantization.group_size", "quantization.target"}
"""Keys that a method alone decides where they are null; null means something else for the last two."""


def refuse_mistakes(arguments: Arguments, command: str) -> None:
    """Raise UserError with all mistakes in our own sections, and in the keys that only this command takes."""
    given = arguments.given()
    mistakes = [words for option in given if (words := _mistake(option, command))]
    if REQUIRED not in [option.key for option in given]:
        mistakes.append(f"{REQUIRED} is missing: give --{REQUIRED} FOLDER, or a configuration with --config")
    if mistakes:
        raise UserError("; ".join(dict.fromkeys(mistakes)))


def refuse_other_methods(arguments: Arguments, methods: Sequence[str] = ()) -> None:
    """Raise UserError where a configuration sets all that another method would decide.

    The run would have the other method's name and the same result. A configuration that sets some of these
    keys alone, such as paper.yaml, is laid over a method on purpose. Without ``methods``, the options choose
    one.
    """
    wanted = methods or [arguments.setting(METHOD, QuantizationSettings().method)]
    for file in (Path(each.value) for each in arguments.options if each.key == "config" and each.value):
        values = dict(leaves(read_configuration(file)))
        method = values.get(METHOD)
        others = ", ".join(other for other in wanted if other != method)
        if method and others and all(values.get(key) is not None for key in DECIDED):
            raise UserError(
                f"config: {file} is the configuration of a run and sets all that {METHOD} decides, so "
                f"{others} would give {method}'s result: take the configuration that the run was begun with, "
                "or remove from its section quantization what the method should decide"
            )


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``: did you mean X?`` for a misspelt name, the empty string where nothing is near."""
    same_end = [key for key in known if key.split(".")[-1] == name.rsplit(".", maxsplit=1)[-1]]
    likely = same_end[:1] or get_close_matches(name, known, n=1)
    return f": did you mean {likely[0]}?" if likely else ""


def expected(kind: Any) -> str:
    """Return in words what a value of a type has to be: ``2 to 8, or null``."""
    if kind in EXPECTED:
        return EXPECTED[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list, each item {expected(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a number for each name, {expected(get_args(kind)[1])}, such as {{down_proj: 4}}"
    choices = sorted(get_args(kind), key=lambda choice: choice is NoneType)
    return ", or ".join(map(expected, choices))


def _mistake(option: Option, command: str) -> str | None:
    """Return what is wrong with a key or its value; None where nothing is."""
    key, where = option.key.removesuffix("+"), f" ({option.file})" if option.file else ""
    # tasks may name files that run Python, so they stand where the user sees them
    kinds = KEYS if option.file else KEYS | OWN_KEYS.get(command, {})
    section, _, name = key.partition(".")
    if option.value is None and not option.file and key != FLAG:
        return f"{key} has no value: give one after --{key}"
    if command == "compare" and key in CELL_KEYS and not option.file:
        return f"{key} differs from cell to cell: {CELL_KEYS[key]}"
    if key in (FLAG, *OTHERS) or (section == FREE and name.partition(".")[0] not in WALK_KEYS):
        return None
    if key not in kinds:
        return _unknown(kinds, key) + where
    if _takes(kinds[key], option):
        return None
    shown = "null" if option.value is None else option.value
    return f"{key} is {shown}: expected {expected(kinds[key])}{where}"


def _unknown(kinds: Mapping[str, Any], key: str) -> str:
    """Return what is wrong with a key that this command doesn't take."""
    if key.startswith(f"{FREE}."):
        return (
            f"{key} is decided by the walk: set quantization.tuning.blocks.epochs and "
            "quantization.tuning.model.epochs, or quantization.rounding.iterations where the method learns "
            "the rounding"
        )
    if key in SECTIONS:
        first = next(known for known in KEYS if known.startswith(f"{key}."))
        return f"{key} is a section, not a value: give the keys in it, such as {first}"
    for command, own in OWN_KEYS.items():
        if key in own:
            return f"{key} is a key of aespa-pl {command} alone, on its command line"
    return f"{key} is unknown{nearest(key, [*kinds, *OTHERS, *SECTIONS, FREE])}"


def _takes(kind: Any, option: Option) -> bool:
    """Return whether an option's value is of a type."""
    if option.value is None:
        return NoneType in get_args(kind)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        if option.file or not isinstance(option.value, str):
            parser.parse_object({"value": option.value})
        else:
            parser.parse_args([f"--value{'+' if option.key.endswith('+') else ''}={option.value}"])
    except (ArgumentError, TypeError, ValueError):
        return False
    return True
