"""Make a table for people of what a run needs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aespa_pl.planning.arithmetic import block_flops
from aespa_pl.planning.budget import portions_in_words, room
from aespa_pl.planning.disk import disk_bytes, waiting_bytes
from aespa_pl.planning.division import ONE_DEVICE, Devices
from aespa_pl.planning.needs import (
    device_bytes,
    hidden_bytes,
    host_bytes,
    partition_for,
)
from aespa_pl.planning.partition import Partition
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.planning.tuning import recomputes
from aespa_pl.planning.words import duration, human
from aespa_pl.settings import DataSettings, QuantizationSettings


@dataclass(frozen=True)
class Needs:
    """Says what a run takes, in bytes, operations and seconds."""

    device: Mapping[str, int]
    """Bytes on the device by phase; the largest counts."""
    host: int
    disk: int
    waiting: Mapping[str, int]
    """Bytes on disk by what waits there while something is learned; the largest counts."""
    flops: Mapping[str, float]
    """Operations of one block on all devices together, by phase."""
    seconds: Mapping[str, float]
    """Seconds of one block on the device that has most to do, by phase."""
    partition: Partition
    free: float
    """Bytes of the device that a phase may take, beside hidden states that wait there."""
    on_device: int
    """Bytes of the hidden states that wait on an accelerator."""
    rate: float
    """Operations a second of a device."""
    devices: Devices = ONE_DEVICE
    """All devices of the run."""

    @property
    def most_on_device(self) -> int:
        """Return the bytes that the device needs."""
        return max(self.device.values())


def needs_of(
    shape: Shape,
    work: Work,
    data: DataSettings,
    quantization: QuantizationSettings,
    device: torch.device,
    *,
    stored_bytes: int,
    rate: float,
    devices: Devices = ONE_DEVICE,
) -> Needs:
    """Return what a run needs.

    Args:
        shape: Sizes of the model.
        work: Calibration text.
        data: Settings: where hidden states wait, and how much memory a block may take.
        quantization: Method and settings.
        device: Device that blocks run on.
        stored_bytes: Bytes of each weight in the model's files.
        rate: Operations a second of a device.
        devices: All devices of the run, which divide each block.
    """
    on_cpu, on_disk = device.type == "cpu", data.hidden_states == "disk"
    own = work.of_device(devices.count)
    free = room(shape, work, data, quantization, device, devices=devices).free
    partition = partition_for(shape, own, quantization, free, accelerator=not on_cpu)
    recompute = recomputes(shape, work, quantization, free)
    kept = data.hidden_states == "device" and not on_cpu
    streams = hidden_bytes(shape, own, quantization) if kept else 0
    on_device = device_bytes(
        shape, own, quantization, partition, accelerator=not on_cpu, recompute=recompute
    )
    if on_cpu:  # processes of a host divide its processors
        rate /= devices.of_host
    flops = block_flops(shape, work, quantization, partition, devices.count)
    return Needs(
        {phase: count and count + streams for phase, count in on_device.items()},
        host_bytes(
            shape,
            work.of_device(devices.hosts),
            quantization,
            on_cpu=on_cpu,
            on_disk=on_disk or kept,
            partition=partition,
            processes=devices.of_host,
            recompute=recompute,
        ),
        disk_bytes(
            shape,
            work,
            quantization,
            stored_bytes=stored_bytes,
            on_disk=on_disk,
            partition=partition,
        ),
        waiting_bytes(shape, quantization, stored_bytes=stored_bytes),
        block_flops(shape, work, quantization, partition),
        {phase: count / rate for phase, count in flops.items()},
        partition,
        free,
        streams,
        rate,
        devices,
    )


def rows_of(
    needs: Needs,
    shape: Shape,
    work: Work,
    data: DataSettings,
    device: torch.device,
) -> list[tuple[str, str, str]]:
    """Return needs as rows of a table: what, how much, from what; arguments as in :func:`needs_of`."""

    def phase_in_words(phase: str, count: int) -> str:
        if count - needs.on_device <= needs.free:
            return phase
        return f"{phase}: too much, {human(max(needs.free, 0.0))}B may be taken"

    parameters = shape.blocks * shape.block_weights + shape.stem_weights
    stream = human(work.stream_bytes(shape.hidden))
    host = f"hidden states: {stream}B a stream, {data.hidden_states}"
    host += ", and all that the device needs" if device.type == "cpu" else ""
    on_device = f"{device.type}, one block at a time"
    estimate = f"estimate, without evaluation, at {human(needs.rate)}FLOP/s of a device"
    if needs.devices.count > 1:
        host += f"; {needs.devices.of_host} processes"
        on_device += f", each of {needs.devices.count}"
        estimate += f"; {needs.devices.count} devices, without what they send each other"
    flops, total = sum(needs.flops.values()), sum(needs.seconds.values())
    phases = {phase: count for phase, count in needs.device.items() if count}
    seconds = {phase: count for phase, count in needs.seconds.items() if count}
    largest = max(needs.waiting, key=needs.waiting.__getitem__)
    waiting = f", {largest}" if needs.waiting[largest] else ""
    return [
        ("model", f"{human(parameters)} parameters", _blocks(shape)),
        ("device memory", f"{human(needs.most_on_device)}B", on_device),
        *(("", f"{human(n)}B", phase_in_words(phase, n)) for phase, n in phases.items()),
        *(("", "divided", words) for words in portions_in_words(needs.partition, shape)),
        ("host memory", f"{human(needs.host)}B", host),
        ("disk", f"{human(needs.disk)}B", f"model, integers{waiting}"),
        ("arithmetic", f"{human(shape.blocks * flops)}FLOP", f"{human(flops)}FLOP a block"),
        ("time", duration(shape.blocks * total), estimate),
        *(("", duration(shape.blocks * count), phase) for phase, count in seconds.items()),
    ]


def _blocks(shape: Shape) -> str:
    return f"{shape.blocks} blocks of {human(shape.block_weights)}"
