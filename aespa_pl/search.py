"""Steps 2 to 4 of a block: from its weights and statistics to its integers."""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import start
from aespa_pl.algorithm.descent import Descent, descend
from aespa_pl.algorithm.objectives import keep_better
from aespa_pl.algorithm.quantizer import quantize
from aespa_pl.errors import UserError
from aespa_pl.models.family import BlockLayout, Projection, Role
from aespa_pl.preparation import (
    PreparedProjection,
    corrected_targets,
    fit_block_grids,
    prepare_rounding,
    state_problem,
)
from aespa_pl.ranks import ALONE, Ranks
from aespa_pl.rounding import BlockRounding, BlockStatistics, RoundingTask, StatisticsBatch
from aespa_pl.run import DamagedFileError, Run
from aespa_pl.settings import QuantizationSettings
from aespa_pl.shards import Shard
from aespa_pl.statistics import BlockStatisticTensors
from aespa_pl.timing import Stopwatch

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
        self.journal.forget_checkpoint()
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
        tasks, shards = {}, {}
        for name, p in list(prepared.items()):
            if self._learns(p.projection):
                shards[name] = self._shard(p)
                tasks[name] = self._task(p, shards[name])
            prepared[name] = replace(p, updated=p.weight)
        integers = {name: p.integers for name, p in prepared.items()}
        if not tasks:
            return integers
        statistics = {n: self._statistics(prepared[n], shards[n]) for n in tasks}
        learned = self._learn(index, tasks, statistics, shards)
        gc.collect()  # Trainer, module and optimizer refer to each other
        if not self.settings.rounding.keep_best:
            return integers | learned
        for name, found in learned.items():
            p = prepared[name]
            integers[name] = keep_better(found, p.loss(found), p.integers, p.loss(p.integers))
        return integers

    def _task(self, p: PreparedProjection, shard: Shard) -> RoundingTask:
        settings = self.settings.rounding
        attention = p.projection.role is not Role.OTHER
        weight, grid = shard.part(p.weight), shard.grid(p.grid)
        return RoundingTask(
            *start(weight, shard.part(p.updated), grid),
            nearest=quantize(weight, grid).to(torch.uint8),
            penalty=settings.penalty_attention if attention else settings.penalty_other,
        )

    def _shard(self, p: PreparedProjection) -> Shard:
        return Shard.of(p.weight, p.hessian, p.other_side, self.ranks)

    def _statistics(self, p: PreparedProjection, shard: Shard) -> tuple[Tensor, Tensor | None]:
        G = p.other_side
        return shard.of_heads(p.hessian), None if G is None else shard.of_heads(G)

    def _learn(
        self,
        index: int,
        tasks: Mapping[str, RoundingTask],
        statistics: StatisticsBatch,
        shards: Mapping[str, Shard],
    ) -> dict[str, Tensor]:
        """Run one Trainer.fit; each process learns its rows, and all get all integers."""
        settings = self.settings.rounding
        module = BlockRounding(tasks, settings, f"block {index}", shards)
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
            parts = module.integers()
        return {name: shards[name].whole(q.to(self.device)) for name, q in parts.items()}

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

    def _measure(self, phase: str) -> Any:
        return self.stopwatch.measure(phase, self.device)
