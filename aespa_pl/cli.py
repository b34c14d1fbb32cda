"""Call the command that a command line names; help and mistakes answer before a large library is imported."""

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

from jsonargparse import ArgumentError
from rich.console import Console

import aespa_pl
from aespa_pl.commands.arguments import Arguments, with_run
from aespa_pl.commands.keys import HELP, nearest, refuse_mistakes, refuse_other_methods, show_help
from aespa_pl.errors import NOTHING_LOST, EndedError, UserError, one_line, system_words
from aespa_pl.run.interruption import Interruption, RunInterrupted

MISTAKE = 2  # status of what the user can mend
OTHER_VALUE = re.compile(
    r'Parser key "(\w+)":\s+(?:Does not validate.*?)?Expected a typing\.Literal\[(.*?)\]'
    r"(?:\. Got value: |.*Given value: )(.*)",
    re.DOTALL,
)
"""What jsonargparse says of a value that is none of several."""
NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Words of torch in a RuntimeError where the host has no memory; it has no class for that error."""
COMMANDS = {
    "fit": "Quantize a model block by block, or continue a run.",
    "test": "Measure the perplexity of the original and of the quantized model.",
    "compare": "Compare methods, bit widths and seeds on one model, in one table.",
    "plan": "Estimate memory, disk space and time of fit; nothing is written.",
    "export": "Pack the integers of a run for an inference engine.",
    "report": "Describe what a run did to each block.",
}
OVERVIEW = """\
Quantize the weights of a language model with aespa.

usage: aespa-pl COMMAND [--key value ...]
       aespa-pl COMMAND --help | --help | --version

""" + "".join(f"  {name:<8} {says}\n" for name, says in COMMANDS.items())
CONFIGURED = ("fit", "test", "compare", "plan")  # with sections of a configuration


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a mistake of the user ends with one line and status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    interruption = Interruption()
    try:
        with interruption.watching():
            _run(words, interruption)
    except (Exception, RunInterrupted) as error:
        known = message_and_status(error, interruption.how_to_continue)
        if known is None:
            if interruption.how_to_continue:
                error.add_note(f"{NOTHING_LOST}; continue with: {interruption.how_to_continue}")
            raise
        stop(*known)


def _run(words: Sequence[str], interruption: Interruption) -> None:
    if not words or words[0] in HELP:
        sys.stdout.write(OVERVIEW)
        return
    if words[0] == "--version":
        sys.stdout.write(f"aespa-pl {aespa_pl.__version__}\n")
        return
    name, *rest = words
    if name not in COMMANDS:
        hint = nearest(name, list(COMMANDS)) or f": expected one of {', '.join(COMMANDS)}"
        raise UserError(f"{name} is no command{hint}")
    if name in CONFIGURED:
        if {*rest} & {*HELP}:
            show_help(name, COMMANDS[name], rest)
            sys.exit()
        given = with_run(Arguments.read(rest).with_configurations(), name)
        refuse_mistakes(given, name)
        if name in ("fit", "plan"):  # compare has its own methods, and test takes the run's
            refuse_other_methods(given)
        rest = given.words
    module = "application" if name in ("fit", "test", "plan") else name
    # shown in a terminal only; importing torch and Lightning takes seconds
    with Console(stderr=True).status(f"{name}: importing PyTorch and Lightning"):
        command = importlib.import_module(f"aespa_pl.commands.{module}")
    command.run([name, *rest], interruption)


def _in_our_words(refused: re.Match[str]) -> str:
    key, choices, value = refused.groups()
    return f"--{key} is {value}: expected one of " + choices.replace("'", "")


def message_and_status(error: BaseException, advice: str | None) -> tuple[str, int] | None:
    """Return the message and the status for an error; None for one that is a fault of ours.

    ``advice`` is the command that continues the run, if one has begun.
    """
    then = f"; continue with: {advice}" if advice else ""
    if isinstance(error, RunInterrupted):
        return f"stopped by {error}{then or '; the same command begins again'}", 128 + error.number
    if isinstance(error, EndedError):
        return f"{error}{then}", error.status
    if isinstance(error, ArgumentError | UserError):
        return f"{OTHER_VALUE.sub(_in_our_words, str(error))}{then}", MISTAKE
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        mend = (
            "end other programs, or set data.memory_gb below what is free, data.hidden_states to disk, or "
            "data.batch_size lower"
        )
        return f"out of memory ({error}): {mend}{then}", MISTAKE
    if isinstance(error, OSError):
        return f"{system_words(error)}{then}", MISTAKE
    return None


def stop(message: str, status: int) -> None:
    """End with one line; a terminal that is gone changes nothing. Always raises SystemExit."""
    with suppress(OSError):
        sys.stderr.write(f"aespa-pl: {one_line(message)}\n")
        sys.stderr.flush()
    sys.exit(status)


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # whoever has not imported it has none of its errors
    if torch is None or not isinstance(error, RuntimeError):
        return False
    on_device = isinstance(error, torch.OutOfMemoryError)
    return on_device or any(words in str(error) for words in NO_HOST_MEMORY)
