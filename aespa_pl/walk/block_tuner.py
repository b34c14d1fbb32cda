"""Train a block as a whole, after step 4, to do what the original block does (docs/tuning.md)."""

import gc
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.curve_names import ATTENTION, FEED_FORWARD
from aespa_pl.measure import release_memory
from aespa_pl.models.family import BlockLayout, InputGroup
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.run.context import Context
from aespa_pl.run.training import Training, block_curves
from aespa_pl.storage.batches import Batches, in_turn
from aespa_pl.tuning import (
    LearningRates,
    RunBlock,
    SegmentPairs,
    TunableBlock,
    Tuned,
    changed_fraction,
    output_error,
    recipe,
    tune,
)
from aespa_pl.walk.learned_unit import read_unit, write_unit


@dataclass(frozen=True)
class Unit:
    """Describes a part of a block that is trained together."""

    name: str
    """Name of a sublayer; empty for the whole block."""
    groups: tuple[InputGroup, ...]
    run: RunBlock
    """Runs hidden states from the block's start to the end of the unit."""
    targets: Batches
    """Hidden states of the original at the end of the unit."""


@dataclass(frozen=True)
class BlockTuner:
    """Tunes one block after the other."""

    context: Context

    def between(self, index: int, module: nn.Module, originals: Batches) -> Batches | None:
        """Return the original's hidden states between its sublayers; None where none are trained.

        ``module`` is the original block, ``originals`` the hidden states before it.
        """
        if not self.context.settings.tuning.by_sublayer:
            return None
        last = self.context.layout(index).groups[-1]
        with torch.inference_mode():
            batches = in_turn(originals, self.context.device)
            return self.context.source.keep(self._run_attention(last, module, batch) for batch in batches)

    @torch.no_grad()
    def begin(self, block: QuantizedBlock, module: nn.Module) -> TunableBlock:
        """Turn the module into the quantized block in float32, and return what its tuning starts from.

        The Hessians of ``block`` are not needed afterwards.
        """
        source = self.context.source
        # before fold: the weights that are aimed at may be the module's own memory
        targets = {name: folded_target(p) for name, p in block.projections.items()}
        module.float()
        replace_weights(block, module, source)
        types = stored_types(source, block.index)
        return TunableBlock(module, block.layout, block.stored(), types, targets)

    def tune(
        self, index: int, tunable: TunableBlock, inputs: Batches, between: Batches | None, targets: Batches
    ) -> Tuned:
        """Tune a block; its module has the result, in float32.

        ``inputs`` are the hidden states before the quantized block; the original model's are ``between`` the
        sublayers and, after the block, the ``targets``.
        """
        *first, last = self._units(tunable.layout, between, targets)
        weights, finite = dict(tunable.weights), True
        for unit in first:
            learned, usable = self._tune_before(index, unit, tunable, inputs)
            weights |= learned
            finite = finite and usable
        found = self._tune_unit(self._training(index, last), last, tunable, inputs)
        weights |= found.weights[0]
        changed = changed_fraction([tunable.weights], [weights])
        return replace(found, weights=[weights], changed=changed, finite=finite and found.finite)

    def _units(self, layout: BlockLayout, between: Batches | None, targets: Batches) -> list[Unit]:
        if between is None:
            return [Unit("", layout.groups, self._run_block, targets)]
        groups = layout.groups
        end = 1 + next(i for i, group in enumerate(groups) if group.projections[0].residual is not None)
        return [
            Unit(ATTENTION, groups[:end], partial(self._run_attention, groups[-1]), between),
            Unit(FEED_FORWARD, groups[end:], self._run_block, targets),
        ]

    def _tune_before(
        self, index: int, unit: Unit, tunable: TunableBlock, inputs: Batches
    ) -> tuple[dict[str, StoredWeight], bool]:
        """Tune a unit that others follow, or read what an interrupted run learned of it (``read_unit``)."""
        context = self.context
        training, file = context.world.from_first(lambda: self._known_unit(index, unit))
        if file is not None:
            return read_unit(file, tunable)
        found = self._tune_unit(training, unit, tunable, inputs)
        if context.world.is_first:
            file = context.run.portion_file(training)
            write_unit(file, tunable, found)
            context.run.note_portion(training, file)
        return found.weights[0], found.finite

    def _training(self, index: int, unit: Unit, number: int = 0) -> Training:
        """Return the training of a unit of a block; ``number`` is its place among those that are kept."""
        name, curves = f"tuning {unit.name}".strip(), block_curves(index, unit.name)
        return Training(index, name, curves, number, self.context.world.size)

    def _known_unit(self, index: int, unit: Unit) -> tuple[Training, Path | None]:
        """Return the training of a unit, and the file of what it has learned, if there is one."""
        run, key = self.context.run, self._training(index, unit).key
        known = [record.key for record in run.portions]
        number = known.index(key) if key in known else len(known)
        training = self._training(index, unit, number)
        return training, run.portion_to_continue(training)

    def _tune_unit(self, training: Training, unit: Unit, tunable: TunableBlock, inputs: Batches) -> Tuned:
        context, quantization, block = self.context, self.context.settings, tunable.block
        settings = quantization.tuning.blocks
        layout = replace(tunable.layout, groups=unit.groups)
        names = [p.name for p in layout.projections]
        pairs = SegmentPairs(
            inputs,
            unit.targets,
            batch_size=settings.batch_size,
            held_back=quantization.tuning.held_back,
            seed=training.block,
            world=context.world,
        )
        learned = recipe(quantization, block, layout)
        found = tune(
            [replace(tunable, layout=layout, weights={n: tunable.weights[n] for n in names})],
            pairs,
            loss=output_error(unit.run),
            rates=LearningRates(
                cast(float, settings.integer_rate),
                cast(float, settings.scale_rate),
                settings.bias_rate,
                settings.transformation_rate,
                bits=quantization.bits if learned.learns_steps else None,
            ),
            trainer=context.trainers.of_tuning(context.run, training, cast(int, settings.epochs)),
            label=f"block {training.block}",
            checkpoint=context.world.from_first(lambda: context.run.checkpoint_to_continue(training)),
            recipe=learned,
        )
        gc.collect()  # Trainer, module and optimizer refer to each other
        release_memory()
        return found

    def _run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        source = self.context.source
        hidden = hidden.to(next(block.parameters()).dtype)
        arguments = source.family.arguments(source.model, hidden)
        return source.family.run_block(block, hidden, arguments)

    def _run_attention(self, last: InputGroup, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return what the feed-forward network, whose ``last`` group it is, and its residual begin with."""
        kept: list[Tensor] = []
        module = block.get_submodule(cast(str, last.projections[0].residual))
        handle = module.register_forward_pre_hook(lambda _, arguments: kept.append(arguments[0]))
        try:
            self._run_block(block, hidden)
        finally:
            handle.remove()
        return kept[0].view(hidden.shape)  # some families have flattened it


@torch.no_grad()
def replace_weights(block: QuantizedBlock, module: nn.Module, source: StreamedModel) -> None:
    """Turn the module into the quantized block: zeta is folded, the weights are the integers'.

    All other parameters become float32, so that they are rounded once, to the type that they are stored in.
    """
    prefix = source.family.block_prefix(block.index)
    weights = {f"{p.module}.weight" for p in block.layout.projections}
    for name in stored_types(source, block.index):
        if name not in weights and source.dtype != torch.float32:
            exact = source.pretrained.tensor(prefix + name, torch.float32)
            module.get_parameter(name).data = exact.to(source.device)
    fold(module, block.layout, block.zetas())
    for p in block.projections.values():
        set_projection_weight(module, block.layout, p.projection, p.stored().weight())


def stored_types(source: StreamedModel, index: int) -> dict[str, torch.dtype]:
    """Return the types that the parameters of a block are stored in, by their names in the block."""
    pretrained, family = source.pretrained, source.family
    prefix = family.block_prefix(index)
    return {
        name.removeprefix(prefix): DTYPES[pretrained.tensors[name].dtype]
        for name in pretrained.block_names(family, index)
    }


def folded_target(p: QuantizedProjection) -> Tensor:
    """Return the weight that is aimed at, as it is where zeta is folded, ``[rows, d_in]``."""
    return (p.weight / p.grid.zeta * p.row_factor[..., None]).flatten(0, 1)
