"""A walk is stopped and saved by the Trainer options that the command line adds."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from aespa_pl.run.checkpointing import JournaledCheckpointIO, StopAtIteration, checkpoints
from aespa_pl.run.folder import Training
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from tests.walks import BASE

LAST = BASE.rounding.iterations


def whole_block(index: int) -> Training:
    """Return what the tests' OPT learns together: all projections of a block."""
    return Training(index, "q_proj, k_proj, v_proj, out_proj, fc1, fc2 in torch.float32", f"block_{index:03}")


EVERY_FIVE = OutputSettings(checkpoint_iterations=5, checkpoint_seconds=None)


def options(
    interruption: Interruption,
    before: list[Callback],
    after: list[Callback],
    output: OutputSettings = EVERY_FIVE,
) -> Callable[[Run, Training], dict[str, Any]]:
    """Return what the command line adds to each block's Trainer, and callbacks around it."""

    def make(run: Run, training: Training) -> dict[str, Any]:
        folder = run.checkpoint_folder(training.block)
        stop = StopAtIteration(interruption, folder)
        saving = checkpoints(output, folder)
        plugins = [JournaledCheckpointIO(run, training, folder)]
        return {
            "callbacks": [*before, stop, *after, *saving],
            "plugins": plugins,
            "enable_checkpointing": bool(saving),
        }

    return make
