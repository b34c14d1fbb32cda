"""Run ``aespa-pl fit``, ``test`` and ``plan``, which begin with Lightning's Trainer."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

from aespa_pl.commands import evaluate, fit
from aespa_pl.commands.arguments import Arguments, Option
from aespa_pl.commands.effect import refuse_beside_packed, refuse_other_quantization, without_effect
from aespa_pl.commands.job import Job, checked, find_model
from aespa_pl.commands.keys import PLAN_DEVICE
from aespa_pl.commands.limits import check_evaluation, shortages, tuning_shortages
from aespa_pl.commands.output import CELL, print_results, quiet
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.target import for_target
from aespa_pl.commands.trainer_limits import check_tuning
from aespa_pl.commands.trainers import BlockTrainers, chosen_loggers, first_trainer
from aespa_pl.distributed.launch import end_with_launcher, launch, let_the_first_speak
from aespa_pl.distributed.processes import World
from aespa_pl.errors import UserError
from aespa_pl.models.headers import read_config
from aespa_pl.models.hub import here, is_local
from aespa_pl.paths import expanded
from aespa_pl.planning.estimate import needs_of, product_rate, rows_of
from aespa_pl.planning.shape import Devices, Setup
from aespa_pl.progress import PlainConsole, WalkProgress
from aespa_pl.resolve import resolved
from aespa_pl.run.find import LAST, find_run
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import can_read_settings, stored_quantization, stored_settings
from aespa_pl.settings import QuantizationSettings, Settings

MEASURING_SECONDS = 2.0  # in which the rate of the device is measured
MACHINE = re.compile(r"\s*(\d+\.?\d*)\s*GB\s*,\s*(\d+\.?\d*)\s*TFLOPS\s*")


def run(words: Sequence[str], interruption: Interruption) -> None:
    """Run ``fit``, ``test`` or ``plan``. Raises PeerLostError where another process of the run has ended."""
    end_with_launcher()
    torch.set_float32_matmul_precision("highest")  # whatever the environment says
    command, arguments = words[0], Arguments.read(words[1:])
    try:
        with quiet():
            if command == "plan":
                _plan(arguments)
            elif command == "test":
                _test(AespaCLI(arguments, command))
            else:
                _fit(AespaCLI(arguments, command), interruption)
    except (Exception, RunInterrupted):
        let_the_first_speak()
        raise


def quantize(parsed: AespaCLI, interruption: Interruption, console: Console) -> tuple[Run, dict[str, Any]]:
    """Quantize a model; return the run and its metrics. Whatever is raised, finished blocks stay on disk."""
    trainer, smoke = first_trainer(parsed), parsed.trainer_section.fast_dev_run
    resume = parsed.config.ckpt_path
    settings = _continued(parsed.settings, resume)
    devices = Devices(trainer.world_size, trainer.num_nodes)
    job = Job.prepare(settings, trainer.strategy.root_device, devices)
    # all of this before other processes start: most mistakes are noticed here
    chosen_loggers(parsed)
    check_tuning(trainer, parsed.trainer_section, job.quantization.tuning, job.work)
    world = _launch(trainer, console)
    with WalkProgress(console, terse=CELL in os.environ) as progress:
        if smoke:
            progress.say("smoke test (trainer.fast_dev_run): one block, few segments and steps, no model")
        local = is_local(job.model.pretrained)
        if resume in (None, LAST) and (
            idle := without_effect(parsed.arguments, job.quantization, local=local)
        ):
            progress.say(idle)
        if job.quantization.target is not None and resume in (None, LAST):
            world.from_first(partial(_check_inputs, job, job.setup(devices)))
        job, mixture = for_target(job, settings, resume, progress, world)
        job = _with_agreed_place(job, world)
        saved = parsed.text(job.quantization, job.model.revision)
        trainers = BlockTrainers(parsed, saved, trainer, interruption, progress, world, mixture)
        run, metrics = fit.fit(job, resume, trainers, one_block=smoke)
    trainers.show_result(asdict(job.quantization), metrics)
    return run, metrics


def _with_agreed_place(job: Job, world: World) -> Job:
    """Have the blocks of the end-to-end tuning on disk in all processes where they don't fit in one."""
    if not world.largest(int(job.quantization.tuning.model.blocks == "disk")):
        return job
    return replace(job, quantization=job.quantization.with_place("disk"))


def _check_inputs(job: Job, setup: Setup) -> None:
    """Notice before a choice, which takes minutes, what a run would refuse after it."""
    check_evaluation(job.evaluation(), setup, job.runs_folder, compares=True)
    fit.refuse_without_room(job, setup)


def _continued(settings: Settings, resume: str | None) -> Settings:
    """Return settings with what a run has found: the model's revision, and the place of the blocks."""
    if resume in (None, LAST):
        return settings
    run = Run.open(Path(resume))
    settings = _with_revision(settings, run)
    if settings.quantization.tuning.model.blocks != "auto":
        return settings
    place = stored_quantization(run).tuning.model.blocks
    return replace(settings, quantization=settings.quantization.with_place(place))


def _with_revision(settings: Settings, run: Run) -> Settings:
    """Return settings with the revision that a run has found of its model; another model has not that one."""
    if not can_read_settings(run):
        return settings
    model, known = settings.model, stored_settings(run.folder, run.fingerprint).model
    if known.pretrained != model.pretrained and model.revision == known.revision:
        return replace(settings, model=replace(model, revision=None))
    if known.pretrained == model.pretrained and model.revision is None:
        return replace(settings, model=replace(model, revision=known.revision))
    return settings


def _fit(parsed: AespaCLI, interruption: Interruption) -> None:
    if parsed.config.print_config:
        sys.stdout.write(parsed.text(_planned(parsed), parsed.settings.model.revision))
        return
    console = PlainConsole()
    run, metrics = quantize(parsed, interruption, console)
    if CELL in os.environ:
        return
    print_results(console, metrics, stored_quantization(run).method)
    if not parsed.trainer_section.fast_dev_run:
        console.print(f"quantized model: {run.model_folder}", soft_wrap=True)
    console.print(str(run.folder), soft_wrap=True)


def _planned(parsed: AespaCLI) -> QuantizationSettings:
    """Return the settings that a run would have; learning rates stay null where the model isn't here."""
    device, model = first_trainer(parsed).strategy.root_device, parsed.settings.model
    words = "types, bits and learning rates follow from what is chosen for quantization.target"
    if (folder := here(model.pretrained, model.revision)) is None:
        what = "is not on this machine, so learning rates that depend on its hidden size stay null"
        words = f"{model.pretrained} {what}"
    elif (found := checked(parsed.settings, device, read_config(folder)).quantization).target is None:
        return found
    logging.getLogger(__name__).warning("%s", words)
    return resolved(parsed.settings.quantization, device.type, width=None)


def _test(parsed: AespaCLI) -> None:
    trainer, console, model = first_trainer(parsed), PlainConsole(), parsed.settings.model
    device = trainer.strategy.root_device
    if (exported := evaluate.quantized_folder(model)) is not None:
        refuse_beside_packed(parsed.arguments, exported)
        metrics = evaluate.measure_exported(exported, model, parsed.settings.data, parsed.tasks, device)
        print_results(console, metrics, exported.name)
        return
    output = parsed.settings.output
    folder = find_run(parsed.config.ckpt_path or LAST, expanded(output.folder), output.name)
    found = Run.open(folder)
    job = Job.prepare(_with_revision(parsed.settings, found), device)
    refuse_other_quantization(parsed.arguments, job.quantization, found)
    world = _launch(trainer, console)
    with WalkProgress(console) as progress:
        run, metrics = evaluate.test(job, folder, parsed.tasks, progress, world)
    print_results(console, metrics, stored_quantization(run).method)
    console.print(str(run.folder), soft_wrap=True)


def _plan(arguments: Arguments) -> None:
    """Print what ``fit`` needs, and what of it this machine has too little of."""
    rented = _rented(arguments.last(PLAN_DEVICE))
    if rented:  # this machine need not have the device
        arguments = arguments.without("plan").then(Option("trainer.accelerator", "cpu"))
    parsed = AespaCLI(arguments, "plan")
    trainer = first_trainer(parsed)
    device = torch.device("cuda") if rented else trainer.strategy.root_device
    console = PlainConsole()
    settings = parsed.settings
    if settings.quantization.target is not None:
        with WalkProgress(console) as progress:
            before = Job.prepare(settings, trainer.strategy.root_device)
            chosen, mixture = for_target(before, settings, None, progress)
        for line in mixture.lines() if mixture else ():
            console.print(line, soft_wrap=True)
        types, bits_of = chosen.quantization.types, chosen.quantization.bits_of
        quantization = replace(settings.quantization, types=types, bits_of=bits_of)
        settings = replace(settings, quantization=quantization)
    if rented:
        settings = replace(settings, data=replace(settings.data, memory_gb=rented[0]))
    config = read_config(find_model(settings, device, weights=False))
    devices = Devices(trainer.world_size, trainer.num_nodes)
    job = checked(settings, device, config, devices=devices)
    check_tuning(trainer, parsed.trainer_section, job.quantization.tuning, job.work)
    setup = job.setup(devices)
    refused = tuning_shortages(setup)
    rate = rented[1] if rented else product_rate(device, job.shape.hidden, MEASURING_SECONDS)
    needs = needs_of(setup, stored_bytes=job.stored.itemsize, rate=rate)
    table = Table(show_header=False, box=None)
    for row in rows_of(needs):
        table.add_row(*row)
    console.print(table)
    for words in refused:
        console.print(f"fit refuses this: {words}", soft_wrap=True)
    for words in [] if rented else shortages(job.runs_folder, needs):
        console.print(f"too little here: {words}", soft_wrap=True)


def _rented(words: str | None) -> tuple[float, float] | None:
    """Return the GB and the operations a second of a device that a user describes; None: this machine's."""
    if words is None:
        return None
    parts = MACHINE.fullmatch(words)
    if parts is None or not float(parts[1]) * float(parts[2]):
        raise UserError(f"{PLAN_DEVICE} is {words}: expected such as '24 GB, 80 TFLOPS'")
    return float(parts[1]), 1e12 * float(parts[2])


def _launch(trainer: Trainer, console: Console) -> World:
    """Start the other processes; return all of them. Only the first one writes."""
    world = launch(trainer)
    if not world.is_first:
        console.quiet = True
        logging.getLogger("aespa_pl").setLevel(logging.ERROR)  # the first has the same warnings
    return world
