"""Show the keys of a configuration, and refuse mistakes in them before any large library is imported."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from aespa_pl.commands.arguments import FLAG, FREE, KEYS, REQUIRED, Arguments, Option
from aespa_pl.errors import UserError
from aespa_pl.settings import EXPECTED, SECTIONS, CompareSettings, QuantizationSettings, TaskSettings, keys_of

PLAN_DEVICE = "plan.device"
OWN_KEYS: dict[str, dict[str, Any]] = {  # types of the keys that only one command takes, in its words
    "test": get_type_hints(TaskSettings),
    "plan": {PLAN_DEVICE: str},
    "compare": keys_of(CompareSettings, "compare"),
}
CELL_KEYS = {
    "ckpt_path": "each cell finds its own run",
    "quantization.method": "use --compare.methods",
    "quantization.bits": "use --compare.bits",
    "quantization.format": "use --compare.formats",
    "data.calibration.seed": "use --compare.seeds",
}
"""Keys that differ from cell to cell of a comparison, and what to do instead of giving them."""
OTHERS = ("config", "ckpt_path")
WALK_KEYS = (
    "max_steps", "min_steps", "max_epochs", "min_epochs", "max_time",
    "limit_train_batches", "overfit_batches", "accumulate_grad_batches", "barebones",
)  # fmt: skip
"""Keys of the Trainer that would change the number of iterations, which the walk decides."""
METHOD = "quantization.method"
DECIDED = {
    key
    for key, kind in KEYS.items()
    if key.startswith("quantization.") and NoneType in get_args(kind) and not key.endswith("_rate")
} - {"quantization.group_size", "quantization.target"}
"""Keys that a method alone decides where they are null; null means something else for the last two."""
COMMON = {  # the keys that most users need, in a few words
    "config FILE": "YAML file of keys: one here, or of aespa-pl; what comes later counts",
    "model.pretrained NAME": "name on the hub, folder, or embedded:llama (opt, bloom)",
    "data.calibration.source": "c4, wikitext2, ptb, embedded, or a file",
    "data.calibration.segments": "number of calibration segments",
    "data.calibration.segment_length": "tokens in each of them",
    "data.evaluation.texts": "list of texts to measure the perplexity on; []: none",
    "quantization.method": "aespa-tuned, aespa, aespa-fast, rtn ... (docs/methods.md)",
    "quantization.format": "uniform, or llama.cpp's types (Q2_K, Q4_K_M, IQ4_XS ..., auto: by target)",
    "quantization.bits": "bits of a weight, 2 to 8",
    "quantization.group_size": "columns that share a scale; null: the whole row",
    "quantization.target": "file size (3.5 GB) or bits a weight to choose types or bits for",
    "output.name": "name of the run, whose folder is output.folder/NAME/version_N",
    "trainer.accelerator": "auto, cpu or gpu",
    "trainer.devices": "number of devices",
    "trust_run true": "let the configuration of a run from somebody else name code and places",
    "seed_everything": "seed for callbacks and loggers; ours draw nothing from it",
    "ckpt_path": "last, or the folder of a run: the run that is continued or measured",
}
ONLY = {  # further keys of each command
    "fit": {
        "print_config": "print what would be run, and exit",
        "trainer.fast_dev_run true": "smoke test: few segments and steps, no evaluation",
    },
    "test": {"tasks": "list of zero-shot tasks; also task_limit, task_examples ..."},
    "plan": {"plan.device 'GB, TFLOPS'": "a machine that isn't this one, such as '24 GB, 80 TFLOPS'"},
    "compare": {
        "output.name": "name (default: compare), cells: output.folder/NAME/METHOD_wBITS_sSEED",
        "compare.methods": "list of values of quantization.method; by default all",
        "compare.bits": "list of values of quantization.bits; by default [2, 3, 4]",
        "compare.formats": "list of values of quantization.format, in place of bits",
        "compare.seeds": "list of values of data.calibration.seed; mean and spread are over them",
    },
}
NAMES = (*SECTIONS, FREE)
A_RUN = "a run is missing: give its folder (NAME/version_N), or last"
HELP = ("-h", "--help")


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
    given = arguments.given()
    for file in dict.fromkeys(option.file for option in given if option.file):
        values = {option.key: option.value for option in given if option.file == file}
        method = values.get(METHOD)
        others = ", ".join(other for other in wanted if other != method)
        if method and others and all(values.get(key) is not None for key in DECIDED):
            raise UserError(
                f"config: {file} is the configuration of a run and sets all that {METHOD} decides, so "
                f"{others} would give {method}'s result: take the configuration that the run was begun with, "
                "or remove from its section quantization what the method should decide"
            )


@contextmanager
def in_words(command: Callable[..., Any], **words: str) -> Iterator[None]:
    """Say in ``words`` what a command needs and its command line lacks, and which option doesn't exist."""
    try:
        yield
    except ArgumentError as error:
        names = re.fullmatch(r"the following arguments are required: (.*)", str(error))
        if names is not None:
            raise UserError("; ".join(words[name] for name in names[1].split(", "))) from error
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", str(error))
        if unknown is None:
            raise
        takes = signature(command).parameters.values()
        options = [f"--{p.name}" for p in takes if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
        hint = nearest(unknown[1], options) or f": expected one of {', '.join(options)}"
        raise UserError(f"{unknown[1]} is unknown{hint}") from error


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``: did you mean X?`` for a misspelt name, the empty string where nothing is near."""
    section, _, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    same_end = [key for key in known if key.split(".")[-1] == last]
    elsewhere = [key for key in known if key not in siblings.values()]
    likely = (
        [siblings[key] for key in get_close_matches(last, siblings, n=1, cutoff=0.85)]
        or same_end[:1]
        or [siblings[key] for key in get_close_matches(last, siblings, n=1)]
        or get_close_matches(name, elsewhere, n=1)
    )
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
    free = section == FREE and name.partition(".")[0] not in WALK_KEYS
    if key == FREE:  # the name of a file, or YAML
        free = isinstance(option.value, str)
    if key in (FLAG, *OTHERS) or free:
        elsewhere = key == FLAG and command != "fit" and not option.file
        return f"{key} is a key of aespa-pl fit alone" if elsewhere else None
    if key not in kinds:
        no_cell = [known for known in kinds if command != "compare" or known not in CELL_KEYS]
        return _unknown(kinds if option.file else no_cell, key) + where
    if _takes(kinds[key], option):
        return None
    shown = "null" if option.value is None else option.value
    return f"{key} is {shown}: expected {expected(kinds[key])}{where}"


def _unknown(known_keys: Iterable[str], key: str) -> str:
    """Return what is wrong with a key that this command doesn't take."""
    if key.startswith(f"{FREE}."):
        return (
            f"{key} is decided by the walk: set quantization.tuning.blocks.epochs and "
            "quantization.tuning.model.epochs, or quantization.rounding.iterations where the method learns "
            "the rounding"
        )
    if key == FREE:
        return f"{key} is a section, not a value: give the keys in it, such as {key}.accelerator"
    if first := next((known for known in KEYS if known.startswith(f"{key}.")), None):
        return f"{key} is a section, not a value: give the keys in it, such as {first}"
    for command, own in OWN_KEYS.items():
        if key in own:
            return f"{key} is a key of aespa-pl {command} alone, on its command line"
    hint = nearest(key, [*known_keys, *OTHERS, *SECTIONS, FREE])
    return f"{key} is unknown{hint or ': --help shows the common keys, and --help SECTION all of a section'}"


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


def show_help(command: str, says: str, words: Sequence[str]) -> None:
    """Print the common keys, or all of the section that the words name beside ``--help``."""
    asked = next(i for i, word in enumerate(words) if word in HELP)
    named = next((word for word in words[asked + 1 :][:1] if not word.startswith("-")), None)
    if named in (None, command):  # compare's and plan's own keys are among the common ones
        sys.stdout.write(_overview(command, says))
        return
    parser = ArgumentParser(prog=f"aespa-pl {command}", usage=f"aespa-pl {command} [--KEY VALUE ...]")
    if named == FREE:
        from aespa_pl.commands.sections import add_trainer  # noqa: PLC0415  (takes seconds to import)

        add_trainer(parser)
    elif (command, named) == ("test", "tasks"):
        parser.add_class_arguments(TaskSettings)
    else:
        kind: Any = SECTIONS.get(named.split(".", maxsplit=1)[0])
        for name in named.split(".")[1:]:
            kind = get_type_hints(kind).get(name) if kind else None
        if not hasattr(kind, "__dataclass_fields__"):
            hint = nearest(named, NAMES) or f": expected one of {', '.join(NAMES)}"
            raise UserError(f"--help {named}: there is no such section{hint}")
        parser.add_class_arguments(kind, named)
    parser.print_help()


def _overview(command: str, says: str) -> str:
    common = {**COMMON, **ONLY[command]}
    if command == "compare":
        common = {key: words for key, words in common.items() if key not in CELL_KEYS}
    width = max(map(len, common))
    keys = "".join(f"  --{key:<{width}}  {words}\n" for key, words in common.items())
    names = ", ".join([*NAMES, "tasks"] if command == "test" else NAMES)
    return f"""\
usage: aespa-pl {command} [--KEY VALUE ...] | --help [SECTION]

{says}

{keys}
aespa-pl {command} --help SECTION explains all keys of a section, which is one of
{names}, or a part of one, such as quantization.tuning.
"""
