"""A walk is stopped and saved by the Trainer options that the command line adds."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from aespa_pl.planning.partition import HeadRange, Portion
from aespa_pl.run.checkpointing import JournaledCheckpointIO, StopAtIteration, checkpoints
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from tests.walks import BASE

LAST = BASE.rounding.iterations


HEADS = 4
"""Number of heads of the tests' OPT."""


def whole_block(index: int) -> Portion:
    """Return what the tests' OPT learns together: all projections of a block."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    heads = {"q_proj": HEADS, "k_proj": HEADS, "v_proj": HEADS}
    ranges = (HeadRange(name, 0, heads.get(name, 1), heads.get(name, 1)) for name in names)
    return Portion(index, 0, tuple(ranges))


EVERY_FIVE = OutputSettings(checkpoint_iterations=5, checkpoint_seconds=None)


def options(
    interruption: Interruption,
    before: list[Callback],
    after: list[Callback],
    output: OutputSettings = EVERY_FIVE,
) -> Callable[[Run, Portion], dict[str, Any]]:
    """Return what the command line adds to each block's Trainer, and callbacks around it."""

    def make(run: Run, portion: Portion) -> dict[str, Any]:
        folder = run.checkpoint_folder(portion.block)
        stop = StopAtIteration(interruption, folder)
        saving = checkpoints(output, folder)
        plugins = [JournaledCheckpointIO(run, portion)]
        return {
            "callbacks": [*before, stop, *after, *saving],
            "plugins": plugins,
            "enable_checkpointing": bool(saving),
        }

    return make
