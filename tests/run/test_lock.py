"""One process at a time has a run, until it gives it back or dies."""

import os
import signal
import subprocess
import sys

import pytest

from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run

HOLDER = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1])  # given back when nothing refers to it
lock.acquire()
print("has it", flush=True)
sys.stdin.read()
"""


def test_lock_keeps_other_processes_off_until_theirs_is_dead(run: Run) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.folder / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "has it\n"
        message = rf"^{run.folder} is in use by another process: wait for it, or start a new run"
        with pytest.raises(UserError, match=message), run.locked():
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=30)
    with run.locked():
        pass


def test_lock_is_taken_and_given_back(run: Run) -> None:
    other = Run.open(run.folder)
    in_use = pytest.raises(UserError, match=r"in use by another process")
    with run.locked(), in_use, other.locked():
        pass
    with pytest.raises(KeyError), run.locked():
        raise KeyError
    with other.locked():
        pass
