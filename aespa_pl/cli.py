"""Read the first word of a command line, and call the command that it names.

Nothing large is imported here: ``--help``, a wrong command and a wrong key answer at once.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jsonargparse import ArgumentError, auto_cli
from rich.console import Console

import aespa_pl
from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.ending import interrupted_by_closed_pipe, message_and_status, stop
from aespa_pl.commands.help import show_help
from aespa_pl.commands.mistakes import nearest, refuse_mistakes, refuse_other_methods
from aespa_pl.commands.resuming import with_run
from aespa_pl.errors import UserError
from aespa_pl.run.interruption import Interruption, RunInterrupted


@dataclass(frozen=True)
class Command:
    """Describes what the first word of a command line calls."""

    target: str
    """``module:function``, imported when it is called."""
    says: str
    """One line for the list of commands."""
    configured: bool = False
    """Whether it takes the sections of a configuration."""
    reads_words: bool = False
    """Whether it reads its words itself: a signature doesn't say what they may be."""
    section: str | None = None
    """Section of keys beside the configuration's, which the command checks itself."""


COMMANDS = {
    "fit": Command(
        "aespa_pl.commands.application:run",
        "Quantize a model block by block, or continue a run.",
        configured=True,
        reads_words=True,
    ),
    "test": Command(
        "aespa_pl.commands.application:run",
        "Measure the perplexity of the original and of the quantized model.",
        configured=True,
        reads_words=True,
    ),
    "compare": Command(
        "aespa_pl.commands.compare:run",
        "Compare methods, bit widths and seeds on one model, in one table.",
        configured=True,
        reads_words=True,
        section="compare",
    ),
    "plan": Command(
        "aespa_pl.commands.plan:run",
        "Estimate the memory, disk space and time that fit needs.",
        configured=True,
        reads_words=True,
    ),
    "export": Command(
        "aespa_pl.commands.export:export", "Pack the integers of a run for an inference engine."
    ),
    "report": Command(
        "aespa_pl.commands.report:run",
        "Describe what a run did to each block.",
        reads_words=True,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a mistake of the user ends with one line and status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    interruption = Interruption()
    try:
        with interruption.watching():
            _run(words, interruption)
    except BrokenPipeError:
        _end(interrupted_by_closed_pipe(), interruption, words)
    except (Exception, RunInterrupted) as error:  # noqa: BLE001  (raised again where it is a fault)
        _end(error, interruption, words)


def overview() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.says}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Quantize the weights of a language model with aespa.",
            "",
            "usage: aespa-pl COMMAND [--key value ...]",
            "       aespa-pl COMMAND --help | --help | --version",
            "",
            *lines,
            "",
        ]
    )


def _run(words: Sequence[str], interruption: Interruption) -> None:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return
    if words[0] == "--version":
        sys.stdout.write(f"aespa-pl {aespa_pl.__version__}\n")
        return
    name, *rest = words
    command = COMMANDS.get(name)
    if command is None:
        hint = nearest(name, list(COMMANDS)) or f": expected one of {', '.join(COMMANDS)}"
        raise UserError(f"{name} is no command{hint}")
    if command.configured and command.section is None and Arguments.read(rest).wants_help:
        show_help(name, rest)
    if command.configured:
        given = with_run(Arguments.read(rest).with_configurations(), name)
        own = given.without(command.section) if command.section else given
        refuse_mistakes(own, name)
        if name in ("fit", "plan"):  # compare has its own methods, and test takes the run's
            refuse_other_methods(own)
        rest = rest if given.wants_help else given.words
    # shown in a terminal only; importing torch and Lightning takes seconds
    with Console(stderr=True).status(f"{name}: importing PyTorch and Lightning"):
        function = _imported(command)
    try:
        if command.reads_words:
            function([name, *rest], interruption)
        else:
            auto_cli(function, args=rest, prog=f"aespa-pl {name}", exit_on_error=False)
    except ArgumentError as error:
        raise UserError(_refused(error, name)) from error


def _refused(error: ArgumentError, command: str) -> str:
    """Return the message for an argument that is missing, or that is none of a few words."""
    text = " ".join(str(error).split())
    if missing := re.search(r"are required: (.*)", text):
        return f"{missing[1]} is missing: aespa-pl {command} --help shows what to give"
    found = re.search(r'key "(\w+)".*Literal\[([^]]*)\].*(?:Got|Given) value: (\S+)', text)
    if found is None:
        return text
    key, choices, value = found.groups()
    return f"--{key} is {value}: {choices.replace(chr(39), '')}"


def _imported(command: Command):  # type: ignore[no-untyped-def]
    module, function = command.target.split(":")
    return getattr(importlib.import_module(module), function)


def _end(error: BaseException, interruption: Interruption, words: Sequence[str]) -> None:
    command = COMMANDS.get(words[0]) if words else None
    configured = command is not None and command.configured
    known = message_and_status(error, interruption.advice, configured=configured)
    if known is None:
        if interruption.advice:
            error.add_note(f"nothing is lost; continue with: {interruption.advice}")
        raise error
    stop(*known)
