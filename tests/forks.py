"""Start a process that imports everything once, and runs each command line in a fork of itself.

An import of PyTorch takes seconds, a fork none: so a run can be killed many times in a test. Reads
requests as lines of JSON, and answers each with one; see :class:`Request`.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

LONGEST = 300.0
"""Seconds after which a command is killed, whatever it does."""
THREADS = 2
"""Threads that the process itself might use: it computes nothing, so its forks start as it did."""


@dataclass(frozen=True)
class Request:
    """Describes a command line, and when it gets a signal."""

    arguments: Sequence[str]
    log: str
    """File for stdout and stderr."""
    number: int = 0
    """Number of the signal; 0: none."""
    when: str = ""
    """Glob of a file that has to be there before the signal comes; empty: at once."""
    delay: float = 0.0
    """Seconds from then to the signal."""
    processes: int = 1
    """Number of processes, which find each other in the environment as with Lightning, torchrun, SLURM. When
    the first has ended the others are killed, as by all of those."""
    to: int = 0
    """Number of the process that gets the signal."""
    target: str = "aespa_pl.cli:main"
    """Function that is called with the arguments."""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables of the environment; of ``{rank}`` in a value each process gets its own."""
    threads: int = 1
    """Number of torch's threads, which is 1 or as if ``OMP_NUM_THREADS`` were THREADS."""


@dataclass(frozen=True)
class Outcome:
    """Says how a command ended."""

    status: int
    """Exit status, or minus the signal's number."""
    seconds: float
    text: str
    """Output of the first process."""
    texts: Sequence[str] = ()
    """Output of each process."""


class Forks:
    """Talks to the process."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._log = folder / "output.txt"

    def run(
        self, arguments: Sequence[str], number: int = 0, when: str = "", delay: float = 0.0, **more: Any
    ) -> Outcome:
        """Run a command line; ``more`` as in Request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = Request(arguments, str(self._log), number, when, delay, **more)
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        texts = [Path(log(request, rank)).read_text() for rank in range(request.processes)]
        return Outcome(**answer, text=texts[0], texts=texts)


def log(request: Request, rank: int) -> str:
    """Return the file for what a process writes."""
    return f"{request.log}.{rank}" if rank else request.log


@contextmanager
def started(folder: Path) -> Iterator[Forks]:
    """Run the process in this context."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forks"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS), "COLUMNS": "500"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process, folder)
        assert process.stdin is not None
        process.stdin.close()  # the process ends at the end of its input


def _serve() -> None:
    importlib.import_module("aespa_pl.commands.application")  # what fit and test import
    sections = importlib.import_module("aespa_pl.commands.sections")
    words = ["--model.pretrained", "embedded"]
    sections.AespaCLI(sections.Arguments.read(words), "fit")  # its parser takes 0.2 s to make
    os.fsync = lambda fd: None  # see conftest.py
    warm: set[str] = set()
    for line in sys.stdin:
        request = Request(**json.loads(line))
        imported = Path(f"{request.log}.imported")
        start = time.monotonic()
        port = _free_port()
        children: list[int] = []
        for rank in range(request.processes):
            child = os.fork()
            if child:
                children.append(child)
                continue
            _redirect(log(request, rank))
            status = 1
            try:
                if request.processes > 1:
                    os.environ |= {
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0",
                        "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request.processes),
                    }  # fmt: skip
                _limit_threads(request.threads)
                _linger(request, rank)
                for key, value in request.environment.items():
                    os.environ[key] = value.format(rank=rank)
                module, name = request.target.split(":")
                getattr(importlib.import_module(module), name)(request.arguments)
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
        status = _wait(children, request, start)
        seconds = time.monotonic() - start
        if request.target not in warm and imported.is_file():
            warm.add(request.target)  # what the first imported, the others need not
            for name in imported.read_text().splitlines():
                with suppress(Exception):
                    importlib.import_module(name)
            gc.freeze()  # runs ask for garbage collections, each of which would look at all modules
        sys.stdout.write(json.dumps({"status": status, "seconds": seconds}) + "\n")
        sys.stdout.flush()


def _redirect(log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _limit_threads(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if threads < THREADS:  # otherwise nothing is called that a process of a user would not call
        torch.set_num_threads(threads)


def _linger(request: Request, rank: int) -> None:
    """Have this process wait after it wrote a file of the glob, so that the signal comes in time."""
    replace = os.replace
    if not request.when or request.delay or rank != request.to:
        return

    def lingering(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target) in Path("/").glob(request.when.lstrip("/")):
            os.replace = replace
            time.sleep(0.5)  # SIGKILL ends it at once; a handler runs at once, and the process goes on later

    os.replace = lingering  # type: ignore[assignment]


def _wait(children: Sequence[int], request: Request, start: float) -> int:
    """Send the signal once it is due; return how the first child ended."""
    due: float | None = None
    sent = not request.number
    while True:
        found, status = os.waitpid(children[0], os.WNOHANG)
        if found:
            for child in children[1:]:
                _reap(child)
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if due is None and (not request.when or any(Path("/").glob(request.when.lstrip("/")))):
            due = (start if not request.when else now) + request.delay
        if not sent and due is not None and now >= due:
            os.kill(children[request.to], request.number)
            sent = True
        if now > start + LONGEST:
            os.kill(children[0], signal.SIGKILL)
        time.sleep(0.002)


def _reap(child: int) -> None:
    """Give a child a moment to end by itself."""
    until = time.monotonic() + 1
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.01)


if __name__ == "__main__":
    _serve()
