"""Check model, texts and settings before a command's work begins."""

import hashlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import aespa_pl
from aespa_pl.block.quantized import grid_format, nearest_weight
from aespa_pl.commands.checked import Checked, checked, find_model
from aespa_pl.data.texts import short_names
from aespa_pl.data.tokens import calibration_tokens, check_vocabulary, evaluation_tokens
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import set_projection_weight
from aespa_pl.run.fingerprint import model_fingerprint
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings
from aespa_pl.storage.cache import cache_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job(Checked):
    """Holds the model, the settings and the device that a command works with, all checked."""

    pretrained: PretrainedFolder

    @classmethod
    def prepare(
        cls,
        model: ModelSettings,
        data: DataSettings,
        quantization: QuantizationSettings,
        output: OutputSettings,
        device: torch.device,
    ) -> "Job":
        """Open the model's folder and refuse what cannot work with it.

        Raises UserError where the model can't be found, read or quantized with these settings.
        """
        folder = find_model(model, quantization, output, device, weights=True)
        pretrained = PretrainedFolder.open(folder, cache_folder(data.cache))
        found = checked(
            model,
            data,
            quantization,
            output,
            device,
            config=pretrained.config,
            stored=pretrained.dtype,
        )
        return cls(**vars(found), pretrained=pretrained)

    def stream(self, pretrained: PretrainedFolder) -> StreamedModel:
        """Return the model, or another one of its shape, streamed."""
        on_disk = self.data.hidden_states == "disk"
        return StreamedModel.open(
            pretrained,
            self.family,
            self.device,
            self.dtype,
            hidden_folder=self.runs_folder if on_disk else None,
            hidden_on_device=self.data.hidden_states == "device",
        )

    def round_to_nearest(self, index: int, block: nn.Module) -> None:
        """Round a block's weights to the nearest integers of min-max grids: the usual comparison."""
        layout = self.family.layout(self.config, index)
        for projection in layout.projections:
            form = grid_format(self.quantization, index, projection.name)
            weight = nearest_weight(block, layout, projection, form)
            set_projection_weight(block, layout, projection, weight)

    def calibration(self) -> Tensor:
        """Return the calibration segments ``[segments, L]``."""
        tokens = calibration_tokens(
            self.data.calibration, self.pretrained.tokenizer(), self.segment_length, self.cache
        )
        check_vocabulary(tokens, self.config.vocab_size)
        return tokens

    def evaluation(self) -> dict[str, Tensor]:
        """Return the segments of each held-out text, by its name."""
        tokenizer, vocabulary = self.pretrained.tokenizer(), self.config.vocab_size
        return held_out_texts(self.data, tokenizer, self.evaluation_length, vocabulary)

    def fingerprint(self, tokens: Tensor) -> dict[str, Any]:
        """Return everything that the result depends on; a resume with anything else is refused.

        The number of iterations may change (it then holds for the block under way and those to come), and
        so may the batch size (sums are then rounded in another order) and model.dtype (so that a run whose
        activations overflow can go on in a wider type). The trainer section is left out as well: of what
        changes the result ``check_trainer`` refuses all but devices and the user's callbacks. Another
        version of this package may compute something else, so its number belongs to the inputs.
        """
        quantization = asdict(self.quantization)
        del quantization["rounding"]["iterations"]
        return {
            "model": self.model_fingerprint,
            "version of aespa-pl": aespa_pl.__version__,
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
        """Return a checksum that tells one model from another."""
        weights = {tensor.file for tensor in self.pretrained.tensors.values()}
        return model_fingerprint({self.pretrained.folder / "config.json", *weights})

    @property
    def cache(self) -> Path:
        """Return the folder of tokens, weights and perplexities that later runs need again."""
        return cache_folder(self.data.cache)


def held_out_texts(
    data: DataSettings, tokenizer: PreTrainedTokenizerBase, length: int, vocabulary: int
) -> dict[str, Tensor]:
    """Return the segments ``[segments, length]`` of each held-out text, by its name in tables.

    Raises UserError where a text can't be had, or has fewer tokens than a segment or others than the model
    knows.
    """
    limit, cache = data.evaluation.max_segments, cache_folder(data.cache)
    texts = {
        name: evaluation_tokens(source, tokenizer, length, limit, cache)
        for source, name in short_names(data.evaluation.names).items()
    }
    for tokens in texts.values():
        check_vocabulary(tokens, vocabulary)
    return texts
