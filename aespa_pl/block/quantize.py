"""Run the steps of one block in their order, from weights and statistics to integers."""

import logging
from dataclasses import dataclass

from torch import nn

from aespa_pl.block.correct import correct
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.learn import Learner
from aespa_pl.block.polish import polish
from aespa_pl.block.quantized import QuantizedBlock
from aespa_pl.block.update import update
from aespa_pl.calibration.statistics import BlockStatistics, Shifts
from aespa_pl.errors import NumericalError, UserError
from aespa_pl.run.context import Context

DAMPING_GROWTH = 10
"""Factor of the damping in the second attempt at a block whose loss was not finite."""
ADVICE = "check the model and data.calibration.source, or try another quantization.damping in a new run"
"""What to do about a NumericalError that a second attempt doesn't mend."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockQuantizer:
    """Runs the steps of one block after the other."""

    context: Context

    def start(self, index: int, module: nn.Module, statistics: BlockStatistics) -> QuantizedBlock:
        """Return a block's nearest rounding, aimed at weights that make up for earlier blocks' errors.

        Args:
            index: Number of the block, from 0.
            module: The block with its original weights.
            statistics: Statistics of the block. Its Hessians become the quantized block's; the rest is
                not needed afterwards.

        Raises:
            UserError: A Hessian cannot be factored.
        """
        settings = self.context.settings
        layout = self.context.layout(index)
        block = QuantizedBlock.nearest(index, module, layout, statistics, settings)
        block.damp(settings.damping)
        if statistics.shifts is not None:
            with self.context.measure("correction"):
                self._correct(block, statistics.shifts)
        if settings.uses_inputs:
            block.clear_dead_columns()
        return block

    def quantize(self, block: QuantizedBlock) -> None:
        """Run steps 2 to 4 and the polish on a block that has started.

        Raises:
            UserError: The loss is not finite even with ten times the damping.
        """
        context, settings = self.context, self.context.settings
        damping = context.run.damping.get(block.index, settings.damping)
        while True:
            block.damp(damping)
            try:
                with context.measure("grid"):
                    fit_grids(block, settings, context.world)
                self._update(block, damping)
                with context.measure("rounding"):
                    Learner(context).learn(block)
                break
            except NumericalError as error:
                damping = self._more_damping(block.index, damping, error)
        block.damp(settings.damping)  # all blocks' losses are measured alike
        if settings.polish.enabled:
            with context.measure("polish"):
                polish(block, settings.polish.passes, context.world)

    def _correct(self, block: QuantizedBlock, shifts: Shifts) -> None:
        try:
            correct(block, shifts, self.context.settings.input_correction or 0.0)
        except NumericalError as error:
            raise UserError(f"{error}; {ADVICE}") from error

    def _update(self, block: QuantizedBlock, damping: float) -> None:
        optq = self.context.settings.optq
        if optq.enabled:
            with self.context.measure("optq"):
                update(block, self.context.world, rows=bool(optq.rows))
        block.damp(self.context.settings.damping)
        for p in block.projections.values():
            p.measured["optq"] = float(p.loss(p.integers).sum())
        block.damp(damping)

    def _more_damping(self, index: int, used: float, error: NumericalError) -> float:
        """Return the damping of the second attempt; there is no third."""
        stronger = DAMPING_GROWTH * used
        if used != self.context.settings.damping or stronger >= 1:
            raise UserError(f"{error}; {ADVICE}") from error
        log.warning("%s; again with damping %g", error, stronger)
        self.context.run.damp_again(index, stronger)
        return stronger
