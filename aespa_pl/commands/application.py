"""Run ``aespa-pl fit`` and ``aespa-pl test``, which work through Lightning's Trainer.

The Python call quantizes by :func:`quantize` as well.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Trainer
from rich.console import Console

from aespa_pl.commands import evaluate, fit
from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.exported import measure_exported, quantized_folder
from aespa_pl.commands.job import Job
from aespa_pl.commands.loggers import Loggers
from aespa_pl.commands.output import PipeConsole, print_results, quiet_libraries, quiet_writers
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.trainers import BlockTrainers, check_tuning, first_trainer
from aespa_pl.distributed.launch import end_with_launcher, launch, let_the_first_speak
from aespa_pl.distributed.processes import PeerLostError, World
from aespa_pl.errors import EndedError
from aespa_pl.planning.shape import Devices
from aespa_pl.progress import WalkProgress
from aespa_pl.run.find import LAST
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.run.journal import Run

PEER_LOST = 1
"""Status of a process whose peers have ended; if a mistake was made, another process reports it."""


def run(words: Sequence[str], interruption: Interruption) -> None:
    """Run ``fit`` or ``test``. Raises EndedError where another process of the run has ended."""
    quiet_libraries()
    quiet_writers()
    end_with_launcher()
    torch.set_float32_matmul_precision("highest")  # whatever the environment says
    try:
        parsed = AespaCLI(Arguments.read(words[1:]), words[0])
        if words[0] == "test":
            _test(parsed)
        elif parsed.config.print_config:
            device = first_trainer(parsed).strategy.root_device.type
            sys.stdout.write(parsed.text(parsed.planned(device)))
        else:
            _fit(parsed, interruption)
    except PeerLostError as error:
        let_the_first_speak()
        raise EndedError(
            f"another process of this run has ended or cannot be reached: {error}", PEER_LOST
        ) from error
    except (Exception, RunInterrupted):
        let_the_first_speak()
        raise


def quantize(
    parsed: AespaCLI, interruption: Interruption, console: Console
) -> tuple[Run, dict[str, Any]]:
    """Quantize a model; return the run and its metrics. Whatever is raised, finished blocks stay on disk."""
    trainer, smoke_test = first_trainer(parsed), parsed.trainer_section.fast_dev_run
    job = Job.prepare(parsed.settings, trainer.strategy.root_device)
    # all of this before other processes start: most mistakes are noticed here
    saved, loggers = parsed.text(job.quantization), Loggers(parsed)
    check_tuning(trainer, parsed.trainer_section, job.quantization.tuning, job.work)
    world = _launch(trainer, console)
    with WalkProgress(console) as progress:
        if smoke_test:
            progress.say(
                "smoke test (trainer.fast_dev_run): one block, few segments and steps, no model"
            )
        run, metrics = fit.fit(
            job,
            parsed.config.ckpt_path,
            trainers=BlockTrainers(parsed, saved, trainer, loggers, interruption, progress, world),
            progress=progress,
            one_block=smoke_test,
            devices=Devices(trainer.world_size, trainer.num_nodes),
            world=world,
        )
    loggers.show_result(asdict(job.quantization), metrics)
    return run, metrics


def _fit(parsed: AespaCLI, interruption: Interruption) -> None:
    """Quantize, and print the results."""
    console = PipeConsole()
    run, metrics = quantize(parsed, interruption, console)
    print_results(console, metrics, evaluate.method_of(run))
    console.print(f"{metrics['seconds']['quantization']:.0f} s for the quantization")
    if not parsed.trainer_section.fast_dev_run:
        console.print(f"quantized model: {run.model_folder}", soft_wrap=True)
    console.print(str(run.folder), soft_wrap=True)


def _test(parsed: AespaCLI) -> None:
    """Measure, and print the results."""
    trainer, console, model = first_trainer(parsed), PipeConsole(), parsed.settings.model
    if (exported := quantized_folder(model)) is not None:
        device = trainer.strategy.root_device
        metrics = measure_exported(exported, model, parsed.settings.data, parsed.tasks, device)
        print_results(console, metrics, exported.name)
        return
    job = Job.prepare(parsed.settings, trainer.strategy.root_device)
    world = _launch(trainer, console)
    with WalkProgress(console) as progress:
        run, metrics = evaluate.test(
            job, parsed.config.ckpt_path or LAST, parsed.tasks, progress, world
        )
    print_results(console, metrics, evaluate.method_of(run))
    console.print(str(run.folder), soft_wrap=True)


def _launch(trainer: Trainer, console: Console) -> World:
    """Start the other processes; return all of them. Only the first one writes."""
    world = launch(trainer)
    if not world.is_first:
        console.quiet = True
        logging.getLogger("aespa_pl").setLevel(logging.ERROR)  # the first has the same warnings
    return world
