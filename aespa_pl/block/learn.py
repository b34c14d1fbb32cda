"""Step 4 learns the rounding, with a Lightning Trainer for each portion of the block.

Source: docs/algorithm.md, step 4; Eq. 27 and 28 of the paper.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from aespa_pl.algorithm.objectives import keep_better, multiplying_in, operand
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.calibration.statistics import Hessian
from aespa_pl.distributed.processes import RowShare
from aespa_pl.fitting import fit, refuse_early_end
from aespa_pl.measure import release_memory
from aespa_pl.models.family import Role
from aespa_pl.planning.partition import WHOLE, Divisible, HeadRange, Portion, learning_portions
from aespa_pl.rounding import BlockRounding, ProjectionRounding, StatisticsBatch, StatisticsDataModule
from aespa_pl.run.checkpointing import read_checkpoint
from aespa_pl.run.context import Context
from aespa_pl.run.folder import Training, block_curves
from aespa_pl.storage.files import checksum_of, write_tensors


@dataclass(frozen=True)
class Learner:
    """Learns the rounding of one block after the other."""

    context: Context

    def learn(self, block: QuantizedBlock) -> None:
        """Replace the integers of the projections whose rounding the method learns.

        Raises NumericalError where a loss is not finite, and UserError where a callback ends one early.
        """
        context, run = self.context, self.context.run
        learned = {name: p for name, p in block.projections.items() if p.learned}
        divisible = [
            Divisible(name, p.heads, p.weight.numel(), not p.hessian.in_memory) for name, p in learned.items()
        ]
        integers: dict[str, list[Tensor]] = {name: [] for name in learned}
        for number, portion in enumerate(learning_portions(divisible, context.partition)):
            name = f"{', '.join(heads.key for heads in portion)} in {context.source.dtype}"
            start = checksum_of(_starts(portion, learned))
            training = Training(block.index, name, block_curves(block.index), number, start=start)
            of_portion = context.world.from_first(partial(self._learned_before, training))
            if of_portion is None:
                module = self._module(portion, block)
                release_memory()
                trainer = context.trainers.of_rounding(run, training)
                fit(
                    trainer,
                    module,
                    StatisticsDataModule(self._statistics(portion, block)),
                    context.world.from_first(partial(self._checkpoint, training)),
                )
                key, wanted = "quantization.rounding.iterations", context.settings.rounding.iterations
                refuse_early_end(trainer, wanted, f"block {block.index}: learning", key)
                of_portion = self._integers(module, portion, block)
                del module, trainer
                self._keep(training, of_portion)
            for heads in portion:
                integers[heads.name].append(of_portion[heads.key].to(context.device))
        for name, p in learned.items():
            q = torch.cat(integers[name])
            if context.settings.rounding.keep_best:
                q = keep_better(q, p.loss(q), p.integers, p.loss(p.integers))
            p.integers = q

    def _checkpoint(self, training: Training) -> Path | None:
        """Return the checkpoint of a training, unless it has more iterations than are wanted now."""
        file = self.context.run.checkpoint_to_continue(training)
        wanted = self.context.settings.rounding.iterations
        if file is None or read_checkpoint(file, mmap=True)["global_step"] <= wanted:
            return file
        self.context.progress.say(
            f"block {training.block}: its checkpoint has more than {wanted} iterations, so it is learned "
            "again"
        )
        return None

    def _module(self, portion: Portion, block: QuantizedBlock) -> BlockRounding:
        projections = {heads.key: self._rounding(heads, block) for heads in portion}
        settings = self.context.settings
        return BlockRounding(projections, settings.rounding, f"block {block.index}", settings.precision)

    def _integers(self, module: BlockRounding, portion: Portion, block: QuantizedBlock) -> dict[str, Tensor]:
        """Return the integers of all processes' rows, by head range."""
        with self.context.world.failing_together():
            own = module.integers()
        shares = {heads.key: self._share(heads, block.projections[heads.name]) for heads in portion}
        return {key: share.whole(own[key].to(self.context.device)) for key, share in shares.items()}

    def _keep(self, training: Training, integers: dict[str, Tensor]) -> None:
        """Write down what a portion has learned where an interruption may follow."""
        self.context.free_memory()
        # there may be a next portion, or the tuning of the block, to be interrupted in
        context = self.context
        more = context.partition != WHOLE or context.settings.tuning.blocks.enabled
        if more and context.world.is_first:
            file = context.run.portion_file(training)
            write_tensors(file, integers, {})
            context.run.note_portion(training, file)

    def _rounding(self, heads: HeadRange, block: QuantizedBlock) -> ProjectionRounding:
        """Return the soft rounding of this process's rows; W' goes when its last heads have begun."""
        p, settings = block.projections[heads.name], self.context.settings.rounding
        some = slice(heads.first, heads.end)
        share, grid = self._share(heads, p), p.grid.heads(heads.first, heads.end - heads.first)
        updated = p.weight if p.updated is None else p.updated
        attention = p.projection.role is not Role.OTHER
        rounding = ProjectionRounding(
            share.part(p.weight[some]),
            share.part(updated[some]),
            grid.merged(share.part),
            penalty=settings.penalty_attention if attention else settings.penalty_other,
            share=share,
        )
        if heads.end == heads.heads:
            p.updated = None
        return rounding

    def _statistics(self, portion: Portion, block: QuantizedBlock) -> StatisticsBatch:
        """Return H and G of this process's rows; projections with the same input share an H."""
        batch, shared = {}, dict[Hessian, Tensor]()
        with multiplying_in(self.context.settings.precision):
            for heads in portion:
                p = block.projections[heads.name]
                taken = self._share(heads, p).taken_heads
                taken = slice(heads.first + taken.start, heads.first + taken.stop)
                if len(p.hessian) == 1:
                    if p.hessian not in shared:
                        shared[p.hessian] = operand(p.hessian[:])
                    H = shared[p.hessian]
                else:
                    H = operand(p.hessian[taken])
                batch[heads.key] = H, None if p.other_side is None else p.other_side[taken]
        return batch

    def _share(self, heads: HeadRange, p: QuantizedProjection) -> RowShare:
        return replace(p.share(self.context.world), heads=heads.end - heads.first)

    def _learned_before(self, training: Training) -> dict[str, Tensor] | None:
        """Return the integers that a portion had learned before an interruption, if it had."""
        file = self.context.run.portion_to_continue(training)
        return None if file is None else load_file(file)


def _starts(portion: Portion, projections: Mapping[str, QuantizedProjection]) -> Iterator[Tensor]:
    """Yield grids and integers: variables of a checkpoint are of weights between two values of these grids.

    Sums in another order, as with another batch size, device or number of threads, make other ones.
    """
    for heads in portion:
        p = projections[heads.name]
        grid = p.grid.heads(heads.first, heads.end - heads.first)
        yield from (grid.scale, grid.zero_point, grid.zeta)
        yield p.integers[heads.first : heads.end].to(torch.uint8)
