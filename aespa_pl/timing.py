"""Seconds and peak memory of a run."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds of each phase."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, phase: str, device: torch.device) -> Iterator[None]:
        """Add the time spent in this context, the device's pending work included."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.seconds[phase] += time.perf_counter() - start


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Return the most memory that this process has had, on the host and on the device."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, KiB on Linux
    cuda = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"host": host, "device": cuda}
