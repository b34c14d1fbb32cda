"""Seconds add up by phase, and the peak is in bytes."""

import resource
import time
from pathlib import Path

import psutil
import pytest
import torch

from aespa_pl.measure import Stopwatch, free_bytes, peak_bytes

CPU = torch.device("cpu")


def test_seconds_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 21.0, 30.0, 35.0, 40.0, 41.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    for phase in ("grid", "rounding", "grid"):
        with stopwatch.measure(phase, CPU):
            pass
    assert dict(stopwatch.seconds) == {"grid": 8.0, "rounding": 1.0}
    since = stopwatch.since()
    with stopwatch.measure("grid", CPU):
        pass
    assert since() == {"grid": 1.0, "rounding": 0.0}


def test_time_up_to_a_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    with pytest.raises(KeyError), stopwatch.measure("grid", CPU):
        raise KeyError
    assert stopwatch.seconds["grid"] == 4


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_is_in_bytes(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", platform)
    expected = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = peak_bytes(CPU)
    assert found["device"] == 0
    assert found["host"] == pytest.approx(expected, rel=0.01)


def test_free_memory_is_less_than_there_is() -> None:
    everything = psutil.virtual_memory().total
    assert 0 < free_bytes(CPU) < everything


def test_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aespa_pl.measure.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_bytes(CPU) == 3000
    (tmp_path / "memory.stat").write_text("anon 800\ninactive_file 1200\nactive_file 0\n")
    assert free_bytes(CPU) == 4200  # files that were read make room
    (tmp_path / "memory.current").write_text("9000\n")
    assert free_bytes(CPU) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) > 5000


def test_limit_of_a_container_of_version_1_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aespa_pl.measure.CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    for name, text in (
        ("limit_in_bytes", "5000"), ("usage_in_bytes", "3000"), ("stat", "total_inactive_file 500"),
    ):  # fmt: skip
        (tmp_path / "memory" / f"memory.{name}").write_text(text + "\n")
    assert free_bytes(CPU) == 2500
