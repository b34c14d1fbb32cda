"""Check model, texts and settings before a command's work begins, in ``fit``, ``test`` and ``plan`` alike."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import aespa_pl
from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.algorithm.refit import rounded_rows
from aespa_pl.block.quantized import grid_format, nearest_weight
from aespa_pl.commands import limits
from aespa_pl.commands.block_types import block_types, check_format, with_head
from aespa_pl.data.texts import short_names
from aespa_pl.data.tokens import calibration_tokens, check_vocabulary, evaluation_tokens
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, Family
from aespa_pl.models.hub import resolve
from aespa_pl.models.kept import layouts_of
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import set_projection_weight
from aespa_pl.paths import expanded
from aespa_pl.planning.budget import resolved_data, resolved_place
from aespa_pl.planning.shape import ONE_DEVICE, Devices, Setup, Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.run.journal import model_fingerprint
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.settings import DataSettings, ModelSettings, Settings
from aespa_pl.storage.cache import cache_folder
from aespa_pl.storage.files import checksum_of
from aespa_pl.walk.stem import ROWS


@dataclass(frozen=True)
class Checked(Settings):
    """Holds settings that fit a model and the device, without auto or null; :func:`checked` makes it."""

    device: torch.device
    config: PreTrainedConfig
    stored: torch.dtype  # of the weights in the model's files

    @property
    def family(self) -> Family:
        """Return what is known of the model's family."""
        return family_of(self.config)

    @cached_property
    def shape(self) -> Shape:
        """Return the sizes of the model, from which its needs follow."""
        return Shape.of(self.config, self.layouts)

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Return the layout of every block."""
        return layouts_of(self.family, self.config, self.quantization)

    @property
    def work(self) -> Work:
        """Return the amount of calibration text."""
        segments = self.data.calibration.segments
        batch = min(self.data.batch, segments)
        return Work(segments, self.segment_length, batch, self.dtype.itemsize)

    def setup(self, devices: Devices = ONE_DEVICE) -> Setup:
        """Return what the needs of a run on these devices follow from."""
        return Setup(self.shape, self.work, self.data, self.quantization, self.device, devices)

    @property
    def segment_length(self) -> int:
        """Return the number of tokens in a calibration segment."""
        length = self.data.calibration.segment_length or self.family.positions(self.config)
        if length is None:
            raise UserError(
                "data.calibration.segment_length must be a number: this model has no limit of positions"
            )
        return length

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that blocks run in."""
        return block_dtype(self.model, self.device, self.stored)

    @property
    def runs_folder(self) -> Path:
        """Return the folder of the runs of this name."""
        return expanded(self.output.folder) / self.output.name


@dataclass(frozen=True)
class Job(Checked):
    """Holds the model, the settings and the device that a command works with, all checked."""

    pretrained: PretrainedFolder

    @classmethod
    def prepare(cls, settings: Settings, device: torch.device, devices: Devices = ONE_DEVICE) -> "Job":
        """Open the model's folder. Raises UserError where it can't be quantized with these settings."""
        folder, model = find_model(settings, device, weights=True), settings.model
        if folder.parent.name == "snapshots":  # what a branch is today
            settings = replace(settings, model=replace(model, revision=folder.name))
        pretrained = PretrainedFolder.open(folder, cache_folder(settings.data.cache))
        fitting = checked(settings, device, pretrained.config, pretrained.dtype, devices=devices)
        return cls(**vars(fitting), pretrained=pretrained)

    def stream(self, pretrained: PretrainedFolder) -> StreamedModel:
        """Return the model, or another one of its shape, streamed."""
        place = self.data.hidden_states
        folder, on_device = self.runs_folder if place == "disk" else None, place == "device"
        return StreamedModel.open(
            pretrained, self.device, self.dtype, hidden_folder=folder, hidden_on_device=on_device
        )

    @property
    def rounded_to_nearest(self) -> dict[str, Any]:
        """Return what changes a model to nearest integers on min-max grids, the usual comparison."""
        return {"change": self._round_block, "change_stem": self._round_stem}

    def _round_block(self, index: int, block: nn.Module) -> None:
        layout = self.layouts[index]
        for projection in layout.projections:
            form = grid_format(self.quantization, index, projection.name)
            weight = nearest_weight(block, layout, projection, form)
            set_projection_weight(block, layout, projection, weight)

    def _round_stem(self, model: PreTrainedModel) -> None:
        """Round embedding and head, where they have block types."""
        for part, name in self.pretrained.embeddings().items():
            if part in self.quantization.types:
                kind, weight = TYPES[self.quantization.types[part]], model.get_parameter(name)
                rounded = (rounded_rows(rows, kind).weight().to(weight) for rows in weight.data.split(ROWS))
                weight.data = torch.cat(list(rounded))  # some are mapped from a file

    def calibration(self) -> Tensor:
        """Return the calibration segments ``[segments, L]``."""
        settings, tokenizer = self.data.calibration, self.pretrained.tokenizer()
        bos = bos_of(self.data, tokenizer, self.family)
        tokens = calibration_tokens(settings, tokenizer, self.segment_length, self.cache, bos=bos)
        check_vocabulary(tokens, self.config.vocab_size)
        return tokens

    def evaluation(self) -> dict[str, Tensor]:
        """Return the segments of each held-out text, by its name."""
        length = limits.evaluation_length(self.data, self.family.positions(self.config))
        return held_out_texts(self.data, self.pretrained.tokenizer(), length, self.config)

    def fingerprint(self, tokens: Tensor) -> dict[str, Any]:
        """Return everything that the result depends on; a resume with anything else is refused.

        The number of iterations may change (it then holds for the block under way and those to come), and
        so may the batch size (sums are then rounded in another order) and model.dtype (so that a run whose
        activations overflow can go on in a wider type). The trainer section is left out as well: of what
        changes the result ``check_trainer`` refuses all but devices and the user's callbacks.
        """
        quantization = asdict(self.quantization)
        del quantization["rounding"]["iterations"]
        return {
            "model": self.model_fingerprint,
            "version of aespa-pl": aespa_pl.__version__,  # another one may compute something else
            "calibration": {
                "tokens": checksum_of([tokens]),
                "segments": self.data.calibration.segments,
                "segment_length": self.segment_length,
                "seed": self.data.calibration.seed,
            },
            "quantization": quantization,
        }

    @property
    def model_fingerprint(self) -> str:
        """Return a checksum that tells one model from another."""
        return model_fingerprint(self.pretrained.files)

    @property
    def cache(self) -> Path:
        """Return the folder of tokens, weights and perplexities that later runs need again."""
        return cache_folder(self.data.cache)


def find_model(settings: Settings, device: torch.device, *, weights: bool) -> Path:
    """Return a model's folder, or that of its config.json, once settings that can't work are refused."""
    check_format(settings.quantization)
    if "://" in settings.output.folder:
        raise UserError(
            f"output.folder is {settings.output.folder}: expected a folder of this machine; copy the run to "
            "its destination afterwards"
        )
    if expanded(settings.output.folder).is_file():
        raise UserError(f"output.folder: {settings.output.folder} is a file: name a folder")
    resolved(settings.quantization, device.type)
    folder = resolve(settings.model.pretrained, settings.model.revision, weights=weights)
    if (folder / DESCRIPTION).is_file():
        raise UserError(
            f"{settings.model.pretrained} is a model that aespa-pl has quantized already ({DESCRIPTION} lies "
            "in it): give the original to model.pretrained"
        )
    return folder


def checked(
    settings: Settings,
    device: torch.device,
    config: PreTrainedConfig,
    stored: torch.dtype | None = None,
    *,
    devices: Devices = ONE_DEVICE,
) -> Checked:
    """Return settings without auto. Raises UserError where the model can't be quantized with them.

    ``stored`` is the type of the model's files; None: as its configuration says. Processes on
    ``devices`` of one host share its memory.
    """
    stored = stored or getattr(config, "dtype", None) or torch.float32
    family, quantization = family_of(config), settings.quantization
    quantization = with_head(quantization, config)
    quantization = replace(quantization, types=block_types(quantization, config))
    layouts = layouts_of(family, config, quantization)
    shape = Shape.of(config, layouts)
    numbers = Counter(quantization.bits_for(i, name) for i, has in enumerate(shape.of_blocks) for name in has)
    bits = max(numbers, key=numbers.__getitem__, default=None)
    segments = settings.data.calibration.segments
    quantization = resolved(quantization, device.type, shape.hidden, segments, bits)
    given = Checked(settings.model, settings.data, quantization, settings.output, device, config, stored)
    name, positions, length = settings.model.pretrained, family.positions(config), given.segment_length
    limits.check_length("calibration", length, positions, name)
    limits.check_length("evaluation", limits.evaluation_length(given.data, positions), positions, name)
    limits.check_bits_of(family.layouts(config), quantization)
    if quantization.format == "uniform":
        limits.check_groups(shape, quantization)
    limits.check_histograms(settings.output.histograms, layouts)
    size = given.dtype.itemsize
    data = resolved_data(settings.data, quantization, shape, device, length=length, dtype_bytes=size)
    found = replace(given, data=data)
    return replace(found, quantization=resolved_place(found.setup(devices)))


def block_dtype(model: ModelSettings, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """Return the type that blocks run in; CPUs are slow in types of two bytes."""
    if model.dtype != "auto":
        return cast(torch.dtype, getattr(torch, model.dtype))
    return torch.float32 if device.type == "cpu" else stored


def bos_of(data: DataSettings, tokenizer: PreTrainedTokenizerBase, family: Family) -> int | None:
    """Return the token that segments begin with; None: any. Raises UserError where the tokenizer has none."""
    if not (family.needs_bos if data.bos == "auto" else data.bos):
        return None
    if tokenizer.bos_token_id is None and data.bos != "auto":
        raise UserError("data.bos is true, but the tokenizer has no BOS token: set data.bos to auto")
    return cast(int | None, tokenizer.bos_token_id)


def held_out_texts(
    data: DataSettings, tokenizer: PreTrainedTokenizerBase, length: int, config: PreTrainedConfig
) -> dict[str, Tensor]:
    """Return the segments ``[segments, length]`` of each held-out text, by its name in tables."""
    limit, cache = data.evaluation.max_segments, cache_folder(data.cache)
    bos = bos_of(data, tokenizer, family_of(config))
    texts = {
        name: evaluation_tokens(source, tokenizer, length, limit, cache, bos=bos)
        for source, name in short_names(data.evaluation.names).items()
    }
    for tokens in texts.values():
        check_vocabulary(tokens, config.vocab_size)
    return texts
