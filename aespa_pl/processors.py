"""Find how many processors this process may use, where that is fewer than it sees.

OpenMP does not see a container's quota of processor time: it begins a thread for each processor, and the
quota then stops some of them while the others wait.
"""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Linux tells a container its limits in this folder."""


def seen() -> int:
    """Return the processors that this process may run on (its affinity, where the system has one)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def paid_for(cgroup: Path = CGROUP) -> float | None:
    """Return the processors' worth of time that a container (cgroup 2 or 1) may use; None: no quota."""
    version_1 = [cgroup / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    try:
        files = [cgroup / "cpu.max"] if (cgroup / "cpu.max").exists() else version_1
        quota, period = " ".join(file.read_text() for file in files).split()
        worth = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
        return None
    return worth if worth > 0 else None  # -1: none


def threads() -> int | None:
    """Return how many threads to begin where a quota allows fewer than there are processors, or None."""
    quota = paid_for()
    return None if quota is None or quota >= seen() else max(1, int(quota))
