"""The simulated device counts its kernels, the bytes that they move, and what the host waits for."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What the device was asked for."""

    kernels: Counter[str] = field(default_factory=Counter)
    """By name of the operation."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that they read and wrote, by the same names."""
    waits: Counter[str] = field(default_factory=Counter)
    """What the host waited for."""

    @property
    def count(self) -> int:
        """Number of all kernels."""
        return self.kernels.total()

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and wrote."""
        return self.moved.total()

    def add(self, name: str, moved: int) -> None:
        """Count a kernel."""
        self.kernels[name] += 1
        self.moved[name] += moved


tallies: list[Tally] = []


def tally(wait: str) -> None:
    """Count a synchronization, by its kind and the function of the package that asked for it."""
    if not tallies:
        return
    frame = sys._getframe()
    while frame.f_back and not frame.f_globals.get("__name__", "").startswith("aespa_pl."):
        frame = frame.f_back
    where = f"{wait} in {frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
    for one in tallies:
        one.waits[where] += 1


@contextmanager
def counting() -> Iterator[Tally]:
    """Count what happens in this context."""
    tallies.append(found := Tally())
    try:
        yield found
    finally:
        tallies[:] = [one for one in tallies if one is not found]
