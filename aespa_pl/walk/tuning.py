"""After step 4: a block as a whole is trained to do what the original block does (docs/tuning.md)."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import dequantize
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.measure import release_memory
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.planning.partition import HeadRange, Portion
from aespa_pl.run.journal import Run
from aespa_pl.settings import TuningSettings
from aespa_pl.storage.batches import Batches
from aespa_pl.tuning import (
    LearningRates,
    QuantizedWeight,
    Reconstruction,
    SegmentPairs,
    TunableBlock,
    reconstruct,
)

MakeTuningTrainer = Callable[[Portion, int], Trainer]
"""Makes the Trainer of a tuning from its portion and its number of epochs."""


def tuning_portion(block: int, name: str) -> Portion:
    """Return what tells the checkpoints of a tuning from those of step 4.

    Args:
        block: Number of the block; that of the last plus one for the model.
        name: ``tuning`` or ``model``.
    """
    return Portion(block, 0, (HeadRange(name, 0, 1, 1),))


@dataclass(frozen=True)
class BlockTuner:
    """Tunes one block after the other."""

    source: StreamedModel
    run: Run
    settings: TuningSettings
    make_trainer: MakeTuningTrainer

    @torch.no_grad()
    def begin(self, block: QuantizedBlock, module: nn.Module) -> TunableBlock:
        """Turn the module into the quantized block in float32, and return what its tuning starts from.

        The Hessians of ``block`` are not needed afterwards.
        """
        # before fold: the weights that are aimed at may be the module's own memory
        targets = {name: _folded_target(p) for name, p in block.projections.items()}
        module.float()
        replace_weights(block, module)
        weights = {name: _quantized_weight(p) for name, p in block.projections.items()}
        return TunableBlock(
            module, block.layout, weights, targets, stored_types(self.source, block.index)
        )

    def tune(
        self, index: int, tunable: TunableBlock, inputs: Batches, targets: Batches
    ) -> Reconstruction:
        """Tune a block; its module has the result, in float32.

        Args:
            index: Number of the block, from 0.
            tunable: The block.
            inputs: Hidden states before the quantized block.
            targets: Hidden states after the original block, in the original model.
        """
        settings, portion = self.settings.blocks, tuning_portion(index, "tuning")
        pairs = SegmentPairs(
            inputs,
            targets,
            batch_size=settings.batch_size,
            held_back=self.settings.held_back,
            seed=index,
        )
        found = reconstruct(
            tunable,
            pairs,
            run_block=self._run_block,
            rates=LearningRates(settings.integer_rate, settings.scale_rate, settings.bias_rate),
            trainer=self.make_trainer(portion, settings.epochs),
            label=f"block {index}",
            checkpoint=self.run.checkpoint_to_continue(portion),
        )
        gc.collect()  # Trainer, module and optimizer refer to each other
        release_memory()
        return found

    def _run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        family, hidden = self.source.family, hidden.float()
        return family.run_block(block, hidden, family.arguments(self.source.model, hidden))


@torch.no_grad()
def replace_weights(block: QuantizedBlock, module: nn.Module) -> None:
    """Turn the module into the quantized block: zeta is folded, the weights are the integers'."""
    fold(module, block.layout, block.zetas())
    for p in block.projections.values():
        weight = dequantize(p.integers, p.folded_grid).flatten(0, 1)
        set_projection_weight(module, block.layout, p.projection, weight)


def stored_types(source: StreamedModel, index: int) -> dict[str, torch.dtype]:
    """Return the types that the parameters of a block are stored in, by their names in the block."""
    pretrained, family = source.pretrained, source.family
    prefix = family.block_prefix(index)
    return {
        name.removeprefix(prefix): DTYPES[pretrained.tensors[name].dtype]
        for name in pretrained.block_names(family, index)
    }


def projection_weights(layout: BlockLayout) -> set[str]:
    """Return the names of the quantized parameters of a block."""
    return {f"{projection.module}.weight" for projection in layout.projections}


def _folded_target(p: QuantizedProjection) -> Tensor:
    """Return the weight that is aimed at, as it is where zeta is folded, ``[rows, d_in]``."""
    return (p.weight / p.grid.zeta * p.row_factor[..., None]).flatten(0, 1)


def _quantized_weight(p: QuantizedProjection) -> QuantizedWeight:
    grid = p.folded_grid
    return QuantizedWeight(
        p.integers.flatten(0, 1),
        grid.scale.flatten(0, 1),
        grid.zero_point.flatten(0, 1),
        grid.bits,
    )
