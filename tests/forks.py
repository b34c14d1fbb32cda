"""A process that has imported everything, and runs each command line in a fork of itself.

An import of PyTorch takes seconds, a fork none: so a run can be killed many times in a test. Reads
requests as lines of JSON, and answers each with one; see :class:`Request`.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LONGEST = 120.0
"""Seconds after which a command is killed, whatever it does."""


@dataclass(frozen=True)
class Request:
    """A command line, and when it gets a signal."""

    arguments: Sequence[str]
    log: str
    """File for stdout and stderr."""
    number: int = 0
    """Signal; 0: none."""
    when: str = ""
    """Glob of a file that has to be there before the signal comes; empty: at once."""
    delay: float = 0.0
    """Seconds from then to the signal."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    """Exit status, or minus the signal's number."""
    seconds: float
    text: str


class Forks:
    """Talks to the process."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._log = folder / "output.txt"

    def run(
        self, arguments: Sequence[str], number: int = 0, when: str = "", delay: float = 0.0
    ) -> Outcome:
        """Run a command line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = Request(arguments, str(self._log), number, when, delay)
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Outcome(**answer, text=self._log.read_text())


@contextmanager
def started(folder: Path) -> Iterator[Forks]:
    """Have the process for the time of this context."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forks"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process, folder)
        assert process.stdin is not None
        process.stdin.close()  # the process ends at the end of its input


def _serve() -> None:
    from aespa_pl.cli import main  # noqa: PLC0415

    warm = False
    for line in sys.stdin:
        request = Request(**json.loads(line))
        imported = Path(f"{request.log}.imported")
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _redirect(request.log)
            status = 1
            try:
                main(request.arguments)
                imported.write_text("\n".join(sys.modules))
                status = 0
            except SystemExit as error:
                status = int(error.code or 0)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = _wait(child, request, start)
        seconds = time.monotonic() - start
        if not warm and imported.is_file():  # what the first imported, the others need not
            warm = True
            for name in imported.read_text().splitlines():
                with suppress(Exception):
                    importlib.import_module(name)
        sys.stdout.write(json.dumps({"status": status, "seconds": seconds}) + "\n")
        sys.stdout.flush()


def _redirect(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _wait(child: int, request: Request, start: float) -> int:
    """Send the signal once it is due; return how the child ended."""
    due: float | None = None
    sent = not request.number
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if due is None and (not request.when or any(Path("/").glob(request.when.lstrip("/")))):
            due = (start if not request.when else now) + request.delay
        if not sent and due is not None and now >= due:
            os.kill(child, request.number)
            sent = True
        if now > start + LONGEST:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


if __name__ == "__main__":
    _serve()
