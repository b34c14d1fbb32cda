"""What several devices divide is counted as the run divides it, and the rest is counted on each."""

from dataclasses import replace

import pytest
import torch

from aespa_pl.distributed.processes import World
from aespa_pl.models.family import Role
from aespa_pl.planning.arithmetic import block_flops, block_visits
from aespa_pl.planning.division import Devices, device_flops, device_visits, row_shares
from aespa_pl.planning.needs import PROCESS_BYTES, device_bytes, hidden_bytes
from aespa_pl.planning.table import needs_of, rows_of
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    DataSettings,
    ModelTuningSettings,
    QuantizationSettings,
    RoundingSettings,
)
from tests.planning.shapes import PAPER, WORK, shape
from tests.walks import changed

LEARNED = replace(PAPER, rounding=RoundingSettings(iterations=7, learn="all"))
CPU = torch.device("cpu")


def test_one_device_does_all() -> None:
    s = shape()
    assert device_flops(s, WORK, LEARNED, 1) == pytest.approx(block_flops(s, WORK, LEARNED))
    assert device_visits(s, LEARNED, 1) == block_visits(s, LEARNED)


@pytest.mark.parametrize("devices", [2, 3, 5, 64])
def test_segments_are_those_of_the_process_with_most(devices: int) -> None:
    tokens = torch.zeros(WORK.segments, 1)
    most = max(
        len(World(rank, devices).segments(tokens, WORK.batch_size)) for rank in range(devices)
    )
    assert WORK.of_device(devices).segments == most
    s = shape()
    alone, divided = block_flops(s, WORK, LEARNED), device_flops(s, WORK, LEARNED, devices)
    for phase in ("forward", "statistics"):
        assert divided[phase] == pytest.approx(alone[phase] * most / WORK.segments)


def test_rows_are_those_of_the_process_with_most() -> None:
    """Counted matrix by matrix: 4 heads and 2 key/value heads, on 3 devices."""
    s, devices = shape("llama-grouped"), 3
    layout = s.layout
    assert (layout.heads, layout.key_value_heads) == (4, 2)

    def largest(units: int) -> float:
        shares = [World(rank, devices).share(units) for rank in range(devices)]
        return max(len(range(units)[share]) for share in shares) / units

    heads = {Role.QUERY: layout.heads, Role.KEY: layout.key_value_heads, Role.VALUE: 2}
    d_h, learned, searched = layout.head_dim, 0.0, 0.0
    for m in s.matrices:
        coupled = m.role in (Role.QUERY, Role.KEY)
        step = 2 * m.size * (m.columns + (d_h if coupled else 0))
        learned += step * largest(heads.get(m.role, m.rows))
        searched += m.product_flops * largest(2 if m.role is Role.VALUE else m.rows)
    divided = device_flops(s, WORK, LEARNED, devices)
    assert divided["rounding"] == pytest.approx(7 * learned)
    shared = sum(3 * columns**3 for columns in s.inputs.values())
    assert divided["OPTQ"] == pytest.approx(searched + shared + 3 * s.hidden**3)


def test_more_devices_than_heads_leave_a_head_to_each() -> None:
    shares = row_shares(shape("llama"), LEARNED, 1000)
    heads = shape("llama").layout.heads
    assert 1 / 1000 < shares["grid"] < shares["rounding"] < 1 / heads


def test_table_counts_the_processes_of_a_host() -> None:
    s, data = shape(), DataSettings(hidden_states="memory", memory_gb=1)
    needs = needs_of(
        s, WORK, data, PAPER, CPU, stored_bytes=2, seconds=0.01, devices=Devices(6, hosts=2)
    )
    each = max(device_bytes(s, WORK.of_device(6), PAPER).values())
    streams = hidden_bytes(s, replace(WORK, segments=6), PAPER)  # 3 of 5 batches of 2
    assert needs.host == 3 * (PROCESS_BYTES + each) + streams
    assert needs.flops == block_flops(s, WORK, PAPER)
    said = " ".join(" ".join(row) for row in rows_of(needs, s, WORK, data, CPU))
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
    needs = needs_of(s, WORK, data, settings, CPU, stored_bytes=2, seconds=0.01)
    (words,) = [words for what, _, words in rows_of(needs, s, WORK, data, CPU) if what == "disk"]
    assert words.startswith(f"model, integers{said}")
    assert (words == "model, integers") is (not said)
