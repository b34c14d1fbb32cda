"""Quantized blocks of tiny random models, and silent Trainers: what the tests of the tuning share."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from aespa_pl.algorithm.objectives import Precision
from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, Family
from aespa_pl.models.weights import projection_weight, set_projection_weight
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.losses import output_error
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.tune import Tuned, tune
from aespa_pl.tuning.weights import EVERYTHING, Recipe, TunableBlock
from tests.models.examples import make_ids, make_model

SEGMENTS, HELD_BACK = 10, 0.2
RATES = LearningRates(0.01, 0.005, 0.005)


def quantize(W: Tensor, bits: int, groups: int = 1) -> QuantizedWeight:
    """Return the nearest integers of the min-max grid, by plain arithmetic."""
    parts = W.view(len(W), groups, -1)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    scale = scale.where(scale > 0, 1)  # a row of zeros
    zero_point = (-low / scale).round().clamp(0, 2**bits - 1)
    q = (parts / scale[..., None]).round() + zero_point[..., None]
    q = q.clamp(0, 2**bits - 1).to(torch.uint8).view(W.shape)
    return QuantizedWeight(q, scale, zero_point, bits)


@dataclass
class Example:
    """A model, and its first block quantized to nearest."""

    model: Any
    family: Family
    quantized: TunableBlock
    inputs: list[Tensor]
    targets: list[Tensor]

    @classmethod
    def make(cls, name: str = "llama-grouped", bits: int = 2, groups: int = 1) -> "Example":
        model: Any = make_model(name, torch.float32)
        family = family_of(model.config)
        layout = family.layout(model.config)
        source = model.get_submodule(family.blocks_path)[0]
        block = copy.deepcopy(source)
        ids = make_ids(SEGMENTS).split(4)
        inputs = [family.embed(model, part)[0] for part in ids]
        targets = {p.name: projection_weight(source, layout, p).clone() for p in layout.projections}
        weights = {n: quantize(W, bits, groups) for n, W in targets.items()}
        for p in layout.projections:
            set_projection_weight(block, layout, p, weights[p.name].weight())
        dtypes = {n: torch.float16 for n, _ in block.named_parameters()}
        for parameter in block.parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter.half())
        quantized = TunableBlock(block, layout, weights, dtypes, targets)
        example = cls(model, family, quantized, inputs, [])
        example.targets = [example.run_block(source, hidden) for hidden in inputs]
        return example

    @property
    def layout(self) -> BlockLayout:
        return self.quantized.layout

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return self.family.run_block(block, hidden, self.family.arguments(self.model, hidden))

    def pairs(self, batch_size: int = 2, seed: int = 0) -> SegmentPairs:
        return SegmentPairs(self.inputs, self.targets, batch_size=batch_size, held_back=HELD_BACK, seed=seed)


def tune_block(
    example: Example,
    epochs: int,
    *,
    rates: LearningRates = RATES,
    pairs: SegmentPairs | None = None,
    recipe: Recipe = EVERYTHING,
    products: Precision = "float32",
    checkpoint: Path | None = None,
    **options: Any,
) -> Tuned:
    """Tune an example by a silent Trainer, which takes the options."""
    return tune(
        [example.quantized],
        pairs or example.pairs(),
        loss=output_error(example.run_block),
        rates=rates,
        trainer=silent_trainer(epochs, **options),
        recipe=recipe,
        products=products,
        checkpoint=checkpoint,
    )


def silent_trainer(epochs: int, **options: Any) -> Trainer:
    silent = {
        "accelerator": "cpu",
        "max_epochs": epochs,
        "num_sanity_val_steps": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**silent, **options})
