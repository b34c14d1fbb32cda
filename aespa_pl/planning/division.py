"""Say how much of a block each of several devices does, where its rows are divided (docs/devices.md)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from aespa_pl.models.family import Role
from aespa_pl.planning.arithmetic import (
    Visits,
    block_flops,
    block_visits,
    learned,
    learning_flops,
    shared_factor_flops,
    value_factor_flops,
)
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Matrix, Shape, Work
from aespa_pl.settings import QuantizationSettings


@dataclass(frozen=True)
class Devices:
    """Says how many devices a run has."""

    count: int = 1
    hosts: int = 1

    @property
    def of_host(self) -> int:
        """Return the number of devices of a host."""
        return math.ceil(self.count / self.hosts)


ONE_DEVICE = Devices()
"""A single device."""


def device_flops(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    devices: int,
    partition: Partition = WHOLE,
) -> dict[str, float]:
    """Return the operations of one block on the device that has most to do, by phase.

    Segments are divided for the forward passes, the statistics and the tuning; rows for the rest, and heads
    where the rows of a head depend on each other.
    """
    flops = block_flops(shape, work.of_device(devices), settings, partition)
    shares = row_shares(shape, settings, devices)
    for phase, share in shares.items():
        flops[phase] *= share
    if settings.optq.enabled:
        # the share is that of the products; each device factors a Hessian that all rows share
        products = sum(m.product_flops for m in shape.matrices)
        heads = shape.layout.key_value_heads
        flops["OPTQ"] = products * shares["OPTQ"]
        flops["OPTQ"] += shared_factor_flops(shape)
        flops["OPTQ"] += value_factor_flops(shape) * math.ceil(heads / devices) / heads
    return flops


def device_visits(shape: Shape, settings: QuantizationSettings, devices: int) -> Visits:
    """Return the visits of a block's weights on the device that has most to do."""
    visits, shares = block_visits(shape, settings), row_shares(shape, settings, devices)
    return Visits(
        compared=visits.compared * shares["grid"],
        updated=visits.updated * shares["OPTQ"],
        polished=visits.polished * shares["polish"],
        coupled=visits.coupled * shares["polish"],
    )


def row_shares(shape: Shape, settings: QuantizationSettings, devices: int) -> dict[str, float]:
    """Return the largest share of the rows that a device gets, in each phase that divides them."""

    def mean(operations: Iterable[tuple[Matrix, float]], *, coupled: bool) -> float:
        done, total = 0.0, 0.0
        for matrix, count in operations:
            total += count
            done += count * _share(matrix, shape, devices, coupled=coupled)
        return done / total if total else 1.0

    products = [(m, float(m.product_flops)) for m in shape.matrices]
    learning = [(m, learning_flops(m, shape)) for m in shape.matrices if learned(m, settings)]
    # the search and OPTQ know no G: of them only V goes by heads
    searched = mean(products, coupled=False)
    return {
        "grid": searched,
        "OPTQ": searched,
        "rounding": mean(learning, coupled=True),
        "polish": mean(products, coupled=True),
    }


def _share(matrix: Matrix, shape: Shape, devices: int, *, coupled: bool) -> float:
    """Return the largest share of a matrix's rows that a device gets."""
    units = matrix.rows
    if matrix.role is Role.VALUE or (coupled and matrix.role is Role.KEY):
        units = shape.layout.key_value_heads
    elif coupled and matrix.role is Role.QUERY:
        units = shape.layout.heads
    return math.ceil(units / devices) / units
