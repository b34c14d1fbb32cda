"""Collect all records of a quantized block: measurements, curves and words."""

import logging
import math
from collections.abc import Collection, Mapping

from aespa_pl.algorithm.quantizer import quantize
from aespa_pl.block.quantized import QuantizedBlock
from aespa_pl.curve_names import DESCENT, NOT_NEAREST, tag
from aespa_pl.distributed.processes import World
from aespa_pl.measure import duration
from aespa_pl.models.family import BlockLayout, Role
from aespa_pl.run.schema import BlockRecord, TuningRecord
from aespa_pl.settings import QuantizationSettings
from aespa_pl.tuning.tune import Tuned
from aespa_pl.walk.collect import Streams

log = logging.getLogger(__name__)

Losses = Mapping[str, Mapping[str, int | float]]  # what ``losses_of`` returns, by projection
PASSES = 8
"""Forward passes of all blocks that an epoch of the end-to-end tuning takes as long as; 10 were measured on a
model of 3 blocks, where the head weighs more than in others."""


def losses_of(block: QuantizedBlock) -> dict[str, dict[str, float]]:
    """Return what was measured on each projection: losses, moved integers, damping and more."""
    found = {}
    for name, p in block.projections.items():
        for key, phase in (("extra_damping", "the update"), ("correction_damping", "the correction")):
            if p.measured.get(key):
                log.warning(
                    "block %d, %s: %s needed %g of the Hessian's mean diagonal as extra damping",
                    block.index, name, phase, p.measured[key],
                )  # fmt: skip
        nearest = quantize(p.weight, p.grid)
        found[name] = {
            "nearest": float(p.loss(nearest).sum()),
            "final": float(p.loss(p.integers).sum()),
            NOT_NEAREST: int((p.integers != nearest).count_nonzero()) / nearest.numel(),
            **p.measured,
        }
    return found


def descent_curves(block: QuantizedBlock, losses: Losses) -> list[dict[str, float]]:
    """Return the points of each projection's loss, relative to nearest rounding's, by pass of the descent."""
    # the first is of what the descent began with; projections that took fewer passes have fewer points
    nearest = {name: measured["nearest"] for name, measured in losses.items() if measured["nearest"] > 0}
    curves = {
        tag(DESCENT, name): [loss / value for loss in block.projections[name].descent]
        for name, value in nearest.items()
    }
    steps = max(map(len, curves.values()), default=0)
    return [{name: x[step] for name, x in curves.items() if step < len(x)} for step in range(steps)]


def output_error(streams: Streams, width: int, world: World) -> float:
    """Return ``||output - original||^2 / ||original||^2`` of the block that both streams have just passed.

    The hidden states are the first ``width`` columns of a stream.
    """
    error = size = 0.0
    if streams.own and streams.original:
        for i in range(len(streams.quantized)):
            original = streams.original[i][..., :width].float()
            error += float((streams.quantized[i][..., :width].float() - original).square().sum())
            size += float(original.square().sum())
    error, size = world.sum(error), world.sum(size)  # of the segments of all processes
    return error / size if size > 0 else 0.0


def tuning(found: Tuned) -> TuningRecord:
    """Return what the journal tells of a tuning; JSON has no numbers that are not finite."""
    known = {name: getattr(found, name) for name in TuningRecord.model_fields}
    errors = {name: None for name in ("start_error", "error") if not math.isfinite(known[name])}
    return TuningRecord(**known | errors)


def tuning_curves(found: Tuned, measure: str = "error") -> dict[str, float]:
    """Return what a tuning found as points of curves; ``measure`` names what its errors are."""
    return {
        f"tuning/{measure}_before": found.start_error,
        f"tuning/{measure}_after": found.error,
        "tuning/changed": found.changed,
    }


def tuning_words(found: Tuned) -> str:
    """Return what a tuning found in words."""
    text = f"tuning took the error on held-back text from {found.start_error:.5g} to {found.error:.5g}"
    if not found.epoch:
        text = "tuning found nothing better on held-back text than the start, which is kept"
    elif found.error == found.start_error:  # of a feed-forward network, tuned behind its attention
        text = "tuning found something better on held-back text for the attention alone"
    if found.epoch and found.changed:
        text += f" and changed {100 * found.changed:.1f} % of the integers"
    if not found.finite:
        text += "; it ended where the loss was not a finite number, lower its learning rates"
    return text


def curves(losses: Losses, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return a block's losses and seconds of each phase as points of curves over the blocks."""
    points = {}
    for name, measured in losses.items():
        if measured["nearest"] > 0:
            points[f"loss_relative_to_nearest/{name}"] = measured["final"] / measured["nearest"]
        if measured.get("before_polish", 0) > 0:
            points[f"polish_loss_of_before/{name}"] = measured["final"] / measured["before_polish"]
            points[f"polish_changed/{name}"] = measured["polish_changed"]
            points[f"polish_passes/{name}"] = measured["polish_passes"]
    return points | {f"seconds/{phase}": value for phase, value in seconds.items()}


def line(index: int, blocks: int, losses: Losses, seconds: float) -> str:
    """Return one line about a finished block, and the seconds that it took."""
    measured, text = losses.values(), f"block {index} of {blocks}: "
    if not measured:
        return f"{text}its projections are kept, {seconds:.1f} s"
    if all("polish_changed" in x for x in measured):
        changed = sum(x["polish_changed"] for x in measured)
        passes = max(x["polish_passes"] for x in measured)
        text += f"polish changed {changed} integers in {passes} passes; "
    shares = [x["final"] / x["nearest"] for x in measured if x["nearest"] > 0]
    mean = sum(shares) / max(1, len(shares))
    return f"{text}loss {mean:.3f} of nearest rounding's, {seconds:.1f} s"


def few_tokens(index: int, losses: Losses) -> str | None:
    """Say which part of a block's experts few tokens have reached; None where all have seen enough."""
    experts = [measured for measured in losses.values() if "layer_share" in measured]
    few = [measured for measured in experts if measured["layer_share"] > 0]
    if not few:
        return None
    least, most = min(x["tokens"] for x in few), max(x["layer_share"] for x in few)
    return (
        f"block {index}: {len(few)} of {len(experts)} matrices of experts have seen fewer tokens than they "
        f"have columns, the fewest {least:.0f}: up to {100 * most:.0f} % of their Hessians are of all tokens"
    )


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


def time_left(finished: Collection[BlockRecord], blocks: int, epochs: int | None) -> str:
    """Return how long a run still takes, by its finished blocks; ``epochs`` are the end-to-end tuning's."""
    each, missing = sum(sum(x.seconds.values()) for x in finished) / len(finished), blocks - len(finished)
    seconds, what = missing * each, f"{missing} block{'s' if missing > 1 else ''}"
    if epochs is not None:
        forward = max(record.seconds.get("forward", 0.0) for record in finished)
        seconds += PASSES * epochs * blocks * forward
        what += " and the end-to-end tuning"
    return f"about {duration(seconds)} left for {what} (an estimate)"
