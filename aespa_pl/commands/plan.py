"""Run ``aespa-pl plan``: estimate the needs of ``fit`` from a model's config.json alone."""

from typing import Any

from aespa_pl.errors import UserError
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings

MEASURING_SECONDS = 30.0
"""Seconds of measurement on the device, from which the time is estimated."""
DEVICES = {"auto": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
"""The device of each value of trainer.accelerator; None: CUDA where there is one."""


def plan(  # noqa: PLR0917 - called by jsonargparse, by name
    model: ModelSettings | None = None,
    data: DataSettings | None = None,
    quantization: QuantizationSettings | None = None,
    output: OutputSettings | None = None,
    trainer: dict[str, Any] | None = None,
    seed_everything: bool | int = False,  # noqa: ARG001, FBT001, FBT002
    ckpt_path: str | None = None,  # noqa: ARG001
) -> None:
    """Estimate the memory, disk space and time that fit needs, with the same configurations and keys.

    It takes some 30 seconds and writes nothing.

    Args:
        model: --model.pretrained FOLDER is required.
        data: Keys as in fit --help.
        quantization: Keys as in fit --help.
        output: Keys as in fit --help.
        trainer: Only trainer.accelerator counts.
        seed_everything: Ignored.
        ckpt_path: Ignored.

    Raises:
        UserError: fit would refuse this.
    """
    if model is None:
        raise UserError("model.pretrained is missing")
    # What follows takes seconds to import, which --help does without.
    import torch  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from aespa_pl.commands import limits  # noqa: PLC0415
    from aespa_pl.commands.job import block_dtype  # noqa: PLC0415
    from aespa_pl.commands.output import quiet_libraries  # noqa: PLC0415
    from aespa_pl.models import family_of  # noqa: PLC0415
    from aespa_pl.models.headers import read_config  # noqa: PLC0415
    from aespa_pl.models.hub import resolve  # noqa: PLC0415
    from aespa_pl.planning.placement import resolved_data  # noqa: PLC0415
    from aespa_pl.planning.shape import Shape, Work  # noqa: PLC0415
    from aespa_pl.planning.table import needs_of, rows_of  # noqa: PLC0415
    from aespa_pl.resolve import resolved  # noqa: PLC0415

    quiet_libraries()
    data = data or DataSettings()
    output = output or OutputSettings()
    folder = limits.check_output(output)
    name = str((trainer or {}).get("accelerator", "auto"))
    if name not in DEVICES:
        raise UserError(f"trainer.accelerator is {name}: {', '.join(DEVICES)}")
    found = torch.cuda.is_available()
    device = torch.device(DEVICES[name] or ("cuda" if found else "cpu"))
    if device.type == "cuda" and not found:
        raise UserError(f"trainer.accelerator is {name}: torch finds no CUDA device, set it to cpu")
    config = read_config(resolve(model.pretrained, model.revision, weights=False))
    family = family_of(config)
    positions = family.positions(config)
    shape = Shape.of(config, family)
    quantization = resolved(quantization or QuantizationSettings(), device.type, shape.hidden)
    limits.check_lengths(data, positions, model.pretrained)
    limits.check_groups(shape, quantization)
    limits.check_histograms(output.histograms, family.layout(config))
    stored = getattr(config, "dtype", None) or torch.float32
    segments, length = data.calibration.segments, limits.calibration_length(data, positions)
    size = block_dtype(model, device, stored).itemsize
    data = resolved_data(data, quantization, shape, device, length=length, dtype_bytes=size)
    work = Work(segments, length, min(data.batch, segments), size)
    limits.refuse_tuning(shape, work, data, quantization, device)
    needs = needs_of(
        shape,
        work,
        data,
        quantization,
        device,
        stored_bytes=stored.itemsize,
        seconds=MEASURING_SECONDS,
    )
    console, table = Console(), Table(show_header=False, box=None)
    for row in rows_of(needs, shape, work, data, device):
        table.add_row(*row)
    console.print(table, highlight=False)
    missing = limits.shortages(
        device,
        folder,
        device_bytes=needs.most_on_device,
        host_bytes=needs.host,
        disk_bytes=needs.disk,
    )
    for words in missing:
        console.print(f"too little here: {words}", highlight=False, soft_wrap=True)
