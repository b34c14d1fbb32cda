"""Refuse mistakes in the sections of a configuration before any large library is imported.

Each key and value of our own sections is checked here; Lightning checks the section of its Trainer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from aespa_pl.commands.arguments import (
    FLAGS,
    FREE,
    KEYS,
    OTHERS,
    PLAN_DEVICE,
    REQUIRED,
    TASK_KEYS,
    Arguments,
)
from aespa_pl.errors import UserError
from aespa_pl.settings import EXPECTED, SECTIONS, QuantizationSettings, TaskSettings

METHOD = "quantization.method"
DECIDED = {
    key
    for key, kind in KEYS.items()
    if key.startswith("quantization.") and NoneType in get_args(kind) and not key.endswith("_rate")
} - {"quantization.group_size", "quantization.target"}
"""Keys that a method alone decides where they are null; null means something else for the last two."""


def refuse_mistakes(arguments: Arguments, command: str) -> None:
    """Raise UserError with all mistakes in our own sections, unless help is asked for."""
    if arguments.wants_help:
        return
    own: dict[str, dict[str, Any]] = {"test": TASK_KEYS, "plan": {PLAN_DEVICE: str}}
    parser, mistakes, seen = _parser(), list[str](), set[str]()
    by_file = defaultdict[str, list[tuple[str, Any]]](list)
    for key, value, file in arguments.given():
        if not file and FLAGS.match(f"--{key}"):
            continue
        if not file and value is None:
            mistakes.append(f"{key} has no value: give one after --{key}")
        elif not file and key in SECTIONS and _is_section(value):
            seen.add(REQUIRED)  # a section as a whole, in JSON or in a file: the parser's to check
        else:
            seen.add(key)
            by_file[file].append((key, value))
    for file, given in by_file.items():
        # tasks may name files that run Python, so they stand where the user sees them
        kinds = KEYS if file else KEYS | own.get(command, {})
        mistakes += _mistakes(parser, kinds, given, f" ({file})" if file else "")
    if REQUIRED not in seen:
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
    by_file = defaultdict[str, dict[str, Any]](dict)
    for each in arguments.given():
        by_file[each.file][each.key] = each.value
    for file, values in by_file.items():
        method = values.get(METHOD)
        others = [other for other in wanted if other != method]
        is_complete = method and all(values.get(key) is not None for key in DECIDED)
        if file and is_complete and others:
            raise UserError(
                f"config: {file} is the configuration of a run and sets all that {METHOD} decides, so "
                f"{', '.join(others)} would give {method}'s result: take the configuration that the run was "
                "begun with, or remove from its section quantization what the method should decide"
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
        return "a list"
    if get_origin(kind) is dict:
        return f"a number for each name, {expected(get_args(kind)[1])}, such as {{down_proj: 4}}"
    choices = sorted(get_args(kind), key=lambda choice: choice is NoneType)
    return ", or ".join(map(expected, choices))


def _mistakes(
    parser: ArgumentParser, kinds: Mapping[str, Any], given: Sequence[tuple[str, Any]], where: str
) -> list[str]:
    """Return a message for each key or value that is wrong; ``where`` names the file that they are from.

    All values are tried together first, because the parser takes as long for one of them.
    """
    right = _takes(parser, [(key, value) for key, value in given if key in kinds], where)
    mistakes = []
    for key, value in given:
        if key not in kinds:
            mistakes += _unknown(kinds, key, where)
        elif not right and not _takes(parser, [(key, value)], where):
            shown = "null" if value is None else value
            mistakes.append(f"{key} is {shown}: expected {expected(kinds[key])}{where}")
    return mistakes


def _is_section(value: str) -> bool:
    """Return whether a word stands for a section: in YAML or JSON, or in a file."""
    try:
        return isinstance(yaml.safe_load(value), Mapping) or Path(value).expanduser().is_file()
    except yaml.YAMLError:
        return True  # the parser says what is wrong with it


def _unknown(kinds: Mapping[str, Any], key: str, where: str) -> list[str]:
    """Return what is wrong with a key that is not of our own sections, none or one message."""
    if key.split(".", maxsplit=1)[0] == FREE or key in OTHERS:
        return []
    if key in SECTIONS:
        first = next(known for known in KEYS if known.startswith(f"{key}."))
        return [f"{key} is a section, not a value: give the keys in it, such as {first}{where}"]
    if key in TASK_KEYS:
        return [f"{key} is a key of aespa-pl test alone, on its command line{where}"]
    hint = nearest(key, [*kinds, *OTHERS, *SECTIONS, FREE])
    return [f"{key} is unknown{where}{hint or ': aespa-pl fit --help lists all keys'}"]


def _takes(parser: ArgumentParser, values: Sequence[tuple[str, Any]], where: str) -> bool:
    """Return whether the parser takes values of a file, or of the command line."""
    given = [(REQUIRED, "any"), *values]  # of two values the second counts
    try:
        if where:
            content = Namespace()  # type: ignore[no-untyped-call]
            for key, value in given:
                content[key] = value
            parser.parse_object(content.as_dict())
        else:
            parser.parse_args([f"--{key}={value}" for key, value in given])
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_class_arguments(TaskSettings)
    parser.add_argument(f"--{PLAN_DEVICE}", type=str)
    parser.add_argument("--seed_everything", type=KEYS["seed_everything"])
    return parser
