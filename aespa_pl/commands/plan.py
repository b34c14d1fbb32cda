"""Run ``aespa-pl plan``: estimate the needs of ``fit`` from a model's config.json alone."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.table import Table

from aespa_pl.commands.arguments import PLAN_DEVICE, Arguments, Option
from aespa_pl.commands.job import checked, find_model
from aespa_pl.commands.limits import shortages, tuning_shortages
from aespa_pl.commands.output import PipeConsole, quiet_libraries
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.trainers import check_tuning, first_trainer
from aespa_pl.errors import UserError
from aespa_pl.models.headers import read_config
from aespa_pl.planning.arithmetic import product_rate
from aespa_pl.planning.shape import Devices
from aespa_pl.planning.table import needs_of, rows_of
from aespa_pl.run.interruption import Interruption

MEASURING_SECONDS = 2.0
"""Seconds in which the rate of the device is measured."""
MACHINE = re.compile(r"\s*(\d+\.?\d*)\s*GB\s*,\s*(\d+\.?\d*)\s*TFLOPS\s*")


def run(words: Sequence[str], interruption: Interruption) -> None:  # noqa: ARG001 - as all commands
    """Print what ``fit`` needs, and what of it this machine has too little of."""
    quiet_libraries()
    arguments = Arguments.read(words[1:])
    rented = _rented(arguments.last(PLAN_DEVICE))
    if rented:  # this machine need not have the device
        arguments = arguments.without("plan").then(Option("trainer.accelerator", "cpu"))
    parsed = AespaCLI(arguments, "plan")
    trainer = first_trainer(parsed)
    device = torch.device("cuda") if rented else trainer.strategy.root_device
    settings = parsed.settings
    if rented:
        settings = replace(settings, data=replace(settings.data, memory_gb=rented[0]))
    config = read_config(find_model(settings, device, weights=False))
    job = checked(settings, device, config)
    check_tuning(trainer, parsed.trainer_section, job.quantization.tuning, job.work)
    setup = job.setup(Devices(trainer.world_size, trainer.num_nodes))
    refused = tuning_shortages(setup)
    rate = rented[1] if rented else product_rate(device, job.shape.hidden, MEASURING_SECONDS)
    needs = needs_of(setup, stored_bytes=job.stored.itemsize, rate=rate)
    console, table = PipeConsole(), Table(show_header=False, box=None)
    for row in rows_of(needs):
        table.add_row(*row)
    console.print(table)
    lines = [f"fit refuses this: {words}" for words in refused]
    if not rented:
        lines += [f"too little here: {words}" for words in shortages(job.runs_folder, needs)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _rented(words: str | None) -> tuple[float, float] | None:
    """Return the GB and the operations a second of a device that a user describes; None: this machine's."""
    if words is None:
        return None
    parts = MACHINE.fullmatch(words)
    if parts is None or not float(parts[1]) * float(parts[2]):
        raise UserError(f"{PLAN_DEVICE} is {words}: expected such as '24 GB, 80 TFLOPS'")
    return float(parts[1]), 1e12 * float(parts[2])
