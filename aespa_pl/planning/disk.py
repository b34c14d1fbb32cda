"""Compute the disk space of a run from shapes: what it leaves, and what waits there meanwhile."""

from aespa_pl.planning import tuning
from aespa_pl.planning.arithmetic import learned
from aespa_pl.planning.needs import hidden_bytes, value_bytes
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import FLOAT, Shape, Work
from aespa_pl.settings import QuantizationSettings

CHECKPOINT_BYTES = 3 * FLOAT
"""A checkpoint has this many bytes of a weight whose rounding is learned: the rounding variable and two
moments. It is there twice while one replaces another."""


def disk_bytes(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    *,
    stored_bytes: int,
    on_disk: bool,
    partition: Partition = WHOLE,
) -> int:
    """Return the bytes that a run leaves or holds on disk.

    Args:
        shape: Sizes of the model.
        work: Calibration text.
        settings: Settings of the quantization.
        stored_bytes: Bytes of each weight in the model's files.
        on_disk: Hidden states are kept in files.
        partition: The part of a block that is in memory at once; the rest is on disk.
    """
    model = (shape.blocks * shape.block_weights + shape.stem_weights) * stored_bytes
    integers = shape.blocks * shape.weights
    hidden = hidden_bytes(shape, work, settings) if on_disk else 0
    values = bool(partition.heads) * shape.layout.key_value_heads * value_bytes(shape, settings)
    waiting = waiting_bytes(shape, settings, stored_bytes=stored_bytes)
    return model + integers + max(waiting.values()) + hidden + values


def waiting_bytes(
    shape: Shape, settings: QuantizationSettings, *, stored_bytes: int
) -> dict[str, int]:
    """Return the bytes on disk while each part of a run is learned; no two of them are there at once.

    Args:
        shape: Sizes of the model.
        settings: Settings of the quantization.
        stored_bytes: Bytes of each weight in the model's files.
    """
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    of_block = 2 * CHECKPOINT_BYTES * learning
    if settings.tuning.blocks.enabled:  # beside its checkpoints wait the integers that were learned
        of_block = max(of_block, 2 * tuning.CHECKPOINT_BYTES * shape.weights + learning)
    found = {"two checkpoints of a block": of_block}
    if settings.tuning.model.enabled:
        replaced = shape.block_weights * stored_bytes + shape.weights
        if settings.tuning.model.integer_rate:
            integers = shape.blocks * shape.weights
            checkpoints = max(replaced, 2 * tuning.CHECKPOINT_BYTES * integers)
            found["two checkpoints of the end-to-end tuning"] = checkpoints + integers
        else:
            found["a block that replaces another"] = replaced
    return found
