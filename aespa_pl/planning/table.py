"""Make a table for people of what a run needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from aespa_pl.measure import duration, human
from aespa_pl.planning.arithmetic import block_flops
from aespa_pl.planning.budget import portions_in_words, room
from aespa_pl.planning.needs import (
    device_bytes,
    disk_bytes,
    hidden_bytes,
    host_bytes,
    partition_for,
    waiting_bytes,
)
from aespa_pl.planning.partition import Partition
from aespa_pl.planning.shape import Setup
from aespa_pl.planning.tuning import recomputes


@dataclass(frozen=True)
class Needs:
    """Says what a run takes, in bytes, operations and seconds."""

    setup: Setup
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

    @property
    def most_on_device(self) -> int:
        """Return the bytes that the device needs."""
        return max(self.device.values())


def needs_of(setup: Setup, *, stored_bytes: int, rate: float) -> Needs:
    """Return what a run needs.

    Args:
        setup: The devices divide each block.
        stored_bytes: Bytes of each weight in the model's files.
        rate: Operations a second of a device.
    """
    shape, work, quantization, devices = (
        setup.shape, setup.work, setup.quantization, setup.devices,
    )  # fmt: skip
    accelerator, on_disk = not setup.on_cpu, setup.data.hidden_states == "disk"
    own, free = work.of_device(devices.count), room(setup).free
    partition = partition_for(shape, own, quantization, free, accelerator=accelerator)
    recompute = recomputes(shape, work, quantization, free)
    kept = setup.data.hidden_states == "device" and accelerator
    streams = hidden_bytes(shape, own, quantization) if kept else 0
    on_device = device_bytes(
        shape, own, quantization, partition, accelerator=accelerator, recompute=recompute
    )
    if setup.on_cpu:  # processes of a host divide its processors
        rate /= devices.of_host
    flops = block_flops(shape, work, quantization, partition, devices.count)
    disk = disk_bytes(
        shape, work, quantization, stored_bytes=stored_bytes, on_disk=on_disk, partition=partition
    )
    host = host_bytes(
        shape,
        work.of_device(devices.hosts),
        quantization,
        on_cpu=setup.on_cpu,
        on_disk=on_disk or kept,
        partition=partition,
        processes=devices.of_host,
        recompute=recompute,
    )
    return Needs(
        setup,
        {phase: count and count + streams for phase, count in on_device.items()},
        host,
        disk,
        waiting_bytes(shape, quantization, stored_bytes=stored_bytes),
        block_flops(shape, work, quantization, partition),
        {phase: count / rate for phase, count in flops.items()},
        partition,
        free,
        streams,
        rate,
    )


def rows_of(needs: Needs) -> list[tuple[str, str, str]]:
    """Return needs as rows of a table: what, how much, from what."""
    shape, data, device = needs.setup.shape, needs.setup.data, needs.setup.device.type
    devices = needs.setup.devices

    def phase_in_words(phase: str, count: int) -> str:
        if count - needs.on_device <= needs.free:
            return phase
        return f"{phase}: too much, {human(max(needs.free, 0.0), 'B')} may be taken"

    parameters = shape.blocks * shape.block_weights + shape.stem_weights
    stream = human(needs.setup.work.stream_bytes(shape.hidden), "B")
    host = f"hidden states: {stream} a stream, {data.hidden_states}"
    host += ", and all that the device needs" if needs.setup.on_cpu else ""
    on_device = f"{device}, one block at a time"
    estimate = f"estimate, without evaluation, at {human(needs.rate, 'FLOP/s')} of a device"
    if devices.count > 1:
        host += f"; {devices.of_host} processes"
        on_device += f", each of {devices.count}"
        estimate += f"; {devices.count} devices, without what they send each other"
    flops, total = sum(needs.flops.values()), sum(needs.seconds.values())
    largest = max(needs.waiting, key=needs.waiting.__getitem__)
    waiting = f", {largest}" if needs.waiting[largest] else ""
    blocks = f"{shape.blocks} blocks of {human(shape.block_weights)}"
    return [
        ("model", f"{human(parameters)} parameters", blocks),
        ("device memory", human(needs.most_on_device, "B"), on_device),
        *(("", human(n, "B"), phase_in_words(p, n)) for p, n in needs.device.items() if n),
        *(("", "divided", words) for words in portions_in_words(needs.partition, shape)),
        ("host memory", human(needs.host, "B"), host),
        ("disk", human(needs.disk, "B"), f"model, integers{waiting}"),
        ("arithmetic", human(shape.blocks * flops, "FLOP"), f"{human(flops, 'FLOP')} a block"),
        ("time", duration(shape.blocks * total), estimate),
        *(("", duration(shape.blocks * n), phase) for phase, n in needs.seconds.items() if n),
    ]
