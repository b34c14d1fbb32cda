"""Starts the processes of a run through Lightning, and ends them with the first.

Lightning starts them when the first Trainer fits; ours divide the work from the statistics on, which
come before.
"""

import os
import threading
import time
from datetime import timedelta

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from aespa_pl.distributed.processes import Ranks
from aespa_pl.errors import UserError

LAUNCHER = "AESPA_PL_LAUNCHER"
"""Environment variable: the process that has started this one."""
LOOK_SECONDS = 0.2
"""Between two looks at whether it is still there."""
LONGEST_WAIT = timedelta(hours=2)
"""Of one process for another: the first may have to tokenize a long text."""


class RowsStrategy(DDPStrategy):
    """Lightning's processes, without its averages: each learns rows of its own."""

    def configure_ddp(self) -> None:
        """Leave the module as it is; DDP would make the rows of all processes those of the first."""


def launch(trainer: Trainer) -> Ranks:
    """Start the processes that a Trainer wants, unless they are running, and let them find each other.

    Raises:
        UserError: torchrun or SLURM has started another number of processes.
    """
    strategy = trainer.strategy
    started = int(os.environ.get("WORLD_SIZE", "1"))
    elastic = distributed.is_available() and distributed.is_torchelastic_launched()
    if elastic and started != trainer.world_size:
        raise UserError(
            f"torchrun has started {started} processes, but trainer.devices times "
            f"trainer.num_nodes is {trainer.world_size}: make them equal"
        )
    if trainer.world_size == 1 or strategy.launcher is None:
        return Ranks(device=strategy.root_device)
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        strategy.launcher.launch(strategy.setup_environment)
    except ValueError as error:
        raise UserError(f"trainer: {error}") from error
    finally:
        del os.environ[LAUNCHER]  # it is for these processes only, not for what they start
    return Ranks.current(strategy.root_device)


def environment_plugins(trainer: Trainer) -> list[SLURMEnvironment]:
    """Return what a block's Trainer has to know of where its processes come from.

    On SLURM's signal to requeue Lightning saves in the signal's handler, while the other processes may
    wait for this one elsewhere.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(
        strategy.cluster_environment, SLURMEnvironment
    ):
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def end_with_launcher() -> None:
    """If another process has started this one, end with it, however it ends.

    A process that waits for a device's answer or for others could not be stopped otherwise.
    """
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()
