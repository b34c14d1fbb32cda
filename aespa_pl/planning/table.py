"""Make a table for people of what a run needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from aespa_pl.measure import duration, human
from aespa_pl.planning.arithmetic import block_flops
from aespa_pl.planning.budget import Room, partition_for, portions_in_words, room
from aespa_pl.planning.needs import device_bytes, disk_bytes, host_bytes, waiting_bytes
from aespa_pl.planning.partition import Partition
from aespa_pl.planning.shape import Setup
from aespa_pl.planning.tuning import recomputes


@dataclass(frozen=True)
class Needs:
    """Says what a run takes, in bytes and seconds."""

    setup: Setup
    device: Mapping[str, int]
    """Bytes on the device by phase; the largest counts."""
    host: int
    disk: int
    waiting: Mapping[str, int]
    """Bytes on disk by what waits there while something is learned; the largest counts."""
    seconds: Mapping[str, float]
    """Seconds of all blocks on the device that has most to do, by phase."""
    partition: Partition
    room: Room
    rate: float
    """Operations a second of a device."""


def needs_of(setup: Setup, *, stored_bytes: int, rate: float) -> Needs:
    """Return what a run needs of devices that divide each block.

    A weight in the model's files has ``stored_bytes``; a device computes ``rate`` operations a second.
    """
    shape, work, settings, devices = setup.shape, setup.work, setup.quantization, setup.devices
    space = room(setup)
    partition = partition_for(setup, space.free)
    recompute = recomputes(shape, work, settings, space.free)
    on_device = device_bytes(setup, partition, recompute=recompute)
    if setup.on_cpu:  # processes of a host divide its processors
        rate /= devices.of_host
    flops = block_flops(shape, work, settings, partition, devices.count)
    return Needs(
        setup,
        {phase: count and count + _streams(setup, space) for phase, count in on_device.items()},
        host_bytes(setup, partition, recompute=recompute),
        disk_bytes(setup, stored_bytes, partition),
        waiting_bytes(shape, settings, stored_bytes),
        {phase: shape.blocks * count / rate for phase, count in flops.items()},
        partition,
        space,
        rate,
    )


def _streams(setup: Setup, space: Room) -> int:
    """Return the bytes of the hidden states that wait in an accelerator's memory."""
    return 0 if setup.on_cpu else space.waiting


def rows_of(needs: Needs) -> list[tuple[str, str, str]]:
    """Return needs as rows of a table: what, how much, from what."""
    shape, data, device = needs.setup.shape, needs.setup.data, needs.setup.device.type
    devices = needs.setup.devices
    too_much = f": too much, {human(max(needs.room.free, 0.0), 'B')} may be taken"
    most = needs.room.free + _streams(needs.setup, needs.room)
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
    largest = max(needs.waiting, key=needs.waiting.__getitem__)
    waiting = f", {largest}" if needs.waiting[largest] else ""
    blocks = f"{shape.blocks} blocks of {human(shape.block_weights)}"
    return [
        ("model", f"{human(parameters)} parameters", blocks),
        ("device memory", human(max(needs.device.values()), "B"), on_device),
        *(("", human(n, "B"), p + too_much * (n > most)) for p, n in needs.device.items() if n),
        *(("", "divided", words) for words in portions_in_words(needs.partition, shape)),
        ("host memory", human(needs.host, "B"), host),
        ("disk", human(needs.disk, "B"), f"model, integers{waiting}"),
        ("time", duration(sum(needs.seconds.values())), estimate),
        *(("", duration(seconds), phase) for phase, seconds in needs.seconds.items() if seconds),
    ]
