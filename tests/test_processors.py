"""Threads are as many as a container's quota pays for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aespa_pl import processors

V2 = "cpu.max"
QUOTA, PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({V2: "150000 100000\n"}, 1.5),
        ({V2: "max 100000\n"}, None),
        ({QUOTA: "200000\n", PERIOD: "50000\n"}, 4),
        ({QUOTA: "-1\n", PERIOD: "100000\n"}, None),
        ({QUOTA: "100000\n"}, None),
        ({V2: "0 0\n"}, None),
        ({}, None),
    ],
)
def test_quota_is_read_from_both_versions(
    files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processors.paid_for(tmp_path) == expected


@pytest.mark.parametrize(
    ("quota", "processors_seen", "expected"),
    [(None, 8, None), (8.0, 8, None), (2.9, 8, 2), (0.5, 8, 1), (3.0, 2, None)],
)
def test_threads_are_fewer_only_where_the_quota_is(
    quota: float | None, processors_seen: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "paid_for", lambda: quota)
    monkeypatch.setattr(processors, "seen", lambda: processors_seen)
    assert processors.threads() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_affinity_counts_the_processors_allowed() -> None:
    show = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from aespa_pl.processors import seen; print(seen())"
    )
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "1"
