"""Check settings against a model's config.json and the device, in ``fit``, ``test`` and ``plan`` alike."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from aespa_pl.commands.block_types import block_types, check_format
from aespa_pl.commands.limits import (
    calibration_length,
    check_bits_of,
    check_groups,
    check_histograms,
    check_lengths,
    check_output,
    evaluation_length,
)
from aespa_pl.models import family_of
from aespa_pl.models.family import Family
from aespa_pl.models.hub import resolve
from aespa_pl.planning.budget import resolved_data
from aespa_pl.planning.shape import ONE_DEVICE, Devices, Setup, Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings


@dataclass(frozen=True)
class Checked:
    """Holds settings that fit a model's config.json and the device; made by :func:`checked`."""

    model: ModelSettings
    data: DataSettings
    """Settings of the data; none is auto any more."""
    quantization: QuantizationSettings
    """Settings in which the method has replaced every null, and the device every auto."""
    output: OutputSettings
    device: torch.device
    config: PreTrainedConfig
    stored: torch.dtype
    """Type of the weights in the model's files."""

    @property
    def family(self) -> Family:
        """Return what is known of the model's family."""
        return family_of(self.config)

    @property
    def shape(self) -> Shape:
        """Return the sizes of the model, from which its needs follow."""
        return Shape.of(self.config, self.family)

    @property
    def work(self) -> Work:
        """Return the amount of calibration text."""
        return Work(
            self.data.calibration.segments,
            self.segment_length,
            min(self.data.batch, self.data.calibration.segments),
            self.dtype.itemsize,
        )

    def setup(self, devices: Devices = ONE_DEVICE) -> Setup:
        """Return what the needs of a run on these devices follow from."""
        return Setup(self.shape, self.work, self.data, self.quantization, self.device, devices)

    @property
    def segment_length(self) -> int:
        """Return the number of tokens in a calibration segment."""
        return calibration_length(self.data, self.family.positions(self.config))

    @property
    def evaluation_length(self) -> int:
        """Return the number of tokens in a segment of held-out text."""
        return evaluation_length(self.data, self.family.positions(self.config))

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that blocks run in."""
        return block_dtype(self.model, self.device, self.stored)

    @property
    def runs_folder(self) -> Path:
        """Return the folder of the runs of this name."""
        return Path(self.output.folder).expanduser() / self.output.name


def find_model(
    model: ModelSettings,
    quantization: QuantizationSettings,
    output: OutputSettings,
    device: torch.device,
    *,
    weights: bool,
) -> Path:
    """Return the model's folder, after refusing what can't work with any model: it may take a download.

    Without ``weights``, only config.json is needed. Raises UserError where settings contradict each other, or
    there is no such model.
    """
    check_format(quantization)
    resolved(quantization, device.type)
    check_output(output)
    return resolve(model.pretrained, model.revision, weights=weights)


def checked(
    model: ModelSettings,
    data: DataSettings,
    quantization: QuantizationSettings,
    output: OutputSettings,
    device: torch.device,
    *,
    config: PreTrainedConfig,
    stored: torch.dtype,
) -> Checked:
    """Return the settings as they are run.

    Raises UserError where the model can't be quantized with these settings.
    """
    width = Shape.of(config, family_of(config)).hidden
    # a YAML file has the number of a block as a number
    bits_of = {str(key): bits for key, bits in quantization.bits_of.items()}
    types = block_types(quantization, config)
    quantization = replace(quantization, bits_of=bits_of, types=types)
    quantization = resolved(quantization, device.type, width)
    found = Checked(model, data, quantization, output, device, config, stored)
    check_lengths(data, found.family.positions(config), model.pretrained)
    layouts = found.family.layouts(config)
    check_bits_of(layouts, found.quantization)
    if quantization.format == "uniform":
        check_groups(found.shape, found.quantization)
    check_histograms(output.histograms, layouts)
    data = resolved_data(
        data,
        found.quantization,
        found.shape,
        device,
        length=found.segment_length,
        dtype_bytes=found.dtype.itemsize,
    )
    return replace(found, data=data)


def block_dtype(model: ModelSettings, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """Return the type that blocks run in; CPUs are slow in types of two bytes."""
    if model.dtype != "auto":
        chosen: torch.dtype = getattr(torch, model.dtype)
        return chosen
    return torch.float32 if device.type == "cpu" else stored
