"""Run ``aespa-pl fit`` and ``aespa-pl test``, which work through Lightning's Trainer.

The Python call quantizes by :func:`quantize` as well.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console

from aespa_pl.commands import evaluate, fit
from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.ending import ENDINGS, EndedError
from aespa_pl.commands.exported import measure_exported, quantized_folder
from aespa_pl.commands.job import Job
from aespa_pl.commands.loggers import Loggers
from aespa_pl.commands.output import PipeConsole, print_results, quiet_libraries, quiet_writers
from aespa_pl.commands.resuming import note_own
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.trainer_section import TRAINER_KEYS
from aespa_pl.commands.trainers import BlockTrainers, check_trainer, check_tuning, first_trainer
from aespa_pl.distributed.launch import end_with_launcher, launch, let_the_first_speak
from aespa_pl.distributed.processes import PeerLostError, World
from aespa_pl.planning.shape import Devices
from aespa_pl.progress import WalkProgress
from aespa_pl.run.find import LAST
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import TaskSettings
from aespa_pl.storage.files import write_text

PEER_LOST = 1
"""Status of a process whose peers have ended; if a mistake was made, another process reports it."""


def run(words: Sequence[str], interruption: Interruption) -> None:
    """Run ``fit`` or ``test``.

    Raises UserError where something that the user gave can't work. Raises EndedError where another process of
    the run has ended.
    """
    quiet_libraries()
    quiet_writers()
    end_with_launcher()
    torch.set_float32_matmul_precision("highest")  # whatever the environment says
    try:
        parsed = AespaCLI(Arguments.read(words[1:]), words[0])
        if words[0] == "test":
            _test(parsed)
        elif parsed.config.print_config:
            sys.stdout.write(
                parsed.text(parsed.planned(_first_trainer(parsed).strategy.root_device.type))
            )
        else:
            _fit(parsed, interruption)
    except PeerLostError as error:
        let_the_first_speak()
        raise EndedError(
            f"another process of this run has ended or cannot be reached: {error}", PEER_LOST
        ) from error
    except ENDINGS:
        let_the_first_speak()
        raise


def quantize(
    parsed: AespaCLI, interruption: Interruption, console: Console
) -> tuple[Run, dict[str, Any]]:
    """Quantize a model; return the run and its metrics.

    Raises UserError where something that the user gave can't work; finished blocks stay on disk.
    """
    settings, trainer = parsed.settings, _first_trainer(parsed)
    job = _job(parsed, trainer)  # before other processes: most mistakes are noticed here
    saved = parsed.text(job.quantization)
    check_tuning(trainer, settings.trainer, job.quantization.tuning, job.work)
    loggers = Loggers(
        parsed.config.trainer.logger, lambda chosen: parsed.new_section(logger=chosen).logger
    )
    world = _launch(trainer, console)

    def begin(run: Run) -> list[Logger]:
        write_text(run.folder / "config.yaml", saved)
        note_own(run.folder)
        interruption.run_folder = run.folder
        interruption.how_to_continue = how_to_continue(run.folder)
        return loggers.begin(run, saved)

    with WalkProgress(console) as progress:
        if settings.trainer.fast_dev_run:
            progress.say(
                "smoke test (trainer.fast_dev_run): one block, few segments and steps, no model"
            )
        trainers = BlockTrainers(
            begin=begin,
            section=lambda: parsed.new_section(logger=False),
            loggers=loggers.of,
            instantiate=parsed.instantiate_trainer,
            first=trainer,
            output=settings.output,
            iterations=settings.quantization.rounding.iterations,
            interruption=interruption,
            progress=progress,
            world=world,
        )
        run, metrics = fit.fit(
            job,
            settings.ckpt_path,
            trainers=trainers,
            progress=progress,
            one_block=settings.trainer.fast_dev_run,
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
    if not parsed.settings.trainer.fast_dev_run:
        console.print(f"quantized model: {run.model_folder}", soft_wrap=True)
    console.print(str(run.folder), soft_wrap=True)


def _test(parsed: AespaCLI) -> None:
    """Measure, and print the results."""
    s, trainer, console = parsed.settings, _first_trainer(parsed), PipeConsole()
    tasks = TaskSettings(**{key.name: s[key.name] for key in fields(TaskSettings)})
    if (exported := quantized_folder(s.model)) is not None:
        device = trainer.strategy.root_device
        metrics = measure_exported(exported, s.model, s.data, tasks, device)
        print_results(console, metrics, exported.name)
        return
    job = _job(parsed, trainer)
    world = _launch(trainer, console)
    with WalkProgress(console) as progress:
        run, metrics = evaluate.test(job, s.ckpt_path or LAST, tasks, progress, world)
    print_results(console, metrics, evaluate.method_of(run))
    console.print(str(run.folder), soft_wrap=True)


def _first_trainer(parsed: AespaCLI) -> Trainer:
    """Return a Trainer that knows the device and the processes; each block gets its own later."""
    section = parsed.settings.trainer
    check_trainer({**TRAINER_KEYS, **section})
    return first_trainer(parsed.instantiate_trainer, section)


def _job(parsed: AespaCLI, trainer: Trainer) -> Job:
    s = parsed.settings
    return Job.prepare(s.model, s.data, s.quantization, s.output, trainer.strategy.root_device)


def _launch(trainer: Trainer, console: Console) -> World:
    """Start the other processes; return all of them. Only the first one writes."""
    world = launch(trainer)
    if not world.is_first:
        console.quiet = True
        logging.getLogger("aespa_pl").setLevel(logging.ERROR)  # the first has the same warnings
    return world
