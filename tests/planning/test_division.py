"""What several devices divide is counted as the run divides it, and the rest is counted on each."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.distributed.processes import World
from aespa_pl.planning.estimate import needs_of, rows_of
from aespa_pl.planning.needs import PROCESS_BYTES, hidden_bytes
from aespa_pl.planning.shape import Devices, Setup
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, ModelTuningSettings, QuantizationSettings
from tests.planning.shapes import PAPER, WORK, device_bytes, shape
from tests.walks import changed

CPU = torch.device("cpu")


@pytest.mark.parametrize("devices", [2, 3, 5, 64])
def test_segments_are_those_of_the_process_with_most(devices: int) -> None:
    tokens = torch.zeros(WORK.segments, 1)
    most = max(len(World(rank, devices).segments(tokens, WORK.batch_size)) for rank in range(devices))
    assert WORK.of_device(devices).segments == most


def test_table_counts_the_processes_of_a_host() -> None:
    s, data = shape(), DataSettings(hidden_states="memory", memory_gb=1)
    needs = needs_of(Setup(s, WORK, data, PAPER, CPU, Devices(6, hosts=2)), stored_bytes=2, rate=1e9)
    each = max(device_bytes(s, WORK.of_device(6), PAPER).values())
    streams = hidden_bytes(s, replace(WORK, segments=6), PAPER)  # 3 of 5 batches of 2
    assert needs.host == 3 * (PROCESS_BYTES + each) + streams
    said = " ".join(" ".join(row) for row in rows_of(needs))
    assert "3 processes" in said
    assert "model, integers, two checkpoints of a block" in said
    assert "6 devices, without what they send each other" in said


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("rtn", {}, ""),
        ("aespa", {}, ", two checkpoints of a block"),
        ("aespa-tuned", {}, ", two checkpoints of the end-to-end tuning"),
        ("rtn", {"tuning.model": ModelTuningSettings(True, integer_rate=0)}, ", a block that "),
    ],
)
def test_table_names_the_largest_that_waits_on_disk(
    method: str, changes: dict[str, object], said: str
) -> None:
    s, data = shape(), DataSettings(hidden_states="memory", memory_gb=1)
    settings = resolved(changed(changes, QuantizationSettings(method=method)))
    needs = needs_of(Setup(s, WORK, data, settings, CPU), stored_bytes=2, rate=1e9)
    (words,) = [words for what, _, words in rows_of(needs) if what == "disk"]
    assert words.startswith(f"model, integers{said}")
    assert (words == "model, integers") is (not said)
