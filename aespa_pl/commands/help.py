"""Show the keys of ``fit``, ``test`` and ``plan``: the common ones, or all of a section."""

import sys
from collections.abc import Sequence
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from aespa_pl.commands.arguments import FREE, Arguments
from aespa_pl.commands.mistakes import nearest
from aespa_pl.errors import UserError
from aespa_pl.settings import SECTIONS, TaskSettings

COMMON = {
    "config FILE": "YAML file of keys: one here, or of aespa-pl; what comes later counts",
    "model.pretrained NAME": "name on the hub, folder, or embedded:llama (opt, bloom)",
    "data.calibration.source": "c4, wikitext2, ptb, embedded, or a file",
    "data.calibration.segments": "number of calibration segments",
    "data.calibration.segment_length": "tokens in each of them",
    "data.evaluation.texts": "list of texts to measure the perplexity on; []: none",
    "quantization.method": "aespa-tuned, aespa, aespa-fast, rtn ... (docs/methods.md)",
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
"""The keys that most users need, in a few words."""
ONLY = {
    "fit": {
        "print_config": "print what would be run, and exit",
        "trainer.fast_dev_run true": "smoke test: few segments and steps, no evaluation",
    },
    "test": {"tasks": "list of zero-shot tasks; also task_limit, task_examples ..."},
    "plan": {"plan.device 'GB, TFLOPS'": "a machine that isn't this one, such as '24 GB, 80 TFLOPS'"},
}
"""Further keys of each command."""
NAMES = (*SECTIONS, FREE)


def show_help(command: str, says: str, words: Sequence[str]) -> None:
    """Print the help that the words of a command ask for, and end.

    They are ``--help``, alone or before the name of a section; or what jsonargparse answers, such as
    ``--trainer.callbacks.help LearningRateMonitor``. Raises UserError where there is no such section.
    """
    named = [word for word in words if word not in ("-h", "--help")]
    if len(named) == len(words):
        from aespa_pl.commands.sections import AespaCLI  # noqa: PLC0415  (takes seconds to import)

        AespaCLI(Arguments.read(words), command)
    if named:
        _parser_of(command, named[0]).print_help()
    else:
        sys.stdout.write(_overview(command, says))
    sys.exit()


def _overview(command: str, says: str) -> str:
    keys = {f"--{key}": words for key, words in {**COMMON, **ONLY[command]}.items()}
    width = max(map(len, keys))
    names = [*NAMES, "tasks"] if command == "test" else NAMES
    return "\n".join(
        [
            f"usage: aespa-pl {command} [--KEY VALUE ...] | --help [SECTION]",
            "",
            says,
            "",
            *(f"  {key:<{width}}  {words}" for key, words in keys.items()),
            "",
            f"aespa-pl {command} --help SECTION explains all keys of a section, which is one of",
            f"{', '.join(names)}, or a part of one, such as quantization.tuning.",
            "",
        ]
    )


def add_general(parser: ArgumentParser, command: str) -> None:
    """Add the keys that belong to no section."""
    parser.add_argument("--config", action="config", help="YAML file of keys; of several, the last counts.")
    parser.add_argument(
        "--ckpt_path",
        type=str | None,
        default=None,
        help="last (the run of output.folder/output.name that was worked on last), or the folder of a "
        "run or a file in it. fit continues this run, test measures it (without the key, the last). "
        "Without --config and --model.pretrained, the run's own config.yaml is taken; "
        "--trust_run true lets that of a run from somebody else name callbacks, loggers and data.cache.",
    )
    if command == "fit":
        parser.add_argument("--print_config", action="store_true", help="Print what would be run, and exit.")


def _parser_of(command: str, path: str) -> ArgumentParser:
    parser = ArgumentParser(prog=f"aespa-pl {command}", usage=f"aespa-pl {command} [--KEY VALUE ...]")
    if path == FREE:
        from aespa_pl.commands.sections import add_trainer  # noqa: PLC0415  (takes seconds to import)

        add_trainer(parser)
    elif (command, path) == ("test", "tasks"):
        parser.add_class_arguments(TaskSettings)
    else:
        parser.add_class_arguments(_kind(path), path)
    return parser


def _kind(path: str) -> Any:
    """Return the dataclass of a section, or of a part of one. Raises UserError where there is none."""
    kind: Any = SECTIONS.get(path.split(".", maxsplit=1)[0])
    for name in path.split(".")[1:]:
        kind = get_type_hints(kind).get(name) if kind else None
    if not hasattr(kind, "__dataclass_fields__"):
        hint = nearest(path, NAMES) or f": expected one of {', '.join(NAMES)}"
        raise UserError(f"--help {path}: there is no such section{hint}")
    return kind
