"""Say what a run does to each block, and how long the rest of it takes."""

from collections.abc import Collection

from aespa_pl.models.family import BlockLayout, Role
from aespa_pl.planning.words import duration
from aespa_pl.run.schema import BlockRecord
from aespa_pl.settings import QuantizationSettings

PASSES = 4
"""Forward passes of a model that one epoch of its training takes as long as."""


def method_in_words(settings: QuantizationSettings, layout: BlockLayout) -> str:
    """Return how a run finds the integers of a block, and what it trains afterwards."""
    learned = [p for p in layout.projections if settings.learns(attention=p.role is not Role.OTHER)]
    steps = {"OPTQ": settings.optq.enabled, "coordinate descent": settings.polish.enabled}
    taken = [name for name, enabled in steps.items() if enabled]
    tuning = settings.tuning
    trained = [
        name
        for name, section in (("blocks", tuning.blocks), ("the model", tuning.model))
        if section.enabled
    ]
    if learned:
        text = f"rounding of {len(learned)} projections a block is learned"
    elif tuning.blocks.enabled and tuning.blocks.parametrization in ("clipping", "affine"):
        text = "integers are rounded to nearest on grids that are trained"
    else:
        text = f"integers are found by {' and '.join(taken) or 'rounding to nearest'}"
    if trained:
        text += f", then {' and '.join(trained)} are trained".replace(
            "then the model are", "then the model is"
        )
    return f"method {settings.method}: {text}"


def time_left(
    finished: Collection[BlockRecord], missing: int, blocks: int, epochs: int | None
) -> str:
    """Return how long the rest of a run takes, by the seconds of its finished blocks.

    Args:
        finished: Blocks that are quantized.
        missing: Number of blocks that are not.
        blocks: Number of blocks of the model.
        epochs: Epochs of the end-to-end tuning; None: there is none.
    """
    each = sum(sum(record.seconds.values()) for record in finished) / len(finished)
    seconds, what = missing * each, f"{missing} block{'s' if missing > 1 else ''}"
    if epochs is not None:
        forward = max(record.seconds.get("forward", 0.0) for record in finished)
        seconds += PASSES * epochs * blocks * forward
        what += " and the end-to-end tuning"
    return f"about {duration(seconds)} left for {what} (an estimate)"
