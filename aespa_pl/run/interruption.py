"""Stop at Ctrl-C, SIGTERM and SIGHUP: at once where nothing is lost, in a training after the step."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP comes when a terminal is closed


class RunInterrupted(BaseException):
    """Says that the user or the system asked us to stop; like KeyboardInterrupt, it is no error to handle."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interruption:
    """Turns signals into exceptions; while they are deferred, they wait for :meth:`check`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.how_to_continue: str | None = None
        self.run_folder: Path | None = None
        self._deferred = False
        self._watched: list[signal.Signals] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals in this context; Python lets only the main thread do so, others do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # nohup lets a command ignore SIGHUP, and a shell lets one in the background ignore SIGINT
        self._watched = [n for n, handler in before.items() if handler is not signal.SIG_IGN]
        self._take_signals()
        try:
            yield
        finally:
            for number in self._watched:
                signal.signal(number, before[number])
            self._watched = []

    def defer(self, *, active: bool) -> None:
        """Let signals wait for :meth:`check`, or no longer."""
        self._deferred = active
        if active:
            # Lightning's Trainer put itself before us: at a SIGTERM that comes after our callbacks
            # it would end the process with status 0 and without a checkpoint
            self._take_signals()

    def free(self) -> None:
        """Free objects that refer to each other; a signal waits: Python drops what finalizers raise."""
        before, self._deferred = self._deferred, True
        gc.collect()
        self._deferred = before
        if not before:
            self.check()

    def check(self) -> None:
        """Raise RunInterrupted where a signal has come."""
        if self.received is not None:
            raise RunInterrupted(self.received)

    def _take_signals(self) -> None:
        for number in self._watched:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again = self.received is not None
        self.received = number
        if again or not self._deferred:  # a second Ctrl-C does not wait
            self.check()
