"""Everything that a command works on, checked before the work begins."""

import hashlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aespa_pl.data import calibration_tokens, check_vocabulary, evaluation_tokens
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import Family
from aespa_pl.models.hub import resolve
from aespa_pl.models.pretrained import Checkpoint
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.run.fingerprint import model_fingerprint
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings
from aespa_pl.storage.cache import default_cache

EVALUATION_LENGTH = 2048
"""Tokens in a segment of held-out text at most, unless the user asks for more (Section 4.1)."""


@dataclass(frozen=True)
class Job:
    """Everything that a command works on, checked before the work begins."""

    model: ModelSettings
    data: DataSettings
    quantization: QuantizationSettings
    output: OutputSettings
    device: torch.device
    checkpoint: Checkpoint
    family: Family

    @classmethod
    def prepare(
        cls,
        model: ModelSettings,
        data: DataSettings,
        quantization: QuantizationSettings,
        output: OutputSettings,
        device: torch.device,
    ) -> "Job":
        """Open the checkpoint and refuse what cannot work with it.

        Raises:
            UserError: The model can't be found, read or quantized with these settings.
        """
        cache = Path(data.cache).expanduser() if data.cache else None
        checkpoint = Checkpoint.open(resolve(model.pretrained, model.revision), cache)
        job = cls(
            model, data, quantization, output, device, checkpoint, family_of(checkpoint.config)
        )
        job._check_lengths()
        job._check_groups()
        return job

    @property
    def segment_length(self) -> int:
        """Tokens in a calibration segment."""
        length = self.data.calibration.segment_length or self.family.positions(
            self.checkpoint.config
        )
        if length is None:
            raise UserError(
                "data.calibration.segment_length must be a number: this model has no limit of positions"
            )
        return length

    @property
    def evaluation_length(self) -> int:
        """Tokens in a segment of held-out text."""
        positions = self.family.positions(self.checkpoint.config) or EVALUATION_LENGTH
        return self.data.evaluation.segment_length or min(positions, EVALUATION_LENGTH)

    @property
    def dtype(self) -> torch.dtype:
        """Type that blocks run in."""
        if self.model.dtype != "auto":
            chosen: torch.dtype = getattr(torch, self.model.dtype)
            return chosen
        return torch.float32 if self.device.type == "cpu" else self.checkpoint.dtype

    def stream(self, checkpoint: Checkpoint) -> StreamedModel:
        """Return the model, or another checkpoint of its shape, streamed."""
        on_disk = self.data.hidden_states == "disk"
        return StreamedModel.open(
            checkpoint,
            self.family,
            self.device,
            self.dtype,
            hidden_folder=self.runs_folder if on_disk else None,
        )

    def calibration(self) -> Tensor:
        """Return the calibration segments ``[segments, L]``."""
        tokens = calibration_tokens(
            self.data.calibration, self.checkpoint.tokenizer(), self.segment_length, self.cache
        )
        check_vocabulary(tokens, self.checkpoint.config.vocab_size)
        return tokens

    def evaluation(self) -> dict[str, Tensor]:
        """Return the segments of each held-out text, by its name."""
        settings, tokenizer = self.data.evaluation, self.checkpoint.tokenizer()
        texts = {
            text: evaluation_tokens(
                text, tokenizer, self.evaluation_length, settings.max_segments, self.cache
            )
            for text in settings.texts
        }
        for tokens in texts.values():
            check_vocabulary(tokens, self.checkpoint.config.vocab_size)
        return texts

    def fingerprint(self, tokens: Tensor) -> dict[str, Any]:
        """Return what the result depends on; a resume with anything else is refused.

        The number of iterations may change (it then holds for the block under way and those to come),
        and so may the batch size (sums are then rounded in another order).
        """
        quantization = asdict(self.quantization)
        del quantization["rounding"]["iterations"]
        return {
            "model": self.model_fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "calibration": {
                "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
                "segments": self.data.calibration.segments,
                "segment_length": self.segment_length,
                "seed": self.data.calibration.seed,
            },
            "quantization": quantization,
        }

    @property
    def model_fingerprint(self) -> str:
        """What tells one checkpoint from another."""
        return model_fingerprint({self.checkpoint.folder / "config.json", *self._weight_files})

    @property
    def largest_block(self) -> int:
        """Weights of the largest block."""
        tensors = self.checkpoint.tensors
        blocks = range(self.checkpoint.config.num_hidden_layers)
        return max(
            sum(math.prod(tensors[name].shape) for name in names)
            for names in (self.checkpoint.block_names(self.family, index) for index in blocks)
        )

    @property
    def runs_folder(self) -> Path:
        """Folder of the runs of this name."""
        return Path(self.output.folder).expanduser() / self.output.name

    @property
    def size(self) -> int:
        """Bytes of the checkpoint's weights."""
        return sum(path.stat().st_size for path in self._weight_files)

    @property
    def _weight_files(self) -> set[Path]:
        return {tensor.file for tensor in self.checkpoint.tensors.values()}

    @property
    def cache(self) -> Path:
        """Folder of what later runs need again."""
        return Path(self.data.cache).expanduser() if self.data.cache else default_cache()

    def _check_lengths(self) -> None:
        limit = self.family.positions(self.checkpoint.config)
        for key, length in (
            ("data.calibration.segment_length", self.segment_length),
            ("data.evaluation.segment_length", self.evaluation_length),
        ):
            if length < 2:
                raise UserError(f"{key} is {length}: at least 2 tokens, one predicts the next")
            if limit is not None and length > limit:
                raise UserError(
                    f"{key} is {length}, but {self.model.pretrained} has {limit} positions: "
                    f"choose {limit} or less"
                )

    def _check_groups(self) -> None:
        size = self.quantization.group_size
        if size is None:
            return
        model = self.checkpoint.skeleton()
        block = model.get_submodule(self.family.blocks_path)[0]
        for projection in self.family.layout(self.checkpoint.config).projections:
            columns = block.get_submodule(projection.module).in_features
            if columns % size:
                raise UserError(
                    f"quantization.group_size is {size}, but {projection.name} has {columns} columns: "
                    "choose a divisor of all, or null"
                )
