"""The simulated device has streams and events, in which copies wait until they are waited for."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils import backend_registration

from tests.device.tally import tally

NAME = "simulated"
DEVICE_MEMORY = 80 * 10**9


@dataclass
class Stream:
    """A queue of copies; the current stream of a program computes at once."""

    device: Any = None
    seen: float = 0
    """How much of what the current stream has been given this one waits for."""
    pending: list[Callable[[], None]] = field(default_factory=list)
    stream_id: int = 1

    def wait_stream(self, _other: "Stream") -> None:
        """Wait for all that the current stream has been given."""
        self.seen = math.inf if self is CURRENT else CLOCK[0]

    def record_event(self) -> "Event":
        """Return what happens when all so far is done."""
        return Event(self, CLOCK[0])

    def wait_event(self, event: "Event") -> None:
        """Wait for what another stream was given before the event."""
        if event.stream is not self:
            event.synchronize_quietly()
            self.seen = event.time

    def synchronize(self) -> None:
        """Have the host wait."""
        tally("stream.synchronize")
        self.finish()

    def finish(self) -> None:
        """Do what is pending."""
        pending, self.pending = self.pending, []
        for copying in pending:
            copying()


@dataclass
class Event:
    """A place in a stream."""

    stream: Stream
    time: float

    def synchronize(self) -> None:
        """Have the host wait for the stream up to here; only copies, not computation, end here."""
        self.synchronize_quietly()

    def synchronize_quietly(self) -> None:
        """Finish what the stream was given."""
        self.stream.finish()


CURRENT = Stream(seen=math.inf, stream_id=0)
CLOCK = [0]
"""Operations that the current stream was given."""
active: list[Stream] = []
AnyStream = Stream
"""Its name outside of ``Module``, which has it as an attribute."""


class Module:
    """What ``torch.get_device_module`` returns for the device: the part of torch.cuda that is needed."""

    Stream = Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_stream(self, _device: Any = None) -> AnyStream:
        return active[-1] if active else CURRENT

    @contextmanager
    def stream(self, stream: AnyStream) -> Iterator[None]:
        active.append(stream)
        try:
            yield
        finally:
            active.pop()

    def synchronize(self, _device: Any = None) -> None:
        tally("synchronize")

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        return DEVICE_MEMORY, DEVICE_MEMORY

    def max_memory_allocated(self, _device: Any = None) -> int:
        return 0


@cache
def device() -> torch.device:
    """Return the device; torch knows it from then on, in the whole process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    return torch.device(f"{NAME}:0")
