"""Estimate bytes and seconds of a run, and make a table of them for people.

Products of matrices count as their operations. Work on single weights counts as the operations of a product
that takes as long: these constants are from one thread of a CPU. An accelerator also waits for small kernels.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aespa_pl.algorithm.candidates import leading_rank
from aespa_pl.algorithm.grid import CLIP_RATIOS
from aespa_pl.algorithm.second_moments import computed_fraction
from aespa_pl.calibration.attended import multiplications, stride
from aespa_pl.calibration.end_loss import segments_of
from aespa_pl.measure import duration, human
from aespa_pl.planning.budget import Room, partition_for, portions_in_words, room
from aespa_pl.planning.needs import device_bytes, disk_bytes, host_bytes, waiting_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Setup, Shape, Work
from aespa_pl.planning.tuning import recomputes, streamed_bytes
from aespa_pl.settings import QuantizationSettings

COMPARED, UPDATED, VISITED, LEARNED = 250, 20_000, 5_000, 1_500
"""Operations for each weight: rounded to a candidate grid, rounded by OPTQ, visited by a pass of the descent,
and learned in an iteration; 1 to 1.5 times as many were measured at widths 576 and 2,048."""
SEARCHES = 4
"""Searches without zeta that those of Z-Fold take as long as; 2 to 7 were seen."""
LATER_PASSES = 0.4
"""Mean time of a pass of the descent beside that of the first: less and less moves."""
OF_HEAD, OF_COLUMN = 2.5e-3, {"OPTQ": 2e-4, "polish": 4e-4}
"""Seconds that an accelerator takes to start kernels, whatever its rate: the statistics for each value head
and batch, others for each column. Measured on an H200; polish: 2.5e-4 at width 576, 5.5e-4 at 4,096."""
DISK_RATE = 2e9
"""Bytes a second that a drive is taken to read and write."""
MEASURED_WEIGHTS = 2**22
"""Weights of the largest matrix that the rate is measured on."""


def block_flops(
    shape: Shape, work: Work, settings: QuantizationSettings, partition: Partition = WHOLE, devices: int = 1
) -> dict[str, float]:
    """Return the floating-point operations of one block on each device, by phase; two for a multiply-add.

    Several devices divide the segments in whole batches, and the rows evenly; each factors the Hessians that
    all rows have in common.
    """
    text, layout, shares = work.segments * work.length, shape.layout, shape.shares
    work = work.of_device(devices)
    tokens, d, heads = work.segments * work.length, shape.hidden, layout.key_value_heads
    attention = 4 * tokens * work.length * layout.heads * layout.head_dim
    forward = float(2 * tokens * sum(m.share * m.size for m in shape.matrices) + attention)
    passes = (2 if settings.two_streams else 1) * len(partition.passes(heads, shape.experts))
    moments = sum(shares[name] * computed_fraction(c) * c**2 for name, c in shape.inputs.items())
    moments *= 2 if settings.input_correction else 1  # as many for the shifts
    if settings.objective.value == "attention":
        shared = layout.heads // layout.key_value_heads
        every = stride(settings.objective.value_tokens, text, work.length, d)
        of_head = multiplications(shared, work.length, d, every)
        moments += layout.key_value_heads * min(of_head) / work.length
    end_loss = 0.0
    if settings.objective.end_loss:  # forward, forward again and backward, by one device; the products in G
        share = min(1.0, work.length * segments_of(work.length) / text)
        grams = 2 * text * shape.coupling_numbers(settings)
        end_loss = share * (4 * devices * forward + grams)
    product = sum(2 * m.size * m.columns for m in shape.matrices)  # dW H of all projections
    factors = sum(3 * columns**3 for columns in shape.inputs.values())
    widths = [(m.size, min(m.columns, settings.group_size or m.columns)) for m in shape.matrices]
    search = sum(size * (2 * leading_rank(columns) + COMPARED) for size, columns in widths)
    searches = (1 if settings.symmetric else 2) * CLIP_RATIOS * (SEARCHES if settings.grid.zfold else 1)
    optq = (product + 3 * heads * d**3 + UPDATED * shape.weights) / devices + factors
    coupled = {id(m): 2 * m.size * rows for m, rows in shape.coupled(settings)}  # G dW
    products = (m.size * (2 * m.columns + LEARNED) + coupled.get(id(m), 0) for m in shape.learned(settings))
    learned = sum(products)
    visits, rows_product = LATER_PASSES * settings.polish.passes, sum(coupled.values())
    polish = (2 + visits) * (product + rows_product) + visits * VISITED * shape.weights
    of_blocks, of_model = settings.tuning.blocks, settings.tuning.model
    head, held = 2.0 * tokens * d * shape.vocabulary / shape.blocks, float(settings.tuning.held_back)

    def epochs(count: int, once: float, passes: int = 3) -> float:
        return (count * passes * (1 - held) + (count + 1) * held) * once

    # a backward pass takes as long as two forward; blocks on disk run forward once more for it
    again = 4 if of_model.blocks == "disk" else 3

    units = 2 if settings.tuning.by_sublayer else 1
    return {
        "forward": forward,
        "statistics": passes * forward + 2 * tokens * moments + end_loss,
        "grid": float(searches * search / devices) if settings.grid.search else 0.0,
        "OPTQ": optq if settings.optq.enabled else 0.0,
        "rounding": float(learned * settings.rounding.iterations / devices),
        "polish": polish / devices if settings.polish.enabled else 0.0,
        "tuning of blocks": epochs(of_blocks.epochs or 0, units * forward) if of_blocks.enabled else 0.0,
        # neither the original's head nor the model's own is trained
        "tuning of the model": epochs(of_model.epochs, forward, again) + epochs(of_model.epochs, head)
        if of_model.enabled
        else 0.0,
    }


def block_waits(shape: Shape, work: Work, settings: QuantizationSettings) -> dict[str, float]:
    """Return the seconds of one block that an accelerator starts kernels, by phase."""
    columns = sum(matrix.columns for matrix in shape.matrices)
    waits = {phase: seconds * columns for phase, seconds in OF_COLUMN.items()}
    if settings.objective.value == "attention":
        batches = math.ceil(work.segments / work.batch_size)
        waits["statistics"] = OF_HEAD * shape.layout.key_value_heads * batches
    return waits


def product_rate(device: torch.device, columns: int, seconds: float) -> float:
    """Return the operations a second that products of matrices with so many columns reach on a device."""
    rows = min(columns, max(64, MEASURED_WEIGHTS // columns))
    W, H = (torch.randn(n, columns, device=device) for n in (rows, columns))
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 2 or time.perf_counter() < end:
        began = time.perf_counter()
        float((W @ H)[0, 0])  # waits for the device
        taken.append(time.perf_counter() - began)
    # the first call prepares the library
    return 2.0 * rows * columns**2 / sorted(taken[1:])[(len(taken) - 1) // 2]


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
    streamed: float
    """Bytes that the end-to-end tuning reads and writes where it has the blocks on disk."""


def needs_of(setup: Setup, *, stored_bytes: int, rate: float) -> Needs:
    """Return what a run needs of devices that divide each block.

    A weight in the model's files has ``stored_bytes``; a device computes ``rate`` operations a second.
    """
    shape, work, settings, devices = setup.shape, setup.work, setup.quantization, setup.devices
    space = room(setup)
    streams = 0 if setup.on_cpu else space.waiting  # in an accelerator's memory
    partition = partition_for(setup, space.free)
    recompute = recomputes(shape, work, settings, space.free)
    device = device_bytes(setup, partition, recompute=recompute)
    device = {phase: count and count + streams for phase, count in device.items()}
    host = host_bytes(setup, partition, recompute=recompute)
    disk = disk_bytes(setup, stored_bytes, partition)
    waiting = waiting_bytes(shape, settings, stored_bytes)
    if setup.on_cpu:  # processes of a host divide its processors
        rate /= devices.of_host
    flops = block_flops(shape, work, settings, partition, devices.count)
    waits = {} if setup.on_cpu else block_waits(shape, work.of_device(devices.count), settings)
    seconds = {
        phase: count and shape.blocks * (count / rate + waits.get(phase, 0.0))
        for phase, count in flops.items()
    }
    read_and_written = streamed_bytes(shape, work.of_device(devices.count), settings)
    seconds["tuning of the model"] += read_and_written / DISK_RATE
    return Needs(setup, device, host, disk, waiting, seconds, partition, space, rate, read_and_written)


def rows_of(needs: Needs) -> list[tuple[str, str, str]]:
    """Return needs as rows of a table: what, how much, from what."""
    setup, shape, devices = needs.setup, needs.setup.shape, needs.setup.devices
    too_much = f": too much, {human(max(needs.room.free, 0.0), 'B')} may be taken"
    most = needs.room.free + (0 if setup.on_cpu else needs.room.waiting)
    parameters = shape.in_blocks + shape.stem_weights
    stream = human(setup.work.stream_bytes(shape.stream), "B")
    host = f"hidden states: {stream} a stream, {setup.data.hidden_states}"
    host += ", and all that the device needs" if setup.on_cpu else ""
    on_device = f"{setup.device.type}, one block at a time"
    which = "this CPU" if setup.on_cpu and devices.count == 1 else "a device"
    estimate = f"estimate, without evaluation, at {human(needs.rate, 'FLOP/s')} of {which}"
    if devices.count > 1:
        host += f"; {devices.of_host} processes"
        on_device += f", each of {devices.count}"
        estimate += f"; {devices.count} devices, without what they send each other"
    on_disk = setup.quantization.tuning.model.blocks == "disk"
    where = {"tuning of the model": ", blocks on disk"} if on_disk else {}
    traffic = f", {human(needs.streamed, 'B')} read and written at {human(DISK_RATE, 'B/s')}"
    on_its_way = {"tuning of the model": traffic} if needs.streamed else {}
    device = needs.device.items()
    largest = max(needs.waiting, key=needs.waiting.__getitem__)
    waiting = f", {largest}" if needs.waiting[largest] else ""
    of_block = max(one.block_weights for one in shape.kinds)
    blocks = f"{shape.blocks} blocks of {human(of_block)}"
    return [
        ("model", f"{human(parameters)} parameters", blocks),
        ("device memory", human(max(needs.device.values()), "B"), on_device),
        *(("", human(n, "B"), p + where.get(p, "") + too_much * (n > most)) for p, n in device if n),
        *(("", "divided", words) for words in portions_in_words(needs.partition, shape)),
        ("host memory", human(needs.host, "B"), host),
        ("disk", human(needs.disk, "B"), f"model, integers{waiting}"),
        ("time", duration(sum(needs.seconds.values())), estimate),
        *(("", duration(s), p + on_its_way.get(p, "")) for p, s in needs.seconds.items() if s),
    ]
