"""Measure seconds and memory of a run, and write them as people say them."""

import ctypes
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from aespa_pl.processors import CGROUP


class Stopwatch:
    """Adds up the seconds of each phase."""

    def __init__(self, show: Callable[[str], None] = lambda _: None) -> None:
        self.show = show
        """Called with the name of each phase when it begins."""
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, phase: str, device: torch.device) -> Iterator[None]:
        """Add the time spent in this context, the device's pending work included."""
        self.show(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            self.seconds[phase] += time.perf_counter() - start

    def since(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the seconds of each phase from now to its call."""
        before = dict(self.seconds)
        return lambda: {phase: s - before.get(phase, 0.0) for phase, s in self.seconds.items()}


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Return the most memory that this process has had, on the host and on the device."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, KiB on Linux
    own = 0 if device.type == "cpu" else torch.get_device_module(device).max_memory_allocated(device)
    return {"host": host, "device": own}


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device; of the CPU without swapping, and within a container's limit."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    for folder, limit, used, cached in (  # of cgroup version 2, or 1
        (CGROUP, "memory.max", "memory.current", "inactive_file"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):  # none, or "max"
            continue
        with suppress(OSError, ValueError):  # files that were read count as used, and make room if need be
            statistics = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left += int(dict(statistics).get(cached, 0))
        return max(0, min(free, left))
    return free


def release_memory() -> None:
    """Give what the C library keeps of freed tensors back to the system: some 200 MB of matrices of 16 MB."""
    # malloc_trim is glibc's; others have none
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def human(number: float, unit: str = "") -> str:
    """Return a number in powers of a thousand: ``12.3 GB``."""
    power = 0 if number < 1 else min(6, int(math.log10(number)) // 3)
    places = 0 if power == 0 else 1
    return f"{number / 1000**power:.{places}f} {' KMGTPE'[power].strip()}{unit}".strip()


def duration(seconds: float) -> str:
    """Return seconds in the unit that a person would choose."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
