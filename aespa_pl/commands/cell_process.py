"""Run the cells of ``aespa-pl compare``, each in a process of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from aespa_pl.commands.output import CELL
from aespa_pl.distributed.launch import LAUNCHER
from aespa_pl.errors import NOTHING_LOST
from aespa_pl.run.interruption import Interruption, RunInterrupted


def in_process(interruption: Interruption, words: Sequence[str]) -> str:
    """Run a cell in a process of its own, so that its end spares the others; return why it failed."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        # a process group of its own: a Ctrl-C reaches it once, from us
        process = subprocess.Popen(  # noqa: S603 - our own program
            # -P: a file of the current folder, such as yaml.py, stands for no library
            [sys.executable, "-P", "-m", "aespa_pl", "fit", *words],
            stderr=errors,
            env={**os.environ, CELL: "1", LAUNCHER: str(os.getpid())},
            process_group=0,
        )
        status = _wait(process)
        errors.seek(0)
        said = errors.read()
    interruption.check()  # first: how the cell is continued would stand beside how all are
    # a mistake is the reason, which the caller says beside the cell's name
    others = (line for line in said.splitlines(keepends=True) if not line.startswith("aespa-pl: "))
    sys.stderr.write("".join(others))
    return failure(status, said)


def failure(status: int, said: str) -> str:
    """Return why a run failed, from its status (negative: a signal) and stderr; empty where it did not."""
    if status == 0:
        return ""
    if status < 0:
        killed = " (most likely out of memory)" if status == -9 else ""  # the kernel's SIGKILL
        return f"ended by signal {-status}{killed}"
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(NOTHING_LOST)]
    last = lines[-1] if lines else "it said nothing"
    return last.removeprefix("aespa-pl: ").partition("; continue with:")[0]


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Return the status of a process; a signal is passed on to it, and a second one doesn't wait."""
    try:
        return process.wait()
    except RunInterrupted as stop:
        try:
            process.send_signal(stop.number)
            process.wait()
        except RunInterrupted:
            process.send_signal(stop.number)
        raise
