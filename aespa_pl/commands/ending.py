"""End a command that could not do its work, with one line for a person and a status for a script."""

import os
import signal
import sys
from contextlib import suppress
from types import ModuleType

from jsonargparse import ArgumentError

from aespa_pl.errors import UserError, one_line
from aespa_pl.run.interruption import RunInterrupted


class EndedError(Exception):
    """Ends the command with a message and a status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


MISTAKE = 2
"""Status of a mistake that the user can mend."""
LESS_MEMORY = (
    "set data.memory_gb below what is free, data.hidden_states to disk, or lower data.batch_size"
)
MORE_MEMORY = "end other programs, or take a machine with more memory"
NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Words of torch in a RuntimeError where the host has no memory; it has no class for that error."""
NO_THREAD = "can't start new thread"
"""Words of Python in a RuntimeError where the system refuses a thread."""
MORE_THREADS = (
    "end other programs, or raise the limit of processes (ulimit -u, or that of the container)"
)
ENDINGS = (
    ArgumentError, UserError, EndedError, OSError, MemoryError, RuntimeError, RunInterrupted,
)  # fmt: skip
"""Errors that :func:`message_and_status` may know; a RuntimeError that it doesn't know is a fault of ours."""


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


def interrupted_by_closed_pipe() -> RunInterrupted:
    """Return the error that stops a command whose output nobody reads any more; silence that output."""
    with suppress(OSError, ValueError):  # so that Python's own flush at the end says nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return RunInterrupted(signal.SIGPIPE)


def _is_out_of_memory(error: BaseException, torch: ModuleType | None) -> bool:
    if torch is None or not isinstance(error, RuntimeError):
        return False
    on_device = isinstance(error, torch.OutOfMemoryError)
    return on_device or any(words in str(error) for words in NO_HOST_MEMORY)
