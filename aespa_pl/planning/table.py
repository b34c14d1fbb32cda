"""What a run needs, as a table for people."""

import math

import torch
from transformers import PreTrainedConfig

from aespa_pl.errors import UserError
from aespa_pl.models.family import Family
from aespa_pl.planning.budget import described, divide
from aespa_pl.planning.needs import block_flops, device_bytes, disk_bytes, host_bytes
from aespa_pl.planning.rates import measure_rates
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.settings import DataSettings, QuantizationSettings

PREFIXES = ("", "K", "M", "G", "T", "P", "E")


def plan(
    config: PreTrainedConfig,
    family: Family,
    *,
    data: DataSettings,
    quantization: QuantizationSettings,
    device: torch.device,
    dtype: torch.dtype | None,
    seconds: float,
) -> list[tuple[str, str, str]]:
    """Return what a run needs, as rows of a table: what, how much, from what.

    Args:
        config: Of the model; no weights are needed.
        family: Of the model.
        data: Texts.
        quantization: How.
        device: Where.
        dtype: Type that blocks run in; None: float32 on the CPU, that of the configuration elsewhere.
        seconds: For the measurement of the device.

    Raises:
        UserError: The segments have no length.
    """
    shape = Shape.of(config, family)
    stored: torch.dtype = getattr(config, "dtype", None) or torch.float32
    on_cpu, on_disk = device.type == "cpu", data.hidden_states == "disk"
    if dtype is None:
        dtype = torch.float32 if on_cpu else stored
    length = data.calibration.segment_length or family.positions(config)
    if length is None:
        raise UserError(
            "data.calibration.segment_length must be a number: this model has no limit of positions"
        )
    work = Work(data.calibration.segments, length, data.batch_size, dtype.itemsize)
    partition = divide(shape, work, data, quantization, device)
    phases = device_bytes(shape, work, quantization, partition)
    host = host_bytes(
        shape, work, quantization, on_cpu=on_cpu, on_disk=on_disk, partition=partition
    )
    disk = disk_bytes(
        shape,
        work,
        quantization,
        stored_bytes=stored.itemsize,
        on_disk=on_disk,
        partition=partition,
    )
    flops = block_flops(shape, work, quantization, partition)
    rates = measure_rates(shape, device, seconds=seconds, precision=quantization.products)
    taken = rates.seconds(flops)
    parameters = shape.blocks * shape.block_weights + shape.stem_weights
    return [
        (
            "model",
            f"{human(parameters)} parameters",
            f"{shape.blocks} blocks of {human(shape.block_weights)}",
        ),
        ("device memory", f"{human(max(phases.values()))}B", f"{device.type}, one block at a time"),
        *(("", f"{human(count)}B", phase) for phase, count in phases.items() if count),
        *(("", "in parts", words) for words in described(partition, shape)),
        (
            "host memory",
            f"{human(host)}B",
            f"hidden states: {human(work.stream_bytes(shape.hidden))}B a stream, {data.hidden_states}"
            + (", and what is the device's" if on_cpu else ""),
        ),
        ("disk", f"{human(disk)}B", "model, integers, two checkpoints of a block"),
        (
            "arithmetic",
            f"{human(shape.blocks * sum(flops.values()))}FLOP",
            f"{human(sum(flops.values()))}FLOP a block",
        ),
        (
            "time",
            duration(shape.blocks * sum(taken.values())),
            "estimate, without evaluation: arithmetic over the rates just measured",
        ),
        *(("", duration(shape.blocks * count), phase) for phase, count in taken.items() if count),
    ]


def human(number: float) -> str:
    """Return a number in powers of a thousand: ``12.3 G``."""
    power = 0 if number < 1 else min(len(PREFIXES) - 1, int(math.log10(number)) // 3)
    return f"{number / 1000**power:.1f} {PREFIXES[power]}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that a person would choose."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
