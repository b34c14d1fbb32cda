"""Show the keys of the commands that take a configuration: the common ones, or all of a section."""

import sys
from collections.abc import Sequence
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from aespa_pl.commands.arguments import CELL_KEYS, FREE
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
    "compare": {
        "compare.methods": "list of values of quantization.method; by default all",
        "compare.bits": "list of values of quantization.bits; by default [2, 3, 4]",
        "compare.formats": "list of values of quantization.format, in place of bits",
        "compare.seeds": "list of values of data.calibration.seed; mean and spread are over them",
    },
}
"""Further keys of each command."""
NAMES = (*SECTIONS, FREE)
HELP = ("-h", "--help")


def show_help(command: str, says: str, words: Sequence[str]) -> None:
    """Print the common keys, or all of the section that the words name beside ``--help``."""
    named = next((word for word in words if word not in HELP), None)
    if named is None:
        sys.stdout.write(_overview(command, says))
        return
    parser = ArgumentParser(prog=f"aespa-pl {command}", usage=f"aespa-pl {command} [--KEY VALUE ...]")
    if named == FREE:
        from aespa_pl.commands.sections import add_trainer  # noqa: PLC0415  (takes seconds to import)

        add_trainer(parser)
    elif (command, named) == ("test", "tasks"):
        parser.add_class_arguments(TaskSettings)
    else:
        parser.add_class_arguments(_kind(named), named)
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


def _kind(path: str) -> Any:
    """Return the dataclass of a section, or of a part of one. Raises UserError where there is none."""
    kind: Any = SECTIONS.get(path.split(".", maxsplit=1)[0])
    for name in path.split(".")[1:]:
        kind = get_type_hints(kind).get(name) if kind else None
    if not hasattr(kind, "__dataclass_fields__"):
        hint = nearest(path, NAMES) or f": expected one of {', '.join(NAMES)}"
        raise UserError(f"--help {path}: there is no such section{hint}")
    return kind
