"""Train a block as a whole, after step 4, to do what the original block does (docs/tuning.md)."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import dequantize
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.calibration.observe import observing
from aespa_pl.curve_names import ATTENTION, FEED_FORWARD
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.measure import release_memory
from aespa_pl.models.family import BlockLayout, InputGroup
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.planning.partition import HeadRange, Portion
from aespa_pl.run.journal import Run
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.transfer import in_turn
from aespa_pl.tuning import (
    LearningRates,
    QuantizedWeight,
    Reconstruction,
    RunBlock,
    SegmentPairs,
    TunableBlock,
    changed_share,
    recipe,
    reconstruct,
)
from aespa_pl.walk.learned_unit import LearnedUnit, read_unit, write_unit

MakeTuningTrainer = Callable[[Portion, int], Trainer]
"""Makes the Trainer of a tuning from its portion and its number of epochs."""


def tuning_portion(block: int, name: str, world: World, number: int = 0) -> Portion:
    """Return the portion that tells the checkpoints of a tuning from the checkpoints of step 4.

    Args:
        block: Number of the block; the number of blocks for the model.
        name: Name of the unit, or ``model``.
        world: The processes that tune it together; others could not continue from its checkpoints.
        number: Place among the portions of the block, where its result is kept for another tuning.
    """
    return Portion(block, number, (HeadRange(name, 0, 1, 1),), world.size)


@dataclass(frozen=True)
class Unit:
    """Describes a part of a block that is trained together."""

    name: str
    """Name that tells its checkpoints from the checkpoints of others."""
    groups: tuple[InputGroup, ...]
    run: RunBlock
    """Runs hidden states from the block's start to the end of the unit."""
    targets: Batches
    """Hidden states of the original at the end of the unit."""


@dataclass(frozen=True)
class BlockTuner:
    """Tunes one block after the other."""

    source: StreamedModel
    run: Run
    settings: QuantizationSettings
    make_trainer: MakeTuningTrainer
    world: World = ALONE
    """The processes; each has the hidden states of its segments, and all get the tuned block."""

    def between(self, module: nn.Module, originals: Batches) -> Batches | None:
        """Return the original's hidden states between the sublayers; None where none are trained.

        Args:
            module: The original block.
            originals: Hidden states before it.
        """
        if not self.settings.tuning.by_sublayer:
            return None
        with torch.inference_mode():
            batches = in_turn(originals, self.source.device)
            return self.source.keep(self._run_attention(module, batch) for batch in batches)

    @torch.no_grad()
    def begin(self, block: QuantizedBlock, module: nn.Module) -> TunableBlock:
        """Turn the module into the quantized block in float32, and return what its tuning starts from.

        The Hessians of ``block`` are not needed afterwards.
        """
        # before fold: the weights that are aimed at may be the module's own memory
        targets = {name: _folded_target(p) for name, p in block.projections.items()}
        module.float()
        replace_weights(block, module)
        types = stored_types(self.source, block.index)
        return TunableBlock(module, block.layout, stored_weights(block), targets, types)

    def tune(
        self,
        index: int,
        tunable: TunableBlock,
        inputs: Batches,
        between: Batches | None,
        targets: Batches,
    ) -> Reconstruction:
        """Tune a block; its module has the result, in float32.

        Args:
            index: Number of the block, from 0.
            tunable: The block.
            inputs: Hidden states before the quantized block.
            between: What ``between`` returned.
            targets: Hidden states after the original block, in the original model.
        """
        *first, last = self._units(tunable.layout, between, targets)
        weights, finite = dict(tunable.weights), True
        for unit in first:
            learned = self._tune_before(index, unit, tunable, inputs)
            weights |= learned.weights
            finite = finite and learned.finite
        found = self._tune_unit(tuning_portion(index, last.name, self.world), last, tunable, inputs)
        weights |= found.weights
        changed = changed_share(tunable.weights, weights)
        return replace(found, weights=weights, changed=changed, finite=finite and found.finite)

    def _units(self, layout: BlockLayout, between: Batches | None, targets: Batches) -> list[Unit]:
        if between is None:
            return [Unit("tuning", layout.groups, self._run_block, targets)]
        groups = layout.groups
        end = 1 + next(i for i, group in enumerate(groups) if layout.values_before(group))
        return [
            Unit(ATTENTION, groups[:end], self._run_attention, between),
            Unit(FEED_FORWARD, groups[end:], self._run_block, targets),
        ]

    def _tune_before(
        self, index: int, unit: Unit, tunable: TunableBlock, inputs: Batches
    ) -> LearnedUnit:
        """Tune a unit that others follow, or read what an interrupted run has learned of it."""
        portion, file = self.world.from_first(lambda: self._known_unit(index, unit))
        if file is not None:
            return read_unit(file, tunable)
        found = self._tune_unit(portion, unit, tunable, inputs)
        if self.world.is_first:
            file = self.run.portion_file(portion)
            write_unit(file, tunable, found)
            self.run.note_portion(portion, file)
        return LearnedUnit(found.weights, found.finite)

    def _known_unit(self, index: int, unit: Unit) -> tuple[Portion, Path | None]:
        """Return a unit's portion of the block, and the file of what was learned of it, if there is one."""
        keys = tuning_portion(index, unit.name, self.world).keys
        known = [record.keys for record in self.run.portions]
        number = known.index(keys) if keys in known else len(known)
        portion = tuning_portion(index, unit.name, self.world, number)
        return portion, self.run.portion_to_continue(portion)

    def _tune_unit(
        self, portion: Portion, unit: Unit, tunable: TunableBlock, inputs: Batches
    ) -> Reconstruction:
        settings, block = self.settings.tuning.blocks, tunable.block
        layout = replace(tunable.layout, groups=unit.groups)
        names = [p.name for p in layout.projections]
        pairs = SegmentPairs(
            inputs,
            unit.targets,
            batch_size=settings.batch_size,
            held_back=self.settings.tuning.held_back,
            seed=portion.block,
            world=self.world,
        )
        learned = recipe(self.settings, block, layout)
        found = reconstruct(
            replace(tunable, layout=layout, weights={n: tunable.weights[n] for n in names}),
            pairs,
            run_block=unit.run,
            rates=LearningRates(
                cast(float, settings.integer_rate),
                cast(float, settings.scale_rate),
                settings.bias_rate,
                settings.transformation_rate,
                bits=self.settings.bits if learned.learns_steps else None,
            ),
            trainer=self.make_trainer(portion, cast(int, settings.epochs)),
            label=f"block {portion.block}",
            checkpoint=self.world.from_first(lambda: self.run.checkpoint_to_continue(portion)),
            learned=learned,
        )
        gc.collect()  # Trainer, module and optimizer refer to each other
        release_memory()
        return found

    def _run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        family, dtype = self.source.family, next(block.parameters()).dtype
        hidden = hidden.to(dtype)
        return family.run_block(block, hidden, family.arguments(self.source.model, hidden))

    def _run_attention(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return what the feed-forward network and the residual stream beside it begin with."""
        layout = self.source.family.layout(self.source.pretrained.config)
        last = layout.groups[-1]
        with observing(block, [last], residuals=True) as seen:
            self._run_block(block, hidden)
        return seen.residuals[last.name].view(hidden.shape)  # some families have flattened it


@torch.no_grad()
def replace_weights(block: QuantizedBlock, module: nn.Module) -> None:
    """Turn the module into the quantized block: zeta is folded, the weights are the integers'."""
    fold(module, block.layout, block.zetas())
    for p in block.projections.values():
        weight = dequantize(p.integers, p.folded_grid).flatten(0, 1)
        set_projection_weight(module, block.layout, p.projection, weight)


def stored_weights(block: QuantizedBlock) -> dict[str, QuantizedWeight]:
    """Return what engines store of a block's weights, by projection."""
    weights = {}
    for name, p in block.projections.items():
        grid = p.folded_grid
        scale, zero_point = grid.scale.flatten(0, 1), grid.zero_point.flatten(0, 1)
        weights[name] = QuantizedWeight(p.integers.flatten(0, 1), scale, zero_point, grid.bits)
    return weights


def stored_types(source: StreamedModel, index: int) -> dict[str, torch.dtype]:
    """Return the types that the parameters of a block are stored in, by their names in the block."""
    pretrained, family = source.pretrained, source.family
    prefix = family.block_prefix(index)
    return {
        name.removeprefix(prefix): DTYPES[pretrained.tensors[name].dtype]
        for name in pretrained.block_names(family, index)
    }


def _folded_target(p: QuantizedProjection) -> Tensor:
    """Return the weight that is aimed at, as it is where zeta is folded, ``[rows, d_in]``."""
    return (p.weight / p.grid.zeta * p.row_factor[..., None]).flatten(0, 1)
