"""Refuse what a model, its texts or this machine don't allow, in ``fit`` and ``plan`` alike."""

import math
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.measure import free_bytes, human
from aespa_pl.models.family import BlockLayout
from aespa_pl.planning.budget import room
from aespa_pl.planning.estimate import Needs
from aespa_pl.planning.shape import Setup, Shape
from aespa_pl.planning.tuning import block_bytes, model_bytes, streaming_bytes
from aespa_pl.settings import CalibrationSettings, DataSettings, QuantizationSettings
from aespa_pl.settings.quantization import names_projection
from aespa_pl.storage.files import MEND, disk_errors, existing
from aespa_pl.tuning.data import held_back_and_steps

EVALUATION_LENGTH = 2048  # tokens at most, unless the user asks for more (Section 4.1)


def evaluation_length(data: DataSettings, positions: int | None) -> int:
    """Return the tokens in a segment of held-out text; a model without ``positions`` has no limit of them."""
    return data.evaluation.segment_length or min(positions or EVALUATION_LENGTH, EVALUATION_LENGTH)


def check_length(section: str, length: int, positions: int | None, model: str) -> None:
    """Raise UserError if a segment is too short to predict anything or too long for the model."""
    key = f"data.{section}.segment_length"
    if length < 2:
        raise UserError(f"{key} is {length}: expected 2 or more, because each token predicts the next")
    if positions is not None and length > positions:
        is_default = section == "calibration" and length == CalibrationSettings.segment_length
        given = f"{length} (the default)" if is_default else length
        raise UserError(
            f"{key} is {given}, but {model} has {positions} positions: choose {positions} or less"
        )


def check_groups(shape: Shape, settings: QuantizationSettings) -> None:
    """Raise UserError if the columns of a projection can't be divided into groups."""
    size = settings.group_size
    widths = dict.fromkeys((m.group, m.columns) for block in shape.of_blocks for m in block.values())
    if size and any(columns % size for _, columns in widths):
        given = ", ".join(f"{columns} ({group})" for group, columns in widths)
        common = math.gcd(*(columns for _, columns in widths))
        divisors = [d for d in range(1, common + 1) if common % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(math.log(d / size)))[:3])
        raise UserError(
            f"quantization.group_size is {size}, but the projections have columns {given}: choose a divisor "
            f"of all, such as {', '.join(map(str, near))}, or null"
        )


def check_bits_of(layouts: Sequence[BlockLayout], settings: QuantizationSettings) -> None:
    """Raise UserError for bits of a projection that the model does not have, or of a part of a matrix."""
    of_blocks = [[p.name for p in layout.projections] for layout in layouts]
    names = list(dict.fromkeys(name for of_block in of_blocks for name in of_block))
    for key in settings.bits_of:
        if not any(names_projection(key, i, n) for i, has in enumerate(of_blocks) for n in has):
            raise UserError(
                f"quantization.bits_of: {key} names nothing in this model: expected a projection "
                f"({', '.join(names)}), a block (0 to {len(layouts) - 1}), or both, such as 0.{names[0]} "
                f"or *.{names[0]}"
            )
    if all(settings.keeps(i, name) for i, has in enumerate(of_blocks) for name in has):
        raise UserError("quantization.bits_of keeps all projections: give fewer of them 16 bits")
    for index, layout in enumerate(layouts):
        of_matrix: dict[str, dict[str, int | str]] = {}
        for p in layout.projections:
            bits = settings.type_for(index, p.name) or settings.bits_for(index, p.name)
            of_matrix.setdefault(p.module, {})[p.name] = bits
        for parts in of_matrix.values():
            if len(set(parts.values())) > 1:
                given = ", ".join(f"{name}: {bits}" for name, bits in parts.items())
                key, what = ("bits_of", "bits") if settings.format == "uniform" else ("types", "type")
                raise UserError(
                    f"quantization.{key}: {given} in block {index} are one matrix in this model: give "
                    f"all of them the same {what}"
                )


def tuning_shortages(setup: Setup, done: Collection[str] | None = None) -> list[str]:
    """Return which tuning doesn't fit into the device's memory. Raises UserError for too few segments.

    ``done`` are the tunings that a run to be continued has behind it; None: the run is a new one.
    """
    shape, work, settings, given = setup.shape, setup.work, setup.quantization, room(setup)
    tuning, said = settings.tuning, list[str]()
    if not tuning.enabled:
        return said
    of_model = model_bytes(shape, work, settings, recompute=True)
    if setup.on_cpu:
        of_model += streaming_bytes(shape, work, settings)
    shared = f" by each of {setup.devices.of_host} processes" if setup.devices.of_host > 1 else ""
    for key, section, needed in (
        ("blocks", tuning.blocks, block_bytes(shape, work, settings)),
        ("model", tuning.model, of_model),
    ):
        if not section.enabled or key in (done or ()):
            continue
        held_back_and_steps(work.segments, section.batch_size, tuning.held_back)
        if needed > given.free:
            advice = _how_to_fit(key, setup, given.waiting, new=done is None)
            said.append(
                f"quantization.tuning.{key} needs about {human(needed, 'B')} of the {setup.device.type}'s "
                f"memory, of which {human(max(0.0, given.free), 'B')} may be taken{shared} beside "
                f"{human(given.waiting, 'B')} of hidden states: {advice}"
            )
    return said


def _how_to_fit(key: str, setup: Setup, waiting: int, *, new: bool) -> str:
    """Return what makes room for a tuning; of a run that is continued, most settings stay."""
    keys = ["data.hidden_states"] if waiting else []
    if key == "model" and setup.quantization.tuning.model.blocks != "disk":
        keys.append("quantization.tuning.model.blocks")
    disk = [f"set {' or '.join(keys)} to disk"] if keys else []
    if not new:
        return ", ".join([*disk, "free memory, or continue it on a device with more"])
    lower = f"lower quantization.tuning.{key}.batch_size or data.calibration.segment_length"
    return ", ".join([lower, *disk, f"or set quantization.tuning.{key}.enabled to false"])


def check_evaluation(texts: Mapping[str, Tensor], setup: Setup, runs: Path, *, compares: bool) -> None:
    """Raise UserError where the hidden states of a held-out text ``[segments, L]`` don't fit where they wait.

    Those of one text are there at a time; of two models where it ``compares`` a model with the original.
    Devices divide the segments.
    """
    name = max(texts, key=lambda text: texts[text].numel(), default=None)
    if name is None:
        return
    place, devices = setup.data.hidden_states, setup.devices
    of_segment = setup.shape.hidden * setup.work.dtype_bytes * texts[name].shape[1] * (2 if compares else 1)
    share = 1 / {"device": devices.count, "memory": devices.hosts}.get(place, 1)
    device = setup.device if place == "device" else torch.device("cpu")
    where = {"disk": "the disk", "memory": "host memory"}.get(place, f"the {device.type}'s memory")
    free = shutil.disk_usage(existing(runs)).free if place == "disk" else free_bytes(device)
    if (needed := share * of_segment * len(texts[name])) > free:
        raise UserError(
            f"data.evaluation.texts: the hidden states of {name} take {human(needed, 'B')} of {where}, which "
            f"has {human(free, 'B')} free: set data.evaluation.max_segments to "
            f"{max(1, int(free / share / of_segment / 2))}, or data.hidden_states to "
            f"{'memory' if place == 'disk' else 'disk'}"
        )


def check_histograms(chosen: Sequence[str], layouts: Sequence[BlockLayout]) -> None:
    """Raise UserError if histograms are asked for of a projection that the model doesn't have."""
    known = dict.fromkeys(p.name for layout in layouts for p in layout.projections)
    if unknown := ", ".join(name for name in chosen if name not in known):
        raise UserError(
            f"output.histograms has {unknown}: the projections of this model are {', '.join(known)}"
        )


def check_space(folder: Path, needed: float, otherwise: str) -> None:
    """Raise UserError for a folder that can't be written to or has too few bytes; it need not exist yet."""
    advice = f"{MEND}, or {otherwise}"
    with disk_errors(folder, advice), tempfile.TemporaryFile(dir=existing(folder)):
        pass
    free = shutil.disk_usage(existing(folder)).free
    if free < needed:
        raise UserError(
            f"{folder} has {human(free, 'B')} free, but about {human(needed, 'B')} more are needed: {advice}"
        )


def shortages(folder: Path, needs: Needs) -> list[str]:
    """Return in words which resources this machine has too little of; ``folder`` is that of the runs."""
    device = needs.setup.device
    have = {
        "host memory": (needs.host, free_bytes(torch.device("cpu"))),
        "disk": (needs.disk, shutil.disk_usage(existing(folder)).free),
    }
    if device.type != "cpu":
        have["device memory"] = (max(needs.device.values()), free_bytes(device))
    return [
        f"{what}: {human(free, 'B')} are free here, {human(needed, 'B')} are needed"
        for what, (needed, free) in have.items()
        if needed > free
    ]
