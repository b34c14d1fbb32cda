"""Make a table for people of what a run needs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aespa_pl.algorithm.threads import threads_limited_to
from aespa_pl.planning.arithmetic import block_flops
from aespa_pl.planning.budget import portions_in_words, room
from aespa_pl.planning.complexity import SEQUENCES, aespa_flops, conventional_flops
from aespa_pl.planning.disk import disk_bytes, waiting_bytes
from aespa_pl.planning.division import ONE_DEVICE, Devices, device_flops, device_visits
from aespa_pl.planning.needs import (
    device_bytes,
    hidden_bytes,
    host_bytes,
    partition_for,
)
from aespa_pl.planning.partition import Partition
from aespa_pl.planning.rates import measure_rates
from aespa_pl.planning.shape import Shape, Work
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
    seconds: float,
    devices: Devices = ONE_DEVICE,
) -> Needs:
    """Return what a run needs.

    Args:
        shape: Sizes of the model.
        work: Calibration text.
        data: Settings: where hidden states wait, and how much memory a block may take.
        quantization: Method and settings.
        device: Device that blocks run on; it is measured.
        stored_bytes: Bytes of each weight in the model's files.
        seconds: Time of the measurement.
        devices: All devices of the run, which divide each block.
    """
    on_cpu, on_disk = device.type == "cpu", data.hidden_states == "disk"
    own = work.of_device(devices.count)
    free = room(shape, work, data, quantization, device, devices=devices).free
    partition = partition_for(shape, own, quantization, free, accelerator=not on_cpu)
    # processes of a host share its processors
    threads = max(1, torch.get_num_threads() // devices.of_host)
    with threads_limited_to(threads):
        rates = measure_rates(shape, device, seconds=seconds, precision=quantization.precision)
    kept = data.hidden_states == "device" and not on_cpu
    streams = hidden_bytes(shape, own, quantization) if kept else 0
    on_device = device_bytes(shape, own, quantization, partition, accelerator=not on_cpu)
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
        rates.seconds(
            device_flops(shape, work, quantization, devices.count, partition),
            device_visits(shape, quantization, devices.count),
        ),
        partition,
        devices,
    )


def rows_of(
    needs: Needs, shape: Shape, work: Work, data: DataSettings, device: torch.device
) -> list[tuple[str, str, str]]:
    """Return needs as rows of a table: what, how much, from what; arguments as in :func:`needs_of`."""
    parameters = shape.blocks * shape.block_weights + shape.stem_weights
    stream = human(work.stream_bytes(shape.hidden))
    host = f"hidden states: {stream}B a stream, {data.hidden_states}"
    host += ", and all that the device needs" if device.type == "cpu" else ""
    on_device = f"{device.type}, one block at a time"
    estimate = "estimate, without evaluation: arithmetic over the rates just measured"
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
        *(("", f"{human(count)}B", phase) for phase, count in phases.items()),
        *(("", "divided", words) for words in portions_in_words(needs.partition, shape)),
        ("host memory", f"{human(needs.host)}B", host),
        ("disk", f"{human(needs.disk)}B", f"model, integers{waiting}"),
        ("arithmetic", f"{human(shape.blocks * flops)}FLOP", f"{human(flops)}FLOP a block"),
        ("time", duration(shape.blocks * total), estimate),
        *(("", duration(shape.blocks * count), phase) for phase, count in seconds.items()),
        *complexity_rows(shape, work),
    ]


def complexity_rows(shape: Shape, work: Work) -> list[tuple[str, str, str]]:
    """Return the paper's two counts of an iteration as rows of a table; arguments as in ``needs_of``."""
    d, head = shape.hidden, shape.layout.head_dim
    forward = conventional_flops(d, head, work.length)
    text = f"by forward passes of {SEQUENCES} segments of {work.length} tokens (BRECQ and others)"
    return [
        ("one iteration", f"{human(forward)}FLOP", f"Q, K and V of a head, {text}"),
        (
            "",
            f"{human(aespa_flops(d, head))}FLOP",
            "the same by aespa's objectives, whatever the text",
        ),
    ]


def _blocks(shape: Shape) -> str:
    return f"{shape.blocks} blocks of {human(shape.block_weights)}"
