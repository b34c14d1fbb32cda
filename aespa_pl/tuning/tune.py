"""Tune quantized blocks, one by itself or all of a model end to end, and return their integers and grids.

All projections are learned together, because a block can make up for what a projection cannot. What is
learned of them is the recipe's.

Source: "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (arXiv 2407.11062:
straight-through, all together; E2E-QP, where the integers stay).
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from aespa_pl.algorithm.objectives import Precision
from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.fitting import fit, refuse_early_end
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.losses import Loss
from aespa_pl.tuning.moving import MovingTuning
from aespa_pl.tuning.streamed import TrainableStream
from aespa_pl.tuning.training import LearningRates, Tuning
from aespa_pl.tuning.weights import (
    EVERYTHING,
    Recipe,
    TunableBlock,
    parametrize_block,
    parametrize_vectors,
    quantized_weights,
    remove_parametrizations,
)


@dataclass(frozen=True)
class Tuned:
    """Holds the result of a tuning; norms and biases are in the module."""

    weights: list[dict[str, StoredWeight]]
    """Quantized weights by block and projection."""
    start_error: float
    """Mean error over the positions that are held back, before the training."""
    error: float
    """The same for the epoch that is kept."""
    epoch: int
    """Epoch of the best error; 0 is the start."""
    finite: bool
    """Whether all errors were finite numbers; the training stopped where one was not."""
    changed: float
    """Fraction of the integers that changed."""


def tune(
    blocks: Sequence[TunableBlock],
    pairs: SegmentPairs,
    *,
    loss: Loss,
    rates: LearningRates,
    trainer: Trainer,
    products: Precision = "float32",
    recipe: Recipe = EVERYTHING,
    checkpoint: Path | None = None,
    model: nn.Module | None = None,
    outside: Mapping[str, torch.dtype] | None = None,
    recompute: bool = False,
) -> Tuned:
    """Tune a block, the projections of it that are in its layout, or all blocks of a model.

    The blocks get the tuned weights, norms and biases. A training step multiplies in the precision of
    ``products``, and errors that decide are measured in float32. A ``checkpoint`` is where the training goes
    on. Norms and biases of the model outside of its blocks are trained as well: ``outside`` has the types
    that they are stored in, by name. To ``recompute`` keeps only the inputs of blocks for the backward pass,
    which runs each block once more: a third more time for the memory of one block's activations and weights.
    """
    module = blocks[0].block if model is None else model
    module.requires_grad_(requires_grad=False)
    for block in blocks:
        parametrize_block(block, recipe)
    parametrize_vectors(module, outside or {})
    tuning = Tuning(module, loss, rates, recipe.penalty, anneals=recipe.anneals)
    with _recomputing([b.block for b in blocks] if recompute else ()):
        found = _fit(tuning, pairs, trainer, products, checkpoint)
    weights = [quantized_weights(b.block, b.layout) for b in blocks]
    remove_parametrizations(module)
    return replace(found, weights=weights, changed=changed_fraction([b.weights for b in blocks], weights))


def tune_streamed(
    model: TrainableStream,
    pairs: SegmentPairs,
    *,
    loss: Loss,
    rates: LearningRates,
    trainer: Trainer,
    products: Precision = "float32",
    checkpoint: Path | None = None,
) -> Tuned:
    """Tune a model whose blocks are on disk; what is learned is in ``model`` and its files.

    Arguments as of ``tune``. The weights of the result are empty, and none is counted as changed.
    """
    what = model, loss, rates
    tuning = Tuning(*what) if model.moves is None else MovingTuning(model.moves, *what)
    return _fit(tuning, pairs, trainer, products, checkpoint)


def changed_fraction(
    before: Sequence[Mapping[str, StoredWeight]], after: Sequence[Mapping[str, StoredWeight]]
) -> float:
    """Return the fraction of the integers that differ, of weights by block and projection."""
    pairs = [(q, b[name]) for a, b in zip(before, after, strict=True) for name, q in a.items()]
    changed = sum(int((old.integers != new.integers).sum()) for old, new in pairs)
    return changed / max(1, sum(old.integers.numel() for old, _ in pairs))


def _fit(
    module: Tuning, pairs: SegmentPairs, trainer: Trainer, products: Precision, checkpoint: Path | None
) -> Tuned:
    """Train a module, or go on from a checkpoint, and leave it with the parameters of its best epoch.

    Raises UserError where a callback ends the training early.
    """
    device = next(module.parameters()).device
    module.world, module.products = pairs.world, products
    with warnings.catch_warnings():
        # on purpose: the quantized model has no dropout
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training.*")
        # steps are counted over the epochs, so there are curves all the same
        warnings.filterwarnings("ignore", ".*smaller than the logging interval.*")
        # the errors are sums over all processes already
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        fit(trainer, module, pairs, checkpoint)
    if module.finite:  # otherwise it has ended the training itself
        lower = "quantization.tuning.blocks.epochs or quantization.tuning.model.epochs"
        refuse_early_end(trainer, int(trainer.estimated_stepping_batches), "tuning", lower)
    module.to(device)  # Lightning leaves it on the CPU
    module.restore_best()
    return Tuned([], module.start_error, module.best_error, module.best_epoch, module.finite, changed=0.0)


@contextmanager
def _recomputing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Run blocks a second time in the backward pass; transformers' own way wants the training mode."""
    for block in blocks:
        block.forward = partial(recomputed, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
