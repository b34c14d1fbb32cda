"""Reconstruct a quantized block: its output on quantized inputs becomes the original's output.

The inputs are the hidden states that the blocks before, quantized and tuned, have made; the target is the
output of the original block on the hidden states of the original model. All projections are learned together,
because a block can make up for what a projection cannot. What of them is learned is the recipe's.

Source: "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction" (arXiv
2102.05426); "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (arXiv
2407.11062: straight-through, all together).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from aespa_pl.algorithm.massive import error_divisors
from aespa_pl.models.family import BlockLayout
from aespa_pl.tuning.data import Pair, SegmentPairs
from aespa_pl.tuning.parametrization import QuantizedWeight, WeightParametrization
from aespa_pl.tuning.recipes import EVERYTHING, Recipe
from aespa_pl.tuning.rounding import RoundingPenalty
from aespa_pl.tuning.training import LearningRates, Tuning, fit
from aespa_pl.tuning.weights import (
    merged,
    parametrize_block,
    quantized_weights,
    remove_parametrizations,
)

RunBlock = Callable[[nn.Module, Tensor], Tensor]
"""Runs a batch ``[B, L, d]`` through a block, with autograd."""


class BlockReconstruction(Tuning):
    """Trains a block on the mean squared error of each token of its output, divided by ``error_divisors``."""

    def __init__(
        self,
        block: nn.Module,
        run_block: RunBlock,
        rates: LearningRates,
        label: str,
        penalty: RoundingPenalty | None = None,
    ) -> None:
        """Take a block whose weights are parametrized; ``label`` names it in messages."""
        super().__init__(block, rates, label)
        self.run_block = run_block
        self.rounding_penalty = penalty

    def error(self, batch: Pair) -> Tensor:
        """Return the error of all tokens together, and their number."""
        inputs, target = batch  # [B, L, d]
        output = self.run_block(self.module, inputs).float()
        target = target.float()
        shares = (output - target).square().mean(-1) / error_divisors(target, output)  # [B, L]
        return torch.stack([shares.sum(), shares.new_tensor(shares.numel())])

    def penalty(self) -> Tensor | float:
        """Return the rounding loss, where rounding variables are learned."""
        if self.rounding_penalty is None:
            return 0.0
        steps = int(self.trainer.estimated_stepping_batches)
        return self.rounding_penalty.of(self.module, self.global_step, steps)


@dataclass(frozen=True)
class TunableBlock:
    """Holds a block of the model with what its weights stand for."""

    block: nn.Module
    """Module with zeta folded and dequantized weights, in float32 and evaluation mode."""
    layout: BlockLayout
    weights: Mapping[str, QuantizedWeight]
    """Quantized weights by projection."""
    targets: Mapping[str, Tensor]
    """Weights ``[rows, d_in]`` that the integers were chosen for, with zeta folded, by projection."""
    dtypes: Mapping[str, torch.dtype]
    """Types that the block's parameters are stored in, by their names."""


@dataclass(frozen=True)
class Reconstruction:
    """Holds what the reconstruction of a block found; its norms and biases are in the block."""

    weights: dict[str, QuantizedWeight]
    """Quantized weights by projection."""
    start_error: float
    """Mean over the tokens that were held back, of squared errors divided by ``error_divisors``."""
    error: float
    """The same for the epoch that is kept."""
    epoch: int
    """Epoch of the best error; 0 is the start."""
    finite: bool
    """Whether all errors were finite numbers; the training stopped where one was not."""
    changed: float
    """Share of the integers that changed."""


def reconstruct(
    quantized: TunableBlock,
    pairs: SegmentPairs,
    *,
    run_block: RunBlock,
    rates: LearningRates,
    trainer: Trainer,
    label: str,
    checkpoint: Path | None = None,
    learned: Recipe = EVERYTHING,
) -> Reconstruction:
    """Tune a block, or the projections of it that are in the layout.

    Args:
        quantized: Its block gets the tuned weights, norms and biases.
        pairs: Hidden states before the quantized block, and after the original one.
        run_block: How a batch runs through a block of this model.
        rates: Largest learning rates.
        trainer: Trainer with ``max_epochs``, and ``num_sanity_val_steps=-1``, which measures the start.
        label: Name of the block in messages.
        checkpoint: Checkpoint of an earlier training of the block that goes on.
        learned: Recipe that says what is learned.
    """
    block, layout = quantized.block, quantized.layout

    def weight(path: str, start: QuantizedWeight) -> WeightParametrization:
        return learned.weight(path, start, merged(quantized.targets, layout, path))

    parametrize_block(
        block,
        layout,
        quantized.weights,
        weight,
        quantized.dtypes,
        learns_vectors=learned.learns_vectors,
        transforms=learned.transforms,
    )
    module = BlockReconstruction(block, run_block, rates, label, learned.penalty)
    fit(module, pairs, trainer, checkpoint)
    weights = quantized_weights(block, layout)
    remove_parametrizations(block)
    return Reconstruction(
        weights=weights,
        start_error=module.start_error,
        error=module.best_error,
        epoch=module.best_epoch,
        finite=module.finite,
        changed=changed_share(quantized.weights, weights),
    )


def changed_share(
    before: Mapping[str, QuantizedWeight], after: Mapping[str, QuantizedWeight]
) -> float:
    """Return the share of the integers that differ."""
    changed = sum(int((after[n].integers != q.integers).sum()) for n, q in before.items())
    return changed / sum(q.integers.numel() for q in before.values())
