"""Estimate the needs of ``fit`` from a model's config.json alone, and refuse what ``fit`` refuses."""

import torch
from rich.console import Console
from rich.table import Table

from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.checked import Checked, checked, find_model
from aespa_pl.commands.limits import shortages, tuning_shortages
from aespa_pl.commands.output import quiet_libraries
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.trainer_section import TRAINER_KEYS
from aespa_pl.commands.trainers import check_trainer, check_tuning, first_trainer
from aespa_pl.models.headers import read_config
from aespa_pl.planning.arithmetic import product_rate
from aespa_pl.planning.division import Devices
from aespa_pl.planning.table import Needs, needs_of, rows_of

MEASURING_SECONDS = 2.0
"""Seconds in which the rate of the device is measured."""


def estimate(arguments: Arguments) -> None:
    """Print what ``fit`` needs, and what of it this machine has too little of.

    Raises:
        UserError: fit would refuse this with any memory.
    """
    quiet_libraries()
    job, devices = _job(AespaCLI(arguments, "plan"))
    given = (job.shape, job.work, job.data, job.quantization, job.device)
    refused = tuning_shortages(*given, devices=devices)
    rate = product_rate(job.device, job.shape.hidden, MEASURING_SECONDS)
    needs = needs_of(
        job.shape,
        job.work,
        job.data,
        job.quantization,
        job.device,
        stored_bytes=job.stored.itemsize,
        rate=rate,
        devices=devices,
    )
    console, table = Console(), Table(show_header=False, box=None)
    for row in rows_of(needs, job.shape, job.work, job.data, job.device):
        table.add_row(*row)
    console.print(table, highlight=False)
    for words in refused:
        console.print(f"fit refuses this: {words}", highlight=False, soft_wrap=True)
    for words in _missing(job, needs):
        console.print(f"too little here: {words}", highlight=False, soft_wrap=True)


def _job(parsed: AespaCLI) -> tuple[Checked, Devices]:
    """Return the settings, checked as ``fit`` checks them, and the devices that they ask for.

    Raises:
        UserError: fit would refuse them.
    """
    settings = parsed.settings
    check_trainer({**TRAINER_KEYS, **settings.trainer})
    trainer = first_trainer(parsed.instantiate_trainer, settings.trainer)
    device = trainer.strategy.root_device
    given = (settings.model, settings.quantization, settings.output, device)
    config = read_config(find_model(*given, weights=False))
    job = checked(
        settings.model,
        settings.data,
        settings.quantization,
        settings.output,
        device,
        config=config,
        stored=getattr(config, "dtype", None) or torch.float32,
    )
    check_tuning(trainer, settings.trainer, job.quantization.tuning, job.work)
    devices = Devices(trainer.world_size, trainer.num_nodes)
    return job, devices


def _missing(job: Checked, needs: Needs) -> list[str]:
    return shortages(
        job.device,
        job.runs_folder,
        device_bytes=needs.most_on_device,
        host_bytes=needs.host,
        disk_bytes=needs.disk,
    )
