"""Train a block as a whole, after step 4, to do what the original block does (docs/tuning.md)."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from aespa_pl.algorithm.grid_types import TypedWeight
from aespa_pl.algorithm.quantizer import StoredWeight, read_weight, weight_tensors
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.curve_names import ATTENTION, FEED_FORWARD
from aespa_pl.models.family import BlockLayout, InputGroup
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.run.context import Context
from aespa_pl.run.folder import Training, block_curves
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import checksum_of, write_tensors
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.losses import RunBlock, output_error
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.tune import Tuned, changed_fraction, tune
from aespa_pl.tuning.weights import TunableBlock, recipe


@dataclass(frozen=True)
class Unit:
    """Describes a part of a block that is trained together."""

    name: str  # of a sublayer; empty for the whole block
    groups: tuple[InputGroup, ...]
    run: RunBlock  # from the block's start to the end of the unit
    targets: Batches  # hidden states of the original at the end of the unit


class _ReachedError(Exception):
    """Ends the run of a block where its second sublayer begins, with the hidden states there."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class BlockTuner:
    """Tunes one block after the other."""

    context: Context

    def between(self, index: int, module: nn.Module, originals: Batches) -> Batches | None:
        """Return the hidden states between the original block's sublayers; None where none are trained."""
        if not self.context.settings.tuning.by_sublayer:
            return None
        start = feed_forward_start(self.context.layout(index).groups)
        with torch.inference_mode():
            batches = (originals[i].to(self.context.device) for i in range(len(originals)))
            return self.context.source.keep(self._run_attention(start, module, batch) for batch in batches)

    @torch.no_grad()
    def begin(self, block: QuantizedBlock, module: nn.Module) -> TunableBlock:
        """Turn the module into the quantized block in float32, and return what its tuning starts from."""
        source = self.context.source
        # before fold: the weights that are aimed at may be the module's own memory
        targets = {name: folded_target(p) for name, p in block.projections.items()}
        module.float()
        replace_weights(block, module, source)
        return TunableBlock(module, block.layout, block.stored(), stored_types(source, block.index), targets)

    def tune(
        self, index: int, tunable: TunableBlock, inputs: Batches, between: Batches | None, targets: Batches
    ) -> Tuned:
        """Tune a block; its module has the result, in float32.

        ``inputs`` are the hidden states before the quantized block; the original model's are ``between`` the
        sublayers and, after the block, the ``targets``.
        """
        groups, weights, finite, epoch = tunable.layout.groups, dict(tunable.weights), True, 0
        last = Unit("", groups, self._run_block, targets)
        # a sublayer whose projections are all kept has nothing to learn: the block is one unit then
        if between is not None and all(map(learnable, sublayers := sublayers_of(groups))):
            run_first = partial(self._run_attention, feed_forward_start(groups))
            first = Unit(ATTENTION, sublayers[0], run_first, between)
            last = Unit(FEED_FORWARD, sublayers[1], self._run_block, targets)
            learned, finite, epoch = self._tune_before(index, first, tunable, inputs)
            weights |= learned
        found = self._tune_unit(self._training(index, last, tunable), last, tunable, inputs)
        weights |= found.weights[0]
        changed, epoch = changed_fraction([tunable.weights], [weights]), max(epoch, found.epoch)
        finite = finite and found.finite
        return replace(found, weights=[weights], changed=changed, finite=finite, epoch=epoch)

    def _tune_before(
        self, index: int, unit: Unit, tunable: TunableBlock, inputs: Batches
    ) -> tuple[dict[str, StoredWeight], bool, int]:
        """Tune a unit that another follows, or read what an interrupted run learned of it (``read_unit``)."""
        context = self.context
        training, file = context.world.from_first(lambda: self._known_unit(index, unit, tunable))
        if file is not None:
            return read_unit(file, tunable)
        found = self._tune_unit(training, unit, tunable, inputs)
        if context.world.is_first:
            file = context.run.portion_file(training)
            write_unit(file, tunable, found)
            context.run.note_portion(training, file)
        return found.weights[0], found.finite, found.epoch

    def _training(self, index: int, unit: Unit, tunable: TunableBlock) -> Training:
        # a checkpoint lacks zero points and signs of scales, and targets, which are another dtype's
        name = f"{f'tuning {unit.name}'.strip()} in {self.context.source.dtype}"
        start = checksum_of(weight_tensors(tunable.weights).values())
        division = self.context.division
        return Training(index, name, block_curves(index, unit.name), division=division, start=start)

    def _known_unit(self, index: int, unit: Unit, tunable: TunableBlock) -> tuple[Training, Path | None]:
        """Return the training of a unit, and the file of what it has learned, if there is one."""
        run, training = self.context.run, self._training(index, unit, tunable)
        known = [record.key for record in run.portions]
        number = known.index(training.key) if training.key in known else len(known)
        training = replace(training, number=number)
        return training, run.portion_to_continue(training)

    def _tune_unit(self, training: Training, unit: Unit, tunable: TunableBlock, inputs: Batches) -> Tuned:
        context, quantization = self.context, self.context.settings
        settings, layout = quantization.tuning.blocks, replace(tunable.layout, groups=unit.groups)
        weights = {p.name: tunable.weights[p.name] for p in layout.projections}
        pairs = SegmentPairs(
            inputs,
            unit.targets,
            batch_size=settings.batch_size,
            held_back=quantization.tuning.held_back,
            seed=training.block,
            world=context.world,
        )
        learned = recipe(quantization, tunable.block, layout)
        found = tune(
            [replace(tunable, layout=layout, weights=weights)],
            pairs,
            loss=output_error(unit.run, context.source.pretrained.config.hidden_size),
            rates=LearningRates(
                cast(float, settings.integer_rate),
                cast(float, settings.scale_rate),
                settings.bias_rate,
                settings.transformation_rate,
                bits=quantization.bits if learned.learns_steps else None,
            ),
            trainer=context.trainers.of_tuning(context.run, training, cast(int, settings.epochs)),
            checkpoint=context.world.from_first(lambda: context.run.checkpoint_to_continue(training)),
            products=quantization.precision,
            recipe=learned,
        )
        del pairs  # which know the Trainer, and so all that it has trained
        context.free_memory()
        return found

    def _run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        source = self.context.source
        hidden = hidden.to(next(block.parameters()).dtype)
        arguments = source.family.arguments(source.model, hidden)
        return source.family.run_block(block, hidden, arguments)

    def _run_attention(self, start: str, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return the input of a module, with which the feed-forward network and its residual begin."""
        module = block.get_submodule(start)

        def stop(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            raise _ReachedError(arguments[0])

        handle = module.register_forward_pre_hook(stop)
        try:
            self._run_block(block, hidden)
        except _ReachedError as reached:
            return reached.hidden.view(*hidden.shape[:2], -1)  # some families have flattened it
        finally:
            handle.remove()
        raise RuntimeError("the block ended before its feed-forward network")


def sublayers_of(groups: tuple[InputGroup, ...]) -> tuple[tuple[InputGroup, ...], tuple[InputGroup, ...]]:
    """Return the groups of the attention, and those of the feed-forward network."""
    end = 1 + next(i for i, group in enumerate(groups) if group.projections[0].residual is not None)
    return groups[:end], groups[end:]


def feed_forward_start(groups: tuple[InputGroup, ...]) -> str:
    """Return the path of the module whose input the feed-forward network and its residual begin with."""
    projections = (p for group in sublayers_of(groups)[1] for p in group.projections)
    return next(p.residual for p in projections if p.residual is not None)


def learnable(groups: tuple[InputGroup, ...]) -> bool:
    """Return whether some of the groups' projections are quantized."""
    return any(not p.kept for group in groups for p in group.projections)


def write_unit(file: Path, tunable: TunableBlock, found: Tuned) -> None:
    """Write what was learned of a unit: its weights, and all of the block that is not quantized."""
    tensors = weight_tensors(found.weights[0])
    tensors |= {f"plain {name}": p for name, p in plain_parameters(tunable).items()}
    tensors |= {"finite": torch.tensor(found.finite), "epoch": torch.tensor(found.epoch)}
    write_tensors(file, tensors, {})


@torch.no_grad()
def read_unit(file: Path, tunable: TunableBlock) -> tuple[dict[str, StoredWeight], bool, int]:
    """Put what ``write_unit`` wrote into the block; return weights, finiteness of all errors, best epoch."""
    tensors = load_file(file, str(next(tunable.block.parameters()).device))
    weights: dict[str, StoredWeight] = {}
    for p in tunable.layout.projections:
        if f"{p.name}.integers" in tensors:
            start = tunable.weights[p.name]
            kind = start.kind.name if isinstance(start, TypedWeight) else None
            weights[p.name] = read_weight(tensors, p.name, start.bits, kind)
            set_projection_weight(tunable.block, tunable.layout, p, weights[p.name].weight())
    for name, parameter in plain_parameters(tunable).items():
        parameter.copy_(tensors[f"plain {name}"])
    return weights, bool(tensors["finite"]), int(tensors["epoch"])


def plain_parameters(tunable: TunableBlock) -> dict[str, nn.Parameter]:
    """Return what is not quantized: norms, biases, and matrices that factors of a norm are folded into."""
    quantized = {f"{p.module}.weight" for p in tunable.layout.projections}
    return {name: p for name, p in tunable.block.named_parameters() if name not in quantized}


def vectors(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the norms and biases of a module by name."""
    return {name: p for name, p in module.named_parameters() if p.dim() == 1}


@torch.no_grad()
def replace_weights(block: QuantizedBlock, module: nn.Module, source: StreamedModel) -> None:
    """Turn the module into the quantized block: zeta is folded, the weights are the integers'."""
    restore(module, source, block.index, block.layout)
    fold(module, block.layout, block.zetas())
    for p in block.projections.values():
        set_projection_weight(module, block.layout, p.projection, p.stored().weight())


def restore(module: nn.Module, source: StreamedModel, index: int, layout: BlockLayout) -> None:
    """Give a block what it has beside its projections as the original's file has it, in float32.

    So these values are rounded once, to the type that they are stored in, whatever type the block runs in.
    """
    prefix = source.family.block_prefix(index)
    weights, held = {f"{p.module}.weight" for p in layout.projections}, module.state_dict(keep_vars=True)
    for name in stored_types(source, index):
        if name not in weights and source.dtype != torch.float32:
            exact = source.pretrained.tensor(prefix + name, torch.float32)
            held[name].data = exact.to(source.device)


def stored_types(source: StreamedModel, index: int) -> dict[str, torch.dtype]:
    """Return the types that the tensors of a block are stored in, by their names in the block."""
    prefix, tensors = source.family.block_prefix(index), source.pretrained.tensors
    names = source.pretrained.block_names(index)
    return {name.removeprefix(prefix): DTYPES[tensors[name].dtype] for name in names}


def folded_target(p: QuantizedProjection) -> Tensor:
    """Return the weight that is aimed at, as it is where zeta is folded, ``[rows, d_in]``."""
    return (p.weight / p.grid.zeta * p.row_factor[..., None]).flatten(0, 1)
