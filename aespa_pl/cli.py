"""Read the first word of a command line, and call the command that it names.

Nothing large is imported here: ``--help``, a wrong command and a wrong key answer at once.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

from jsonargparse import ArgumentError
from rich.console import Console

import aespa_pl
from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.help import show_help
from aespa_pl.commands.mistakes import nearest, refuse_mistakes, refuse_other_methods
from aespa_pl.commands.resuming import with_run
from aespa_pl.errors import EndedError, UserError, one_line
from aespa_pl.run.interruption import Interruption, RunInterrupted, interrupted_by_closed_pipe

MISTAKE = 2
"""Status of a mistake that the user can mend."""
LESS_MEMORY = "set data.memory_gb below what is free, data.hidden_states to disk, or lower data.batch_size"
MORE_MEMORY = "end other programs, or take a machine with more memory"
NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Words of torch in a RuntimeError where the host has no memory; it has no class for that error."""
NO_THREAD = "can't start new thread"
"""Words of Python in a RuntimeError where the system refuses a thread."""
MORE_THREADS = "end other programs, or raise the limit of processes (ulimit -u, or that of the container)"


@dataclass(frozen=True)
class Command:
    """Describes what the first word of a command line calls."""

    module: str
    """Module with a function ``run(words, interruption)``, imported when it is called."""
    says: str
    """One line for the list of commands."""
    configured: bool = False
    """Whether it takes the sections of a configuration."""
    section: str | None = None
    """Section of keys beside the configuration's, which the command checks itself."""


COMMANDS = {
    "fit": Command("application", "Quantize a model block by block, or continue a run.", configured=True),
    "test": Command(
        "application",
        "Measure the perplexity of the original and of the quantized model.",
        configured=True,
    ),
    "compare": Command(
        "compare",
        "Compare methods, bit widths and seeds on one model, in one table.",
        configured=True,
        section="compare",
    ),
    "plan": Command(
        "application",
        "Estimate the memory, disk space and time that fit needs; nothing is written.",
        configured=True,
    ),
    "export": Command("export", "Pack the integers of a run for an inference engine."),
    "report": Command("report", "Describe what a run did to each block."),
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
        show_help(name, command.says, rest)
    if command.configured:
        given = with_run(Arguments.read(rest).with_configurations(), name)
        own = given.without(command.section) if command.section else given
        refuse_mistakes(own, name)
        if name in ("fit", "plan"):  # compare has its own methods, and test takes the run's
            refuse_other_methods(own)
        rest = rest if given.wants_help else given.words
    # shown in a terminal only; importing torch and Lightning takes seconds
    with Console(stderr=True).status(f"{name}: importing PyTorch and Lightning"):
        module = importlib.import_module(f"aespa_pl.commands.{command.module}")
    try:
        module.run([name, *rest], interruption)
    except ArgumentError as error:
        raise UserError(_refused(error, name)) from error


def _refused(error: ArgumentError, command: str) -> str:
    """Return the message for an argument that is missing, or that is none of a few words."""
    text = " ".join(str(error).split())
    if missing := re.search(r"are required: (.*)", text):
        return f"{missing[1]} is missing: aespa-pl {command} --help shows what to give"
    if chosen := re.search(r'key "(\w+)".*Literal\[([^]]*)\].*(?:Got|Given) value: (\S+)', text):
        key, choices, value = chosen.groups()
        return f"--{key} is {value}: {choices.replace(chr(39), '')}"
    return text


def _end(error: BaseException, interruption: Interruption, words: Sequence[str]) -> None:
    command = COMMANDS.get(words[0]) if words else None
    configured = command is not None and command.configured
    known = message_and_status(error, interruption.advice, configured=configured)
    if known is None:
        if interruption.advice:
            error.add_note(f"nothing is lost; continue with: {interruption.advice}")
        raise error
    stop(*known)


def message_and_status(
    error: BaseException, advice: str | None, *, configured: bool
) -> tuple[str, int] | None:
    """Return the message and the status for an error; None for one that is a fault of ours.

    ``advice`` is the command that continues the run, if one has begun; ``configured`` says whether the
    command has the keys of a configuration, some of which save memory.
    """
    then = f"; continue with: {advice}" if advice else ""
    if isinstance(error, RunInterrupted):
        return f"stopped by {error}{then or '; the same command begins again'}", 128 + error.number
    if isinstance(error, EndedError):
        return f"{error}{then}", error.status
    words = _words(error, configured=configured)
    return None if words is None else (f"{words}{then}", MISTAKE)


def _words(error: BaseException, *, configured: bool) -> str | None:
    """Return what went wrong and what to do; None for a fault of ours."""
    torch = sys.modules.get("torch")  # whoever has not imported it has none of its errors
    if isinstance(error, ArgumentError | UserError):
        return str(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error, torch):
        return f"out of memory ({error}): {LESS_MEMORY if configured else MORE_MEMORY}"
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return f"{error}: {MORE_THREADS}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return None


def stop(message: str, status: int) -> None:
    """End with one line; a terminal that is gone changes nothing. Always raises SystemExit."""
    with suppress(OSError):
        sys.stderr.write(f"aespa-pl: {one_line(message)}\n")
        sys.stderr.flush()
    sys.exit(status)


def _is_out_of_memory(error: BaseException, torch: ModuleType | None) -> bool:
    if torch is None or not isinstance(error, RuntimeError):
        return False
    on_device = isinstance(error, torch.OutOfMemoryError)
    return on_device or any(words in str(error) for words in NO_HOST_MEMORY)
