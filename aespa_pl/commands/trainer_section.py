"""Put mistakes in the user's ``trainer`` section, which Lightning checks, into words."""

import inspect
import json
import re
from dataclasses import asdict
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Trainer

from aespa_pl.commands.arguments import FREE, Arguments, keys_given, nearest
from aespa_pl.commands.trainers import OWN_KEYS
from aespa_pl.errors import UserError
from aespa_pl.settings import QuantizationSettings

TRAINER_DEFAULTS = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "log_every_n_steps": 20,
}
"""Defaults that differ from Lightning's."""
TRAINER_KEYS = {key: p.default for key, p in inspect.signature(Trainer).parameters.items()}
"""Lightning's own defaults, by key of the ``trainer`` section."""
SHOWN = 200
"""Largest number of characters that are shown of a library's message."""


def refuse_trainer_keys(arguments: Arguments) -> None:
    """Raise UserError with every key of the trainer section that Lightning or the walk doesn't take."""
    mistakes = []
    for key in keys_given(arguments):
        section, *rest = key.split(".")
        if section != FREE or not rest:
            continue
        name = rest[0].removesuffix("+")
        if name in OWN_KEYS:
            mistakes.append(
                f"{FREE}.{name} is decided by the walk: set quantization.rounding.iterations instead"
            )
        elif name not in TRAINER_KEYS:
            offered = [f"{FREE}.{known}" for known in TRAINER_KEYS if known not in OWN_KEYS]
            hint = nearest(f"{FREE}.{name}", offered) or ": aespa-pl fit --help lists all keys"
            mistakes.append(f"{FREE}.{name} is unknown{hint}")
    if mistakes:
        raise UserError("; ".join(dict.fromkeys(mistakes)))


def value_refused(error: ArgumentError, command: str) -> str:
    """Return the message for a value that jsonargparse refuses; our own sections were checked before."""
    key = re.search(r'key "([^"]*)"', str(error))
    return (
        f"{key[1] if key else FREE} can't have this value ({first_cause(error)}): aespa-pl {command} --help "
        "shows what it can be"
    )


def first_cause(error: BaseException) -> str:
    """Return the message of the error that all others were raised because of, in one line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def configuration_text(
    parser: ArgumentParser, config: Any, command: str, quantization: QuantizationSettings
) -> str:
    """Return the configuration as it is run, in YAML: a continued run takes it from its folder.

    Args:
        parser: Parser of all commands.
        config: The parsed command line.
        command: Command whose section is wanted.
        quantization: The section after the method has replaced every null; it is stored in place of
            the user's, because a later version of the method may decide otherwise.

    Raises:
        UserError: A callback or logger has an argument that YAML can't hold.
    """
    try:
        text = parser.dump(config, skip_unset=False)
    except ValueError as error:
        unheld = re.search(r"cannot represent an object', <(\w+)\.\w+: '(\w+)'>", str(error))
        named, example = (
            (f"the type {unheld[1]}", unheld[2]) if unheld else (first_cause(error), "")
        )
        raise UserError(
            "trainer: a callback or logger has an argument that can't be saved in config.yaml "
            f"({named}): give it as a text{f', such as {example}' if example else ''}"
        ) from error
    content = yaml.safe_load(text)[command]
    for key in ("config", "ckpt_path"):
        content.pop(key, None)
    content["quantization"] = json.loads(json.dumps(asdict(quantization)))  # plain numbers only
    return yaml.safe_dump(content, sort_keys=False)
