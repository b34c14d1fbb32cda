"""Run ``aespa-pl plan``; its help comes without a large import."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser

from aespa_pl.commands.arguments import Arguments
from aespa_pl.run.interruption import Interruption
from aespa_pl.settings import SECTIONS


def run(words: Sequence[str], interruption: Interruption) -> None:  # noqa: ARG001 - as all commands
    """Estimate what ``fit`` needs.

    Args:
        words: The command and its options, already checked by :mod:`aespa_pl.commands.arguments`.
        interruption: Isn't asked: nothing is written.

    Raises:
        UserError: fit would refuse this.
    """
    arguments = Arguments.read(words[1:])
    if arguments.wants_help:
        _help_parser().parse_args(list(words[1:]))  # prints it, or that of a section, and exits
    from aespa_pl.commands.estimate import estimate  # noqa: PLC0415  (takes seconds to import)

    estimate(arguments)


def _help_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="aespa-pl plan",
        description="Estimate the memory, disk space and time that fit needs, with the same configurations "
        "and keys. It takes some 30 seconds and writes nothing.",
    )
    parser.add_argument("--config", action="config", help="Path to a configuration file.")
    for name, section in SECTIONS.items():
        required = name == "model"
        words = "--model.pretrained FOLDER is required." if required else "Keys as in fit --help."
        parser.add_argument(f"--{name}", type=section | None, help=words)
    parser.add_argument(
        "--trainer",
        type=dict[str, Any] | None,
        help="Keys as in fit --help; with several devices the time is that of the one with most to "
        "do, without what they send each other.",
    )
    parser.add_argument("--seed_everything", help="Ignored.")
    parser.add_argument(
        "--ckpt_path", help="Ignored, but for the configuration that the run brings along."
    )
    return parser
