"""Choose from the memory that is free how much is worked on at once, and where hidden states wait."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.measure import free_bytes
from aespa_pl.planning.needs import PROCESS_BYTES, device_bytes, hidden_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Setup, Shape, Work
from aespa_pl.planning.tuning import model_bytes
from aespa_pl.settings import DataSettings, QuantizationSettings

RESERVE = 0.9
"""Fraction of the free memory that is planned with: allocators keep some, and others want some."""
CPU_BATCH = 4
"""Number of segments in a batch on a CPU."""
MOST_PORTIONS = 64
"""Largest number of portions that a block is learned in; each large projection is one by then."""
TOKENS = 8192
"""Number of tokens in a batch on an accelerator, which keeps its matrix units busy; more only take memory."""


def partition_for(setup: Setup, free: float) -> Partition:
    """Return what of a block is worked on at once, so that its needs are at most ``free`` bytes.

    As much as possible: fewer heads or experts mean more passes over the segments, fewer weights more
    Trainers. Where nothing is small enough, the passes are those that save nine tenths of what can be saved.
    """
    shape, settings = setup.shape, setup.quantization
    heads = shape.layout.key_value_heads if settings.objective.value == "attention" else 0
    experts = max(shape.experts, shape.other.experts if shape.other else 0)

    def divided(passes: int) -> Partition:
        at_once = [math.ceil(count / passes) if passes > 1 and count else None for count in (heads, experts)]
        return Partition(heads=at_once[0], experts=at_once[1])

    def of_statistics(partition: Partition) -> int:
        needs = device_bytes(setup, partition)
        return max(needs[phase] for phase in ("statistics", "correction", "OPTQ"))

    least = of_statistics(divided(max(heads, experts)))
    limit = max(free, least + 0.1 * (of_statistics(WHOLE) - least))
    for passes in range(1, max(heads, experts, 1) + 1):
        chosen = divided(passes)
        if of_statistics(chosen) <= limit:
            break
    learning = sum(m.size for m in shape.learned(settings))
    for count in range(1, MOST_PORTIONS + 1):
        smaller = replace(chosen, weights=None if count == 1 else math.ceil(learning / count))
        if not learning or device_bytes(setup, smaller)["rounding"] <= free:
            break
    return smaller


def choose_partition(setup: Setup, world: World = ALONE) -> Partition:
    """Return a partition that fits ``data.memory_gb``, or the memory that is free on all devices now."""
    return partition_for(setup, world.smallest(room(setup).free))


@dataclass(frozen=True)
class Room:
    """Says how much memory of a device a phase may take."""

    free: float
    """Bytes, beside those of the hidden states; below 0 where these alone are too many."""
    waiting: int
    """Bytes of the hidden states that wait on the device; 0 where they wait elsewhere."""


def room(setup: Setup) -> Room:
    """Return what may be taken of ``data.memory_gb``, or of the memory that is free now."""
    data, devices, waiting = setup.data, setup.devices, 0
    free = 1e9 * data.memory_gb if data.memory_gb else RESERVE * free_bytes(setup.device)
    if setup.on_cpu and not data.memory_gb:
        free /= devices.of_host  # its processes share its memory
    if data.hidden_states == "device" or (setup.on_cpu and data.hidden_states != "disk"):
        own = setup.work.of_device(devices.count)
        waiting = hidden_bytes(setup.shape, own, setup.quantization)
    return Room(free - waiting, waiting)


def portions_in_words(partition: Partition, shape: Shape) -> list[str]:
    """Return what a partition means, in words; nothing for a block that is worked on as a whole."""
    said, heads = [], shape.layout.key_value_heads
    passes = partition.passes(heads, shape.experts)
    where = f"at once, in {len(passes)} passes over the segments; it waits on disk"
    if (most := max(len(part) for part, _ in passes)) < heads:
        said.append(f"H_V of {most} of {heads} heads {where}")
    if (most := max(len(part) for _, part in passes)) < shape.experts:
        said.append(f"H of {most} of {shape.experts} experts {where}")
    if partition.weights:
        said.append(f"learning in portions of at most {partition.weights:,} weights")
    return said


def resolved_data(
    data: DataSettings,
    quantization: QuantizationSettings,
    shape: Shape,
    device: torch.device,
    *,
    length: int,
    dtype_bytes: int,
) -> DataSettings:
    """Return the settings without ``auto``, for segments of ``length`` tokens.

    The size of a batch changes the order of sums, so it follows from the kind of device and the segments
    alone. Where hidden states wait changes no number, so it may follow from the memory that is free.
    """
    if data.batch_size == "auto":
        size = CPU_BATCH if device.type == "cpu" else max(1, TOKENS // length)
        data = replace(data, batch_size=size)
    if data.hidden_states == "auto":
        segments = data.calibration.segments
        work = Work(segments, length, min(data.batch, segments), dtype_bytes)
        data = replace(data, hidden_states=_hidden_place(Setup(shape, work, data, quantization, device)))
    return data


def resolved_place(setup: Setup) -> QuantizationSettings:
    """Return the settings without ``auto``: the end-to-end tuning has the blocks in memory where all fit."""
    settings = setup.quantization
    if settings.tuning.model.blocks != "auto":
        return settings
    needed = model_bytes(setup.shape, setup.work, settings, recompute=True)
    return settings.with_place("memory" if needed <= room(setup).free else "disk")


def _hidden_place(setup: Setup) -> Literal["device", "memory", "disk"]:
    """Return the nearest place where the streams fit beside everything else."""
    if setup.on_cpu:
        return "memory"
    streams = hidden_bytes(setup.shape, setup.work, setup.quantization)
    if streams + max(device_bytes(setup).values()) <= room(setup).free:
        return "device"
    host = RESERVE * free_bytes(torch.device("cpu"))
    return "memory" if PROCESS_BYTES + streams <= host else "disk"
