"""Say how many devices a run has (docs/devices.md)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Devices:
    """Says how many devices a run has."""

    count: int = 1
    hosts: int = 1

    @property
    def of_host(self) -> int:
        """Return the number of devices of a host."""
        return math.ceil(self.count / self.hosts)


ONE_DEVICE = Devices()
"""A single device."""
