"""Resolve ``auto`` in the section ``data``: how much runs at once, and where hidden states wait."""

from dataclasses import replace
from typing import Literal

import torch

from aespa_pl.measure import free_bytes
from aespa_pl.planning.budget import RESERVE
from aespa_pl.planning.needs import PROCESS_BYTES, device_bytes, hidden_bytes
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.settings import DataSettings, QuantizationSettings

CPU_BATCH = 4
"""Number of segments in a batch on a CPU."""
TOKENS = 8192
"""Number of tokens in a batch on an accelerator, which keeps its matrix units busy; more only take memory."""


def resolved_data(
    data: DataSettings,
    quantization: QuantizationSettings,
    shape: Shape,
    device: torch.device,
    *,
    length: int,
    dtype_bytes: int,
) -> DataSettings:
    """Return the settings without ``auto``.

    The size of a batch changes the order of sums, so it follows from the kind of device and the segments
    alone. Where hidden states wait changes no number, so it may follow from the memory that is free.

    Args:
        data: Settings of the user.
        quantization: Settings of the quantization, resolved.
        shape: Sizes of the model.
        device: Device that blocks run on.
        length: Tokens in a calibration segment.
        dtype_bytes: Bytes of a number of the hidden states.
    """
    if data.batch_size == "auto":
        size = CPU_BATCH if device.type == "cpu" else max(1, TOKENS // length)
        data = replace(data, batch_size=size)
    if data.hidden_states == "auto":
        segments = data.calibration.segments
        work = Work(segments, length, min(data.batch, segments), dtype_bytes)
        data = replace(data, hidden_states=hidden_place(data, quantization, shape, work, device))
    return data


def hidden_place(
    data: DataSettings,
    quantization: QuantizationSettings,
    shape: Shape,
    work: Work,
    device: torch.device,
) -> Literal["device", "memory", "disk"]:
    """Return the nearest place where the streams fit beside everything else."""
    if device.type == "cpu":
        return "memory"
    streams = hidden_bytes(shape, work, quantization)
    free = 1e9 * data.memory_gb if data.memory_gb else RESERVE * free_bytes(device)
    if streams + max(device_bytes(shape, work, quantization, accelerator=True).values()) <= free:
        return "device"
    host = RESERVE * free_bytes(torch.device("cpu"))
    return "memory" if PROCESS_BYTES + streams <= host else "disk"
