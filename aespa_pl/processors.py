"""Find how many processors this process may use, where that is fewer than it sees.

A container's quota of processor time is not seen by OpenMP: it begins a thread for each processor, and
the quota then stops some of them while the others wait.
"""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Linux tells a container its limits in this folder."""


def seen() -> int:
    """Return the processors that this process may run on (its affinity, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def paid_for(cgroup: Path = CGROUP) -> float | None:
    """Return the processors' worth of time that a container (cgroup 2 or 1) may use; None: no quota."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (cgroup / "cpu" / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        except OSError:
            return None
    try:
        worth = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return worth if worth > 0 else None  # -1: none


def threads() -> int | None:
    """Return how many threads to begin where a quota allows fewer than there are processors, or None."""
    quota = paid_for()
    if quota is None or quota >= seen():
        return None
    return max(1, int(quota))
