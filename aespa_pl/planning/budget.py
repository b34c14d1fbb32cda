"""Choose how much of a block is worked on at once, from the memory that is free."""

from dataclasses import dataclass

import torch

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.measure import free_bytes
from aespa_pl.planning.division import ONE_DEVICE, Devices
from aespa_pl.planning.needs import hidden_bytes, partition_for
from aespa_pl.planning.partition import Partition
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.settings import DataSettings, QuantizationSettings

RESERVE = 0.9
"""Share of the free memory that is planned with: allocators keep some, and others want some."""


def choose_partition(
    shape: Shape,
    work: Work,
    data: DataSettings,
    quantization: QuantizationSettings,
    device: torch.device,
    *,
    devices: Devices = ONE_DEVICE,
    world: World = ALONE,
) -> Partition:
    """Return a partition that fits ``data.memory_gb``, or the memory that is free on all devices now."""
    free = world.smallest(room(shape, work, data, quantization, device, devices=devices).free)
    return partition_for(shape, work, quantization, free, accelerator=device.type != "cpu")


@dataclass(frozen=True)
class Room:
    """Says how much memory of a device a phase may take."""

    free: float
    """Bytes, beside those of the hidden states; below 0 where these alone are too many."""
    waiting: int
    """Bytes that the device's share of the hidden states takes; 0 where they wait elsewhere."""


def room(
    shape: Shape,
    work: Work,
    data: DataSettings,
    quantization: QuantizationSettings,
    device: torch.device,
    *,
    devices: Devices = ONE_DEVICE,
) -> Room:
    """Return what may be taken of ``data.memory_gb``, or of the memory that is free now."""
    free = 1e9 * data.memory_gb if data.memory_gb else RESERVE * free_bytes(device)
    if device.type == "cpu" and not data.memory_gb:
        free /= devices.of_host  # its processes share its memory
    waiting, on_device = 0, device.type == "cpu" or data.hidden_states == "device"
    if on_device and data.hidden_states != "disk":
        waiting = hidden_bytes(shape, work.of_device(devices.count), quantization)
    return Room(free - waiting, waiting)


def portions_in_words(partition: Partition, shape: Shape) -> list[str]:
    """Return what a partition means, in words; nothing for a block that is worked on as a whole."""
    said = []
    heads = shape.layout.key_value_heads
    groups = partition.head_groups(heads)
    if len(groups) > 1:
        said.append(
            f"H_V of {max(map(len, groups))} of {heads} heads at once, in {len(groups)} passes over the "
            "segments; it waits on disk"
        )
    if partition.weights:
        said.append(f"learning in portions of at most {partition.weights:,} weights")
    return said
