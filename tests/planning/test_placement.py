"""auto follows from the device, from the text, and from the memory that is free."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig

from aespa_pl.models import family_of
from aespa_pl.planning import budget
from aespa_pl.planning.budget import RESERVE, Room, resolved_data, room
from aespa_pl.planning.needs import PROCESS_BYTES, hidden_bytes
from aespa_pl.planning.shape import Setup, Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, QuantizationSettings
from tests.planning.shapes import device_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QUANTIZATION = resolved(QuantizationSettings(method="aespa"))
WORK = Work(128, 512, 16, 2)


def shape() -> Shape:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2, vocab_size=50
    )
    return Shape.of(config, family_of(config).layouts(config))


def resolve(data: DataSettings, device: torch.device, length: int = 512) -> DataSettings:
    return resolved_data(data, QUANTIZATION, shape(), device, length=length, dtype_bytes=2)


def free(device: float, host: float) -> Callable[[torch.device], float]:
    return lambda where: (host if where.type == "cpu" else device) / RESERVE


@pytest.mark.parametrize(("length", "size"), [(2048, 4), (512, 16), (100_000, 1)])
def test_a_batch_has_four_segments_on_a_cpu_and_8192_tokens_elsewhere(length: int, size: int) -> None:
    data = DataSettings(hidden_states="memory")
    assert resolve(data, CPU, length).batch == 4
    assert resolve(data, GPU, length).batch == size
    assert resolve(DataSettings(batch_size=7, hidden_states="memory"), GPU, length).batch == 7


def test_hidden_states_wait_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = hidden_bytes(shape(), WORK, QUANTIZATION)
    assert streams == 2 * 128 * 512 * 64 * 2  # both streams in half precision
    needs = max(device_bytes(shape(), WORK, QUANTIZATION, accelerator=True).values())
    assert needs > max(device_bytes(shape(), WORK, QUANTIZATION).values())  # larger chunks of work
    for device, host, place in (
        (needs + streams + 1, 0.0, "device"),
        (needs + streams - 1, PROCESS_BYTES + streams + 1, "memory"),
        (needs + streams - 1, PROCESS_BYTES + streams - 1, "disk"),
    ):
        monkeypatch.setattr(budget, "free_bytes", free(device, host))
        assert resolve(DataSettings(), GPU).hidden_states == place
        assert resolve(DataSettings(), CPU).hidden_states == "memory"
        assert resolve(DataSettings(hidden_states="disk"), GPU).hidden_states == "disk"
    enough = (needs + streams + 1) / 1e9
    assert resolve(DataSettings(memory_gb=enough), GPU).hidden_states == "device"


def test_streams_on_the_device_are_not_planned_with_twice() -> None:
    streams = hidden_bytes(shape(), WORK, QUANTIZATION)
    for device, place, taken in (
        (GPU, "device", streams), (GPU, "memory", 0), (CPU, "memory", streams), (CPU, "disk", 0),
    ):  # fmt: skip
        data = DataSettings(memory_gb=1.0, hidden_states=place)  # type: ignore[arg-type]
        found = room(Setup(shape(), WORK, data, QUANTIZATION, device))
        assert found == Room(1e9 - taken, taken)


def test_products_are_tf32_on_cuda_alone() -> None:
    asked = resolved(QuantizationSettings(method="aespa", products="tf32"), "cpu")
    assert asked.precision == "float32"
    for device, products in (("cpu", "float32"), ("cuda", "tf32")):
        assert resolved(QuantizationSettings(), device).precision == products
        assert resolved(QuantizationSettings(products="bfloat16"), device).precision == "bfloat16"


def test_settings_that_are_not_resolved_are_not_read() -> None:
    for read in (lambda: QuantizationSettings().precision, lambda: DataSettings().batch):
        with pytest.raises(ValueError, match="not resolved"):
            read()
