"""Run the steps of one block in their order, from weights and statistics to integers."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from aespa_pl.block.correct import correct
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.learn import Learner
from aespa_pl.block.polish import polish
from aespa_pl.block.quantized import QuantizedBlock
from aespa_pl.block.update import update
from aespa_pl.calibration.statistics import BlockStatistics, Shifts
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import NumericalError, UserError
from aespa_pl.measure import Stopwatch
from aespa_pl.models.family import BlockLayout
from aespa_pl.run.journal import Run
from aespa_pl.settings import QuantizationSettings

DAMPING_GROWTH = 10
"""Factor of the damping in the second attempt at a block whose loss was not finite."""
ADVICE = (
    "check the model and data.calibration.source, or try another quantization.damping in a new run"
)
"""What to do about a NumericalError that a second attempt doesn't mend."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockQuantizer:
    """Runs the steps of one block after the other."""

    settings: QuantizationSettings
    learner: Learner
    stopwatch: Stopwatch
    run: Run
    """Knows the damping of second attempts."""
    device: torch.device
    world: World = ALONE
    """All processes call the same methods; each gets all integers."""

    def start(
        self, index: int, module: nn.Module, layout: BlockLayout, statistics: BlockStatistics
    ) -> QuantizedBlock:
        """Return a block's nearest rounding, aimed at weights that make up for earlier blocks' errors.

        Args:
            index: Number of the block, from 0.
            module: The block with its original weights.
            layout: Layout of the block.
            statistics: Statistics of the block. Its Hessians become the quantized block's; the rest is
                not needed afterwards.

        Raises:
            UserError: A Hessian cannot be factored.
        """
        block = QuantizedBlock.nearest(index, module, layout, statistics, self.settings)
        block.damp(self.settings.damping)
        if statistics.shifts is not None:
            with self._measure("correction"):
                self._correct(block, statistics.shifts)
        if self.settings.uses_inputs:
            block.clear_dead_columns()
        return block

    def quantize(self, block: QuantizedBlock) -> None:
        """Run steps 2 to 4 and the polish on a block that has started.

        Raises:
            UserError: The loss is not finite even with ten times the damping.
        """
        damping = self.run.damping.get(block.index, self.settings.damping)
        while True:
            block.damp(damping)
            try:
                with self._measure("grid"):
                    fit_grids(block, self.settings, self.world)
                self._update(block)
                with self._measure("rounding"):
                    self.learner.learn(block)
                break
            except NumericalError as error:
                damping = self._more_damping(block.index, damping, error)
        if self.settings.polish.enabled:
            with self._measure("polish"):
                polish(block, self.settings.polish.passes, self.world)

    def _correct(self, block: QuantizedBlock, shifts: Shifts) -> None:
        try:
            correct(block, shifts, self.settings.input_correction or 0.0)
        except NumericalError as error:
            raise UserError(f"{error}; {ADVICE}") from error

    def _update(self, block: QuantizedBlock) -> None:
        if self.settings.optq.enabled:
            with self._measure("optq"):
                update(block, self.world, rows=bool(self.settings.optq.rows))
        for p in block.projections.values():
            p.measured["optq"] = float(p.loss(p.integers).sum())

    def _more_damping(self, index: int, used: float, error: NumericalError) -> float:
        """Return the damping of the second attempt; there is no third."""
        stronger = DAMPING_GROWTH * used
        if used != self.settings.damping or stronger >= 1:
            raise UserError(f"{error}; {ADVICE}") from error
        log.warning("%s; again with damping %g", error, stronger)
        self.run.damping[index] = stronger
        self.run.forget_learning()
        return stronger

    def _measure(self, phase: str) -> AbstractContextManager[None]:
        return self.stopwatch.measure(phase, self.device)
