"""Parse the sections of a configuration, ours and Lightning's, alike in every command and the Python call."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from aespa_pl.commands.arguments import FREE, Arguments
from aespa_pl.commands.keys import OWN_KEYS, WALK_KEYS, nearest
from aespa_pl.data.texts import is_file
from aespa_pl.errors import UserError
from aespa_pl.paths import expanded
from aespa_pl.run.find import SMOKE_NAME
from aespa_pl.settings import SECTIONS, QuantizationSettings, Settings, TaskSettings

SMOKE_SEGMENTS, SMOKE_ITERATIONS = 4, 10
TRAINER_DEFAULTS = {  # that differ from Lightning's
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "log_every_n_steps": 20,
}
CLASSES = {"callbacks": "callbacks, such as LearningRateMonitor", "logger": "loggers, such as CSVLogger"}
"""Modules of Lightning with the classes that a key of its section takes."""
SHOWN = 200  # characters of a library's message, at most
_parsers: dict[str, LightningArgumentParser] = {}


def add_trainer(parser: ArgumentParser) -> None:
    """Add Lightning's section, without the keys that the walk decides."""
    parser.add_class_arguments(
        Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=set(WALK_KEYS)
    )  # fmt: skip
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})


class AespaCLI(LightningCLI):
    """Parses the sections of a command; the walk takes the place of Lightning's own subcommands."""

    config: Namespace  # values as they were given, from which the objects are made

    def __init__(self, arguments: Arguments, command: str) -> None:
        """Parse options that are already checked by :mod:`aespa_pl.commands.keys`."""
        self.arguments, self.command = arguments, command
        options = {"exit_on_error": False, "allow_abbrev": False, "print_config": None}
        super().__init__(
            save_config_callback=None,  # the walk writes config.yaml
            seed_everything_default=False,  # our own code draws nothing from it
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            run=False,
            parser_kwargs={"prog": f"aespa-pl {command}", **options},
            args=arguments.words,
        )

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Make the parser, or take that of an earlier command of this process: it takes 0.2 s to make."""
        if self.command not in _parsers:
            super().setup_parser(*args, **kwargs)
            _parsers[self.command] = self.parser
        self.parser = _parsers[self.command]

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our sections, and the Trainer's without the keys that the walk decides."""
        parser.add_argument("--ckpt_path", type=str | None, default=None)
        if self.command == "fit":
            parser.add_argument("--print_config", action="store_true")
        if self.command == "test":
            parser.add_class_arguments(TaskSettings)
        for name, section in SECTIONS.items():
            parser.add_class_arguments(section, name)
        add_trainer(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the words of the command, whatever ``sys.argv`` is."""
        try:
            self.config = parser.parse_args(self.arguments.words)
        except ArgumentError as error:
            raise UserError(_value_refused(error)) from error
        if self.config.trainer.fast_dev_run:  # a smoke test, also in what the run's folder stores
            quantization, data, output = self.config.quantization, self.config.data, self.config.output
            segments = _smoke_segments(data.calibration.source, self.config.trainer.devices)
            data.calibration.segments = min(data.calibration.segments, segments)
            quantization.rounding.iterations = min(quantization.rounding.iterations, SMOKE_ITERATIONS)
            for tuning in (quantization.tuning.blocks, quantization.tuning.model):
                tuning.epochs = tuning.batch_size = 1
            data.batch_size, data.evaluation.texts = 1, []
            output.name = output.name.removesuffix(SMOKE_NAME) + SMOKE_NAME

    def instantiate_classes(self) -> None:
        """Make our sections, the keys that only test takes, and Lightning's section."""
        made = self.config_init = self.made(self.config)
        self.settings = Settings(**{name: made[name] for name in SECTIONS})
        self.tasks = TaskSettings(**{key: made[key] for key in OWN_KEYS["test"] if key in made})
        self.trainer_section = cast(Namespace, made.trainer)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return a Trainer of the section with other values for some keys."""
        # a smoke test is a run in small; Lightning's own would log and save nothing
        return super().instantiate_trainer(**{"fast_dev_run": False, **kwargs})

    def new_trainer_section(self, logger: Any) -> Namespace:
        """Return the section of the Trainer made anew, with other loggers."""
        config = self.config.clone()
        config.trainer.logger = logger
        return cast(Namespace, self.made(config).trainer)

    def text(self, quantization: QuantizationSettings, revision: str | None) -> str:
        """Return the configuration as it is run, in YAML: a continued run takes it from its folder.

        ``revision`` is the one of the model's that was found, so that it is found again when there are newer.
        The method has replaced every null of the quantization, because a later version of it may decide
        otherwise; but learning rates follow the bits, which may be others where it is used again.
        Raises UserError where a callback or logger has an argument that YAML can't hold.
        """
        try:
            text = self.parser.dump(self.config, skip_unset=False)
        except ValueError as error:
            raise UserError(
                "trainer: a callback or logger has an argument that can't be saved in config.yaml "
                f"({first_cause(error)}): give it as a text"
            ) from error
        content = yaml.safe_load(text)
        for key in ("config", "ckpt_path", "print_config"):
            content.pop(key, None)
        given = content["quantization"]["tuning"]
        content["quantization"] = json.loads(json.dumps(asdict(quantization)))  # plain numbers only
        for part in ("blocks", "model"):
            decided = content["quantization"]["tuning"][part]
            decided |= {key: None for key in decided if key.endswith("_rate") and given[part][key] is None}
        # a run may be continued, measured and exported from another folder
        model, data = content["model"], content["data"]
        model["pretrained"], model["revision"] = _absolute(model["pretrained"], Path.is_dir), revision
        for section, key in (("calibration", "source"), ("evaluation", "texts")):
            data[section][key] = _absolute_texts(data[section][key])
        if data["cache"]:
            data["cache"] = _absolute(data["cache"], lambda _: True)
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)

    def made(self, config: Any) -> Namespace:
        """Return a configuration's sections as objects. Raises UserError where one can't be made."""
        try:
            made = cast(Namespace, self.parser.instantiate(config))
        except Exception as error:  # what the constructors of loggers and callbacks raise, of any class
            # of the reasons of all types that a key may have, the one of the class that was named
            reasons = re.findall(r"^ *- (?!Expected a <class)(.*[^:\n])$", str(error), re.MULTILINE)
            raise UserError(f"trainer: {reasons[0] if reasons else first_cause(error)}") from error
        if made.trainer.accelerator == "auto" and not torch.cuda.is_available():
            made.trainer.accelerator = "cpu"  # Lightning may find MPS, which lacks types that are needed
        return made


def _smoke_segments(source: Any, devices: Any) -> int:
    """Return the segments of a smoke test: one of each text, and two for each device, at least."""
    shares = [share for share in source.values() if share > 0] if isinstance(source, Mapping) else []
    of_texts = math.ceil(sum(shares) / min(shares)) if shares else 1
    count = len(devices) if isinstance(devices, list) else devices
    count = int(count) if str(count).isdecimal() else torch.cuda.device_count()  # auto, or -1
    return max(SMOKE_SEGMENTS, of_texts, 2 * count)


def _absolute_texts(given: Any) -> Any:
    """Return one text, a list, keys or null, with absolute paths of files; a file named c4 is not c4."""
    if isinstance(given, Mapping):
        return {_absolute_texts(name): proportion for name, proportion in given.items()}
    if isinstance(given, list):
        return [*map(_absolute_texts, given)]
    return _absolute(given, Path.is_file) if given and is_file(given) else given


def _absolute(given: str, is_meant: Callable[[Path], bool]) -> str:
    """Return the absolute path of what is meant on this machine, and any other name as it is."""
    path = expanded(given)
    return str(path.absolute()) if is_meant(path) else given


def _value_refused(error: ArgumentError) -> str:
    if unknown := re.search(rf"unrecognized arguments: (?:--)?({FREE}\.\w+)", str(error)):
        known = [f"{FREE}.{key}" for key in signature(Trainer).parameters if key not in WALK_KEYS]
        hint = nearest(unknown[1], known)
        return f"{unknown[1]} is unknown{hint or f': aespa-pl fit --help {FREE} shows what there is'}"
    key = re.search(r'key "([^"]*)"', str(error))
    if key is None:
        return f"{first_cause(error)}: aespa-pl fit --help {FREE} shows what it takes"
    # of the reasons of all types that a key may have, the one of the class that was named
    named = re.search(r"Problem with given class_path '(?:[^']*\.)?(\w+)':\s*(.*)", str(error))
    given = re.search(r"Given value: (.*)", str(error))
    cause = f"{named[1]}: {named[2]}" if named else given[1] if given else first_cause(error)
    advice = f"aespa-pl fit --help {FREE} shows what it can be"
    section, _, name = key[1].partition(".")
    if section == FREE and name in CLASSES:
        advice = (
            f"give the name of a class in lightning.pytorch.{CLASSES[name]}, or the import path of yours, "
            "such as my_module.MyClass, with the folder of my_module.py in the environment variable "
            "PYTHONPATH"
        )
    if missing := re.search(r"arguments are required: ([\w, ]+)", cause):
        advice = f"give {' and '.join(f'--{key[1]}.{each}' for each in missing[1].split(', '))} as well"
    return f"{key[1]} can't have this value ({cause}): {advice}"


def first_cause(error: BaseException) -> str:
    """Return the message of the error that all others were raised because of, in one line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
