"""Say what a run does to each block, and how long the rest of it takes."""

from collections.abc import Collection

from aespa_pl.measure import duration
from aespa_pl.models.family import BlockLayout, Role
from aespa_pl.run.schema import BlockRecord
from aespa_pl.settings import QuantizationSettings

PASSES = 8
"""Forward passes of all blocks that an epoch of the end-to-end tuning takes as long as; 10 were measured on a
model of 3 blocks, where the head weighs more than in others."""


def method_in_words(settings: QuantizationSettings, layout: BlockLayout) -> str:
    """Return how a run finds the integers of a block, and what it trains afterwards."""
    learned = [p for p in layout.projections if settings.learns(attention=p.role is not Role.OTHER)]
    steps = {"OPTQ": settings.optq.enabled, "coordinate descent": settings.polish.enabled}
    taken = [name for name, enabled in steps.items() if enabled]
    blocks, model = settings.tuning.blocks, settings.tuning.model
    on_grids = blocks.enabled and blocks.parametrization in ("clipping", "affine")
    if learned:
        text = f"rounding of {len(learned)} projections a block is learned"
    elif on_grids:
        text = "integers are rounded to nearest on grids that are trained block by block"
    else:
        text = f"integers are found by {' and '.join(taken) or 'rounding to nearest'}"
    if blocks.enabled and not on_grids:
        text += ", then blocks and the model are trained" if model.enabled else ", then blocks are trained"
    elif model.enabled:
        text += ", then the model is trained"
    if model.enabled and model.blocks == "disk":
        what = "with" if model.integer_rate else "of the model scales and norms, with"
        text += f" ({what} its blocks read from disk)"
    return f"method {settings.method}: {text}"


def time_left(finished: Collection[BlockRecord], missing: int, blocks: int, epochs: int | None) -> str:
    """Return how long the rest of a run takes, by the seconds of its ``finished`` blocks.

    So many are ``missing`` of all ``blocks``; without an end-to-end tuning it has no ``epochs``.
    """
    each = sum(sum(record.seconds.values()) for record in finished) / len(finished)
    seconds, what = missing * each, f"{missing} block{'s' if missing > 1 else ''}"
    if epochs is not None:
        forward = max(record.seconds.get("forward", 0.0) for record in finished)
        seconds += PASSES * epochs * blocks * forward
        what += " and the end-to-end tuning"
    return f"about {duration(seconds)} left for {what} (an estimate)"
