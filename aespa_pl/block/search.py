"""Steps 2 to 4 of a block: from its weights and statistics to its integers."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import start
from aespa_pl.algorithm.descent import Descent, descend
from aespa_pl.algorithm.hessian import HeadMatrices
from aespa_pl.algorithm.objectives import keep_better
from aespa_pl.algorithm.products import operand
from aespa_pl.algorithm.quantizer import quantize
from aespa_pl.block.preparation import (
    PreparedProjection,
    corrected_targets,
    fit_block_grids,
    prepare_rounding,
    state_problem,
)
from aespa_pl.calibration.statistics import BlockStatisticTensors
from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.distributed.rows import Shard
from aespa_pl.errors import UserError
from aespa_pl.measure import Stopwatch, release_memory
from aespa_pl.models.family import BlockLayout, Projection, Role
from aespa_pl.planning.partition import WHOLE, Divisible, Partition, Piece, learning_parts
from aespa_pl.rounding import BlockRounding, BlockStatistics, RoundingTask, StatisticsBatch
from aespa_pl.run.journal import DamagedFileError, Run
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.files import write_tensors

MakeTrainer = Callable[[int], Trainer]
"""Makes the Trainer of a block from its index."""
Targets = Mapping[str, Tensor] | None
"""Weights to aim at, by projection; None: the block's own."""

DAMPING_GROWTH = 10
"""Factor of the damping in the second attempt at a block whose loss was not finite."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IntegerSearch:
    """Chooses the integers of one block after the other."""

    settings: QuantizationSettings
    layout: BlockLayout
    device: torch.device
    journal: Run
    """Knows the checkpoint of the block under way, and which blocks want more damping."""
    make_trainer: MakeTrainer
    stopwatch: Stopwatch
    partition: Partition
    ranks: Ranks = ALONE
    """All of them call the same methods; each gets all integers."""

    def targets(self, index: int, block: nn.Module, statistics: BlockStatisticTensors) -> Targets:
        """Return the weights to aim at; the statistics' shifts are of no use afterwards.

        Raises:
            UserError: A Hessian cannot be factored.
        """
        if not self.settings.input_correction:
            return None
        with self._measure("correction"):
            try:
                return corrected_targets(
                    block,
                    self.layout,
                    statistics,
                    self.settings.damping,
                    self.settings.input_correction,
                )
            except ArithmeticError as error:
                raise UserError(
                    f"block {index}, {error}; raise quantization.damping in a new run"
                ) from error

    def run(
        self,
        index: int,
        block: nn.Module,
        statistics: BlockStatisticTensors,
        targets: Targets,
    ) -> tuple[dict[str, PreparedProjection], dict[str, Tensor], dict[str, Descent]]:
        """Choose the integers of a block.

        Args:
            index: Of the block.
            block: With its original weights.
            statistics: Of the block; its Hessians are damped in place.
            targets: Weights to aim at.

        Returns:
            By projection: what the integers were chosen for, the integers, and what the descent did
            (nothing where it is off).

        Raises:
            UserError: The loss is not finite even with ten times the damping.
        """
        prepared, integers = self._choose(index, block, statistics, targets)
        descents = self._polish(prepared, integers)
        integers |= {name: descent.integers for name, descent in descents.items()}
        return prepared, integers, descents

    def _choose(
        self,
        index: int,
        block: nn.Module,
        statistics: BlockStatisticTensors,
        targets: Targets,
    ) -> tuple[dict[str, PreparedProjection], dict[str, Tensor]]:
        """Run steps 2 to 4; once more with ten times the damping where the loss is not finite."""
        damping = self.journal.damping.get(index, self.settings.damping)
        try:
            return self._attempt(index, block, statistics, targets, damping)
        except ArithmeticError as error:  # NonFiniteLossError is one
            stronger = DAMPING_GROWTH * damping
            if damping != self.settings.damping or stronger >= 1:
                raise UserError(f"{error}; raise quantization.damping in a new run") from error
            log.warning("%s; again with damping %g", error, stronger)
        self.journal.damping[index] = stronger
        self.journal.forget_learning()
        return self._choose(index, block, statistics, targets)

    def _attempt(
        self,
        index: int,
        block: nn.Module,
        statistics: BlockStatisticTensors,
        targets: Targets,
        damping: float,
    ) -> tuple[dict[str, PreparedProjection], dict[str, Tensor]]:
        try:
            with self._measure("grid"):
                problem = state_problem(block, self.layout, statistics, damping, targets)
                grids = fit_block_grids(problem, self.settings, self.ranks)
            with self._measure("optq"):
                prepared = prepare_rounding(problem, grids, self.settings, self.ranks)
        except ArithmeticError as error:
            raise ArithmeticError(f"block {index}, {error}") from error
        with self._measure("rounding"):
            return prepared, self._round(index, prepared)

    def _round(self, index: int, prepared: dict[str, PreparedProjection]) -> dict[str, Tensor]:
        """Run step 4 on what the method learns; W' is forgotten, for only its start needs it."""
        integers = {name: p.integers for name, p in prepared.items()}
        parts = learning_parts(
            [_divisible(p) for p in prepared.values() if self._learns(p.projection)], self.partition
        )
        found: dict[str, list[Tensor]] = {}
        for number, part in enumerate(parts):
            for name, q in self._learn_part(index, number, part, prepared).items():
                found.setdefault(name, []).append(q)
        for name, pieces in found.items():
            p, q = prepared[name], torch.cat(pieces)
            best = self.settings.rounding.keep_best
            integers[name] = (
                keep_better(q, p.loss(q), p.integers, p.loss(p.integers)) if best else q
            )
        return integers

    def _learn_part(
        self,
        index: int,
        number: int,
        part: Sequence[Piece],
        prepared: dict[str, PreparedProjection],
    ) -> dict[str, Tensor]:
        """Return the integers of the pieces of one part, by projection; what is done already is read."""
        self.journal.pieces = [piece.key for piece in part]
        learned = self.ranks.from_first(lambda: self._learned_before(index, number))
        if learned is None:
            release_memory()
            learned = self._learn(index, *self._tasks(part, prepared))
            gc.collect()  # Trainer, module and optimizer refer to each other
            release_memory()
            # there may be a next part to be interrupted in
            if self.partition != WHOLE and self.ranks.is_first:
                file = self.journal.part_file(index, number)
                write_tensors(file, learned, {})
                self.journal.note_part(index, file)
        return {piece.name: learned[piece.key].to(self.device) for piece in part}

    def _tasks(
        self, part: Sequence[Piece], prepared: dict[str, PreparedProjection]
    ) -> tuple[dict[str, RoundingTask], dict[str, tuple[Tensor, Tensor | None]], dict[str, Shard]]:
        """Return what this process's learning of a part begins with, and which rows these are.

        W' goes when the last heads have begun.
        """
        settings = self.settings.rounding
        tasks, statistics, shards = {}, {}, {}
        shared: dict[int, Tensor] = {}  # projections with the same input share its Hessian
        for piece in part:
            whole = prepared[piece.name]
            p = whole.of_heads(piece.first, piece.end)
            shards[piece.key] = shard = self._shard(p)
            weight, grid = shard.part(p.weight), shard.grid(p.grid)
            attention = p.projection.role is not Role.OTHER
            tasks[piece.key] = RoundingTask(
                *start(weight, shard.part(p.updated), grid),
                nearest=quantize(weight, grid).to(torch.uint8),
                penalty=settings.penalty_attention if attention else settings.penalty_other,
            )
            H, G = self._statistics(p, shard)
            if isinstance(H, Tensor) and H.data_ptr() in shared:
                factor = shared[H.data_ptr()]
            else:
                factor = operand(H[:], self.settings.products)
            if isinstance(H, Tensor):  # and in memory all the time, so that nothing else is there
                shared[H.data_ptr()] = factor
            statistics[piece.key] = factor, G
            if piece.end == piece.heads:
                prepared[piece.name] = replace(whole, updated=whole.weight)
        return tasks, statistics, shards

    def _shard(self, p: PreparedProjection) -> Shard:
        return Shard.of(p.weight, p.hessian, p.other_side, self.ranks)

    def _statistics(
        self, p: PreparedProjection, shard: Shard
    ) -> tuple[Tensor | HeadMatrices, Tensor | None]:
        G = p.other_side
        return shard.hessians(p.hessian), None if G is None else shard.of_heads(G)

    def _learn(
        self,
        index: int,
        tasks: Mapping[str, RoundingTask],
        statistics: StatisticsBatch,
        shards: Mapping[str, Shard],
    ) -> dict[str, Tensor]:
        """Run one Trainer.fit; each process learns its rows, and all get all integers."""
        settings = self.settings.rounding
        module = BlockRounding(tasks, settings, f"block {index}", shards, self.settings.products)
        trainer = self.make_trainer(index)
        trainer.fit(
            module, datamodule=BlockStatistics(statistics), ckpt_path=self._checkpoint(index)
        )
        if trainer.global_step < settings.iterations:
            raise UserError(
                f"block {index}: learning ended after {trainer.global_step} of {settings.iterations} "
                "iterations: remove from the trainer section what ends it early"
            )
        with self.ranks.failing_together():
            found = module.integers()
        return {key: shards[key].whole(q.to(self.device)) for key, q in found.items()}

    def _learns(self, projection: Projection) -> bool:
        """Return whether the method learns the rounding of a projection."""
        return self.settings.learns(attention=projection.role is not Role.OTHER)

    def _polish(
        self, prepared: Mapping[str, PreparedProjection], integers: Mapping[str, Tensor]
    ) -> dict[str, Descent]:
        """Run the coordinate descent, which is not in the paper; where it is off, return nothing."""
        settings = self.settings.polish
        if not settings.enabled:
            return {}
        with self._measure("polish"):
            return {name: self._descend(p, integers[name]) for name, p in prepared.items()}

    def _descend(self, p: PreparedProjection, integers: Tensor) -> Descent:
        shard = self._shard(p)
        part = descend(
            shard.part(integers),
            shard.part(p.weight),
            shard.grid(p.grid),
            *self._statistics(p, shard),
            passes=self.settings.polish.passes,
        )
        return Descent(
            shard.whole(part.integers),
            int(self.ranks.largest(part.passes)),
            int(shard.sum(part.changed)),
            shard.sum(part.loss_before),
        )

    def _checkpoint(self, index: int) -> Path | None:
        """Return where the rounding of a block was interrupted."""

        def look() -> Path | None:
            try:
                return self.journal.usable_checkpoint(index)
            except DamagedFileError as error:
                log.warning("block %d: %s is damaged or missing: it is not used", index, error)
                self.journal.forget_checkpoint()
                return None

        return self.ranks.from_first(look)

    def _learned_before(self, index: int, number: int) -> dict[str, Tensor] | None:
        """Return what one part of the learning found before an interruption."""
        try:
            file = self.journal.usable_part(index, number)
        except DamagedFileError as error:
            log.warning("block %d: %s is damaged or missing: it is learned again", index, error)
            self.journal.forget_parts(number)
            return None
        return None if file is None else load_file(file)

    def _measure(self, phase: str) -> Any:
        return self.stopwatch.measure(phase, self.device)


def _divisible(p: PreparedProjection) -> Divisible:
    on_disk = not isinstance(p.hessian, Tensor)
    return Divisible(p.projection.name, p.weight.shape[0], p.weight.numel(), on_disk)
