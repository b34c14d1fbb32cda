"""Start the processes of a run through Lightning before its first Trainer fits; end them with the first."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import distributed

from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError

log = logging.getLogger(__name__)

LAUNCHER = "AESPA_PL_LAUNCHER"  # environment variable with the id of the process that has started this one
LOOK_SECONDS = 0.2  # between two looks at whether the process that started this one is still there
FIRST_TO_SPEAK_SECONDS = 10.0  # that the others wait with an error, so that the first reports it once for all
LONGEST_ARRIVAL = 600  # seconds until a process gives up on others; a cluster may start nodes minutes apart
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
LONGEST_WAIT = timedelta(hours=2)  # of one process for another: the first may have to tokenize a long text


class RowsStrategy(DDPStrategy):
    """Takes Lightning's processes without its averages, because each learns rows of its own."""

    def configure_ddp(self) -> None:
        """Leave the module as it is; DDP would give the rows of the first process to all."""


def launch(trainer: Trainer) -> World:
    """Start the processes that a Trainer wants, unless they are running, and let them find each other.

    Raises UserError where torchrun or SLURM has started another number of processes.
    """
    strategy = trainer.strategy
    if strategy.root_device.type == "cuda":  # until the first Trainer fits, "the" device would be the first
        torch.cuda.set_device(strategy.root_device)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    elastic = distributed.is_available() and distributed.is_torchelastic_launched()
    if elastic and started != trainer.world_size:
        raise UserError(
            f"torchrun has started {started} processes, but trainer.devices times "
            f"trainer.num_nodes is {trainer.world_size}: make them equal"
        )
    if trainer.world_size == 1 or strategy.launcher is None:
        return World(device=strategy.root_device)
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        if trainer.num_nodes > 1:
            log.warning(
                "waiting up to %d minutes for %d processes (trainer.devices times trainer.num_nodes): start "
                "the others too, or correct trainer.num_nodes",
                LONGEST_ARRIVAL // 60,
                trainer.world_size,
            )
        with waiting_for_others():
            strategy.launcher.launch(strategy.setup_environment)
    except ValueError as error:
        raise UserError(f"trainer: {error}") from error
    finally:
        del os.environ[LAUNCHER]  # it is for these processes only, not for what they start
    return World(distributed.get_rank(), distributed.get_world_size(), strategy.root_device)


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Let signals end this process at once in this context, and an alarm after LONGEST_ARRIVAL."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # torch waits for the other processes in its own code, where Python calls no handler
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heard}
    signal.alarm(LONGEST_ARRIVAL)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def environment_plugins(trainer: Trainer) -> list[SLURMEnvironment]:
    """Return the plugins that tell a block's Trainer where its processes come from."""
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.cluster_environment, SLURMEnvironment):
        # to requeue, Lightning would save in the signal's handler, while other processes may wait elsewhere
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def end_with_launcher() -> None:
    """End with the process that has started this one, if there is one, however it ends."""

    def watch(launcher: int) -> None:  # also while this one waits for a device's answer or for others
        while os.getppid() == launcher:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    if launcher := os.environ.pop(LAUNCHER, None):
        threading.Thread(target=watch, args=(int(launcher),), daemon=True, name="end-with-launcher").start()


def let_the_first_speak() -> None:
    """Wait in every process but the first, which reports what all of them have met."""
    if getattr(rank_zero_only, "rank", 0):
        time.sleep(FIRST_TO_SPEAK_SECONDS)
